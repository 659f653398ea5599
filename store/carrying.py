"""Carrying pieces of a store from one place to another: on threads, each digest checked on the way.

In: a place to read, a place to write, pieces with name, size and digest. Out: the pieces at the target under
their names, whole and durable; what was there already stays. Nothing gets its name before its content was
checked, so damage is never spread. Cost: one read, one BLAKE3 and one write a piece; a buffer of the largest
piece per thread, at most 256 MiB in all; on a local disk many files are written and synced together.
"""

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from blake3 import blake3

from . import durable
from .disk import synced_folder, together
from .errors import DamageError, MissingChunk, NearlineError
from .places import LocalPlace, Place, WritablePlace, refused
from .progress import Progress

THREADS = 16  # requests to a server wait most of their time
DISK_THREADS = 4  # on local disks: one reads while others sync
IN_FLIGHT_BYTES = 256 * 2**20
BATCH_BYTES = 32 * 2**20  # files written, then synced together; a large object is a batch of its own
ATTEMPTS = 3  # to read a piece whose content came out wrong
READ_BYTES = 2**20  # read and digested together: stays in a core's cache
NOTHING: Mapping[str, int] = {}

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Piece:
    """One file to move."""

    name: str  # at the target
    size: int
    digest: str
    source: str | None = None  # its name at the source, where it is another one


@dataclass(frozen=True, slots=True)
class Moved:
    """What a push or pull did."""

    source: str
    target: str
    digest: str  # of the seal at the target
    n_files: int  # moved now
    n_bytes: int  # of those
    n_kept: int  # files that an earlier run had brought there


class Meter:
    """Counts what arrives, from any thread, and reports it in bytes."""

    def __init__(self, stage: str, total: int, progress: Progress) -> None:
        self.n_files = self.n_bytes = self.n_kept = 0
        self.total, self._done, self._stage, self._progress = total, 0, stage, progress
        self._lock = threading.Lock()

    def add(self, piece: Piece, *, kept: bool = False) -> None:
        with self._lock:
            self.n_kept += kept
            self.n_files += not kept
            self.n_bytes += 0 if kept else piece.size
            self._done += piece.size
            self._progress(self._stage, self._done, max(self.total, self._done), "bytes")

    def forget_kept_unless_moved(self) -> None:
        """A copy that was whole before, and still is: nothing was done."""
        self.n_kept = self.n_kept if self.n_files else 0


class Buffers(threading.local):
    """One buffer per thread, as large as the largest piece that the thread has seen."""

    def __init__(self) -> None:
        self._memory = np.empty(0, dtype=np.uint8)

    def view(self, size: int) -> memoryview:
        if self._memory.nbytes < size:
            self._memory = np.empty(size, dtype=np.uint8)
        return memoryview(self._memory)[:size]  # pyright: ignore[reportArgumentType]


