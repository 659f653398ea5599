"""What a copy that is not sealed lacks, in one sentence, and how to go on with it.

In: a place without SEALED. Out: the error to raise. Cost: a listing where the place can be listed; for a
copy, the manifest.
"""

from .errors import FormatError, StoreNotSealed
from .folder import GROUP
from .manifest import MANIFEST, PULLING, PUSHING, SEALED, Manifest, parse_manifest
from .parsing import parse_json
from .places import LocalPlace, Place
from .records import FOLDER as BLOCKS
from .records import parse_record

UNFINISHED = "has no seal: a copy that is not complete, or a harvest that is not finished"
_KINDS = {PUSHING: "an unfinished push", PULLING: "an unfinished pull", None: "an incomplete copy"}
_AGAIN = {
    PUSHING: "repeat the same `nearline push` command",
    PULLING: "repeat the same `nearline pull` command",
    None: "copy it again",
}


def mark_of(place: Place) -> str | None:
    """The mark of a push or pull, PUSHING or PULLING, that was begun here and has not ended."""
    return next((name for name in (PUSHING, PULLING) if place.size(name) is not None), None)


def copy_words(mark: str | None) -> tuple[str, str]:
    """What a copy with this mark is called, and how to go on with it."""
    return _KINDS[mark], _AGAIN[mark]


def begun_copy(place: Place) -> StoreNotSealed | None:
    """The error for an unfinished push or pull; None where none has left its mark."""
    return None if mark_of(place) is None else incomplete_copy(place)


def incomplete_copy(place: Place) -> StoreNotSealed | None:
    """The error for a copy that is not whole; None when the place does not look like a copy."""
    mark = mark_of(place)
    kind, again = copy_words(mark)
    source = MANIFEST if place.size(MANIFEST) is not None else mark  # a mark holds the manifest to come
    if source is None:
        if isinstance(place, LocalPlace):
            return None
        return StoreNotSealed(f"{place.url} {UNFINISHED}; {_AGAIN[PUSHING]}")
    try:
        manifest = parse_manifest(parse_json(place.read(source), place.where(source)), place.where(source))
    except FormatError:
        found = f"{MANIFEST} is cut short" if source == MANIFEST else f"{MANIFEST} has not arrived"
        return StoreNotSealed(f"{place.url} is {kind}: {found}; {again}")
    missing = _missing(place, manifest)
    if mark is None and not missing and isinstance(place, LocalPlace):
        return None  # a harvest that was stopped while it was being sealed
    counted = (
        f"{len(missing)} of its files are missing, first {missing[0]}" if missing else f"{SEALED} is missing"
    )
    return StoreNotSealed(f"{place.url} is {kind}: {counted}; {again}")


def _missing(place: Place, manifest: Manifest) -> list[str]:
    """Files of the manifest, and chunk objects of the records that are here, that are not here."""
    listed = place.list()
    if listed is None:
        return []
    missing = [name for name in manifest.files if name not in listed]
    for name in manifest.files:
        if name.startswith(f"{BLOCKS}/") and name in listed:
            try:
                record = parse_record(parse_json(place.read(name), name), name)
            except FormatError:
                missing.append(name)
            else:
                missing += [key for chunk in record.chunks if (key := f"{GROUP}/{chunk}") not in listed]
    return missing
