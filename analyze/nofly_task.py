"""One work item of `nofly`: needs of a few layers in two stores in, what is found of each need, surrogate and
key out.

Several layers go together because they share the shuffles. Cost: three sorts of the rows a key, O(cells) a
column, and per shuffle one sort and one pass over the rows for all columns. Memory: about 16 bytes a row and
column.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from .nofly_null import ShuffledMeans, Shuffles, null_correlations, permutation_p
from .nofly_paper import Observed, line_of, observe, paper_columns, random_half
from .nofly_statistics import MIN_TYPES, Comparison, compare, nothing
from .token_means import Cells, cells_of, chosen_sums

KEYS: Final = ("input", "target")
_OF_HALVES: Final = 2  # streams of random numbers beside those of the two stores' shuffles


class Column(NamedTuple):
    """Which need."""

    layer: int
    surrogate: str
    need: str


Values = Mapping[Column, Float[np.ndarray, "_"]]  # of the rows of one store


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """The rows of one store that are compared."""

    token_id: Int[np.ndarray, "token"]
    target_id: Int[np.ndarray, "token"]
    group: Int[np.ndarray, "token"]  # numbered from 0
    document: Int[np.ndarray, "token"]
    n_groups: int

    def key(self, name: str) -> Int[np.ndarray, "token"]:
        return self.token_id if name == "input" else self.target_id


@dataclass(frozen=True, slots=True, eq=False)
class Shared:
    """What all items use: the rows of each pair of stores."""

    pairs: tuple[tuple[Side, Side], ...]
    occurrences: int
    n_shuffles: int
    seed: int
    n_top: int


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """Needs of the rows of one pair; both stores have the same columns."""

    pair: int
    values: tuple[Values, Values]


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """What two stores say of one need, keyed by input or by target token."""

    column: Column
    key: str
    comparison: Comparison
    p_permutation: float
    n_tokens: tuple[int, int]
    n_groups: tuple[int, int]
    paper: dict[str, float | int]
    top: list[dict[str, float | int]]  # the types of highest mean in a


@dataclass(frozen=True, slots=True, eq=False)
class _Family:
    """Columns that have a value in the same rows, and the types that are compared in them."""

    key: str
    columns: tuple[Column, ...]
    has_need: tuple[np.ndarray, np.ndarray]
    cells: tuple[Cells, Cells]
    types: Int[np.ndarray, "type"]


def compare_needs(shared: Shared, item: Item) -> list[Found]:
    """Everything about the item's columns, for both keys."""
    sides = shared.pairs[item.pair]
    families = [family for key in KEYS for family in _families(key, sides, item, shared.occurrences)]
    tested = [family for family in families if family.types.size >= MIN_TYPES]
    shuffles = tuple(Shuffles(side.document, (shared.seed, n)) for n, side in enumerate(sides))
    null = null_correlations(
        [_shuffled(family, item, shuffles) for family in tested],
        (shuffles[0], shuffles[1]),
        shared.n_shuffles,
    )
    null_of = dict(zip(map(id, tested), null, strict=True))
    return [
        _found(shared, item, family, place, null_of.get(id(family)))
        for family in families
        for place in range(len(family.columns))
    ]


def _families(key: str, sides: tuple[Side, Side], item: Item, occurrences: int) -> list[_Family]:
    """Columns by where they have values: nearly always one family."""
    by_rows: dict[tuple[bytes, bytes], list[Column]] = {}
    masks: dict[tuple[bytes, bytes], tuple[np.ndarray, np.ndarray]] = {}
    for column in item.values[0]:
        a, b = (
            np.isfinite(values[column]) & (side.key(key) >= 0)
            for values, side in zip(item.values, sides, strict=True)
        )
        name = (np.packbits(a).tobytes(), np.packbits(b).tobytes())
        by_rows.setdefault(name, []).append(column)
        masks[name] = (a, b)
    families = []
    for name, columns in by_rows.items():
        a, b = (
            cells_of(side.key(key)[mask], side.group[mask], side.n_groups)
            for side, mask in zip(sides, masks[name], strict=True)
        )
        types = np.intersect1d(_often(a, occurrences), _often(b, occurrences), assume_unique=True)
        families.append(_Family(key, tuple(columns), masks[name], (a, b), types))
    return families


