"""Speed of `verify` against `cp` and `sha256sum` over the same files: what one would do without it.

In: sizes. Out: rows of name, value, unit, what it is measured against, and how. The yardstick reads every
file twice (once to copy, once to digest) and knows nothing of what is in it. Warm page cache on both sides,
taken in turns, best of each.
"""

import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench_store import MIB, _clocked, _row, _store_data, _write
from nearline.store.verify import verify


def rows() -> Iterator[dict]:
    """All rows, for `make bench`."""
    for dtype, n_blocks in {"float16": 5, "bfloat16": 5, "float32": 3}.items():
        yield from verify_rows(dtype=dtype, n_blocks=n_blocks)


def verify_rows(
    n_layers: int = 12,
    d: int = 576,
    block: int = 8192,
    n_blocks: int = 5,
    dtype: str = "float16",
    repeats: int = 3,
) -> list[dict]:
    """All content of a store of a little more than 1 GiB, and the quick look at it."""
    data = _store_data(n_layers, d, block, n_blocks, dtype)
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        _write(store, data)
        del data
        size = sum(path.stat().st_size for path in store.rglob("*") if path.is_file())
        if (found := verify(store, level="full")).problems:
            raise AssertionError(found.problems[0].message)
        times = [
            (
                _clocked(lambda: verify(store, level="full")),
                _clocked(lambda: _copy_and_digest(store, Path(folder) / "copy")),
                _clocked(lambda: verify(store)),
            )
            for _ in range(repeats)
        ]
    full, floor, quick = (min(column) for column in zip(*times, strict=True))
    note = f"{size / 2**30:.2f} GiB, {n_layers} layers x 2 sites x ({block}, {d}) {dtype}, {n_blocks} blocks"
    return [
        _row(f"verify --full, {dtype}", size / full[0] / MIB, "MiB/s", None, note),
        _row("cp + sha256sum over the same files", size / floor[0] / MIB, "MiB/s", None, note),
        _row("verify --full against cp + sha256sum", floor[0] / full[0], "x", "0.7", note),
        _row(
            "verify --full, CPU time",
            full[1] / size * 2**30,
            "s/GiB",
            None,
            "cp's and sha256sum's not counted",
        ),
        _row("verify --quick", quick[0], "s", None, f"{note}; no chunk is opened"),
    ]


def _copy_and_digest(store: Path, copy: Path) -> None:
    subprocess.run(["rm", "-rf", copy], check=True)
    subprocess.run(["cp", "-r", store, copy], check=True)
    command = f"find {store} -type f -print0 | xargs -0 sha256sum > /dev/null"
    subprocess.run(["bash", "-c", command], check=True)
