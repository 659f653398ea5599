"""Speed of copying a store with every check, against `cp -r` and then `sha256sum` of all files.

In: sizes. Out: rows of name, value, unit, what it is measured against, and how. `push` to a folder of the
same disk reads, digests, writes and syncs every file; `cp` does not sync and `sha256sum` reads the copy from
the page cache. Taken in turns, each starting with nothing left to be written by the one before; medians.
"""

import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from bench_store import MIB, _row, _store_data, _write
from nearline.store.transfer import push


def rows() -> Iterator[dict]:
    """All rows, for `make bench`."""
    yield from share_rows()
    yield from share_rows(n_layers=8, d=2048, block=4096, n_blocks=4)


def share_rows(
    n_layers: int = 30,
    d: int = 576,
    block: int = 1024,
    n_blocks: int = 16,
    dtype: str = "float16",
    repeats: int = 5,
) -> list[dict]:
    """`push` to a folder of one store, about 1 GiB by default."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        store, copy = folder / "store", folder / "copy"
        _write(store, _store_data(n_layers, d, block, n_blocks, dtype))
        sizes = [entry.stat().st_size for entry in store.rglob("*") if entry.is_file()]
        works: dict[str, Callable[[], object]] = {
            "push": lambda: push(store, copy),
            "cp": lambda: (_shell("cp", "-r", store, copy), _sha256sum(copy)),
        }
        taken = {name: statistics.median(times) for name, times in _in_turns(works, copy, repeats).items()}
    size = sum(sizes) / MIB
    note = f"{size:.0f} MiB in {len(sizes)} files of {max(sizes) / MIB:.1f} MiB at most; {repeats} turns"
    speeds = {name: f"{size / seconds:.0f}" for name, seconds in taken.items()}
    copied = f"{speeds['push']} against {speeds['cp']} MiB/s; {note}"
    return [_row("push to a folder against cp + sha256sum", taken["cp"] / taken["push"], "x", "0.7", copied)]


def _in_turns(works: dict[str, Callable[[], object]], copy: Path, repeats: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(repeats):
        for name, work in works.items():
            _shell("sync")  # nothing of the turn before is still on its way to the disk
            start = time.perf_counter()
            work()
            times[name].append(time.perf_counter() - start)
            shutil.rmtree(copy, ignore_errors=True)
    return times


def _sha256sum(folder: Path) -> None:
    _shell("sh", "-c", 'find "$1" -type f -print0 | xargs -0 sha256sum > /dev/null', "sh", folder)


def _shell(*command: str | Path) -> None:
    subprocess.run(command, check=True)
