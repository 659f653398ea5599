"""Run a model over a corpus once and keep what its MLPs saw and gave: the program's main job.

In: settings, or a live model with its tokenizer and documents; a new or empty folder. Out: a sealed store
there, and what the run was like. Everything that can be refused is refused before the first forward pass;
blocks are written and committed by another thread while the model runs. Cost: the forward passes and a few
percent; memory: the model, two block buffers, one batch. When a run fails, its committed blocks stay; while
there are none yet, what it created is removed, so that the same command can be repeated.
"""

import logging
import platform
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from torch import nn
from transformers import PreTrainedTokenizerBase

from ..store.errors import UsageError
from ..store.progress import Progress, silent
from ..store.writer import StoreWriter
from . import corpora, models
from .anatomy import anatomy
from .buffers import SITES
from .claim import Claim, claimed
from .corpora import Corpus, Document
from .describing import affine_of, attributes_of, documents_table, position_embedding_of
from .forward import evaluating
from .loop import run_blocks
from .models import LoadedModel
from .preparing import Prepared, prepare
from .proof import prove
from .rows import block_columns
from .settings import HarvestSettings, parse
from .tokenise import tokenise

SAMPLE_ROWS = 60
SAMPLE_CHARS = 300

logger = logging.getLogger("nearline")


@dataclass(frozen=True, slots=True)
class Harvested:
    """A sealed store and how its run went. `sample` is the text of the first rows, from the stored ids."""

    path: Path
    n_tokens: int
    sample: str
    seconds: float
    tokens_per_s: float
    waited_s: float
    notes: tuple[str, ...]


def collect(settings: HarvestSettings, path: str | Path, progress: Progress = silent) -> Harvested:
    """Load the model and corpus that `settings` name and harvest them into `path`."""
    with claimed(Path(path)) as claim:
        corpus = corpora.load(settings.corpus)
        loaded = models.load(
            settings.model,
            revision=settings.revision,
            dtype=settings.dtype,
            device=settings.device,
            gguf_file=settings.gguf_file,
            attention=settings.attention,
            trust_remote_code=settings.trust_remote_code,
            allow_pickle=settings.allow_pickle,
        )
        return _run(loaded, corpus, claim, settings, progress)


def harvest(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    documents: Corpus | Iterable[str | tuple[str, str] | Document],
    path: str | Path,
    *,
    settings: HarvestSettings | None = None,
    name: str | None = None,
    corpus: str | None = None,
    progress: Progress = silent,
    **overrides: Any,
) -> Path:
    """Harvest a live model, a PEFT-wrapped one too, as it is: nothing in it is moved, cast or changed.

    `documents` are texts, (key, text) pairs, Documents or a Corpus; `corpus` and `name` are what the store
    calls corpus and model; `overrides` are further settings, such as tokens=20_000."""
    chosen = parse({**(settings.model_dump() if settings else {}), **overrides})
    with claimed(Path(path)) as claim:
        given = (
            documents
            if isinstance(documents, Corpus)
            else corpora.from_documents(documents, corpus or "documents")
        )
        loaded = models.describe(model, tokenizer, name)
        return _run(loaded, given, claim, chosen, progress).path


def _run(
    loaded: LoadedModel, corpus: Corpus, claim: Claim, settings: HarvestSettings, progress: Progress
) -> Harvested:
    if loaded.tokenizer is None:
        raise UsageError(f"{loaded.name} comes without a tokenizer, and a corpus of texts needs one.")
    started, began = time.perf_counter(), datetime.now(UTC)
    with evaluating(loaded.model, settings.threads):
        tokens = tokenise(corpus, loaded.tokenizer, bos=settings.bos)
        prepared = prepare(anatomy(loaded.model), corpus, tokens, settings, claim.path)
        sample = sample_of(prepared, loaded.tokenizer)
        notes = () if prepared.planned.note is None else (prepared.planned.note,)
        for note in notes:
            logger.warning(note)
        logger.info("first rows: %s", sample.replace("\n", "↵ "))
        proof = prove(prepared.anatomy, first_batch(prepared))
        writer = begin(claim, prepared, loaded, settings, proof)
        ready = time.perf_counter()
        waited_s = run_blocks(
            prepared, writer, mask_nonfinite=settings.on_nonfinite == "mask", progress=progress
        )
        seconds = time.perf_counter() - ready
    n_tokens = prepared.planned.plan.n_tokens
    done = Harvested(claim.path, n_tokens, sample, seconds, n_tokens / seconds, waited_s, notes)
    writer.write_run(_facts(done, began, ready - started, prepared.store_bytes))
    writer.seal()
    return done


