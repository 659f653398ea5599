"""Folds of the fits beside the main one: stores of a study in, which of their rows each fit learns from and
which surrogate of it scores every row out.

A document that stands in several stores has one fold in all of them; the main fit's store comes first, so
that its folds are those of the main fit. Cost: the columns of tokens and documents.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Int32

from ..store import UsageError
from .engine import Family
from .evidence import Evidence, StoreRows
from .folds import too_few_groups
from .population import FIT, joint_folds, load_population
from .settings import FitSettings

POOLED: Final = "pooled"


@dataclass(frozen=True, slots=True, eq=False)
class JointFolds:
    """The folds of all stores together."""

    stores: Mapping[str, StoreRows]
    by_hash: Mapping[str, Mapping[str, int]]  # by store: content hash → fold in the pooled fit
    joint: Mapping[str, Int32[np.ndarray, "token"]]  # by store: the same of each row

    @classmethod
    def of(cls, evidence: Evidence, settings: FitSettings) -> "JointFolds":
        # The main fit's store first: its folds are then those of the main fit.
        order = [evidence.fit_on, *(name for name in evidence.stores if name != evidence.fit_on)]
        readers = {name: evidence.stores[name].reader for name in order}
        by_hash = joint_folds(readers, settings.folds, settings.seed)
        joint = {name: _of_rows(evidence.stores[name], by_hash[name]) for name in order}
        return cls(evidence.stores, by_hash, joint)

    def family(self, name: str) -> Family:
        """The pooled fit scores by all folds; that of one store only leaves out the documents it has seen."""
        if name == POOLED:
            return Family(name, tuple(self.stores), self.joint)
        seen = self._fitted_documents(name)
        return Family(name, (name,), {other: _of_rows(rows, seen) for other, rows in self.stores.items()})

    def check(self, name: str, n_folds: int) -> None:
        """Enough groups, not all in one fold."""
        store = self.stores[name]
        rows = store.population.rows(FIT)
        rows = rows[self.joint[name][rows] >= 0]
        n_groups, used = store.population.n_groups(rows), np.unique(self.joint[name][rows])
        if n_groups < n_folds:
            raise UsageError(f"store {name}: {too_few_groups(n_groups, n_folds)}")
        if used.size < 2:
            raise UsageError(
                f"store {name}: all its documents to fit are near-duplicates of those in one fold of the "
                "other stores, so that no surrogate of it can be held out: leave it out, or fit with another "
                "`seed`"
            )

    def _fitted_documents(self, name: str) -> dict[str, int]:
        """Content hash → fold, of every document in a group that a store's own fit has seen."""
        store = self.stores[name]
        rows = store.population.rows(FIT)
        groups = np.unique(store.population.group[rows[self.joint[name][rows] >= 0]])
        documents = store.reader.documents
        hashes: list[str] = documents["content_hash"].to_pylist()
        chosen = np.flatnonzero(np.isin(documents["group"].to_numpy(), groups))
        return {hashes[index]: self.by_hash[name][hashes[index]] for index in chosen.tolist()}


def _of_rows(store: StoreRows, folds: Mapping[str, int]) -> Int32[np.ndarray, "token"]:
    return load_population(store.reader, folds, store.name).fold
