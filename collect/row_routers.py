"""Who goes linear by what is known of a row before the model runs: its number, its token, a column of needs.

In: the rows of a batch. Out: a mask on the host, so that nothing waits for a device. Random numbers are
hashes of a row's number: they depend on no other row, on no order and no batch, and a row that a draw sends
linear at one share goes linear at every larger one. Ties (equal needs, tokens of one type) are broken by
such a hash, so that a share is met as closely as rows can be counted. Cost: a hash or a look-up per row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from jaxtyping import Bool, Float32, Int, Int64

from ..analyze.gate_features import TypeMeans, random_scores
from .batch_rows import BatchRows


class RowRouter(Protocol):
    """Sends rows to the surrogate by what is known beforehand."""

    def linear(self, rows: BatchRows) -> Bool[np.ndarray, "sequence position"]:
        """The rows that this router would send, covered or not."""
        ...


@dataclass(frozen=True, slots=True)
class RandomRouter:
    """Each row with probability `share`."""

    share: float
    salt: int

    def linear(self, rows: BatchRows) -> Bool[np.ndarray, "sequence position"]:
        return _drawn(rows, self.salt) < self.share


@dataclass(frozen=True, slots=True, eq=False)
class ColumnRouter:
    """The rows of one store that a mask names."""

    chosen: Bool[np.ndarray, "token"]

    def linear(self, rows: BatchRows) -> Bool[np.ndarray, "sequence position"]:
        return self.chosen[np.maximum(rows.row, 0)] & rows.real


@dataclass(frozen=True, slots=True, eq=False)
class TypeRouter:
    """Tokens whose type's mean need lies below `cut`; of those at the cut itself the share `tied`."""

    means: TypeMeans
    cut: float
    tied: float
    salt: int

    def linear(self, rows: BatchRows) -> Bool[np.ndarray, "sequence position"]:
        mean = self.means.of(rows.token_id.reshape(-1)).reshape(rows.shape)
        drawn = _drawn(rows, self.salt) < self.tied
        return (mean < self.cut) | ((mean == self.cut) & drawn)


def _drawn(rows: BatchRows, salt: int) -> Float32[np.ndarray, "sequence position"]:
    """A number in [0, 1) for each row, by its number in the store."""
    return random_scores(rows.row.astype(np.int64).reshape(-1), salt).reshape(rows.shape)


def salt(seed: int, layer: int, draw: int = 0) -> int:
    """What sets the hash of one draw at one layer apart from all others."""
    return int(np.random.SeedSequence((seed, layer, draw)).generate_state(1, np.uint64)[0])


def lowest(
    need: Float32[np.ndarray, "token"], share: float, salt: int, among: Sequence[Int64[np.ndarray, "row"]]
) -> Bool[np.ndarray, "token"]:
    """Within each set of rows the `share` with the smallest need. Rows without one (NaN) are drawn at random
    at the same share: nobody knows whether they are easy, and the share is still met.
    """
    chosen = np.zeros(need.size, bool)
    for rows in among:
        drawn = random_scores(rows, salt)
        known = np.isfinite(need[rows])
        chosen[rows] = ~known & (drawn < share)
        order = np.lexsort((drawn[known], need[rows][known]))
        chosen[rows[known][order[: round(share * order.size)]]] = True
    return chosen


def type_router(means: TypeMeans, gate_ids: Int[np.ndarray, "token"], share: float, salt: int) -> TypeRouter:
    """The list that sends this share of gate rows (their input tokens) to the surrogate."""
    if share <= 0:
        return TypeRouter(means, float("-inf"), 0.0, salt)
    values, counts = np.unique(means.of(gate_ids), return_counts=True)
    wanted = share * counts.sum()
    below = np.concatenate([[0], np.cumsum(counts)])
    at = int(np.searchsorted(below, wanted, side="right")) - 1
    if at >= values.size:  # everything, types that gate rows do not hold included
        return TypeRouter(means, float("inf"), 0.0, salt)
    return TypeRouter(means, float(values[at]), float((wanted - below[at]) / counts[at]), salt)
