"""The only place that writes files: atomic, durable, and never in place of something half-done.

In: a path and the buffers of its content. Out: the file whole and on disk, or an EnvironmentFault and no
file of that name. Order: temporary file beside the target, fsync, rename (or, for a file that must not exist,
a hard link), fsync of the folder and of every new parent. A batch goes through these steps together: all
temporaries are written, then synced, then renamed, then the folders are synced; the syncs run on threads,
because a journalling file system then commits many of them at once (measured on ext4, 70 files of 1.1 MiB:
44-50 MiB/s one by one, 300 and more together). A batch has as many files as any process may have open.
Cost: one write, no copy.

While a temporary is being written its process holds a lock on it, which the kernel drops when the process
dies: `sweep` removes exactly the temporaries that nobody writes any more.
"""

import errno
import os
import re
import secrets
import shutil
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from . import points
from .disk import (
    fault,
    lock,
    make_folders,
    sync_file,
    sync_folder,
    synced_folder,
    together,
    write_all,
)
from .errors import EnvironmentFault, UsageError

Buffer = Any  # bytes, memoryview or a C-contiguous numpy array
Files = Iterable[tuple[Path, Sequence[Buffer]]]
PARTIAL = ".partial"
OPEN_FILES = 128  # in a batch; macOS lets a process open 256 where nobody asks for more
_TEMPORARY = re.compile(r"\.[0-9a-f]{12}\.partial")
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


class Pending(NamedTuple):
    """A file under its temporary name."""

    descriptor: int
    temporary: Path
    path: Path


def write_file(path: Path, *buffers: Buffer) -> None:
    """Write one file durably, replacing an older one in one step."""
    write_files([(path, buffers)])


def write_files(files: Files, within: Path | None = None) -> None:
    """Write several files durably; when it returns, all are on disk; when it raises, no temporary is left.

    They get their names batch by batch, in order: those of one are on disk before the next is written.
    Folders that this call creates become durable with it. `within` adds those that are there already, from
    the files up to this one: a process that crashed may have created them and not have got any further.
    """
    files = iter(files)
    for first in files:
        _write_batch(chain([first], islice(files, OPEN_FILES - 1)), within)


def _write_batch(files: Files, within: Path | None) -> None:
    with _staged(files, within) as (pending, folders):
        for count, (_, temporary, path) in enumerate(pending):
            with fault(path, "rename"):
                temporary.replace(path)
            if count == 0:
                points.reached("durable.half_renamed")
        points.reached("durable.renamed")
        together(synced_folder, [(folder,) for folder in folders])
    points.reached("durable.folders_synced")


def create_file(path: Path, *buffers: Buffer, within: Path | None = None) -> bool:
    """Write one file durably unless it exists; False then. Of several processes exactly one gets True."""
    return create_files([(path, buffers)], within)[0]


def create_files(files: Files, within: Path | None = None) -> list[bool]:
    """Write those of several files that do not exist; which they were. What was there is made durable too.

    A name appears with its whole content at once: a hard link to the finished temporary file. Where the file
    system has no links the name is first taken by an empty file; a crash in between leaves that, and an empty
    file is nothing that a store holds: whoever reads it refuses it, and `begin` and `seal` write it again.
    """
    files = list(files)
    there = [path.exists() for path, _ in files]
    wanted = [file for file, found in zip(files, there, strict=True) if not found]
    old = [path for (path, _), found in zip(files, there, strict=True) if found]
    with _staged(wanted, within, old) as (pending, folders):
        created: dict[Path, bool] = {}
        for item in pending:
            with fault(item.path, "create"):
                created[item.path] = _appear(item)
                item.temporary.unlink(missing_ok=True)  # before the sync, so that the disk forgets it too
            points.reached("durable.created")
        together(synced_folder, [(folder,) for folder in folders])
    points.reached("durable.folders_synced")
    return [created.get(path, False) for path, _ in files]


def sweep(folder: Path) -> int:
    """Remove temporaries in this folder that no living process writes; how many there were."""
    count = 0
    with fault(folder, "clean up"), suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            if is_temporary(entry.name) and entry.is_file(follow_symlinks=False):
                count += _sweep_file(Path(entry.path))
    return count


