"""Intervals by group: sums per group, or influences of groups, in; estimates with linearised cluster-t
intervals out.

Every mean over tokens is a ratio of two sums over groups (values / counts), and so is 1 − R² (squared error /
total). The ratio is linearised at its estimate; each group's influence is scaled by 1/(1 − its share of the
denominator), which makes the variance that of the group jackknife; the quantile is Student's with one
degree of freedom less than the effective number of groups, (Σ b)²/Σ b² over denominators b. Without these
two, coverage falls to 87 % where group sizes spread widely. Families get simultaneous intervals from one set
of random group signs: every |t| is ranked within its own item's draws, and the family's level is the
quantile of the smallest p of a draw (min-p of Westfall and Young; a plain maximum of |t| compares items
whose draws have other tails, and covered 88–92 % where groups are unequal). Cost: O(groups · items), and
groups · items · draws for a family.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import scipy.special
import scipy.stats
from jaxtyping import Bool, Float64, Num

LEVEL: Final = 0.95
# Under this many groups a result is shown with "too few documents" and gets no verdict.
MIN_GROUPS: Final = 20
DRAWS: Final = 10_000  # the smallest p of 30 layers lies near 0.002: twenty draws decide it
_DRAWS_AT_ONCE: Final = 500
# One group may hold nearly all rows; with fewer degrees of freedom than this the quantile means nothing.
_LEAST_FREEDOM: Final = 0.5


@dataclass(frozen=True, slots=True)
class Estimates:
    """Statistics of one population (ratios Σ numerator / Σ denominator, and whatever else is linearised),
    with the influence of each group on each: the estimate less that without the group, to first order.
    """

    estimate: Float64[np.ndarray, "item"]
    influence: Float64[np.ndarray, "group item"]
    n_effective: Float64[np.ndarray, "item"]  # groups of equal size that would weigh as much
    n_groups: int

    @property
    def standard_error(self) -> Float64[np.ndarray, "item"]:
        if self.n_groups < 2:
            return np.full(self.estimate.shape, np.nan)
        centred = self.influence - self.influence.mean(axis=0)
        return np.sqrt((centred**2).sum(axis=0) * (self.n_groups - 1) / self.n_groups)


def ratios(
    numerator: Num[np.ndarray, "group item"],
    denominator: Num[np.ndarray, "group item"],
    present: Bool[np.ndarray, "group"] | None = None,
) -> Estimates:
    """Linearise Σ numerator / Σ denominator, item by item. Groups that are not `present` do not count; by
    default those without any denominator. An item without any denominator is NaN throughout.
    """
    kept = np.flatnonzero((denominator > 0).any(axis=1) if present is None else present)
    numerator = numerator[kept].astype(np.float64)
    denominator = denominator[kept].astype(np.float64)
    total = denominator.sum(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        estimate = numerator.sum(axis=0) / total
        share = denominator / total
        influence = (numerator - estimate * denominator) / total / (1.0 - share)
        n_effective = 1.0 / (share**2).sum(axis=0)
    return Estimates(estimate, influence, n_effective, int(kept.size))


def stack(parts: Sequence[Estimates]) -> Estimates:
    """One family. Items are over the same groups, where their needs are there for the same rows; where a need
    is missing in other documents at each layer, groups are other ones too. Influences then stand side by side
    as if groups were the same: each item keeps its own spread, and simultaneous bounds take its dependence on
    the others for what chance would give, which makes them wider than they need be, not narrower.
    """
    n_groups = max(part.n_groups for part in parts)
    return Estimates(
        np.concatenate([part.estimate for part in parts]),
        np.concatenate([_padded(part, n_groups) for part in parts], axis=1),
        np.concatenate([part.n_effective for part in parts]),
        n_groups,
    )


def _padded(part: Estimates, n_groups: int) -> Float64[np.ndarray, "group item"]:
    """Influences with groups that are not there, and move nothing, at the end; the spread stays the same."""
    if part.n_groups == n_groups:
        return part.influence
    if part.n_groups < 2:  # no spread is known of one group
        return np.full((n_groups, part.estimate.size), np.nan)
    factor = (part.n_groups - 1) / part.n_groups * n_groups / (n_groups - 1)
    centred = (part.influence - part.influence.mean(axis=0)) * np.sqrt(factor)
    return np.pad(centred, ((0, n_groups - part.n_groups), (0, 0)))


def critical_value(ratios: Estimates, level: float = LEVEL) -> Float64[np.ndarray, "item"]:
    """Student's two-sided quantile for each ratio by itself; NaN for fewer than two groups."""
    return _student(ratios, (1.0 - level) / 2.0)


