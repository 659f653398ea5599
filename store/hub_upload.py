"""A whole store onto the Hugging Face Hub, in few commits.

In: a place, files by name and path, and the few that make the copy whole. Out: all of them there. Commits of
at most 100 files; a file that the Hub has already (its own size and digest say so) is not sent again, so a
repeated call goes on where the last one stopped. When every file is there with its size, `last` goes in one
commit whose parent is exactly the state that was looked at: nobody's commit can slip in between. What the Hub
does not take is refused before the first byte. Cost: a SHA-256 of every file, as the Hub's protocol wants it.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import EnvironmentFault, UsageError
from .progress import Progress

if TYPE_CHECKING:
    from .hub import HubPlace

# The Hub's limits as its page "Storage limits" had them in August 2026; read it again before a release.
MAX_FILES = 100_000  # of a repository
MAX_ENTRIES = 10_000  # of a folder
MAX_FILE_BYTES = 200 * 10**9
FILES_PER_COMMIT = 100

Files = Sequence[tuple[str, Path]]


def upload(place: "HubPlace", files: Files, last: Files, progress: Progress) -> None:
    """See the module's docstring; the caller holds the place's lock."""
    check_limits(place.url, files, last)
    place.ensure()
    place.refresh()
    there = place.entries()
    if any(there.get(name) is not None and not same(there[name], path) for name, path in last):
        raise UsageError(f"{place.url}: another store is there already; name a new repository or folder")
    if all(same(there.get(name), path) for name, path in last):
        missing = _missing(there, files)
        if not missing:
            return
    _send(place, there, files, progress)
    _finish(place, files, last)


def check_limits(url: str, files: Files, last: Files = ()) -> None:
    """Refuse what the Hub would refuse, or serve badly, before anything is sent."""
    everything = [*files, *last]
    names = Counter(name for name, _ in everything)
    if len(names) != len(everything):
        raise UsageError(f"{url}: {names.most_common(1)[0][0]!r} is given twice")
    if len(names) > MAX_FILES:
        raise UsageError(
            f"{url}: {len(names)} files, the Hub takes {MAX_FILES}: collect with larger blocks, fewer "
            "layers or sites, pull a selection into a smaller store, or push to s3:// or gs://"
        )
    folder, entries = _fullest(list(names))
    if entries > MAX_ENTRIES:
        raise UsageError(
            f"{url}: folder {folder!r} would hold {entries} entries, the Hub takes {MAX_ENTRIES}: collect "
            "with larger blocks, or push to s3:// or gs://"
        )
    for name, path in everything:
        if (size := path.stat().st_size) > MAX_FILE_BYTES:
            raise UsageError(f"{url}: {name} has {size} bytes, the Hub takes {MAX_FILE_BYTES}")


def _fullest(names: Sequence[str]) -> tuple[str, int]:
    """The folder with the most files and folders directly in it."""
    children: dict[str, set[str]] = {"": set()}
    for name in names:
        while name:
            parent, _, child = name.rpartition("/")
            if child in children.setdefault(parent, set()):
                break  # and so are its parents
            children[parent].add(child)
            name = parent
    return max(((folder, len(found)) for folder, found in children.items()), key=lambda found: found[1])


def same(entry: Any, source: Path | bytes | None) -> bool:
    """Whether the Hub's record of a file is that of `source` (None: no file): size, then digest."""
    if entry is None or source is None:
        return entry is None and source is None
    size = len(source) if isinstance(source, bytes) else source.stat().st_size
    if int(entry.size) != size:
        return False
    if entry.lfs is not None:
        return bool(entry.lfs.sha256 == _digest(source, hashlib.sha256()))
    return bool(entry.blob_id == _digest(source, hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)))


def _digest(source: Path | bytes, state: Any) -> str:
    if isinstance(source, bytes):
        state.update(source)
        return state.hexdigest()
    with source.open("rb") as file:
        while piece := file.read(2**20):
            state.update(piece)
    return state.hexdigest()


def _send(place: "HubPlace", there: dict[str, Any], files: Files, progress: Progress) -> None:
    total = sum(path.stat().st_size for _, path in files)
    done, todo = 0, list[tuple[str, Path]]()
    for name, path in files:
        if same(there.get(name), path):
            done += path.stat().st_size
        else:
            todo.append((name, path))
    progress("push", done, total, "bytes")
    for start in range(0, len(todo), FILES_PER_COMMIT):
        batch = todo[start : start + FILES_PER_COMMIT]
        place.write(f"nearline push: files {start + 1} to {start + len(batch)} of {len(todo)}", batch)
        done += sum(path.stat().st_size for _, path in batch)
        progress("push", done, total, "bytes")


def _finish(place: "HubPlace", files: Files, last: Files) -> None:
    from .hub import Conflict

    for attempt in range(place.patience.again + 1):
        place.refresh()
        there = place.entries()
        if missing := _missing(there, files):
            raise EnvironmentFault(
                f"{place.where(missing[0])}: sent, and the Hub does not show it whole ({len(missing)} such "
                "files); repeat the command"
            )
        try:
            return place.write(
                "nearline push: manifest and seal", last, parent=place.ask(last[0][0], place.commit)
            )
        except Conflict:
            place.patience.wait(attempt)
    raise EnvironmentFault(f"{place.url}: somebody else keeps committing there; repeat the command")


def _missing(there: dict[str, Any], files: Files) -> list[str]:
    return [
        name
        for name, path in files
        if there.get(name) is None or int(there[name].size) != path.stat().st_size
    ]
