"""The output folder of a run that may fail: claimed early, and given back when nothing in it is worth
keeping.

In: a path that must be new, an empty folder or a store begun before (whether its settings are the same is
found when the store is begun again), and the rank of this process. Out: the folder; no other process of this
rank enters it while the `with` block runs. When the block raises before anything is committed, what this run
created is removed, so that other settings can be tried under the same name; anything else in the folder is
left alone, and so is whatever other ranks may be at. Cost: a listing of the folder.
"""

import shutil
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ..store import folder as names
from ..store.beginning import claim_store
from ..store.durable import is_temporary
from ..store.records import FOLDER as BLOCKS
from .ranks import Ranks, only_one, other_ranks

OURS = (names.GROUP, names.PLAN, names.DOCUMENTS, names.VOCABULARY, names.CARD, names.RUNS, BLOCKS)


@dataclass(slots=True)
class Claim:
    """`begun` is set by the run once this run, and not an earlier one, has begun the store."""

    path: Path
    begun: bool = False
    ranks: Ranks = field(default_factory=Ranks)


@contextmanager
def claimed(path: Path, ranks: Ranks | None = None) -> Generator[Claim]:
    """Claim `path`; give it back as it was when the block fails before its first commit."""
    ranks = ranks or Ranks()
    existed = path.exists()
    claim = Claim(claim_store(path), ranks=ranks)
    try:
        with only_one(path, ranks):
            try:
                yield claim
            except BaseException:
                # Begun alone, and nothing committed: then the files are this run's, and worth nothing.
                alone = ranks.world_size == 1 and not other_ranks(path, ranks)
                if claim.begun and alone and not any((path / BLOCKS).glob("*.json")):
                    _remove_ours(path)
                raise
    except BaseException:
        if not existed and path.is_dir() and not any(path.iterdir()):
            path.rmdir()
        raise


def _remove_ours(path: Path) -> None:
    for entry in list(path.iterdir()):
        if not (is_temporary(entry.name) or entry.name in OURS):
            continue
        if entry.is_file() or entry.is_symlink():
            entry.unlink(missing_ok=True)
        else:
            shutil.rmtree(entry, ignore_errors=True)
