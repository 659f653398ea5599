"""What is a store's own: the names of its files, and folders that are folders and no links.

In: a store folder, or a name that something says is to be written or removed there. Out: a refusal, or none.
A store may come from elsewhere, in an archive: a link in it could lead what is written or removed out of it.
Cost: a listing of the store's folders; those that hold single chunk objects are not opened.
"""

import os
from contextlib import suppress
from pathlib import Path

from .errors import FormatError, UsageError
from .folder import CARD, DOCUMENTS, GROUP, PLAN, RUNS, VOCABULARY
from .manifest import MANIFEST, SEALED
from .records import FOLDER as BLOCKS
from .records import check_key

JOURNAL = "replacing"  # see replacing.py; it holds names of a store once more
FILES = frozenset((PLAN, DOCUMENTS, VOCABULARY, CARD, MANIFEST, SEALED))
FOLDERS = frozenset((GROUP, BLOCKS, RUNS, JOURNAL))
LEVELS = 3  # below activations.zarr: array, "c", layer


def check_name(name: str, where: str) -> str:
    """A name of a file that a store has, of those that are replaced; else FormatError."""
    top, _, rest = check_key(name, where).partition("/")
    if not (top in (GROUP, BLOCKS) if rest else top in FILES):
        raise FormatError(f"{where}: {name!r} is no file of a store")
    return name


def check_links(folder: Path) -> None:
    """Refuse, before anything is written or removed, a store in which one of its own folders is a link."""
    for name in sorted(FOLDERS):
        if (folder / name).is_symlink():
            raise UsageError(_refusal(folder / name))
        _check_below(folder / name, LEVELS + 2 * (name == JOURNAL))


def _check_below(folder: Path, levels: int) -> None:
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_symlink():
                raise UsageError(_refusal(entry.path))
            if levels and entry.is_dir(follow_symlinks=False):
                _check_below(Path(entry.path), levels - 1)


def _refusal(path: str | Path) -> str:
    return (
        f"{path} is a link; a store has none inside, for what is written there would be elsewhere: put what "
        "it leads to in its place (the store's folder as a whole may be a link). Nothing was changed"
    )