def simultaneous_value(
    ratios: Estimates, seed: int, level: float = LEVEL, draws: int = DRAWS
) -> Float64[np.ndarray, "item"]:
    """Critical values that hold for all items at once, by the smallest p under random signs.

    Signs are drawn per group and shared by all items, so that the dependence between items is kept. The
    level found is carried over to each item's own degrees of freedom; it lies between Bonferroni's and the
    pointwise one.
    """
    pointwise = critical_value(ratios, level)
    if ratios.n_groups < 2:
        return pointwise
    centred = ratios.influence - ratios.influence.mean(axis=0)
    centred = centred[:, np.isfinite(centred).all(axis=0) & (centred != 0).any(axis=0)]
    if centred.shape[1] < 2:
        return pointwise
    smallest = float(np.quantile(_smallest_p(centred, seed, draws), 1.0 - level))
    p_value = max(smallest, (1.0 - level) / centred.shape[1])
    return np.fmax(pointwise, _student(ratios, p_value / 2.0))


def _student(ratios: Estimates, tail: float) -> np.ndarray:
    freedom = np.maximum(ratios.n_effective - 1.0, _LEAST_FREEDOM)
    quantile = -scipy.special.stdtrit(freedom, tail)
    return np.where((ratios.n_groups >= 2) & np.isfinite(ratios.n_effective), quantile, np.nan)


def _smallest_p(centred: np.ndarray, seed: int, draws: int) -> np.ndarray:
    """Of each draw, the smallest p over items, each item's |t| ranked within its own draws."""
    n_groups, n_items = centred.shape
    rng = np.random.default_rng(seed)
    square = (centred**2).sum(axis=0)
    t = np.empty((draws, n_items))
    for start in range(0, draws, _DRAWS_AT_ONCE):
        stop = min(draws, start + _DRAWS_AT_ONCE)
        signs = rng.integers(0, 2, (stop - start, n_groups)).astype(np.float64) * 2.0 - 1.0
        total = signs @ centred
        # Signs do not change the squares of influences, only their mean.
        spread = np.maximum(square - total**2 / n_groups, square * 1e-12)
        t[start:stop] = np.abs(total) / np.sqrt(spread)
    rank = scipy.stats.rankdata(t, method="min", axis=0)
    return (1.0 - (rank - 1.0) / draws).min(axis=1)


def share_bounds(
    ratios: Estimates, critical: Float64[np.ndarray, "item"]
) -> tuple[Float64[np.ndarray, "item"], Float64[np.ndarray, "item"]]:
    """Bounds of a share: Wilson's interval (1927) at the sample size that the standard error amounts to, and
    at the effective number of groups where the share is 0 or 1: all of few documents is not all.
    """
    p, error = ratios.estimate, ratios.standard_error
    with np.errstate(invalid="ignore", divide="ignore"):
        n = np.where(error > 0, p * (1.0 - p) / error**2, ratios.n_effective)
        squared = critical**2
        centre = (p + squared / (2 * n)) / (1 + squared / n)
        half = critical / (1 + squared / n) * np.sqrt(p * (1 - p) / n + squared / (4 * n**2))
    return np.maximum(centre - half, 0.0), np.minimum(centre + half, 1.0)


def bounds(
    ratios: Estimates, critical: Float64[np.ndarray, "item"]
) -> tuple[Float64[np.ndarray, "item"], Float64[np.ndarray, "item"]]:
    """estimate ± critical · standard error."""
    half = critical * ratios.standard_error
    return ratios.estimate - half, ratios.estimate + half


def r_squared_bounds(
    unexplained: Estimates, critical: Float64[np.ndarray, "item"]
) -> tuple[Float64[np.ndarray, "item"], Float64[np.ndarray, "item"]]:
    """Bounds of R² = 1 − ratio, symmetric in log(1 − R²): never above 1, and better covered for skewed
    errors.
    """
    # One document may carry nearly all of a layer's error: its interval is then without lower bound.
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        factor = np.exp(critical * unexplained.standard_error / unexplained.estimate)
        low, high = 1.0 - unexplained.estimate * factor, 1.0 - unexplained.estimate / factor
    exact = unexplained.estimate == 0.0
    return np.where(exact, 1.0, low), np.where(exact, 1.0, high)


def verdict_at_least(low: float, high: float, threshold: float, n_groups: int) -> str:
    """Whether "the quantity is at least `threshold`" holds, by an interval of it."""
    if n_groups < MIN_GROUPS:
        return "too few documents"
    if low >= threshold:
        return "supported"
    if high < threshold:
        return "not supported"
    return "cannot tell"
