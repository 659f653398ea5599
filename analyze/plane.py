"""Least squares with intervals by group: columns of features and a need in, a fitted plane out.

All comes from sums of products by group, made in tiles of rows: the coefficients, what each becomes without
any one group (exactly, by taking the group's sums away), and the squared errors on other rows. Cost: two
passes over the columns, (terms + 2)² numbers a group.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Bool, Float, Float64, Int, Int64

from .influences import leave_one_out
from .intervals import Estimates, ratios

TILE_ROWS: Final = 1 << 16
# A feature that varies by less than this share of its mean is a constant, and one of whose variance less than
# this share is new beside the features before it is a repetition: both with rounding.
_CONSTANT: Final = 1e-9
_REPEATED: Final = 1e-9
# Without its group a feature may vary no longer: directions below this have no coefficient there, it is 0.
_RANK: Final = 1e-10

Columns = Callable[[Int64[np.ndarray, "row"]], Float64[np.ndarray, "row term"]]


@dataclass(frozen=True, slots=True, eq=False)
class Plane:
    """need ≈ centre + Σ coefficient · (feature − mean) / sd over the features that are kept."""

    mean: Float64[np.ndarray, "term"]
    sd: Float64[np.ndarray, "term"]
    kept: Bool[np.ndarray, "term"]
    centre: float  # mean of the fitted needs
    coefficients: Estimates  # of the kept features: need per standard deviation
    correlation: Float64[np.ndarray, "term"]  # of each feature by itself with the need; NaN: it does not vary
    r2: float  # of the rows fitted

    def of(self, features: Float64[np.ndarray, "row term"]) -> Float64[np.ndarray, "row"]:
        standard = (features[:, self.kept] - self.mean[self.kept]) / self.sd[self.kept]
        return self.centre + standard @ self.coefficients.estimate


def fit_plane(
    columns: Columns,
    need: Float[np.ndarray, "token"],
    group: Int[np.ndarray, "token"],
    rows: Int64[np.ndarray, "row"],
) -> Plane:
    """Ordinary least squares of `need` on the columns over the named rows."""
    mean, centre = _means(columns, need, rows)
    groups, index = np.unique(group[rows], return_inverse=True)
    products = np.zeros((groups.size, mean.size + 2, mean.size + 2))
    for part in _tiles(rows.size):
        features = columns(rows[part]) - mean
        values = need[rows[part]].astype(np.float64)[:, None] - centre
        _add_products(products, np.concatenate([np.ones_like(values), features, values], axis=1), index[part])
    whole, n_rows = products.sum(axis=0), max(rows.size, 1)
    with np.errstate(invalid="ignore", divide="ignore"):
        sd = np.sqrt(np.diag(whole)[1:-1] / n_rows)
        varies = sd > _CONSTANT * np.abs(mean)
        sd[~varies] = np.nan
        correlation = whole[1:-1, -1] / (sd * np.sqrt(n_rows * whole[-1, -1]))
    kept = varies & _new(whole[1:-1, 1:-1] / n_rows, sd, varies)
    used = np.concatenate([[True], kept, [True]])
    scale = np.concatenate([[1.0], sd[kept], [1.0]])
    standard = products[:, used][:, :, used] / np.outer(scale, scale)
    coefficients, explained = _solve(standard)
    r2 = explained / whole[-1, -1] if whole[-1, -1] > 0 else float("nan")
    return Plane(mean, sd, kept, centre, coefficients, correlation, r2)


def unexplained(
    plane: Plane,
    columns: Columns,
    need: Float[np.ndarray, "token"],
    group: Int[np.ndarray, "token"],
    rows: Int64[np.ndarray, "row"],
) -> Estimates:
    """1 − R² on the named rows, one item: Σ(need − plane)² over Σ(need − mean of the fitted needs)²."""
    groups, index = np.unique(group[rows], return_inverse=True)
    error, total = np.zeros(groups.size), np.zeros(groups.size)
    for part in _tiles(rows.size):
        values = need[rows[part]].astype(np.float64)
        error += np.bincount(index[part], (values - plane.of(columns(rows[part]))) ** 2, groups.size)
        total += np.bincount(index[part], (values - plane.centre) ** 2, groups.size)
    return ratios(error[:, None], total[:, None], np.ones(groups.size, bool))


def _tiles(n_rows: int) -> Iterator[slice]:
    return (slice(start, start + TILE_ROWS) for start in range(0, n_rows, TILE_ROWS))


def _means(columns: Columns, need: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, float]:
    total, of_need = columns(rows[:0]).sum(axis=0), 0.0
    for part in _tiles(rows.size):
        total = total + columns(rows[part]).sum(axis=0)
        of_need += float(need[rows[part]].sum(dtype=np.float64))
    if not rows.size:  # nothing was learned: what is said of other rows is NaN
        return total, float("nan")
    return total / rows.size, of_need / rows.size


def _add_products(products: np.ndarray, values: np.ndarray, index: np.ndarray) -> None:
    """Add Σ vvᵀ over the rows of each group."""
    for i in range(values.shape[1]):
        for j in range(i, values.shape[1]):
            sums = np.bincount(index, values[:, i] * values[:, j], len(products))
            products[:, i, j] += sums
            if i != j:
                products[:, j, i] += sums


def _new(
    covariance: Float64[np.ndarray, "term term"],
    sd: Float64[np.ndarray, "term"],
    varies: Bool[np.ndarray, "term"],
) -> Bool[np.ndarray, "term"]:
    """Which features say something that the ones before them do not."""
    correlation = covariance / np.outer(sd, sd)
    kept = np.zeros(sd.size, bool)
    for term in np.flatnonzero(varies):
        before = correlation[kept][:, kept]
        beside = correlation[kept, term]
        kept[term] = 1.0 - beside @ np.linalg.solve(before, beside) > _REPEATED
    return kept


def _solve(products: Float64[np.ndarray, "group column column"]) -> tuple[Estimates, float]:
    """Coefficients of all columns but the first, which is constant, for the last; and Σ(plane − mean)²."""
    whole = products.sum(axis=0)
    estimate = np.linalg.pinv(whole[:-1, :-1], rcond=_RANK, hermitian=True) @ whole[:-1, -1]
    rest = whole - products
    inverse = np.linalg.pinv(rest[:, :-1, :-1], rcond=_RANK, hermitian=True)
    without = np.einsum("gij,gj->gi", inverse, rest[:, :-1, -1])
    n_rows = products[:, 0, 0]
    found = leave_one_out(estimate[1:], without[:, 1:], n_rows, unbias=False)
    return found, float(estimate @ whole[:-1, -1])
