"""The output folder of a run that may fail: claimed early, and given back when nothing in it is worth
keeping.

In: a path that must be new or an empty folder. Out: the folder, ours while the `with` block runs. When the
block raises before this run committed anything, what this run created is removed, so that the same command
can be repeated; anything else in the folder is left alone. Cost: none.
"""

import shutil
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..store import folder as names
from ..store.durable import PARTIAL, claim_folder
from ..store.records import FOLDER as BLOCKS

OURS = (names.GROUP, names.PLAN, names.DOCUMENTS, names.VOCABULARY, names.CARD, names.RUNS, BLOCKS)


@dataclass(slots=True)
class Claim:
    """`begun` is set by the run once the files in the folder are its own."""

    path: Path
    begun: bool = False


@contextmanager
def claimed(path: Path) -> Generator[Claim]:
    """Claim `path`; give it back as it was when the block fails before its first commit."""
    existed = path.exists()
    claim = Claim(claim_folder(path))
    try:
        yield claim
    except BaseException:
        if claim.begun and not any((path / BLOCKS).glob("*.json")):
            _remove_ours(path)
        if not existed and not any(path.iterdir()):
            path.rmdir()
        raise


def _remove_ours(path: Path) -> None:
    for entry in list(path.iterdir()):
        if entry.name.endswith(PARTIAL) or (entry.name in OURS and entry.is_file()):
            entry.unlink(missing_ok=True)
        elif entry.name in OURS:
            shutil.rmtree(entry, ignore_errors=True)
