"""Folds by group: content hashes of groups in, one fold a group out.

Groups enter in the order of a seeded hash of their content and each goes to the fold with the fewest rows so
far: folds are disjoint in groups, balanced in rows, never empty, and do not depend on the order of the
documents.
"""

from collections.abc import Sequence

import numpy as np
from blake3 import blake3
from jaxtyping import Int

from ..store import UsageError


def assign_folds(
    group_hashes: Sequence[str], group_rows: Int[np.ndarray, "group"], n_folds: int, seed: int
) -> Int[np.ndarray, "group"]:
    """The fold of each group."""
    if len(group_hashes) < n_folds:
        raise UsageError(
            f"only {len(group_hashes)} groups of documents have rows to fit, too few for {n_folds} folds: "
            "set `folds` lower (at least 2) or harvest a corpus with more documents"
        )
    order = sorted(range(len(group_hashes)), key=lambda g: _rank(group_hashes[g], seed))
    folds = np.full(len(group_hashes), -1, np.int32)
    filled = [0] * n_folds
    for place, group in enumerate(order):
        # The first groups open one fold each, so that a group without rows cannot leave a fold empty.
        fold = place if place < n_folds else filled.index(min(filled))
        folds[group] = fold
        filled[fold] += int(group_rows[group])
    return folds


def _rank(content_hash: str, seed: int) -> str:
    return blake3(f"fold:{seed}:{content_hash}".encode()).hexdigest() + content_hash
