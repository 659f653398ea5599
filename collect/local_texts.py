"""Texts in files of the user's.

In: a path. Out: its rows, read as they are taken; keys are names relative to the path, so that the same
files give the same corpus in any place. Every mistake is one sentence that names file and line.
Cost: one read; memory: a text file as a whole, one line of a JSON-lines file.
"""

import json
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from ..store.errors import EnvironmentFault, NearlineError, UsageError
from .documents import Row

TEXT_SUFFIXES = (".txt", ".md")
PATTERN_MARKS = "*?["
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read_text(path: Path) -> Generator[Row]:
    """A text file as one text, or a folder's .txt and .md files (in folders below it too), sorted by name."""
    if not path.is_dir():
        yield Row(path.name, read_file(path), f"{path}")
        return
    files = files_below(path, *TEXT_SUFFIXES)
    if not files:
        raise UsageError(f"text:{path}: the folder holds no {' or '.join(TEXT_SUFFIXES)} file.")
    for file in files:
        yield Row(file.relative_to(path).as_posix(), read_file(file), f"{file}")


def read_jsonl(path: Path, field: str) -> Generator[Row]:
    """One document per line of a JSON-lines file: the field of that name. Blank lines are passed over."""
    with readable(path), path.open("rb") as lines:  # of bytes: these end at \n only, as JSON lines do
        for number, line in enumerate(lines, start=1):
            if number == 1:
                line = line.removeprefix(BYTE_ORDER_MARK)
            if line.strip():
                place = f"{path}, line {number}"
                yield Row(f"{path.name}:{number}", _field_of(line, field, place), f"{place}: field {field!r}")


def files_below(folder: Path, *suffixes: str) -> list[Path]:
    """The files with one of these endings in a folder and those below it, sorted by name."""
    return sorted(file for file in folder.rglob("*") if file.suffix in suffixes and file.is_file())


def read_file(path: Path) -> str:
    """The text of a UTF-8 file, a byte-order mark taken off."""
    try:
        with readable(path):
            return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 text (byte {error.start}); convert it to UTF-8 first.") from None


@contextmanager
def readable(path: Path) -> Generator[None]:
    """What the operating system says against reading this file, in a sentence."""
    try:
        yield
    except NearlineError:  # some of them are OSErrors, too
        raise
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(f"{path}: {no_such(path)}") from None
    except IsADirectoryError:
        raise UsageError(
            f"{path}: a folder; jsonl: takes one file, text: and parquet: take files and folders, hf: takes "
            "folders of data files."
        ) from None
    except OSError as error:
        raise EnvironmentFault(
            f"{path}: cannot be read ({error.strerror or type(error).__name__})."
        ) from None


def no_such(path: Path) -> str:
    """What to say of a path that is not there."""
    if any(mark in str(path) for mark in PATTERN_MARKS):
        return "no such file, and patterns are not expanded; name one file, or a folder (parquet:, text:)."
    return "no such file; a corpus is a file or folder that exists."


def _field_of(line: bytes, name: str, place: str) -> object:
    """What one JSON object holds under a name."""
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{place}: not UTF-8 text (byte {error.start} of it); convert it to UTF-8 first."
        ) from None
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "too deep, or a number too long"
        raise UsageError(f"{place}: not JSON ({reason}); each line holds one object.") from None
    if not isinstance(record, dict):
        raise UsageError(f"{place}: a {type(record).__name__}; each line holds one JSON object.")
    if name not in record:
        found = ", ".join(map(repr, record)) or "none"
        raise UsageError(f"{place}: no field {name!r}; its fields are {found}. Name one: jsonl:PATH:FIELD.")
    return record[name]
