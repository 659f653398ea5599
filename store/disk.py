"""The few calls that durable writing is made of, with the system's refusals as one sentence.

In: paths and descriptors. Out: bytes and folder entries that are on disk, locks that die with their process.
Cost: one system call each; several syncs together run on threads.
"""

import errno
import os
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .errors import EnvironmentFault

try:
    import fcntl
except ImportError:  # Windows: nothing is locked, leftovers stay
    fcntl = None

NO_LINK = getattr(os, "O_NOFOLLOW", 0)  # a lock file that is a link would be made elsewhere
SYNC_THREADS = 16  # they only wait for the disk


def lock(descriptor: int) -> bool | None:
    """Lock an open file until it is closed; False where another process holds the lock, None where the file
    system (or Windows) has no locks."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError as error:
        return False if error.errno in (errno.EAGAIN, errno.EACCES) else None


@contextmanager
def claimed(path: Path) -> Generator[bool | None]:
    """Like `locked`, with a file that is there only so long; where nothing can be locked there is none."""
    if fcntl is None:
        yield None
        return
    with locked(path) as mine:
        try:
            yield mine
        finally:
            if mine is not False:  # removed while held: who opened it meanwhile sees that, and opens another
                with fault(path, "remove"):
                    path.unlink(missing_ok=True)


@contextmanager
def locked(path: Path) -> Generator[bool | None]:
    """Hold the lock on a file, which is created where it is missing; what it yields is that of `lock`."""
    while True:
        with fault(path, "lock"):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | NO_LINK, 0o644)
        mine = lock(descriptor)
        if not mine or os.fstat(descriptor).st_nlink:
            break
        os.close(descriptor)  # removed between the two calls
    try:
        yield mine
    finally:
        os.close(descriptor)


def held(path: Path) -> bool:
    """Whether a living process holds the lock on a file."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:
        return False
    try:
        return lock(descriptor) is False
    finally:
        os.close(descriptor)


def sync_folders(folders: Iterable[Path]) -> None:
    """Make the entries of several folders durable."""
    together(synced_folder, [(folder,) for folder in folders])


def sync_folder(path: Path) -> None:
    """Make the entries of a folder durable."""
    if os.name == "nt":
        return  # Windows cannot open folders; its renames are durable with the file's own flush
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file(descriptor: int, path: Path) -> None:
    with fault(path, "sync"):
        os.fsync(descriptor)


def synced_folder(path: Path) -> None:
    with fault(path, "sync"):
        sync_folder(path)


def together(work: Callable[..., None], calls: Sequence[tuple[Any, ...]]) -> None:
    """Run the calls on threads and wait for all of them; the first error is raised."""
    if len(calls) < 2:
        for call in calls:
            work(*call)
        return
    with ThreadPoolExecutor(SYNC_THREADS, thread_name_prefix="nearline-sync") as pool:
        for done in [pool.submit(work, *call) for call in calls]:
            done.result()


def make_folders(path: Path) -> list[Path]:
    """Create missing folders; returns the folders whose entries changed."""
    missing: list[Path] = []
    folder = path
    while not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    for new in reversed(missing):
        new.mkdir(exist_ok=True)
    return [new.parent for new in missing]


def write_all(descriptor: int, buffer: Any) -> None:
    view = memoryview(buffer).cast("B")
    while len(view):
        view = view[os.write(descriptor, view) :]


@contextmanager
def fault(path: Path, action: str) -> Generator[None]:
    """Turn the system's refusals into one sentence."""
    try:
        yield
    except OSError as error:
        if isinstance(error, EnvironmentFault):
            raise
        reasons = {
            errno.ENOSPC: "no space is left on the disk; free some and run again",
            errno.EDQUOT: "your disk quota is used up; free some space and run again",
            errno.EACCES: "permission is denied; choose a folder you may write to",
            errno.EPERM: "the operation is not permitted; choose a folder you may write to",
            errno.EROFS: "the file system is read-only; choose another folder",
        }
        reason = reasons.get(error.errno or 0, error.strerror or str(error))
        raise EnvironmentFault(f"cannot {action} {path}: {reason}") from error
