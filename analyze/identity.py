"""Whether the need for the nonlinearity belongs to tokens: the share of its variance that they explain.

In: needs and token ids of a fitted study's stores, no activations. Out: table `variance`, one row per store,
layer, need and key (`input`: the token itself, `target`: the one that follows). All body rows count, of every
split: each need is by a surrogate that has not seen the row's document, and nothing is learned here. Cost:
one sort of the rows a store and key, a few passes over them a layer; about 60 bytes of memory a row.

"Token identity explains at least half" is the claim that verdicts are about. A share that no interval tells
from 0 cannot tell context from noise, so it is never "not supported".
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from jaxtyping import Float32

from .compute import Session
from .evidence import Evidence, StoreRows
from .influences import intervals
from .intervals import MIN_GROUPS, Estimates, stack
from .results import to_table
from .same_type import Occurrences, epsilon_squared, occurrences, type_share, type_weighted_share

KEYS: Final = ("input", "target")
HALF: Final = 0.5


def run(evidence: Evidence, session: Session) -> list[str]:
    """The table of all stores, layers and needs. It takes seconds: no work goes to `session`."""
    rows = [row for name in evidence.stores for row in _store_rows(evidence, evidence.stores[name])]
    return [evidence.study.write_table("variance", to_table("variance", rows))]


@dataclass(frozen=True, slots=True)
class _Row:
    """A row of the table without what needs all layers, and the influences behind its share."""

    facts: dict[str, Any]
    share: Estimates


def _store_rows(evidence: Evidence, store: StoreRows) -> Iterator[dict[str, Any]]:
    families: dict[tuple[str, str], list[_Row]] = {}
    columns = [(key, Column(store, key)) for key in KEYS]
    for layer in evidence.layers:
        for need, values in evidence.need_columns(layer, store.name).items():
            for key, column in columns:
                facts = {"store": store.name, "layer": layer, "need": need, "key": key}
                found, share = column.describe(values)
                families.setdefault((need, key), []).append(_Row(facts | found, share))
    for family in families.values():
        yield from with_verdicts(family, evidence.settings.seed)


class Column:
    """Token ids and groups of a store's body rows, sorted out again only when other rows have a need."""

    def __init__(self, store: StoreRows, key: str) -> None:
        population = store.population
        ids = population.token_id if key == "input" else population.target_id
        # −1: no token follows.
        self._rows = np.flatnonzero(population.body & (ids >= 0))
        self._ids = ids[self._rows]
        groups, self._group = np.unique(population.group[self._rows], return_inverse=True)
        self._n_groups = groups.size
        self._seen: tuple[np.ndarray, Occurrences] | None = None

    def describe(self, need: Float32[np.ndarray, "token"]) -> tuple[dict[str, Any], Estimates]:
        """Columns of the table that need no other layer."""
        values = need[self._rows]
        present = np.isfinite(values)
        seen = self._occurrences(present)
        covered = values[present][seen.rows]
        share = type_share(covered, seen)
        return {
            "n_tokens": covered.size,
            "n_types": seen.n_types,
            "n_groups": seen.n_covered_groups,
            "coverage": seen.coverage,
            "share": float(share.estimate[0]),
            "epsilon_squared": epsilon_squared(covered, seen),
            "type_weighted_share": type_weighted_share(covered, seen),
        }, share

    def _occurrences(self, present: np.ndarray) -> Occurrences:
        if self._seen is None or not np.array_equal(self._seen[0], present):
            found = occurrences(self._ids[present], self._group[present], self._n_groups)
            self._seen = (present, found)
        return self._seen[1]


def with_verdicts(family: list[_Row], seed: int) -> Iterator[dict[str, Any]]:
    """The layers of one store, need and key: intervals that hold together, and verdicts by these."""
    found = intervals(stack([row.share for row in family]), seed)
    for index, row in enumerate(family):
        bounds = {f"share_{name}": float(values[index]) for name, values in found.items()}
        verdict = verdict_of(
            bounds["share_lo"], bounds["share_sim_lo"], bounds["share_sim_hi"], row.facts["n_groups"]
        )
        yield row.facts | bounds | {"verdict": verdict}


def verdict_of(low: float, simultaneous_low: float, simultaneous_high: float, n_groups: int) -> str:
    """Whether token identity explains at least half of the variance."""
    if n_groups < MIN_GROUPS:
        return "too few documents"
    if simultaneous_low >= HALF:
        return "supported"
    if low > 0 and simultaneous_low > 0 and simultaneous_high < HALF:
        return "not supported"
    return "cannot tell"