def threads_for(source: Place, target: Place, largest: int) -> int:
    """As many as are useful between these places, and as fit the memory with pieces of this size."""
    to_disk = isinstance(target, LocalPlace)
    most = DISK_THREADS if to_disk and isinstance(source, LocalPlace) else THREADS
    copies = 1 if to_disk else 2  # what goes to a server is copied once more
    return max(1, min(most, IN_FLIGHT_BYTES // max(1, copies * largest)))


def in_parallel(work: Callable[[Item], Any], items: Iterable[Item], n_threads: int) -> None:
    """Call `work` on every item; the first error stops all threads and is raised."""
    source, lock, errors = iter(items), threading.Lock(), list[BaseException]()

    def take() -> list[Item]:
        with lock:
            return [] if errors else list(islice(source, 1))

    def run() -> None:
        try:
            while item := take():
                work(item[0])
        except BaseException as error:
            errors.append(error)

    if n_threads <= 1:
        run()
    else:
        with ThreadPoolExecutor(n_threads, thread_name_prefix="nearline-move") as pool:
            try:
                for running in [pool.submit(run) for _ in range(n_threads)]:
                    running.result()
            except BaseException as error:  # an interrupt reaches this thread only: it must stop the others
                errors.append(error)
    if errors:
        raise errors[0]


def carry(
    source: Place,
    target: WritablePlace,
    pieces: Iterable[Piece],
    meter: Meter,
    n_threads: int,
    there: Mapping[str, int] = NOTHING,
) -> None:
    """Bring the pieces to the target. `there`: names and sizes that a remote target holds already; these are
    enough, as an object there appears whole or not at all and its digest was checked before it was sent. What
    a local folder holds is read and its digest compared."""
    buffers = Buffers()
    if isinstance(target, LocalPlace):
        most = max(1, durable.OPEN_FILES // n_threads)  # over all threads
        folder = target.path
        in_parallel(
            lambda batch: durable.write_files(_checked(source, folder, batch, buffers, meter), folder),
            batches(pieces, most),
            n_threads,
        )
        return

    def send(piece: Piece) -> None:
        kept = there.get(piece.name) == piece.size
        if not kept:
            target.put(piece.name, bytes(fetch(source, piece, buffers)))
        meter.add(piece, kept=kept)

    in_parallel(send, pieces, n_threads)


def batches(pieces: Iterable[Piece], most: int) -> Iterator[list[Piece]]:
    """Pieces in groups of about BATCH_BYTES, at most `most` in each."""
    batch: list[Piece] = []
    n_bytes = 0
    for piece in pieces:
        if batch and (len(batch) == most or n_bytes + piece.size > BATCH_BYTES):
            yield batch
            batch, n_bytes = [], 0
        batch.append(piece)
        n_bytes += piece.size
    if batch:
        yield batch


def fetch(source: Place, piece: Piece, buffers: Buffers) -> memoryview:
    """The content of a piece, in this thread's buffer; DamageError when it comes out wrong every time."""
    for attempt in range(ATTEMPTS):
        try:
            view = buffers.view(piece.size)
            _read(source, piece, view)
            return view
        except MissingChunk:
            raise
        except DamageError:  # bytes change on the way, too; a server that is away was waited for already
            if attempt == ATTEMPTS - 1:
                raise
    raise AssertionError("the last attempt returned or raised")


def holds(folder: Path, piece: Piece, buffers: Buffers) -> bool:
    """Whether a local folder has this piece already, by its full content."""
    try:
        if (folder / piece.name).stat().st_size != piece.size:
            return False
        here = Piece(piece.name, piece.size, piece.digest)
        _read(LocalPlace(folder), here, buffers.view(piece.size))
    except (OSError, DamageError):
        return False
    return True


def settle(folder: Path) -> None:
    """After a copy that went on from an earlier run: what that run renamed becomes durable, too (it may have
    died before its folders were synced), and its temporaries go."""
    folders = [Path(root) for root, _, _ in os.walk(folder)]
    for each in folders:
        durable.sweep(each)
    together(synced_folder, [(each,) for each in folders])


def _checked(
    source: Place, folder: Path, batch: list[Piece], buffers: Buffers, meter: Meter
) -> Iterator[tuple[Path, tuple[memoryview]]]:
    """What a durable batch write consumes: each file is checked before a byte of it is handed on."""
    for piece in batch:
        if holds(folder, piece, buffers):
            meter.add(piece, kept=True)
            continue
        yield folder / piece.name, (fetch(source, piece, buffers),)
        meter.add(piece)


def _read(source: Place, piece: Piece, view: memoryview) -> None:
    """Fill `view` with the piece and compare its digest."""
    name = piece.source or piece.name
    where, digest, done = source.where(name), blake3(), 0
    try:
        file = source.open(name)
    except FileNotFoundError:
        raise MissingChunk(
            f"{where}: the file is missing; collect its block again, or fetch the store again"
        ) from None
    try:
        if file.size != piece.size:
            raise DamageError(f"{where}: {file.size} bytes, {piece.size} were sealed")
        while done < piece.size:
            part = view[done : done + READ_BYTES]
            if (n_read := file.readinto(part)) == 0:
                raise DamageError(f"{where}: ended after {done} of {piece.size} bytes")
            digest.update(part[:n_read])
            done += n_read
    except OSError as error:
        if isinstance(error, NearlineError):
            raise
        raise refused(where, "read", error) from error
    finally:
        file.close()
    if digest.hexdigest() != piece.digest:
        raise DamageError(
            f"{where}: the content is not what was sealed (its BLAKE3 differs); run `nearline verify` on the "
            "store, then repair it or fetch it again"
        )
