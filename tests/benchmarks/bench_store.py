"""Speed of committing and of reading, each against what the machine can do in the same run.

In: sizes. Out: rows of name, value, unit, what it is measured against, and how. The floors: for commits,
the same bytes in as many files by plain write and fsync; for reads, np.load of the same array. Warm page
cache on both sides.
"""

import dataclasses
import os
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from helpers_store import Synthetic, begin, synthetic
from nearline.store import Reader

MIB = 2**20


def rows() -> Iterator[dict]:
    """All rows, for `make bench`."""
    yield from commit_rows()
    yield from layer_read_rows()


def commit_rows(
    n_layers: int = 30, d: int = 576, block: int = 1024, n_blocks: int = 4, dtype: str = "float16"
) -> list[dict]:
    """Commit speed and its CPU cost, against writing the same bytes in as many files and syncing each."""
    data = _store_data(n_layers, d, block, n_blocks, dtype)
    n_bytes = sum(values.nbytes for values in data.stored.values())
    with tempfile.TemporaryDirectory() as folder:
        writer = begin(Path(folder) / "store", data)
        wall, cpu = _clocked(lambda: [writer.commit(b, *data.block(b), {}) for b in range(n_blocks)])
        floor_wall, floor_cpu = _clocked(lambda: _write_plain(Path(folder) / "floor", data))
    note = f"{n_layers} layers x 2 sites x ({block}, {d}) {dtype}, {n_blocks} blocks"
    return [
        _row("commit, all layers of a block", n_bytes / wall / MIB, "MiB/s", None, note),
        _row("the same files by write + fsync, one by one", n_bytes / floor_wall / MIB, "MiB/s", None, note),
        _row("commit against write + fsync", floor_wall / wall, "x", None, note),
        _row("commit, CPU time", cpu / n_bytes * 2**30, "s/GiB", None, "digest, checksum, write"),
        _row("write + fsync, CPU time", floor_cpu / n_bytes * 2**30, "s/GiB", None, "write alone"),
    ]


def layer_read_rows(
    n_layers: int = 4, d: int = 576, block: int = 8192, n_blocks: int = 4, repeats: int = 7
) -> list[dict]:
    """Reading one layer as stored, against np.load of the same bytes; and decoded to float32."""
    found: list[dict] = []
    for dtype in ("float32", "float16", "bfloat16"):
        data = _store_data(n_layers, d, block, n_blocks, dtype)
        with tempfile.TemporaryDirectory() as folder:
            loaded, stored, decoded = _read_times(Path(folder), data, repeats)
        size = data.stored["residual"][1].nbytes / MIB
        speeds = f"{size / stored:.0f} against {size / loaded:.0f} MiB/s"
        note = f"{speeds}; ({n_blocks * block}, {d}), blocks of {block}"
        found.append(_row(f"read a layer, {dtype}, against np.load", loaded / stored, "x", "0.5", note))
        found.append(
            _row(f"read a layer as float32, {dtype}", size / decoded, "MiB/s", None, "bytes as stored")
        )
    return found


def _read_times(folder: Path, data: Synthetic, repeats: int) -> tuple[float, float, float]:
    """Best seconds of np.load, of reading as stored and as float32; taken in turns."""
    _write(folder / "store", data)
    np.save(folder / "layer.npy", data.stored["residual"][1])
    reader, n_blocks = Reader.open(folder / "store"), data.plan.n_blocks
    works = (
        lambda: np.load(folder / "layer.npy"),
        lambda: reader.stored("residual", 1, 0, n_blocks),
        lambda: reader.rows("residual", 1, 0, n_blocks),
    )
    times = [[_clocked(work)[0] for work in works] for _ in range(repeats)]
    loaded, stored, decoded = (min(column) for column in zip(*times, strict=True))
    return loaded, stored, decoded


def _store_data(n_layers: int, d: int, block: int, n_blocks: int, dtype: str) -> Synthetic:
    """Synthetic inputs whose sites are plain noise: only bytes matter here, and noise is quick to make."""
    small = synthetic(n_layers=n_layers, d=2, n_tokens=block * n_blocks, block=block, storage_dtype=dtype)
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 2**14, size=(n_layers, block * n_blocks, d), dtype=np.uint16)
    values = noise if dtype == "bfloat16" else noise.astype(np.float32 if dtype == "float32" else np.float16)
    stored = {"residual": values, "mlp_output": values, "embedding": values[0]}
    model = dataclasses.replace(small.attributes.model, d_model=d)
    return dataclasses.replace(
        small,
        d=d,
        stored=stored,
        sites=stored,
        attributes=dataclasses.replace(small.attributes, model=model),
        affine={},
        position_embedding=None,
    )


def _write(path: Path, data: Synthetic) -> None:
    writer = begin(path, data)
    for block in range(data.plan.n_blocks):
        writer.commit(block, *data.block(block), {})
    writer.seal()


def _write_plain(folder: Path, data: Synthetic) -> None:
    """The same chunks, as many files, each written and synced: what any durable writer must do."""
    folder.mkdir()
    for block in range(data.plan.n_blocks):
        for site, values in data.block(block)[1].items():
            for layer, rows in enumerate(values if values.ndim == 3 else values[None]):
                descriptor = os.open(folder / f"{site}-{layer}-{block}", os.O_WRONLY | os.O_CREAT, 0o644)
                os.write(descriptor, memoryview(rows).cast("B"))
                os.fsync(descriptor)
                os.close(descriptor)


def _clocked(work: Callable[[], object]) -> tuple[float, float]:
    """Wall and CPU seconds."""
    cpu, wall = _cpu(), time.perf_counter()
    work()
    return time.perf_counter() - wall, _cpu() - cpu


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _row(name: str, value: float, unit: str, reach: str | None, note: str) -> dict:
    return {"name": name, "value": value, "unit": unit, "reach": reach, "note": note}
