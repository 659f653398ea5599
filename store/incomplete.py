"""What a copy that is not sealed lacks, in one sentence.

In: a place without SEALED. Out: the error to raise. Cost: a listing where the place can be listed; for a
copy, the manifest.
"""

from .errors import FormatError, StoreNotSealed
from .folder import GROUP
from .manifest import MANIFEST, PULLING, PUSHING, Manifest, parse_manifest
from .parsing import parse_json
from .places import LocalPlace, Place
from .records import FOLDER as BLOCKS
from .records import parse_record

UNFINISHED = "has no seal: a copy that is not complete, or a harvest that is not finished; push it again"


def incomplete_copy(place: Place) -> StoreNotSealed | None:
    """The error for a copy that is not whole; None when the place does not look like a copy."""
    marker = next((name for name in (PUSHING, PULLING) if place.size(name) is not None), None)
    source = MANIFEST if place.size(MANIFEST) is not None else marker  # a mark holds the manifest to come
    if source is None:
        return None if isinstance(place, LocalPlace) else StoreNotSealed(f"{place.url} {UNFINISHED}")
    again = "push it again" if marker == PUSHING else "copy or pull it again"
    try:
        manifest = parse_manifest(parse_json(place.read(source), place.where(source)), place.where(source))
    except FormatError:
        found = f"{MANIFEST} is cut short" if source == MANIFEST else f"{MANIFEST} has not arrived"
        return StoreNotSealed(f"{place.url} is an incomplete copy: {found}; {again}")
    missing = _missing(place, manifest)
    if marker is None and not missing and isinstance(place, LocalPlace):
        return None  # a harvest that was stopped while it was being sealed
    counted = (
        f"{len(missing)} of its files are missing, first {missing[0]}" if missing else "SEALED is missing"
    )
    return StoreNotSealed(f"{place.url} is an incomplete copy: {counted}; {again}")


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
