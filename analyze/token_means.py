"""Sums of a need per token type and group: rows in, one cell for each pair of type and group that occurs out.

Everything that is asked of token means (their variance over documents, halves of a corpus, a mean without one
document) is a function of these cells. They depend on keys and groups only, so several needs share them.
Cost: one sort of the rows, then one pass a column; memory: two numbers a row and four a cell.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float64, Int


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """Where each type occurs, ordered by type and then by group. `types` holds the ids of the types,
    increasing; types are numbered in this order.
    """

    types: Int[np.ndarray, "type"]
    type: Int[np.ndarray, "cell"]
    group: Int[np.ndarray, "cell"]
    count: Float64[np.ndarray, "cell"]  # occurrences
    n_groups: int
    of_row: Int[np.ndarray, "token"]  # the cell of each row

    @property
    def n_types(self) -> int:
        return int(self.types.size)

    def sums(self, values: Float[np.ndarray, "token"]) -> Float64[np.ndarray, "cell"]:
        """Sums of a column over the rows of each cell, in the order of the rows."""
        return summed(self.of_row, values, self.type.size)

    def over_groups(self, cell_sums: Float64[np.ndarray, "cell"]) -> Float64[np.ndarray, "type"]:
        """Sums over the groups of each type."""
        return summed(self.type, cell_sums, self.n_types)

    @property
    def occurrences(self) -> Float64[np.ndarray, "type"]:
        return self.over_groups(self.count)

    @property
    def groups_of_type(self) -> Int[np.ndarray, "type"]:
        """In how many groups each type occurs."""
        return np.bincount(self.type, minlength=self.n_types)


def cells_of(key: Int[np.ndarray, "token"], group: Int[np.ndarray, "token"], n_groups: int) -> Cells:
    """The cells of rows with these keys (no −1 among them) and groups, numbered below `n_groups`."""
    types, type_of_row = np.unique(key, return_inverse=True)
    pair, of_row, count = np.unique(
        type_of_row.astype(np.int64) * n_groups + group, return_inverse=True, return_counts=True
    )
    return Cells(
        types=types.astype(np.int64),
        type=(pair // max(n_groups, 1)).astype(np.int32),
        group=(pair % max(n_groups, 1)).astype(np.int32),
        count=count.astype(np.float64),
        n_groups=n_groups,
        of_row=of_row.astype(np.int32),
    )


@dataclass(frozen=True, slots=True, eq=False)
class TokenSums:
    """A need summed over the cells of chosen types; `type` counts within the chosen, in their order."""

    type: Int[np.ndarray, "cell"]
    group: Int[np.ndarray, "cell"]
    count: Float64[np.ndarray, "cell"]
    total: Float64[np.ndarray, "cell"]
    n_types: int
    n_groups: int

    @property
    def means(self) -> Float64[np.ndarray, "type"]:
        """The mean need of each type over all its occurrences."""
        total, count = (summed(self.type, values, self.n_types) for values in (self.total, self.count))
        with np.errstate(invalid="ignore"):
            return total / count

    @property
    def group_rows(self) -> Float64[np.ndarray, "group"]:
        """Occurrences of the chosen types in each group."""
        return summed(self.group, self.count, self.n_groups)


def chosen_sums(
    cells: Cells, totals: Float64[np.ndarray, "cell"], types: Int[np.ndarray, "chosen"]
) -> TokenSums:
    """The cells of the types with these ids, which are increasing and all occur."""
    place = np.full(cells.n_types, -1, np.int32)
    place[np.searchsorted(cells.types, types)] = np.arange(types.size, dtype=np.int32)
    kept = np.flatnonzero(place[cells.type] >= 0)
    return TokenSums(
        type=place[cells.type[kept]],
        group=cells.group[kept],
        count=cells.count[kept],
        total=totals[kept],
        n_types=int(types.size),
        n_groups=cells.n_groups,
    )


def summed(
    place: Int[np.ndarray, "item"], values: Float[np.ndarray, "item"], n_places: int
) -> Float64[np.ndarray, "place"]:
    """Sums of the values of each place; numpy alone would give whole numbers for no values at all."""
    return np.bincount(place, values, n_places).astype(np.float64, copy=False)
