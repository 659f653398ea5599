"""What a harvest will take, before it is begun: bytes, files, memory, time, and whether there is room.

In: the settings of a harvest and the folder it is meant for. Out: a frozen `Forecast`, plain enough for JSON;
or the refusal that the harvest itself would meet, in the same words. Model and corpus are loaded, the corpus
is tokenised and planned and the start-up proof is run as in a harvest; nothing stays in the target folder.
Cost: that of a harvest's start, and about ten seconds for the probe.
"""

import shutil
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..analyze.moments_file import claim_moments
from ..store.attributes import Attributes
from ..store.beginning import begun_attributes, check_same, claim_store
from ..store.folder import committed_blocks
from ..store.hub_limits import Limit, hub_limits
from ..store.layout import objects_per_block
from ..store.plan import SPLITS
from ..store.progress import Progress, silent
from . import moments_only, moments_pass, probing
from .anatomy import anatomy
from .available import available_memory_bytes, free_device_bytes, free_files, process_bytes
from .batch_budget import batch_budget
from .describing import attributes_of
from .forward import evaluating
from .loading import load_both
from .needs import Needs, padded_tokens, working_device
from .preparing import Prepared, prepare
from .proving import proved
from .ranks import ranks_of
from .settings import HarvestSettings
from .tokenise import tokenise_for


@dataclass(frozen=True, slots=True)
class Speeds:
    """From the probe. The model and the writer work at the same time: the slower one decides."""

    padded_tokens_per_s: float
    write_bytes_per_s: float
    model_s: float
    write_s: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Forecast:
    """Numbers of a harvest that has not begun. Bytes of the store are those before any compressor."""

    model: str
    corpus: str
    store: str
    n_tokens: int
    splits: dict[str, int]  # rows
    layers: tuple[int, ...]
    sites: tuple[str, ...]
    d_model: int
    storage_dtype: str
    compressor: str | None
    sequence_length: int
    block: int
    n_blocks: int
    n_committed: int
    rank: int
    world_size: int
    bytes_per_token: float
    store_bytes: int
    missing_bytes: int  # of them, those not written yet
    free_bytes: int
    n_objects: int
    n_files: int  # at most
    n_folders: int
    free_files: int | None  # None: the file system does not say
    chunk_bytes: int
    device: str
    host_bytes: int  # at the peak
    host_parts: dict[str, int]
    available_bytes: int  # for what is still to come
    device_bytes: int  # at the peak; on a CPU a part of host_bytes
    device_parts: dict[str, int]
    device_free_bytes: int | None  # beside the model
    hub: tuple[Limit, ...]
    setup_s: float
    speeds: Speeds | None
    notes: tuple[str, ...]


def forecast(
    settings: HarvestSettings, path: str | Path, *, probe: bool = True, progress: Progress = silent
) -> Forecast:
    """Everything a harvest with these settings into `path` needs; what cannot fit is refused."""
    started = time.perf_counter()
    with visited(Path(path), claim_moments if settings.moments_only else claim_store) as folder:
        corpus, loaded = load_both(settings)
        with evaluating(loaded.model, settings.threads, gradients=settings.differentiates):
            net = anatomy(loaded.model)
            tokens = tokenise_for(settings, corpus, loaded.tokenizer, net.vocab_size)
            budget = batch_budget(net, tokens, settings, folder)
            settings = budget.settings
            prepared = prepare(net, tokens.corpus, tokens, settings, folder, measured=budget.measured)
            held_bytes, device_free = process_bytes(), free_device_bytes(working_device(net))
            begun = begun_attributes(folder)
            proof = proved(prepared, begun)
            attributes = attributes_of(prepared, loaded, settings, proof.errors, proof.exponents)
            if begun is not None:
                check_same(folder, begun, attributes)
            if settings.moments_only:
                moments_only.check_whole(folder, attributes, settings)
            setup_s = time.perf_counter() - started
            speeds = _speeds(prepared, attributes, settings, folder, progress) if probe else None
        return Forecast(
            model=loaded.name,
            corpus=corpus.spec,
            store=str(path),
            compressor=settings.compressor,
            setup_s=setup_s,
            speeds=speeds,
            device_free_bytes=device_free,
            notes=tuple(note for note in (budget.note, *prepared.notes) if note),
            **_plan_facts(prepared),
            **_memory(prepared.needs, held_bytes),
            **_disk(prepared, folder),
            **asdict(ranks_of(settings)),
        )


