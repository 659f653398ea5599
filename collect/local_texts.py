"""Texts in files of the user's.

In: a path. Out: the path's portable name and (key, text) pairs; keys are names relative to the path, so
that the same files give the same corpus in any place. Every mistake is one sentence that names file and
line. Cost: one read; all texts are in memory.
"""

import json
from pathlib import Path

from ..store.errors import EnvironmentFault, UsageError

TEXT_SUFFIXES = (".txt", ".md")

Keyed = list[tuple[str, str]]


def read_text(path: Path) -> tuple[str, Keyed]:
    """A text file as one text, or a folder's .txt and .md files (in folders below it too), sorted by name."""
    if not path.is_dir():
        return path.name, [(path.name, read_file(path))]
    files = sorted(file for file in path.rglob("*") if file.suffix in TEXT_SUFFIXES and file.is_file())
    if not files:
        raise UsageError(f"text:{path}: the folder holds no {' or '.join(TEXT_SUFFIXES)} file.")
    return path.resolve().name, [(file.relative_to(path).as_posix(), read_file(file)) for file in files]


def read_jsonl(path: Path, field: str) -> tuple[str, Keyed]:
    """One text per line of a JSON-lines file: the field of that name. Blank lines are passed over."""
    lines = enumerate(
        read_file(path).split("\n"), start=1
    )  # splitlines would cut at U+2028, which JSON allows
    texts = [
        (f"{path.name}:{number}", field_of(line, field, f"{path}, line {number}"))
        for number, line in lines
        if line.strip()
    ]
    return f"{path.name}:{field}", texts


def split_field(rest: str, default: str = "text") -> tuple[Path, str]:
    """PATH[:FIELD] as path and field; a path that exists as it stands is a path, colons included."""
    head, colon, tail = rest.rpartition(":")
    if not colon or not head or not tail or "/" in tail or "\\" in tail or Path(rest).exists():
        return Path(rest), default
    return Path(head), tail


def field_of(line: str, name: str, where: str) -> str:
    """The text in one JSON object."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise UsageError(f"{where}: not JSON ({error.msg}); each line holds one object.") from None
    if not isinstance(record, dict):
        raise UsageError(f"{where}: a {type(record).__name__}; each line holds one JSON object.")
    if name not in record:
        found = ", ".join(map(repr, record)) or "none"
        raise UsageError(f"{where}: no field {name!r}; its fields are {found}. Name one: jsonl:PATH:FIELD.")
    if not isinstance(record[name], str):
        raise UsageError(f"{where}: field {name!r} holds a {type(record[name]).__name__}, not text.")
    return record[name]


def read_file(path: Path) -> str:
    """The text of a UTF-8 file, a byte-order mark taken off."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 text (byte {error.start}); convert it to UTF-8 first.") from None
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(f"{path}: no such file; a corpus is a file or folder that exists.") from None
    except IsADirectoryError:
        raise UsageError(f"{path}: a folder; jsonl: takes one file, text: takes files and folders.") from None
    except OSError as error:
        raise EnvironmentFault(f"{path}: cannot be read ({error.strerror}).") from None
