"""Speed and memory of training batches, against a plain read of the same chunks in the same run.

In: sizes. Out: rows of name, value, unit, what it is measured against, and how. The floors read the same
chunks one after the other, with the checks that every read makes: as they are stored, and as float32. Best of
turns, warm page cache; memory is the peak of what Python and numpy allocate, beside what was projected.
"""

import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from bench_store import MIB, _row, _store_data, _write
from nearline.store import Reader

PAIR = ("residual", "mlp_output")


def rows() -> Iterator[dict]:
    """All rows, for `make bench`."""
    for dtype in ("float16", "bfloat16"):
        yield from batch_rows(dtype=dtype)


def batch_rows(
    d: int = 576,
    block: int = 8192,
    n_blocks: int = 40,
    dtype: str = "float16",
    repeats: int = 5,
    pool: str | int = "128 MiB",
) -> list[dict]:
    """One layer's MLP input and output: in order, shuffled, as stored and as float32, and recomputed."""
    data = _store_data(1, d, block, n_blocks, dtype)
    with tempfile.TemporaryDirectory() as folder:
        _write(Path(folder) / "store", data)
        reader = Reader.open(Path(folder) / "store")
        common: dict[str, Any] = {"layers": 0, "sites": PAIR, "pool_memory": pool}
        asked = {name: common | one for name, one in _asked(dtype).items()}
        works: dict[str, Callable[[], object]] = {
            "stored": lambda: _read(reader, reader.stored),
            "float32": lambda: _read(reader, reader.rows),
        }
        works |= {name: _through(reader, one) for name, one in asked.items()}
        taken = _in_turns(works, repeats)
        peak, projected = _peak(reader, asked["shuffled, float32"])
    n_rows, size = block * n_blocks, sum(data.stored[site].nbytes for site in PAIR) / MIB
    note = f"2 x ({n_rows}, {d}) {dtype}, blocks of {block}, batches of 4096, pools of {pool}"
    found = []
    for name in asked:
        kind = "float32" if "float32" in name else "stored"
        read, seconds = taken[kind], taken[name]
        how = f"{n_rows / seconds:,.0f} rows/s, {size / seconds:.0f} MiB/s; alone {size / read:.0f} MiB/s"
        what = f"batches {name}, against reading as {kind}, {dtype}"
        found.append(_row(what, read / seconds, "x", None, f"{how}; {note}"))
    held = f"projected {projected / MIB:.0f} MiB; {note}"
    return [*found, _row(f"batches shuffled, float32, of {dtype}: peak", peak / MIB, "MiB", None, held)]


def _asked(dtype: str) -> dict[str, dict[str, Any]]:
    return {
        "in order, as stored": {"seed": None, "dtype": dtype},
        "shuffled, as stored": {"dtype": dtype},
        "shuffled, float32": {},
        "shuffled, float32, norm recomputed": {"sites": ("mlp_input", "mlp_output")},
    }


def _read(reader: Reader, read: Callable[..., np.ndarray]) -> None:
    for block in range(reader.n_blocks):
        for site in PAIR:
            read(site, 0, block, block + 1)


def _through(reader: Reader, asked: dict[str, Any]) -> Callable[[], object]:
    return lambda: sum(len(batch) for batch in reader.batches(**asked))


def _in_turns(works: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Best seconds of each."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(repeats):
        for name, work in works.items():
            start = time.perf_counter()
            work()
            times[name].append(time.perf_counter() - start)
    return {name: min(found) for name, found in times.items()}


def _peak(reader: Reader, asked: dict[str, Any]) -> tuple[int, int]:
    batches = reader.batches(**asked)
    tracemalloc.start()
    try:
        for _ in batches:
            pass
        return tracemalloc.get_traced_memory()[1], batches.memory_bytes
    finally:
        tracemalloc.stop()