def begin(
    claim: Claim, prepared: Prepared, loaded: LoadedModel, settings: HarvestSettings, proof: dict[str, float]
) -> StoreWriter:
    """Everything of the store that is not a block."""
    attributes = attributes_of(prepared, loaded, settings, proof)
    vocabulary = vocabulary_of(prepared)
    try:
        writer = StoreWriter.create(
            claim.path,
            plan=prepared.planned.plan,
            attributes=attributes,
            layers=prepared.shape.layers,
            d_model=prepared.shape.d_model,
            storage_dtype=prepared.shape.storage_dtype,
            sites=SITES,
            documents=documents_table(prepared),
            vocabulary=vocabulary,
            affine=affine_of(prepared),
            position_embedding=position_embedding_of(prepared),
            compressor=settings.compressor,
        )
    except BaseException as error:
        # A usage error means that somebody else began a store here after we claimed the folder.
        claim.begun = not isinstance(error, UsageError)
        raise
    claim.begun = True
    return writer


def sample_of(prepared: Prepared, tokenizer: PreTrainedTokenizerBase) -> str:
    """The first rows as text, decoded from the ids that will be stored: a wrong tokenizer shows here."""
    ids = first_batch(prepared)[0][:SAMPLE_ROWS]
    return str(tokenizer.decode(ids.tolist()))[:SAMPLE_CHARS]


def first_batch(prepared: Prepared) -> list[np.ndarray]:
    """Token ids of the sequences of the first forward pass, BOS included."""
    plan, tokens = prepared.planned.plan, prepared.tokens
    token_id = block_columns(plan, 0, tokens.ids, tokens.special_ids)["token_id"]
    n_sequences = len(plan.batches_of(0)[0])
    return np.split(token_id[: plan.row_offsets[n_sequences]], plan.row_offsets[1:n_sequences])


def vocabulary_of(prepared: Prepared) -> pa.Table:
    """The ids that occur as a token or as a target, and in how many rows each is the token."""
    plan, tokens = prepared.planned.plan, prepared.tokens
    rows, targets = np.zeros(0, np.int64), np.zeros(0, np.int64)
    for block in range(plan.n_blocks):
        columns = block_columns(plan, block, tokens.ids, tokens.special_ids)
        rows = _add_counts(rows, columns["token_id"])
        targets = _add_counts(targets, columns["target_id"])
    size = max(len(rows), len(targets))
    rows, targets = (np.pad(counts, (0, size - len(counts))) for counts in (rows, targets))
    ids = np.flatnonzero((rows > 0) | (targets > 0))
    return tokens.vocabulary(ids, rows[ids])


def _add_counts(counts: np.ndarray, ids: np.ndarray) -> np.ndarray:
    more = np.bincount(ids[ids >= 0], minlength=len(counts))
    more[: len(counts)] += counts
    return more


def _facts(done: Harvested, began: datetime, setup_s: float, n_bytes: int) -> dict[str, Any]:
    return {
        "command": sys.argv,
        "start": began.isoformat(timespec="seconds"),
        "end": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": platform.node(),
        "path": str(done.path.resolve()),
        "rank": 0,
        "world_size": 1,
        "n_tokens": done.n_tokens,
        "setup_s": round(setup_s, 3),
        "seconds": round(done.seconds, 3),
        "tokens_per_s": round(done.tokens_per_s, 1),
        "waited_s": round(done.waited_s, 3),
        "waited_share": round(done.waited_s / done.seconds, 4),
        "uncompressed_bytes": n_bytes,
        "mib_per_s": round(n_bytes / 2**20 / done.seconds, 1),
    }
