"""What a report may replace: a page, tables and figures of its own, and nothing else.

In: where a page or files are to be written. Out: nothing, or a UsageError that names what is there. A page
is known by its head, files by the `captions.txt` that is written beside them. Cost: the first bytes of a
page, and one small file a folder.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from ..store import UsageError
from ..store.names import printable

CAPTIONS: Final = "captions.txt"
_HEAD_BYTES: Final = 1024
_GENERATOR: Final = b'<meta name="generator" content="nearline">'
# Pages of versions that wrote no generator.
_POLICY: Final = (
    b'<meta name="referrer" content="no-referrer">\n'
    b'<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; style-src'
)
_CAPTIONS_BYTES: Final = 2**20
_CAPTION: Final = re.compile(rb"([^\s:]+): .")
_SHOWN: Final = 3


def check_page(target: Path) -> None:
    """Refuse to put a page in the place of what is none; an empty file may go."""
    if target.exists() and not _is_page(target):
        raise UsageError(
            f"{target} is there already, and is no report of nearline: name another file, or remove this one"
        )


def check_files(files: Iterable[Path], what: str) -> None:
    """The same of `what`, tables or figures, in their folders."""
    folders: dict[Path, list[Path]] = {}
    for file in files:
        folders.setdefault(file.parent, []).append(file)
    for folder, written in folders.items():
        there = sorted(file.name for file in written if file.exists())
        if there and not _is_ours(folder / CAPTIONS, written):
            shown = ", ".join(map(printable, there[:_SHOWN])) + (", …" if len(there) > _SHOWN else "")
            raise UsageError(
                f"--{what} {folder}: holds {shown}, not written by a report of nearline (which leaves a "
                f"{CAPTIONS} beside its {what}): name a new or an empty folder"
            )


def _is_page(target: Path) -> bool:
    head = _beginning(target, _HEAD_BYTES)
    if not head:
        return head is not None
    return head.startswith(b"<!doctype html>") and (_GENERATOR in head or _POLICY in head)


def _is_ours(captions: Path, written: Iterable[Path]) -> bool:
    """Each line is a caption, one at least of what is written again."""
    lines = (_beginning(captions, _CAPTIONS_BYTES) or b"").splitlines()
    found = [match[1].decode(errors="replace") for line in lines if (match := _CAPTION.match(line))]
    return (
        captions.is_file()
        and len(found) == len(lines)
        and (not found or not {file.stem for file in written}.isdisjoint(found))
    )


def _beginning(path: Path, limit: int) -> bytes | None:
    """None of what is no file."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return file.read(limit)
