"""Spearman's ρ with an interval over groups: two values a row and the group of each in, `Estimates` out.

ρ is the correlation of mid-ranks, C / (s_R s_S) with C = mean(F G) − 1/4, F and G the mid-distribution
functions of the two values. A row moves C in three ways: by its own product, and by moving the ranks of all
others. To first order
    φ(x, y) = F(x)G(y) + mean(1{X ≥ x} G(Y)) + mean(1{Y ≥ y} F(X)) − 3 mean(F G),
ties counting half; ranks held fixed would miss the last two. With p_v the share of rows of value v, s² is
(1 − Σ p³)/12, and moves by (Σ p³ − p_v²)/4 for a row of value v: nothing to speak of without ties. A group's
influence is the sum over its rows, scaled by 1/(1 − its share) as for ratios. Cost: one sort a value, no loop
over groups.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float64, Int, Int64

from .influences import from_influence
from .intervals import Estimates


@dataclass(frozen=True, slots=True, eq=False)
class Ranked:
    """Values by their place among themselves."""

    place: Int64[np.ndarray, "token"]  # among the distinct values, increasing
    n_values: int
    mid: Float64[np.ndarray, "token"]  # mid-distribution function: in (0, 1), of mean 1/2
    variance: float  # of mid
    variance_moved: Float64[np.ndarray, "token"]  # to first order, by each row

    def at_least(self, weight: Float64[np.ndarray, "token"]) -> Float64[np.ndarray, "token"]:
        """Of each row, the mean of weight · 1{value of another ≥ its own}, ties counting half."""
        of_value = np.bincount(self.place, weight, self.n_values)
        from_here = np.cumsum(of_value[::-1])[::-1]
        return (from_here - of_value / 2.0)[self.place] / self.place.size


def ranked(values: Float[np.ndarray, "token"]) -> Ranked:
    """Ranks; values must be finite."""
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    share = count / max(values.size, 1)
    cubes = float((share**3).sum())
    mid = np.cumsum(share) - share / 2.0
    variance = (1.0 - cubes) / 12.0 if count.size > 1 else 0.0
    return Ranked(place.astype(np.int64), count.size, mid[place], variance, ((cubes - share**2) / 4.0)[place])


def spearman(one: Ranked, other: Ranked, group: Int[np.ndarray, "token"]) -> Estimates:
    """ρ of two values of the same rows, one item; groups in the order of np.unique(group). NaN without rows,
    or where a value is constant.
    """
    groups, index = np.unique(group, return_inverse=True)
    count = np.bincount(index, minlength=groups.size).astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        share = count / count.sum()
        product = one.mid * other.mid
        theta = product.mean() if product.size else np.nan
        spread = np.sqrt(one.variance * other.variance)
        value = (theta - 0.25) / spread if spread > 0 else np.nan
        moved = (product + one.at_least(other.mid) + other.at_least(one.mid) - 3.0 * theta) / spread
        for ranks in (one, other):
            moved -= value / 2.0 * ranks.variance_moved / ranks.variance
        influence = np.bincount(index, moved, groups.size) / max(product.size, 1) / (1.0 - share)
    return from_influence(np.clip([value], -1.0, 1.0), influence[:, None], count)
