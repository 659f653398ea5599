"""Which share of the blocks this process collects, and that no other process collects the same.

In: `rank` and `world_size` of the settings, or of torchrun's environment (RANK, WORLD_SIZE, LOCAL_RANK).
Out: the blocks of this rank, its device, and a lock on the rank. Rank r of n takes the blocks b with
b % n == r, in order, so that what is committed so far is nearly a prefix, whatever happens. Cost: none.
The lock is the kernel's own (flock), free again however the process ends; it saves work and protects
nothing: the store is safe without it.
"""

import contextlib
import errno
import os
import platform
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..store.errors import EnvironmentFault, UsageError
from ..store.folder import RUNS
from .settings import HarvestSettings

_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


@dataclass(frozen=True, slots=True)
class Ranks:
    """Rank `rank` of `world_size` processes that fill one store."""

    rank: int = 0
    world_size: int = 1

    def own(self, blocks: Iterable[int]) -> list[int]:
        """Those of `blocks` that this rank takes, in increasing order."""
        return sorted(block for block in blocks if block % self.world_size == self.rank)

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world_size}"


def ranks_of(settings: HarvestSettings, environment: Mapping[str, str] | None = None) -> Ranks:
    """The rank of this process: the settings' own, else torchrun's, else 0 of 1."""
    rank, world_size = settings.rank, settings.world_size
    if rank is None and world_size is None:
        environment = os.environ if environment is None else environment
        if not {"RANK", "WORLD_SIZE"} <= set(environment):
            return Ranks()
        rank, world_size = (_number(environment, name) for name in ("RANK", "WORLD_SIZE"))
    if rank is None or world_size is None:
        given, absent = ("rank", "world_size") if world_size is None else ("world_size", "rank")
        raise UsageError(f"{given} is set and {absent} is not: give both, such as rank=0 world_size=4")
    if not 0 <= rank < world_size:
        allowed = "0" if world_size < 2 else f"0-{world_size - 1}"
        raise UsageError(f"rank={rank} of world_size={world_size}: ranks count from 0, allowed: {allowed}")
    return Ranks(rank, world_size)


def local_device(device: str, environment: Mapping[str, str] | None = None) -> str:
    """`auto` under torchrun, where there is CUDA: this process's own GPU."""
    environment = os.environ if environment is None else environment
    if device != "auto" or not {"RANK", "WORLD_SIZE", "LOCAL_RANK"} <= set(environment):
        return device
    import torch

    if not torch.cuda.is_available():
        return device
    # Launchers that show each process only its own GPU number it 0 there.
    return f"cuda:{_number(environment, 'LOCAL_RANK') % torch.cuda.device_count()}"


@contextmanager
def only_one(folder: Path, ranks: Ranks) -> Generator[None]:
    """Refuse a second process of this rank in this store while the block runs."""
    path = folder / RUNS / f"rank-{ranks.rank}.lock"
    descriptor = _lock(path, ranks)
    try:
        yield
    finally:
        if descriptor is not None:
            # Removed while held: whoever opened it meanwhile sees that it is no longer the one in place.
            path.unlink(missing_ok=True)
            os.close(descriptor)
        with contextlib.suppress(OSError):
            path.parent.rmdir()  # only where it is empty


def other_ranks(folder: Path, ranks: Ranks) -> bool:
    """Whether a process of another rank is, or was, at work in this folder."""
    return any(path.name != f"rank-{ranks.rank}.lock" for path in (folder / RUNS).glob("rank-*.lock"))


def _lock(path: Path, ranks: Ranks) -> int | None:
    """Descriptor of the locked file; None where the system has no such locks."""
    try:
        import fcntl
    except ImportError:  # Windows
        return None
    while True:
        descriptor = _open(path)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 200).decode(errors="replace").strip()
            os.close(descriptor)
            raise UsageError(
                f"{path.parent.parent}: another process ({holder or 'unknown'}) collects {ranks} here. "
                "Wait for it, or give each process a rank of its own (rank, world_size)."
            ) from None
        except OSError as error:
            os.close(descriptor)
            if error.errno in _NO_LOCKS:
                return None
            raise EnvironmentFault(f"cannot lock {path}: {error.strerror}") from error
        if _is_in_place(descriptor, path):
            with contextlib.suppress(OSError):  # only a courtesy: a full disk may still hold all blocks
                os.ftruncate(descriptor, 0)
                os.write(descriptor, f"process {os.getpid()} on {platform.node()}".encode())
            return descriptor
        os.close(descriptor)


def _open(path: Path) -> int:
    try:
        while True:
            path.parent.mkdir(exist_ok=True)
            with contextlib.suppress(FileNotFoundError):  # another process removed the empty folder meanwhile
                return os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise EnvironmentFault(f"cannot create {path}: {error.strerror}") from error


def _is_in_place(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment[name].strip()
    if not text.isdecimal():
        raise UsageError(
            f"the environment has {name}={text!r}: a number is needed; or set rank and world_size"
        )
    return int(text)
