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
from pathlib import Path

import numpy as np
from blake3 import blake3

from ..store import durable
from ..store.metadata import ArraySpec, encode_chunk
from ..store.progress import Progress
from .buffers import SITES, Recorder, ValueRefused, make_buffers
from .capture import Capture
from .loop import (
    _explained,  # pyright: ignore[reportPrivateUsage]
    harvest_batch,
)
from .preparing import Prepared
from .rows import Batch, block_batches, block_columns

PROBE_S = 6.0
MOST_BATCHES = 5
PROBE_BYTES = 128 * 2**20
MOST_CHUNKS = 64


def model_speed(prepared: Prepared, *, mask_nonfinite: bool, progress: Progress) -> float:
    """Padded tokens a second, over batches from the longest to the shortest of the first block."""
    recorder = Recorder(prepared.shape, prepared.anatomy.device, mask_nonfinite)
    recorder.start_block(make_buffers(prepared.shape, prepared.anatomy.device, count=1)[0])
    columns = block_columns(prepared.planned.plan, 0, prepared.tokens.ids, prepared.tokens.special_ids)
    columns["nll"] = np.full(len(columns["token_id"]), np.nan, np.float32)
    chosen = _spread(list(block_batches(prepared.planned.plan, 0, columns["token_id"])))
    tokens, seconds = 0, 0.0
    with Capture(prepared.anatomy, recorder, sites=SITES, layers=prepared.shape.layers) as capture:
        for number, batch in enumerate([chosen[0], *chosen]):  # the first one warms up
            started = time.perf_counter()
            try:
                harvest_batch(prepared, recorder, capture, batch, columns)
            except ValueRefused as refused:
                raise _explained(refused, prepared, [0, 0], 0) from None
            took = time.perf_counter() - started
            progress("probe", number + 1, len(chosen) + 1, "batches")
            if number or took > PROBE_S:
                tokens, seconds = tokens + batch.ids.size, seconds + took
            if seconds > PROBE_S:
                break
    return tokens / seconds


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
    n_chunks = max(1, min(PROBE_BYTES // spec.chunk_bytes, MOST_CHUNKS, 2 * len(shape.layers) + 1))
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