def _often(cells: Cells, occurrences: int) -> Int[np.ndarray, "type"]:
    return cells.types[(cells.occurrences >= occurrences) & (cells.groups_of_type >= 2)]


def _shuffled(
    family: _Family, item: Item, shuffles: tuple[Shuffles, ...]
) -> tuple[ShuffledMeans, ShuffledMeans]:
    a, b = (
        ShuffledMeans.of(
            one,
            mask,
            _type_of_row(family.types, cells, mask),
            family.types.size,
            np.stack([values[column] for column in family.columns], axis=1),
        )
        for one, mask, cells, values in zip(shuffles, family.has_need, family.cells, item.values, strict=True)
    )
    return a, b


def _type_of_row(
    types: Int[np.ndarray, "type"], cells: Cells, mask: Bool[np.ndarray, "token"]
) -> Int[np.ndarray, "token"]:
    """The number of each row's type among those compared, or −1."""
    place = np.full(cells.n_types, -1)
    place[np.searchsorted(cells.types, types)] = np.arange(types.size)
    found = np.full(mask.size, -1)
    found[mask] = place[cells.type[cells.of_row]]
    return found


def _found(
    shared: Shared, item: Item, family: _Family, place: int, null: Float[np.ndarray, "shuffle column"] | None
) -> Found:
    column = family.columns[place]
    values = [
        found[column][mask].astype(np.float64)
        for found, mask in zip(item.values, family.has_need, strict=True)
    ]
    totals = [cells.sums(one) for cells, one in zip(family.cells, values, strict=True)]
    a, b = (
        chosen_sums(cells, total, family.types) for cells, total in zip(family.cells, totals, strict=True)
    )
    known = null is not None
    comparison = compare(a, b) if known else nothing(family.types.size, a.n_groups + b.n_groups)
    r = float(comparison.estimates.estimate[0])
    return Found(
        column=column,
        key=family.key,
        comparison=comparison,
        p_permutation=permutation_p(r, null[:, place]) if known else float("nan"),
        n_tokens=(int(a.count.sum()), int(b.count.sum())),
        n_groups=(int((a.group_rows > 0).sum()), int((b.group_rows > 0).sum())),
        paper=_paper(column.need, family.cells, totals, values, shared.seed),
        top=_top(family.types, a.means, b.means, family.cells, shared.n_top),
    )


def _paper(
    need: str, cells: tuple[Cells, Cells], totals: list[np.ndarray], values: list[np.ndarray], seed: int
) -> dict[str, float | int]:
    lines = [line_of(need, one) for one in values]
    above = [found.sums((one > line) * 1.0) for found, one, line in zip(cells, values, lines, strict=True)]

    def seen(side: int, groups: np.ndarray | None = None) -> Observed:
        return observe(cells[side], totals[side], above[side], lines[side], groups)

    half = random_half(cells[0].n_groups, (seed, _OF_HALVES))
    return paper_columns(need, seen(0), seen(1), (seen(0, half), seen(0, ~half)))


def _top(
    types: np.ndarray, mean_a: np.ndarray, mean_b: np.ndarray, cells: tuple[Cells, Cells], n_top: int
) -> list[dict[str, float | int]]:
    """The types of highest mean in a, the lower id first where means are equal."""
    order = np.argsort(-mean_a, kind="stable")[:n_top]
    n_a, n_b = (found.occurrences[np.searchsorted(found.types, types)] for found in cells)
    return [
        {
            "rank": rank,
            "token_id": int(types[place]),
            "mean_a": float(mean_a[place]),
            "mean_b": float(mean_b[place]),
            "n_a": int(n_a[place]),
            "n_b": int(n_b[place]),
        }
        for rank, place in enumerate(order, start=1)
    ]
