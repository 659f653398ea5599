"""How fast this machine will be, from a few seconds of the real work: batches of the plan, writes to the
disk.

In: a prepared harvest; a folder. Out: padded tokens a second through the model with every hook on, and bytes
a second through digest, checksum and durable write. Nothing of it is kept. A value that the harvest would
refuse is refused here. Cost: at most about ten seconds, one block buffer, and for a moment 128 MiB on the
disk.
"""

import secrets
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from blake3 import blake3

from ..store import durable
from ..store.metadata import ArraySpec, encode_chunk
from ..store.progress import Progress
from .batch_budget import device_full, is_full
from .buffers import make_buffers
from .capture import Capture
from .flight import Flight, OpenBlock
from .loop import recorder_of
from .needs import working_device
from .preparing import Prepared
from .recorder import Filling, Recorder
from .refused_values import ValueRefused
from .rows import Batch, block_batches, block_columns

PROBE_S = 6.0
MOST_BATCHES = 5
PROBE_BYTES = 128 * 2**20
MOST_CHUNKS = 64


def model_speed(
    prepared: Prepared, *, mask_nonfinite: bool, progress: Progress, summing: Recorder | None = None
) -> float:
    """Padded tokens a second, over batches from the longest to the shortest of the first block. `summing`:
    the recorder of a harvest that stores no rows."""
    plan, net = prepared.planned.plan, prepared.anatomy
    recorder = summing or recorder_of(prepared, mask_nonfinite=mask_nonfinite)
    shape = prepared.shape if summing is None else replace(prepared.shape, block=1)
    filling = Filling(make_buffers(shape, working_device(net), count=1)[0], shape)
    columns = block_columns(plan, 0, prepared.tokens.ids, prepared.tokens.special_ids)
    block = OpenBlock(0, 0.0, columns, filling)
    chosen = _spread(list(block_batches(plan, 0, columns["token_id"])))
    try:
        with Capture(net, recorder, sites=prepared.shape.sites, layers=prepared.shape.layers) as capture:
            flight = Flight(net, recorder, capture, lambda _: None)
            tokens, seconds = _timed(flight, block, chosen[:1], progress, (0, len(chosen) + 1))
            if seconds > PROBE_S:
                return tokens / seconds
            tokens, seconds = _timed(flight, block, chosen, progress, (1, len(chosen) + 1))  # warm by now
    except ValueRefused as refused:
        raise refused.explained(prepared, 0) from None
    except RuntimeError as error:
        if not is_full(error):
            raise
        raise device_full(error, plan, 0) from None
    return tokens / seconds


def _timed(
    flight: Flight, block: OpenBlock, batches: list[Batch], progress: Progress, steps: tuple[int, int]
) -> tuple[int, float]:
    """Padded tokens of these batches, or of as many as there is time for, and how long they took."""
    tokens, started = 0, time.perf_counter()
    for number, batch in enumerate(batches):
        flight.launch(block, batch)
        tokens += batch.ids.size
        progress("probe", steps[0] + number + 1, steps[1], "batches")
        if time.perf_counter() - started > PROBE_S:
            break
    flight.land()
    return tokens, time.perf_counter() - started


def disk_speed(prepared: Prepared, folder: Path, compressor: str | None) -> float:
    """Bytes a second of chunks as large and as many as a block has, written as a commit writes them."""
    shape = prepared.shape
    spec = ArraySpec(
        "probe",
        ("token", "feature"),
        (shape.block, shape.d_model),
        (shape.block, shape.d_model),
        np.dtype(np.uint16 if shape.itemsize == 2 else np.float32),
        0,
    )
    n_chunks = max(1, min(PROBE_BYTES // spec.chunk_bytes, MOST_CHUNKS, len(shape.slots)))
    noise = np.random.default_rng(0).integers(0, 2**16, spec.chunk_bytes // 2, dtype=np.uint16)
    values = noise.view(spec.dtype).reshape(spec.chunks)
    target = folder / f"probe.{secrets.token_hex(6)}{durable.PARTIAL}"

    def files() -> Iterator[tuple[Path, tuple[object, bytes]]]:
        for number in range(n_chunks):
            body, crc = encode_chunk(values, spec, compressor)
            blake3(memoryview(body)).update(crc).hexdigest()
            yield target / str(number) / "0", (body, crc)

    started = time.perf_counter()
    try:
        durable.write_files(files())
        return n_chunks * spec.chunk_bytes / (time.perf_counter() - started)
    finally:
        shutil.rmtree(target, ignore_errors=True)


def _spread(batches: list[Batch]) -> list[Batch]:
    places = np.unique(np.linspace(0, len(batches) - 1, MOST_BATCHES).round().astype(int))
    return [batches[place] for place in places]
