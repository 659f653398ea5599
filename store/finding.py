"""Where a store or a study is: its folder, or one sentence on what lies there instead.

In: a path, a URL or a place. Out: the place of the store; or an error that says what is there and what was
probably meant. Cost: a look at a few names.
"""

from pathlib import Path

from .errors import IncompleteError, NearlineError, StoreNotFound, UsageError
from .folder import GROUP, MOMENTS, PLAN, SIGNS, Where
from .names import typed
from .places import LocalPlace, Place, parent_of, place_of
from .records import FOLDER
from .study_files import PROVENANCE, SETTINGS


def store_place(where: Where) -> Place:
    """The place of a store, from itself or from its activations.zarr; StoreNotFound when there is none."""
    place = place_of(where)
    if isinstance(place, LocalPlace):
        return LocalPlace(store_folder(place.path))
    if any(place.size(name) is not None for name in SIGNS):
        return place
    if place.size(MOMENTS) is not None:
        raise no_store(place)
    if place.url.rstrip("/").endswith(f"/{GROUP}"):
        return store_place(parent_of(place))
    place.list(f"{FOLDER}/")  # of a bucket that does not exist every file is absent; a listing says so
    raise no_store(place)


def store_folder(path: str | Path) -> Path:
    """The store's folder, from itself or from its activations.zarr; StoreNotFound when there is none."""
    folder = Path(path)
    if folder.name == GROUP and not (folder / GROUP).exists():
        folder = folder.parent
    if not is_store(folder):
        raise no_store(LocalPlace(folder))
    return folder


def is_store(folder: Path) -> bool:
    """Whether a folder looks like a store, whole or not."""
    return any((folder / name).exists() for name in (*SIGNS, GROUP))


def is_study(folder: Path) -> bool:
    """Whether a folder looks like a study: a settings file of that name may lie in any folder."""
    return (folder / SETTINGS).is_file() and (folder / PROVENANCE).exists()


def check_there(where: Where) -> None:
    """Refuse a path at which nothing is: for commands on a store that somebody has made."""
    place = place_of(where)
    if isinstance(place, LocalPlace) and not place.path.exists():
        raise StoreNotFound(f"{place.url} does not exist: check the path")


def no_store(place: Place) -> StoreNotFound:
    """What to say of a place where no store is."""
    local = place.path if isinstance(place, LocalPlace) else None
    if local is not None and not local.exists():
        again = f"`nearline collect MODEL CORPUS {typed(local)}` makes a store"
        return StoreNotFound(f"{place.url} does not exist; {again}")
    if local is not None and not local.is_dir():
        return StoreNotFound(f"{place.url} is a file, not a store; a store is a folder")
    if place.size(MOMENTS) is not None:
        return StoreNotFound(
            f"{place.url} holds moments only, no rows that could be read, checked or sent as a store's; "
            f"`nearline fit STUDY NAME={place.url} STORE` fits surrogates on it and evaluates them on STORE"
        )
    if local is not None and is_study(local):
        return StoreNotFound(f"{place.url} is a study, not a nearline store: name one of its stores")
    advice = ": check the URL" if local is None else ""
    return StoreNotFound(f"{place.url} is not a nearline store: it holds neither {PLAN} nor {GROUP}{advice}")


def no_study(folder: Path) -> NearlineError:
    """What to say of a path where no study is."""
    if folder.is_dir():
        if is_store(folder):
            again = f"`nearline fit STUDY {typed(folder)}` makes a study of it"
            return UsageError(f"{folder} is not a study but a store; {again}")
        what = f"{folder} is not a study (a folder that `nearline fit` wrote)"
        if (settings := folder / SETTINGS).is_file():
            return UsageError(
                f"{what}: there is no {PROVENANCE} beside its {SETTINGS}. For a settings file of yours: "
                f"`nearline run {typed(settings)}`"
            )
        return UsageError(what)
    if folder.exists():
        run = f". For a settings file: `nearline run {typed(folder)}`" if folder.suffix == ".toml" else ""
        return UsageError(f"{folder} is a file; a study is a folder{run}")
    return IncompleteError(f"{folder} does not exist; `nearline fit {typed(folder)} STORE` makes a study")
