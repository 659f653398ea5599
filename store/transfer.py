"""Moving a sealed store whole: `push` from this disk to any place, `pull` from any place to this disk.

In: a sealed store and an empty place, or one where the same copy was cut short. Out: the same bytes there,
and a Moved that counts them. Order: a mark that says what is coming, chunk objects, block records, metadata,
README.md, manifest.json, SEALED, and the mark goes. So a copy cut short at any moment has no SEALED, is
refused by every reader, and goes on where it stopped when the command is repeated. A copy that was whole and
has lost or damaged files since gets these again, under the same seal. Each digest is checked on the way, and
all sizes at the target before SEALED. Cost: one read, one BLAKE3 and one write a file; memory for 256 MiB in
flight, and about 180 bytes a chunk object for the records.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from blake3 import blake3

from . import durable, points
from .bulk import BulkPlace, carry_bulk, prepare_bulk
from .carrying import Meter, Moved, Piece, carry, settle, threads_for
from .contents import Contents
from .errors import DamageError, EnvironmentFault, UsageError
from .finding import check_there, store_folder
from .folder import CARD, Where
from .incomplete import PULLING, PUSHING
from .manifest import MANIFEST, read_seal
from .marks import claim, create_settled, finish, read_or_none
from .places import LocalPlace, Place, WritablePlace, writable_place_of
from .probe import require_exclusive_create
from .progress import Progress, silent
from .reader import Reader

CARD_BYTES = 2**20  # of a README.md that is taken along


def push(
    store: str | Path,
    to: Where,
    *,
    progress: Progress = silent,
    allow_unsafe_create: bool = False,
) -> Moved:
    """Copy a sealed store of this machine to a folder, s3://, gs://, az:// or hf://datasets/…

    A remote store that lets two writers create one file is refused unless `allow_unsafe_create`.
    """
    check_there(store)
    folder = store_folder(store)
    contents = Contents.of(Reader.open(folder))
    _check_present(contents)
    target = writable_place_of(to)
    if isinstance(target, LocalPlace):
        _check_apart(folder, target.path)
    elif read_seal(target) is None:
        require_exclusive_create(target, allowed=allow_unsafe_create)
    return _move(contents, target, PUSHING, "push", progress)


def pull(
    source: Where,
    path: str | Path,
    *,
    layers: str | Sequence[int] | None = None,
    sites: str | Sequence[str] | None = None,
    split: str | Sequence[str] | None = None,
    tokens: int | None = None,
    progress: Progress = silent,
) -> Moved:
    """Copy a sealed store from anywhere into a folder of this machine; whole, or a selection of it.

    `layers` ("4-9" or numbers), `sites`, `split` (names) and `tokens` (as many whole blocks as hold them)
    give a smaller store that is valid by itself and names its parent.
    """
    check_there(source)
    reader = Reader.open(source)
    if any(choice is not None for choice in (layers, sites, split, tokens)):
        from .selection import choose, pull_selection

        if (chosen := choose(reader, layers, sites, split, tokens)) is not None:
            return pull_selection(reader, Path(path), chosen, progress)
    return _move(Contents.of(reader), LocalPlace(path), PULLING, "pull", progress)


def _move(contents: Contents, target: WritablePlace, mark: str, stage: str, progress: Progress) -> Moved:
    source, manifest = contents.reader.place, _manifest_bytes(contents)
    if isinstance(target, LocalPlace) and target.path.is_file():
        raise UsageError(f"{target.url} is a file; name a new or an empty folder")
    bulk = isinstance(target, BulkPlace)
    meter = Meter(stage, contents.n_bytes, silent if bulk else progress)  # the Hub's upload reports itself
    if bulk:
        prepare_bulk(contents, target)
    if claim(target, mark, manifest, lambda sealed: sealed == contents.digest):
        points.reached("transfer.begun")
        if bulk:
            carry_bulk(contents, target, meter, progress)
            target.delete(mark)
            return Moved(source.url, target.url, contents.digest, meter.n_files, meter.n_bytes, 0)
        there = _present(contents, target)
        if isinstance(target, LocalPlace):
            _check_space(target, contents, there, mark)
        _carry_all(contents, target, there, meter)
        _put_card(contents, target)
        if not create_settled(target, MANIFEST, manifest):
            raise UsageError(f"{target.where(MANIFEST)}: another store's manifest is here; name a new place")
        points.reached("transfer.manifest_there")
        if isinstance(target, LocalPlace) and set(there) != {mark}:
            settle(target.path)
        _check_arrived(contents, target)
        finish(target, mark, manifest)
        points.reached("transfer.sealed_there")
    elif not _is_same_folder(source, target):
        _mend(contents, target, meter, manifest, progress)
    return Moved(source.url, target.url, contents.digest, meter.n_files, meter.n_bytes, meter.n_kept)


def _mend(
    contents: Contents, target: WritablePlace, meter: Meter, manifest: bytes, progress: Progress
) -> None:
    """Bring again what a sealed copy has lost since: of a folder every digest is compared, of a server the
    sizes that it lists. README.md may have been edited or removed there, and stays as it is."""
    there = _present(contents, target)
    if not isinstance(target, BulkPlace):
        _carry_all(contents, target, there, meter)
        if read_or_none(target, MANIFEST) != manifest:
            target.put(MANIFEST, manifest)
            meter.add(Piece(MANIFEST, len(manifest), contents.digest))
    elif there.get(MANIFEST) != len(manifest) or any(there.get(p.name) != p.size for p in contents.pieces()):
        carry_bulk(contents, target, meter, progress, there)
    meter.forget_kept_unless_moved()


def _carry_all(contents: Contents, target: WritablePlace, there: dict[str, int], meter: Meter) -> None:
    """Chunk objects, then what makes a reader believe in them."""
    source = contents.reader.place
    n_threads = threads_for(source, target, contents.largest)

    def bring(pieces: Iterable[Piece]) -> None:
        carry(source, target, pieces, meter, n_threads, there)

    bring(contents.chunks())
    points.reached("transfer.chunks_there")
    bring(contents.record_files())
    points.reached("transfer.records_there")
    bring(contents.metadata_files())
    points.reached("transfer.metadata_there")


def _check_space(target: LocalPlace, contents: Contents, there: dict[str, int], mark: str) -> None:
    """A folder in which the copy would not fit is left as it was found."""
    try:
        durable.check_space(target.path, contents.n_bytes - sum(there.values()))
    except EnvironmentFault:
        if set(there) <= {mark}:
            target.delete(mark)
        raise


def _manifest_bytes(contents: Contents) -> bytes:
    """manifest.json as it was sealed, to the byte."""
    place = contents.reader.place
    content = read_or_none(place, MANIFEST)
    if content is None or blake3(content).hexdigest() != contents.digest:
        raise DamageError(f"{place.where(MANIFEST)}: the file is not the one that was sealed")
    return content


def _put_card(contents: Contents, target: WritablePlace) -> None:
    """README.md: not under the seal, a person may have edited it; absent is fine. A link is not followed:
    nothing vouches for what it leads to, which may be a private file of whoever copies."""
    place = contents.reader.place
    if isinstance(place, LocalPlace) and (place.path / CARD).is_symlink():
        return
    size = place.size(CARD)
    if size is not None and size <= CARD_BYTES and (content := read_or_none(place, CARD)) is not None:
        target.put(CARD, content)


def _check_present(contents: Contents) -> None:
    """Before the first byte leaves: every file of the store is on disk with its size."""
    place = contents.reader.place
    for piece in contents.pieces():
        if (size := place.size(piece.name)) != piece.size:
            found = "is missing" if size is None else f"has {size} bytes, {piece.size} were sealed"
            raise DamageError(
                f"{place.where(piece.name)} {found}: a damaged store is not pushed; run `nearline verify` on "
                "it, then repair it or fetch it again"
            )


def _check_apart(folder: Path, target: Path) -> None:
    """A store is not copied into itself."""
    inside = target.resolve()
    if inside != folder.resolve() and folder.resolve() in inside.parents:
        raise UsageError(f"{target} lies inside the store {folder}; name a folder outside")


def _is_same_folder(source: Place, target: Place) -> bool:
    if not (isinstance(source, LocalPlace) and isinstance(target, LocalPlace)):
        return False
    return source.path.resolve() == target.path.resolve()


def _present(contents: Contents, target: WritablePlace) -> dict[str, int]:
    """Names and sizes of what is at the target, as the target itself says."""
    if (listed := target.list()) is not None:
        return listed
    sizes = {piece.name: target.size(piece.name) for piece in contents.pieces()}
    return {name: size for name, size in sizes.items() if size is not None}


def _check_arrived(contents: Contents, target: WritablePlace) -> None:
    """All files are at the target with their sizes, as the target itself says."""
    there = _present(contents, target)
    for piece in contents.pieces():
        if (size := there.get(piece.name)) != piece.size:
            found = "is not there" if size is None else f"has {size} bytes there, {piece.size} were sent"
            raise EnvironmentFault(
                f"{target.where(piece.name)} {found}: not sealed; run the same command again"
            )
