"""Moving a store to a place where every write is a commit (the Hub): all files are handed over at once.

In: a sealed store of this disk, and such a place. Out: the store there, manifest and seal in the last commit;
what the place does not take is refused before the first byte. Cost: every file is read and digested once
before it leaves, and once more by the upload.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from .carrying import DISK_THREADS, NOTHING, Buffers, Meter, Piece, fetch, in_parallel
from .contents import Contents
from .folder import CARD
from .manifest import MANIFEST, SEALED
from .places import WritablePlace
from .progress import Progress, silent


@runtime_checkable
class BulkPlace(WritablePlace, Protocol):
    """A place where every write is a commit (the Hub): it takes a whole store at once."""

    def upload(
        self,
        files: Sequence[tuple[str, Path]],
        *,
        last: Sequence[tuple[str, Path]],
        progress: Progress = silent,
    ) -> None: ...


def prepare_bulk(contents: Contents, target: BulkPlace) -> None:
    """What the Hub does not take is refused first; a repository that is not there yet is made."""
    from .hub_upload import check_limits

    check_limits(target.url, *_bulk_files(contents))
    target.upload([], last=[])


def carry_bulk(
    contents: Contents,
    target: BulkPlace,
    meter: Meter,
    progress: Progress,
    there: Mapping[str, int] = NOTHING,
) -> None:
    """Check every digest, then hand all files over; manifest and seal go in the last commit."""
    place, buffers = contents.reader.place, Buffers()
    checked = Meter("check", contents.n_bytes, progress)

    def check(piece: Piece) -> None:
        fetch(place, piece, buffers)
        checked.add(piece)

    in_parallel(check, contents.pieces(), DISK_THREADS)
    files, last = _bulk_files(contents)
    target.upload(files, last=last, progress=progress)
    for piece in contents.pieces():
        meter.add(piece, kept=there.get(piece.name) == piece.size)


def _bulk_files(contents: Contents) -> tuple[list[tuple[str, Path]], list[tuple[str, Path]]]:
    folder = Path(contents.reader.path)
    names = [piece.name for piece in contents.pieces()]
    names += [CARD] if (folder / CARD).is_file() and not (folder / CARD).is_symlink() else []
    return [(name, folder / name) for name in names], [(name, folder / name) for name in (MANIFEST, SEALED)]
