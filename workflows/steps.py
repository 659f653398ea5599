"""Run a step unless its output is there and current.

In: a folder for records, a step's name, what it depends on, and how to run it. Out: whether it ran. A
record is one small JSON file, written after the step succeeded: the key of everything the step depends on,
and the seal of what it made. Cost: one file read when nothing is to be done.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from blake3 import blake3

from ..store import NearlineError, Reader, UsageError
from ..store.durable import write_file
from ..store.parsing import parse_json

State = Literal["done", "current"]


@dataclass(frozen=True, slots=True)
class Step:
    """One step that was asked for, and whether it had to run."""

    name: str
    state: State


def key_of(**inputs: Any) -> str:
    """One digest for everything a step depends on."""
    return blake3(json.dumps(inputs, sort_keys=True, default=str).encode()).hexdigest()


def file_digest(path: Path) -> str:
    """The BLAKE3 digest of a file."""
    return blake3(path.read_bytes()).hexdigest()


def store_step(name: str, store: Path, records: Path, key: str, run: Callable[[], Any]) -> Step:
    """Make a store unless the one in place was made from the same key and is still sealed as it was."""
    record = records / f"{store.name}.json"
    if record.exists():
        known = parse_json(record.read_bytes(), str(record))
        if known == {"key": key, "seal": _seal_of(store)}:
            return Step(name, "current")
        raise UsageError(
            f"{store}: this store was made with other settings, or is no longer whole. "
            "Name another output folder, or delete this store to make it again."
        )
    run()
    records.mkdir(parents=True, exist_ok=True)
    write_file(record, json.dumps({"key": key, "seal": _seal_of(store)}, indent=2).encode())
    return Step(name, "done")


def _seal_of(store: Path) -> str | None:
    try:
        return Reader.open(store).digest
    except NearlineError:
        return None
