"""Text and names from elsewhere: what a terminal may be given, and what may name a file.

In: any string of a store or a study. Out: whether it is harmless, or a form that is. Cost: one pass.
"""

import re
import shlex
from pathlib import Path

MAX_TEXT = 4096
MAX_NAME_BYTES = 220  # file systems take 255; a temporary file's ending must fit too

# What moves a cursor, hides or reorders text, or is no text at all: controls, bidi marks, surrogates.
_UNPRINTABLE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)
_DEVICES = {"CON", "PRN", "AUX", "NUL", "CONIN$", "CONOUT$", "CLOCK$"}
_DEVICES |= {f"{name}{digit}" for name in ("COM", "LPT") for digit in "0123456789¹²³"}


def printable(text: str) -> str:
    """Text that a terminal shows and does not obey: controls, bidi marks and the like as escapes."""
    return _UNPRINTABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def typed(path: Path) -> str:
    """A path as one word of a command that a message suggests: as it was given, quoted where it must be."""
    return shlex.quote(printable(str(path)))


def text_problem(text: str) -> str | None:
    """What is wrong with a string that is going to be printed; None where nothing is."""
    if len(text) > MAX_TEXT:
        return f"must have at most {MAX_TEXT} characters"
    return "must hold no control characters" if _UNPRINTABLE.search(text) else None


def is_file_name(name: str) -> bool:
    """One plain name: no separator, no `..`, no Windows device, nothing that a file system would change."""
    return (
        name.isprintable()
        and not set(name) & set('/\\:*?"<>|')
        and bool(name.strip(". "))
        and name[-1] not in ". "
        and name.partition(".")[0].rstrip().upper() not in _DEVICES
        and len(name.encode()) <= MAX_NAME_BYTES
    )
