"""What r would be if the token did not matter: needs shuffled within documents, in both stores.

In: rows of two stores, their documents, the types compared, and columns of needs. Out: r of each column under
each shuffle. A shuffle keeps every document's needs and every document's tokens, and only breaks who needs
what; so agreement that comes of documents (long ones, hard ones) stays in the null. Shuffles depend on the
seed and the documents alone: all layers, needs and surrogates share them. Cost per shuffle and store: one
sort of as many numbers as rows, and one pass over the rows for all columns together.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Bool, Float, Float64, Int, Int32
from scipy import sparse


@dataclass(frozen=True, eq=False)
class Shuffles:
    """Permutations of rows within documents."""

    document: Int[np.ndarray, "token"]
    seed: tuple[int, ...]

    @cached_property
    def by_document(self) -> Int[np.ndarray, "token"]:
        """Rows, documents together."""
        return np.argsort(self.document, kind="stable")

    @cached_property
    def _rank(self) -> np.ndarray:
        """The number of the document of each place; 16 bits where they suffice, which numpy sorts in O(n)."""
        _, rank = np.unique(self.document[self.by_document], return_inverse=True)
        return rank.astype(np.uint16 if rank.max(initial=0) < 2**16 else np.uint32)

    def permutation(self, number: int) -> Int[np.ndarray, "token"]:
        """For each place in the order of `by_document`, the place whose token comes there."""
        drawn = np.random.default_rng((*self.seed, number)).permutation(self._rank.size)
        return drawn[np.argsort(self._rank[drawn], kind="stable")]


@dataclass(frozen=True, slots=True, eq=False)
class ShuffledMeans:
    """Token means of columns under shuffles. Needs stay where they are and tokens change places, which is the
    same and reads the needs from first to last.
    """

    has_need: Bool[np.ndarray, "place"]  # in the order of documents
    type: Int32[np.ndarray, "place"]  # n_types for types that are not compared
    values: Float64[np.ndarray, "row column"]  # of the places that have a need
    count: Int[np.ndarray, "type"]

    @classmethod
    def of(
        cls,
        shuffles: Shuffles,
        has_need: Bool[np.ndarray, "token"],
        type_of_row: Int[np.ndarray, "token"],
        n_types: int,
        values: Float[np.ndarray, "token column"],
    ) -> "ShuffledMeans":
        """Rows without a need take no part. `type_of_row`: −1 for types that are not compared."""
        by_document = shuffles.by_document
        kept = has_need[by_document]
        kind = np.where(type_of_row < 0, n_types, type_of_row)[by_document].astype(np.int32)
        count = np.bincount(kind[kept], minlength=n_types + 1)[:n_types]
        return cls(kept, kind, values[by_document[kept]].astype(np.float64), count)

    def means(self, permutation: Int[np.ndarray, "place"]) -> Float64[np.ndarray, "type column"]:
        """The means when each place has the token of the place that the permutation names."""
        # Leaving places out of both sides keeps the number of every document's rows.
        source = permutation if self.has_need.all() else permutation[self.has_need[permutation]]
        n_rows, n_types = self.values.shape[0], self.count.size
        one_a_row = np.arange(n_rows + 1, dtype=np.int32)
        tokens = sparse.csc_matrix(
            (np.ones(n_rows), self.type[source], one_a_row), shape=(n_types + 1, n_rows)
        )
        return (tokens @ self.values)[:n_types] / self.count[:, None]


def null_correlations(
    sides: Sequence[tuple[ShuffledMeans, ShuffledMeans]], shuffles: tuple[Shuffles, Shuffles], n_shuffles: int
) -> list[Float64[np.ndarray, "shuffle column"]]:
    """r over types between both stores' shuffled means, for each column of each pair of sides."""
    found = [np.empty((n_shuffles, one.values.shape[1])) for one, _ in sides]
    for number in range(n_shuffles):
        permutations = [one.permutation(number) for one in shuffles]
        for place, pair in enumerate(sides):
            a, b = (side.means(one) for side, one in zip(pair, permutations, strict=True))
            found[place][number] = correlations(a, b)
    return found


def correlations(
    a: Float64[np.ndarray, "type column"], b: Float64[np.ndarray, "type column"]
) -> Float64[np.ndarray, "column"]:
    """Pearson's r of each column; NaN where one does not vary."""
    a, b = a - a.mean(axis=0), b - b.mean(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        return (a * b).sum(axis=0) / np.sqrt((a**2).sum(axis=0) * (b**2).sum(axis=0))


def permutation_p(r: float, null: Float64[np.ndarray, "shuffle"]) -> float:
    """(1 + shuffles with r as large) / (1 + shuffles): Phipson and Smyth (2010), one-sided for r > 0."""
    if not np.isfinite(r):
        return float("nan")
    return (1.0 + float((null >= r).sum())) / (1.0 + null.size)


def enough_shuffles(asked: int, n_layers: int, level: float) -> int:
    """At least so many that one layer of the family can be significant after Holm."""
    return max(asked, int(np.ceil(n_layers / level)) - 1)
