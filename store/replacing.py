"""Replacing several files of a store together: all of them, or none.

In: a store folder, new contents by name, and names that go. Out: the folder with all of it done, whatever is
interrupted where: the new contents are staged under replacing/, the file READY there decides, and whoever
comes next finishes. Readers refuse a store that has replacing/READY. It may name files of a store alone, none
by way of a link: it may have come with the store from elsewhere. Cost: each new file is written twice.
"""

import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from blake3 import blake3

from . import durable, in_place, points
from .disk import fault, held, locked, sync_folders
from .errors import DamageError, NearlineError, UsageError
from .own import JOURNAL, check_links, check_name
from .parsing import MAX_JSON_BYTES, get_hex, get_list, get_object, parse_json, readable

READY = f"{JOURNAL}/READY"
LOCK = f"{JOURNAL}/LOCK"
STAGED = f"{JOURNAL}/new"


def replace_together(
    folder: Path,
    files: Mapping[str, bytes],
    remove: Iterable[str] = (),
    check: Callable[[], None] = lambda: None,
) -> None:
    """Write `files` and remove the names in `remove`; after a crash `finish_replacing` does the rest, or
    nothing was decided and nothing has changed. `check` is called under the lock, while nobody begins to
    collect, and raises unless what `files` was made from still stands."""
    finish_replacing(folder)
    forget_staged(folder)
    durable.make_folder(folder / JOURNAL)
    with locked(folder / LOCK) as mine:
        if mine is False:
            raise UsageError(_busy(folder))
        try:
            check()
        except NearlineError:
            if mine:
                _clear(folder)
            raise
        durable.write_files(((folder / STAGED / name, (files[name],)) for name in files), folder)
        points.reached("replacing.staged")
        digests = {name: blake3(content).hexdigest() for name, content in files.items()}
        ready = readable({"schema": 1, "move": digests, "remove": list(remove)})
        durable.write_files([(folder / READY, (ready,))], folder)
        points.reached("replacing.ready")
        _finish(folder)


def finish_replacing(folder: Path) -> None:
    """Finish what `replace_together` decided and did not get done. Every command that writes begins here."""
    check_links(folder)
    if not (folder / READY).exists():
        return
    with locked(folder / LOCK) as mine:
        if mine is False:
            raise UsageError(_busy(folder))
        if (folder / READY).exists():
            _finish(folder)


def check_idle(folder: Path) -> None:
    """Refuse while another process replaces files here."""
    if (folder / LOCK).exists() and held(folder / LOCK):
        raise UsageError(_busy(folder))


def forget_staged(folder: Path) -> None:
    """Remove what a process that died had staged and not decided; it stays where nothing can be locked."""
    if not (folder / JOURNAL).is_dir() or (folder / READY).exists():
        return
    with locked(folder / LOCK) as mine:
        if mine and not (folder / READY).exists():
            _clear(folder)


def _busy(folder: Path) -> str:
    return f"another process is changing {folder}; let it finish first"


def _finish(folder: Path) -> None:
    move, remove = _parse((folder / READY).read_bytes(), str(folder / READY))
    _move(folder, move)
    points.reached("replacing.moved")
    _remove(folder, remove)
    points.reached("replacing.removed")
    in_place.remove_file(folder / READY)
    _clear(folder)


def _parse(content: bytes, where: str) -> tuple[dict[str, str], list[str]]:
    found = get_object(parse_json(content, where, MAX_JSON_BYTES), where, keys=("schema", "move", "remove"))
    move = get_object(found["move"], f"{where}: `move`")
    digests = {check_name(name, where): get_hex(move, name, where) for name in move}
    return digests, [check_name(name, where) for name in get_list(found, "remove", where, str)]


def _move(folder: Path, move: Mapping[str, str]) -> None:
    """Copy the staged files into their places: a rename across folders may reach the disk by halves."""
    names = list(move)
    for count, batch in enumerate([names[:1], names[1:]]):
        durable.write_files(((folder / name, (_staged(folder, name, move[name]),)) for name in batch), folder)
        if count == 0:
            points.reached("replacing.half_moved")


def _staged(folder: Path, name: str, digest: str) -> bytes:
    path = folder / STAGED / name
    content = path.read_bytes() if path.is_file() else b""
    if blake3(content).hexdigest() != digest:
        raise DamageError(
            f"{path} is missing or damaged, so that a change of {folder} that was interrupted cannot be "
            "finished; restore the store from a copy"
        )
    return content


def _remove(folder: Path, names: Iterable[str]) -> None:
    """Remove files, and folders that are empty then."""
    parents = set()
    for name in names:
        in_place.unlink_file(folder / name)
        parents.add((folder / name).parent)
    sync_folders({parent for parent in parents if parent.is_dir()})
    for parent in sorted(parents, key=lambda path: len(path.parts), reverse=True):
        while parent != folder and parent.is_dir() and not any(parent.iterdir()):
            with fault(parent, "remove"):
                parent.rmdir()
            parent = parent.parent


def _clear(folder: Path) -> None:
    """Remove the journal's folder, also one that was never decided."""
    if (folder / JOURNAL).exists():
        with fault(folder / JOURNAL, "remove"):
            shutil.rmtree(folder / JOURNAL)
        sync_folders({folder})
