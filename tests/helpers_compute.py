"""Functions that tests send to workers: they must be importable there, and cheap to import."""

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import threadpoolctl
from nearline.store import UsageError


class Counted:
    """A shared value that leaves a mark each time it arrives somewhere."""

    def __init__(self, folder: Path, values: np.ndarray) -> None:
        self.folder, self.values = folder, values

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        mark(self.folder / "arrived", f"{os.getpid()}\n")


def mark(path: Path, text: str) -> None:
    """Append to a file that several processes write."""
    with path.open("a") as file:
        file.write(text)


def product(shared: Counted, item: int) -> np.ndarray:
    """Rounds differently if BLAS adds in another order."""
    return shared.values @ (shared.values[item] * np.float32(1 + item))


def pid_of(shared: object, item: int) -> int:
    return os.getpid()


def pid_when_let(shared: Path, item: int) -> int:
    """Waits for a file."""
    while not (shared / "go").exists():
        time.sleep(0.01)
    return os.getpid()


def join_pids(shared: object, item: str, *pids: int) -> str:
    return " ".join([item, *map(str, pids)])


def refuse(shared: object, item: int) -> None:
    if item == 3:
        raise UsageError(f"item {item} cannot be computed; leave it out")


def threads_of_blas(shared: object, item: int) -> list[int]:
    import scipy.linalg

    scipy.linalg.eigh(np.eye(3))
    return [found["num_threads"] for found in threadpoolctl.threadpool_info()]


def die_once(shared: Path, item: int) -> int:
    """Kills its worker at item 2, the first time."""
    spot = shared / "died"
    if item == 2 and not spot.exists():
        spot.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return item * item


def die(shared: Path, item: int) -> int:
    if item == 1:
        mark(shared / "deaths", f"{os.getpid()}\n")
        os.kill(os.getpid(), signal.SIGKILL)
    return item


def alive(pids: Sequence[int]) -> list[int]:
    """Those of the processes that still run."""
    found: list[int] = []
    for pid in pids:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            continue
        found.append(pid)
    return found
