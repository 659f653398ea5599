"""The only place that writes files: atomic, durable, and never in place of something half-done.

In: a path and the buffers of its content. Out: the file whole and on disk, or an EnvironmentFault and no
file of that name. Order: temporary file beside the target, fsync, rename, fsync of the folder and of every
new parent. A batch goes through these steps together: all temporaries are written, then synced, then
renamed, then the folders are synced; the syncs run on threads, because a journalling file system then
commits many of them at once (measured on ext4, 70 files of 1.1 MiB: 44-50 MiB/s one by one, 300 and more
together). Cost: one write, no copy.
"""

import errno
import os
import secrets
import shutil
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .errors import EnvironmentFault, UsageError

Buffer = Any  # bytes, memoryview or a C-contiguous numpy array
PARTIAL = ".partial"
SYNC_THREADS = 16  # they only wait for the disk


def write_file(path: Path, *buffers: Buffer) -> None:
    """Write one file durably, replacing an older one in one step."""
    write_files([(path, buffers)])


def write_files(files: Iterable[tuple[Path, Sequence[Buffer]]]) -> None:
    """Write several files durably; when it returns, all are on disk; when it raises, no temporary is left."""
    pending: list[tuple[int, Path, Path]] = []  # descriptor, temporary, target
    folders: dict[Path, None] = {}
    try:
        for path, buffers in files:
            with _fault(path, "write"):
                folders |= dict.fromkeys(_make_folders(path.parent))
                temporary = path.with_name(f"{path.name}.{secrets.token_hex(6)}{PARTIAL}")
                descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
                pending.append((descriptor, temporary, path))
                for buffer in buffers:
                    _write_all(descriptor, buffer)
        _together(_sync_file, [(descriptor, path) for descriptor, _, path in pending])
        for _, temporary, path in pending:
            with _fault(path, "rename"):
                temporary.replace(path)
        changed = dict.fromkeys([*(path.parent for _, _, path in pending), *folders])
        _together(_sync_folder, [(folder,) for folder in changed])
    finally:
        for descriptor, temporary, _ in pending:
            os.close(descriptor)
            temporary.unlink(missing_ok=True)  # gone already where the rename came to pass


def make_folder(path: Path) -> None:
    """Create a folder and its parents, durably; one that exists is fine."""
    with _fault(path, "create"):
        for folder in _make_folders(path):
            sync_folder(folder)


def create_folder(path: Path) -> None:
    """Create a folder that must not exist: of several processes exactly one succeeds."""
    with _fault(path, "create"):
        try:
            path.mkdir()
        except FileExistsError:
            raise UsageError(
                f"{path} exists: another run is writing here, or wrote here; choose a new folder"
            ) from None
        sync_folder(path.parent)


def claim_folder(path: Path) -> Path:
    """Check early that a store or study can be written at `path`; the folder is created, or is empty."""
    path = Path(path)
    if path.exists() and not path.is_dir():
        raise UsageError(f"{path} is a file; name a new or an empty folder")
    make_folder(path)
    with _fault(path, "use"):
        found = sorted(entry.name for entry in os.scandir(path))
    if found:
        shown = ", ".join(found[:3]) + (", ..." if len(found) > 3 else "")
        raise UsageError(f"{path} is not empty (it holds {shown}); name a new or an empty folder")
    with _fault(path, "write to"):
        probe = path / f"probe.{secrets.token_hex(6)}{PARTIAL}"
        probe.touch()
        probe.unlink()
    return path


def check_space(path: Path, need_bytes: int) -> None:
    """Refuse before the first byte when the disk cannot hold what is planned."""
    with _fault(path, "inspect"):
        free = shutil.disk_usage(path).free
    if free < need_bytes:
        raise EnvironmentFault(
            f"{path}: {need_bytes / 2**30:.2f} GiB are needed, {free / 2**30:.2f} GiB are free; "
            "free some space, choose another disk, or lower tokens, layers or the storage dtype"
        )


def replace_folder(source: Path, target: Path) -> None:
    """Put a finished folder in the place of an older one; in between there is none, never a mixture."""
    with _fault(target, "replace"):
        if target.exists():
            shutil.rmtree(target)
        source.replace(target)
        sync_folder(target.parent)


def sync_folder(path: Path) -> None:
    """Make the entries of a folder durable."""
    if os.name == "nt":
        return  # Windows cannot open folders; its renames are durable with the file's own flush
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_file(descriptor: int, path: Path) -> None:
    with _fault(path, "sync"):
        os.fsync(descriptor)


def _sync_folder(path: Path) -> None:
    with _fault(path, "sync"):
        sync_folder(path)


def _together(work: Callable[..., None], calls: Sequence[tuple[Any, ...]]) -> None:
    """Run the calls on threads and wait for all of them; the first error is raised."""
    if len(calls) == 1:
        work(*calls[0])
        return
    with ThreadPoolExecutor(SYNC_THREADS, thread_name_prefix="nearline-sync") as pool:
        for done in [pool.submit(work, *call) for call in calls]:
            done.result()


def _make_folders(path: Path) -> list[Path]:
    """Create missing folders; returns the folders whose entries changed."""
    missing: list[Path] = []
    folder = path
    while not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    for new in reversed(missing):
        new.mkdir(exist_ok=True)
    return [new.parent for new in missing]


def _write_all(descriptor: int, buffer: Buffer) -> None:
    view = memoryview(buffer).cast("B")
    while len(view):
        view = view[os.write(descriptor, view) :]


@contextmanager
def _fault(path: Path, action: str) -> Generator[None]:
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
