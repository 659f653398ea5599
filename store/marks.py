"""Marks on a copy in the making: who may write here, and when it is whole.

In: the target of a push or pull, and what is to come there. Out: a claim (a file PUSHING or PULLING, which
holds what identifies the store that is coming: its manifest) or a refusal that says what is there; and
SEALED, created once. Both are created exclusively, so of two different stores one is refused, and of two
copies of one store both succeed. Cost: a few small requests.
"""

import os
from collections.abc import Callable

from .durable import PARTIAL
from .errors import EnvironmentFault, FormatError, UsageError
from .incomplete import PULLING
from .manifest import SEALED, read_seal, seal_bytes
from .parsing import MAX_JSON_BYTES
from .places import LocalPlace, Place, WritablePlace

IGNORED = (".gitattributes", "nearline-probe-")  # the Hub's own; and what a probe is trying just now
_ROUNDS = 5  # somebody else may begin or finish the same copy while we look


def claim(target: WritablePlace, mark: str, content: bytes, is_same: Callable[[str], bool]) -> bool:
    """Take the target for what `content` stands for: True when it is to be filled, False when it is whole
    there already, which `is_same` says of the digest of the seal that it finds."""
    for _ in range(_ROUNDS):
        found = read_or_none(target, mark)
        if (sealed := read_seal(target)) is not None:
            if not is_same(sealed):
                raise UsageError(f"{target.url} holds another sealed store ({sealed[:12]}); name a new place")
            if found is not None:
                target.delete(mark)  # left by a copy that was killed at its last step
            return False
        if found == content:
            return True
        if found is not None:
            raise UsageError(_other_copy(target, mark))
        foreign = [name for name in _names(target) if name != mark]
        if foreign and read_or_none(target, mark) is None and read_seal(target) is None:
            raise UsageError(_occupied(target, foreign))
        if not foreign:
            create_settled(target, mark, content)
    raise EnvironmentFault(f"{target.url}: another process keeps changing it; run again when it is done")


def create_settled(target: WritablePlace, name: str, content: bytes) -> bool:
    """Create a file once; True when it holds `content` afterwards, also where the server's reply was lost."""
    try:
        if target.create(name, content):
            return True
    except EnvironmentFault:
        # Perhaps only the reply was lost: what stands there decides.
        if read_or_none(target, name) != content:
            raise
        return True
    return read_or_none(target, name) == content


def finish(target: WritablePlace, mark: str, manifest: bytes) -> None:
    """Create SEALED, then take the mark away."""
    if not create_settled(target, SEALED, seal_bytes(manifest)):
        raise UsageError(
            f"{target.where(SEALED)}: another store was sealed here meanwhile; nothing of it was replaced by "
            "this seal, but its files may have been: push each store to a place of its own"
        )
    target.delete(mark)


def read_or_none(place: Place, name: str) -> bytes | None:
    """The content of a small file, None when there is none."""
    try:
        return place.read(name, limit=MAX_JSON_BYTES)
    except FileNotFoundError:
        return None
    except FormatError:
        return b""  # larger than anything of ours


def _names(target: WritablePlace) -> list[str]:
    """What lies at the target; of a folder only the top, which may be a home folder by mistake."""
    if isinstance(target, LocalPlace):
        try:
            names = [entry.name for entry in os.scandir(target.path)]
        except FileNotFoundError:
            names = []
        except NotADirectoryError:
            raise UsageError(f"{target.url} is a file; name a new or an empty folder") from None
        except OSError as error:
            raise EnvironmentFault(f"{target.url}: cannot be listed ({error.strerror})") from error
    else:
        names = list(target.list() or ())
    return sorted(name for name in names if not name.startswith(IGNORED) and not name.endswith(PARTIAL))


def _other_copy(target: WritablePlace, mark: str) -> str:
    verb = "pull" if mark == PULLING else "push"
    return (
        f"{target.url} holds an unfinished {verb} of another store (its file {mark} says so); "
        f"finish that {verb}, or name a new place"
    )


def _occupied(target: WritablePlace, names: list[str]) -> str:
    shown = ", ".join(names[:3]) + (f", ... ({len(names)} in all)" if len(names) > 3 else "")
    return f"{target.url} is not empty (it holds {shown}); name a new or an empty place"
