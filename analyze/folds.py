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
    group_hashes: Sequence[str],
    group_rows: Int[np.ndarray, "group"],
    n_folds: int,
    seed: int,
    filled: Sequence[int] | None = None,
) -> Int[np.ndarray, "group"]:
    """The fold of each group. `filled`: rows that each fold holds already, of groups whose fold is given."""
    opened = filled is not None
    if not opened and len(group_hashes) < n_folds:
        raise too_few_groups(len(group_hashes), n_folds)
    order = sorted(range(len(group_hashes)), key=lambda g: _rank(group_hashes[g], seed))
    folds = np.full(len(group_hashes), -1, np.int32)
    filled = list(filled) if opened else [0] * n_folds
    for place, group in enumerate(order):
        # The first groups open one fold each, so that a group without rows cannot leave a fold empty.
        fold = place if not opened and place < n_folds else filled.index(min(filled))
        folds[group] = fold
        filled[fold] += int(group_rows[group])
    return folds


def too_few_groups(
    n_groups: int, n_folds: int, n_stored: int | None = None, n_corpus: int | None = None
) -> UsageError:
    """What to say, and to do. `n_stored`: groups with rows in the store, of the corpus's `n_corpus`."""
    have = {0: "no group of documents has", 1: "only 1 group of documents has"}
    have_rows = have.get(n_groups, f"only {n_groups} groups of documents have")
    few = f"{have_rows} rows to fit, too few for {n_folds} folds"
    ways = ["harvest a corpus with more documents"]
    if n_stored is not None and n_corpus is not None:
        groups = "group" if n_corpus == 1 else "groups"
        few += f"; the store's rows come from {n_stored} of the {n_corpus} {groups} in its corpus"
        if n_stored < n_corpus:
            ways = ["harvest more `tokens`", "set `keep` to a smaller share"]
    if n_groups >= 2:
        ways.append(f"set `folds` to {n_groups}" + (" or less" if n_groups > 2 else ""))
    return UsageError(f"{few}: {', or '.join(ways)}")


def _rank(content_hash: str, seed: int) -> str:
    return blake3(f"fold:{seed}:{content_hash}".encode()).hexdigest() + content_hash