def is_temporary(name: str) -> bool:
    """A name that `_temporary` gives; a person's own `film.mp4.partial` is none."""
    return _TEMPORARY.fullmatch(name[-21:]) is not None


def _sweep_file(path: Path) -> int:
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:
        return 0  # it got its name meanwhile, or it is not ours
    try:
        if not lock(descriptor):
            return 0
        path.unlink(missing_ok=True)
        return 1
    finally:
        os.close(descriptor)


@contextmanager
def _staged(
    files: Files, within: Path | None, old: Sequence[Path] = ()
) -> Generator[tuple[list[Pending], list[Path]]]:
    """The files under temporary names, written and synced; and the folders to sync once they have theirs."""
    pending: list[Pending] = []
    folders: dict[Path, None] = {}
    try:
        for path, buffers in files:
            with fault(path, "write"):
                folders |= dict.fromkeys(make_folders(path.parent))
                pending.append(_temporary(path))
                for buffer in buffers:
                    write_all(pending[-1].descriptor, buffer)
        points.reached("durable.written")
        together(sync_file, [(descriptor, path) for descriptor, _, path in pending])
        points.reached("durable.synced")
        for path in (*(path for _, _, path in pending), *old):
            folders |= dict.fromkeys(_folders_of(path, within))
        yield pending, list(folders)
    finally:
        for descriptor, temporary, _ in pending:
            with suppress(OSError):  # gone already where it got its name
                temporary.unlink(missing_ok=True)
            os.close(descriptor)


def _temporary(path: Path) -> Pending:
    """A new file beside the target, locked."""
    while True:
        temporary = path.with_name(f"{path.name}.{secrets.token_hex(6)}{PARTIAL}")
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        mine = lock(descriptor)
        if mine is None or (mine and os.fstat(descriptor).st_nlink):
            return Pending(descriptor, temporary, path)
        temporary.unlink(missing_ok=True)  # somebody sweeps between the two calls
        os.close(descriptor)


def _appear(item: Pending) -> bool:
    """Give a finished temporary its name, if no file has it."""
    try:
        os.link(item.temporary, item.path)
        return True
    except FileExistsError:
        # A network file system may have made the link, lost the reply and asked again.
        return os.path.samestat(os.fstat(item.descriptor), item.path.stat())
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
    try:
        os.close(os.open(item.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
    except FileExistsError:
        return False
    item.temporary.replace(item.path)
    return True


def _folders_of(path: Path, within: Path | None) -> list[Path]:
    """The folder of a file, and those above it up to `within`."""
    if within is None:
        return [path.parent]
    return [folder for folder in path.parents if folder == within or within in folder.parents]


def make_folder(path: Path) -> None:
    """Create a folder and its parents, durably; one that exists is fine."""
    with fault(path, "create"):
        for folder in make_folders(path):
            sync_folder(folder)


def claim_folder(path: Path) -> Path:
    """Check early that a store or study can be written at `path`; the folder is created, or is empty."""
    path = Path(path)
    if path.exists() and not path.is_dir():
        raise UsageError(f"{path} is a file; name a new or an empty folder")
    make_folder(path)
    with fault(path, "use"):
        found = sorted(entry.name for entry in os.scandir(path))
    if found:
        shown = ", ".join(found[:3]) + (", ..." if len(found) > 3 else "")
        raise UsageError(f"{path} is not empty (it holds {shown}); name a new or an empty folder")
    check_writable(path)
    return path


def check_writable(path: Path) -> None:
    """Refuse a folder that takes no files."""
    with fault(path, "write to"):
        probe = path / f"probe.{secrets.token_hex(6)}{PARTIAL}"
        probe.touch()
        probe.unlink()


def check_space(path: Path, need_bytes: int, otherwise: str = "") -> None:
    """Refuse before the first byte when the disk cannot hold what is planned; `otherwise`: what helps too."""
    with fault(path, "inspect"):
        free = shutil.disk_usage(path).free
    if free < need_bytes:
        raise EnvironmentFault(
            f"{path}: {need_bytes / 2**30:.3f} GiB are needed, {free / 2**30:.3f} GiB are free; "
            f"free some space or choose another disk{otherwise}"
        )