@contextmanager
def visited(path: Path, claim: Callable[[Path], Path] = claim_store) -> Generator[Path]:
    """The target as a harvest would find and claim it; afterwards what was not there is gone again."""
    absent = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        yield claim(path)
    finally:
        for folder in absent:
            with suppress(OSError):  # another process may have begun to write there
                folder.rmdir()


def _speeds(
    prepared: Prepared, attributes: Attributes, settings: HarvestSettings, folder: Path, progress: Progress
) -> Speeds:
    """Of the blocks that this rank would do now; one block more is written when the model is done, or all
    sums are."""
    plan, needs = prepared.planned.plan, prepared.needs
    summing = moments_pass.first_recorder(prepared, attributes, settings) if settings.moments_only else None
    masking = settings.on_nonfinite == "mask"
    model = probing.model_speed(prepared, mask_nonfinite=masking, progress=progress, summing=summing)
    disk = probing.disk_speed(prepared, folder, settings.compressor)
    if summing is None:
        blocks = ranks_of(settings).own(set(range(plan.n_blocks)) - committed_blocks(folder))
    else:
        blocks = moments_pass.summed_blocks(plan)
    _, first = np.unique(plan.sequence_batch, return_index=True)
    n_padded = int(padded_tokens(plan)[np.isin(plan.sequence_block[first], blocks)].sum())
    model_s = n_padded / model
    if summing is not None:
        write_s = needs.store_bytes / disk
        return Speeds(model, disk, model_s, write_s, model_s + write_s)
    block_s = needs.store_bytes / plan.n_blocks / disk
    write_s = len(blocks) * block_s
    return Speeds(model, disk, model_s, write_s, max(model_s, write_s) + (block_s if blocks else 0.0))


def _plan_facts(prepared: Prepared) -> dict[str, Any]:
    plan, shape, needs = prepared.planned.plan, prepared.shape, prepared.needs
    n_objects = plan.n_blocks * objects_per_block(*shape.sizes[1:3])
    dtype = shape.storage_dtype
    if prepared.n_sums:
        n_objects, dtype = needs.n_chunks, f"float64 sums of {dtype} values"
    rows = {name: int(plan.block_rows[plan.block_split == code].sum()) for code, name in enumerate(SPLITS)}
    return {
        "n_tokens": plan.n_tokens,
        "splits": rows,
        "layers": shape.layers,
        "d_model": shape.d_model,
        "sites": shape.sites,
        "storage_dtype": dtype,
        "sequence_length": plan.sequence_length,
        "block": plan.block,
        "n_blocks": plan.n_blocks,
        "n_objects": n_objects,
        "bytes_per_token": needs.store_bytes / plan.n_tokens,
        "store_bytes": needs.store_bytes,
    }


def _memory(needs: Needs, held_bytes: int) -> dict[str, Any]:
    """Peaks: the process as it was when all was loaded, and what a run takes beyond it."""
    on_host = needs.device == "cpu"
    batch = {"batch": needs.batch_bytes, "logits": needs.logits_bytes}
    batch |= {"moments": needs.moments_bytes} if needs.moments_bytes else {}
    model = {"model": needs.model_bytes}
    rest = held_bytes - needs.model_bytes if on_host else held_bytes
    host = {"program and texts": max(rest, 0), **(model if on_host else {})}
    if needs.moments_bytes:
        host |= {"layer in hand": needs.packing_bytes}
    else:
        host |= {"block buffers": needs.buffer_bytes, "chunk in hand": needs.packing_bytes}
    host |= batch if on_host else {}
    return {
        "device": needs.device,
        "host_bytes": sum(host.values()),
        "host_parts": host,
        "available_bytes": available_memory_bytes(),
        "device_bytes": needs.device_bytes,
        "device_parts": model | batch,
    }


def _disk(prepared: Prepared, folder: Path) -> dict[str, Any]:
    needs, committed = prepared.needs, committed_blocks(folder)
    return {
        "n_committed": len(committed),
        "n_files": needs.n_files,
        "n_folders": needs.n_folders,
        "chunk_bytes": needs.chunk_bytes,
        "missing_bytes": prepared.missing_bytes(committed),
        "free_bytes": shutil.disk_usage(folder).free,
        "free_files": free_files(folder),
        "hub": hub_limits(
            n_files=needs.n_files,
            most_entries=needs.most_entries,
            largest_bytes=needs.chunk_bytes,
            n_bytes=needs.store_bytes,
        ),
    }
