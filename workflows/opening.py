"""`nearline.open`: a store or a study, whichever lies there.

In: a path, or a URL of a store. Out: a `Reader` or an `OpenStudy`; or one sentence on what lies there
instead. Cost: a look at a few names, and opening.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from ..store import IncompleteError, Reader, UsageError
from ..store.finding import is_store, is_study
from ..store.folder import GROUP, MOMENTS
from ..store.names import printable, typed
from ..store.places import LocalPlace, Place, place_of
from ..store.study import Study

if TYPE_CHECKING:
    from .opened import OpenStudy

SHOWN = 8


def open(where: "str | Path | Place") -> "Reader | OpenStudy":
    """Open a store (a folder, its activations.zarr, a URL) or a study (a folder)."""
    place = place_of(where)
    if not isinstance(place, LocalPlace) or not place.path.is_dir():
        if isinstance(place, LocalPlace) and not place.path.exists():
            name = typed(place.path)
            raise IncompleteError(
                f"{place.url} does not exist; `nearline collect MODEL CORPUS {name}` makes a store, "
                f"`nearline fit {name} STORE` a study"
            )
        return Reader.open(where)
    if is_study(place.path):
        from .opened import OpenStudy

        return OpenStudy(Study.open(place.path))
    if not _is_store(place.path) and (inside := _inside(place.path)):
        raise UsageError(f"{place.url} is neither a store nor a study; it holds {inside}: open one of them")
    return Reader.open(where)


def _is_store(folder: Path) -> bool:
    return folder.name == GROUP or is_store(folder) or (folder / MOMENTS).exists()


def _inside(folder: Path) -> str:
    """Stores and studies one folder further down."""
    found = [
        printable(entry.name)
        for entry in sorted(folder.iterdir())
        if entry.is_dir() and (_is_store(entry) or is_study(entry))
    ]
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return ", ".join(found[:SHOWN]) + more
