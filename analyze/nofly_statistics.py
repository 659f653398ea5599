"""Whether the mean needs of tokens agree between two corpora: sums per type and group of both in,
correlation, reliability and the correlation of what is not noise out.

A token's mean over a few occurrences is mostly noise, so the plain correlation r of two corpora is near 0
even for a perfectly stable trait: it cannot exceed √(reliability_a · reliability_b). Only what two
*different* documents agree on is the token's own. So the true variance of the means is that of the products
of a type's values over pairs of different groups, which is what covariances of half-means over random halves
of the documents converge to, without a seed:

    U(τ) = (S² − Σ_g s_g²) / (N² − Σ_g n_g²)        s_g, n_g: sum and count of type τ in group g; S, N: of all
    B = (Z² − Σ_g z_g²) / (1 − Σ_g w_g²)            z_g = Σ_τ s_g/(N·T), w_g = Σ_τ n_g/(N·T); Z: sum over g
    V = [Σ_τ U(τ) − T·B] / (T − 1)                  values less M, the mean of the T means
    r_disattenuated = Cov(a, b) / √(V_a · V_b)      (Spearman 1904, with V in the place of his reliabilities)

B is the square of the mean over types, again from pairs of different groups: where one document holds half of
the rows, M² less its variance would weigh that document more than U does, and add its level to V.

Types are a fixed population, documents are drawn: every interval comes from leaving out one group after the
other, in each store. Cost: O(cells) for everything, the jackknife included.
"""

from dataclasses import dataclass, fields
from typing import Final

import numpy as np
import scipy.stats
from jaxtyping import Float64

from .influences import leave_one_out, side_by_side
from .intervals import Estimates
from .token_means import TokenSums

MIN_TYPES: Final = 20  # a correlation over fewer types says nothing about tokens
# Of `Comparison.estimates`, in this order.
ITEMS: Final = ("r", "covariance", "true_variance_a", "true_variance_b")
_ROUNDING: Final = 1e-12  # relative: means that differ by less do not vary
_LEAST_KEPT: Final = 1 / 3  # of a jackknife variance: the correction is an estimate itself


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """Two corpora's mean needs over the same types."""

    n_types: int
    spearman: float
    reliability_a: float
    reliability_b: float
    ceiling: float  # of r
    r_disattenuated: float
    estimates: Estimates  # the items of ITEMS; groups of a, then groups of b


@dataclass(frozen=True, slots=True, eq=False)
class _Sums:
    """Sums over types of all that the statistics are made of; one number, or one for each group left out."""

    n: Float64[np.ndarray, "*set"]
    a: Float64[np.ndarray, "*set"]
    b: Float64[np.ndarray, "*set"]
    ab: Float64[np.ndarray, "*set"]
    aa: Float64[np.ndarray, "*set"]
    bb: Float64[np.ndarray, "*set"]
    true_aa: Float64[np.ndarray, "*set"]
    true_bb: Float64[np.ndarray, "*set"]


@dataclass(frozen=True, slots=True, eq=False)
class _Means:
    """Token means of one store less their mean, and of each cell what its type is without it."""

    sums: TokenSums
    mean: Float64[np.ndarray, "type"]
    product: Float64[np.ndarray, "type"]  # U: mean product over pairs of different groups
    mean_without: Float64[np.ndarray, "cell"]
    product_without: Float64[np.ndarray, "cell"]  # NaN where one group would be left
    mean_square: float  # B: square of the mean over types, less M, from pairs of different groups
    mean_square_without: Float64[np.ndarray, "group"]

    @property
    def noise(self) -> Float64[np.ndarray, "type"]:
        """Variance of each mean that is no trait of the token, without bias; may be negative."""
        return self.mean**2 - self.product


def token_means(sums: TokenSums) -> _Means:
    """Means, cross-group products, and both without each group; every type is in two groups or more."""
    kind, count = sums.type, sums.count
    total = sums.total - count * sums.means.mean()

    def over(values: np.ndarray) -> np.ndarray:
        return np.bincount(kind, values, sums.n_types)

    n, s, nn, ss = over(count), over(total), over(count**2), over(total**2)
    mean, product = s / n, (s**2 - ss) / (n**2 - nn)
    n_left, s_left = n[kind] - count, s[kind] - total
    pairs_left = n_left**2 - (nn[kind] - count**2)
    two_left = over(np.ones(kind.size))[kind] > 2
    product_without = np.full(kind.size, np.nan)
    np.divide(s_left**2 - (ss[kind] - total**2), pairs_left, out=product_without, where=two_left)
    mean_without = s_left / n_left
    weight = 1.0 / (n[kind] * sums.n_types)
    level, share = (np.bincount(sums.group, one * weight, sums.n_groups) for one in (total, count))
    mean_square, mean_square_without = _squares_of_mean(level, share)
    return _Means(sums, mean, product, mean_without, product_without, mean_square, mean_square_without)


def _squares_of_mean(
    level: Float64[np.ndarray, "group"], share: Float64[np.ndarray, "group"]
) -> tuple[float, Float64[np.ndarray, "group"]]:
    """B of all groups, and without each one, types weighing as before: it is 0 but for noise, and what other
    weights would change is smaller still. NaN where one group is all there is.
    """
    pairs = level.sum() ** 2 - (level**2).sum()
    of_shares = 1.0 - (share**2).sum()
    rest = (level.sum() - level) ** 2 - ((level**2).sum() - level**2)
    of_rest = (1.0 - share) ** 2 - ((share**2).sum() - share**2)
    with np.errstate(invalid="ignore", divide="ignore"):
        return float(pairs / of_shares), rest / np.where(of_rest > _ROUNDING, of_rest, np.nan)


def compare(a: TokenSums, b: TokenSums) -> Comparison:
    """Compare two stores' sums over the same types, each of which is in two groups of each store."""
    if any(np.ptp(one.means) <= _ROUNDING * np.abs(one.means).max() for one in (a, b)):
        return nothing(a.n_types, a.n_groups + b.n_groups)
    mean_a, mean_b = token_means(a), token_means(b)
    whole = _whole(mean_a, mean_b)
    found = _statistics(whole, mean_a.mean_square, mean_b.mean_square)
    parts = []
    for own, other, swapped in ((mean_a, mean_b, False), (mean_b, mean_a, True)):
        without = _without_each_group(own, other, whole, swapped)
        squares = (own.mean_square_without, other.mean_square)
        replicates = _statistics(without, *(squares[::-1] if swapped else squares))
        parts.append(leave_one_out(found, replicates, own.sums.group_rows, unbias=False))
    estimates = _counted_once(side_by_side(parts), mean_a, mean_b)
    _, covariance, true_a, true_b = found
    means_variance = [np.var(one.mean, ddof=1) for one in (mean_a, mean_b)]
    reliability_a, reliability_b = true_a / means_variance[0], true_b / means_variance[1]
    both = true_a > 0 and true_b > 0
    return Comparison(
        n_types=a.n_types,
        spearman=_spearman(mean_a.mean, mean_b.mean),
        reliability_a=float(reliability_a),
        reliability_b=float(reliability_b),
        ceiling=float(np.sqrt(reliability_a * reliability_b)) if both else np.nan,
        r_disattenuated=float(covariance / np.sqrt(true_a * true_b)) if both else np.nan,
        estimates=estimates,
    )


def nothing(n_types: int, n_groups: int) -> Comparison:
    """Where there is nothing to compare, too few types or means that do not vary: NaN throughout."""
    unknown = np.full(len(ITEMS), np.nan)
    influence = np.full((n_groups, len(ITEMS)), np.nan)
    nan, estimates = float("nan"), Estimates(unknown, influence, unknown, n_groups)
    return Comparison(n_types, nan, nan, nan, nan, nan, estimates)


def _spearman(x: np.ndarray, y: np.ndarray) -> float:
    x, y = (ranks - ranks.mean() for ranks in map(scipy.stats.rankdata, (x, y)))
    with np.errstate(invalid="ignore"):
        return float((x * y).sum() / np.sqrt((x**2).sum() * (y**2).sum()))


def _whole(a: _Means, b: _Means) -> _Sums:
    x, y = a.mean, b.mean
    columns = (np.ones(x.size), x, y, x * y, x * x, y * y, a.product, b.product)
    return _Sums(*(np.asarray(column.sum()) for column in columns))


def _without_each_group(own: _Means, other: _Means, whole: _Sums, swapped: bool) -> _Sums:
    """The sums without each group of `own`. A type that would be left in one group leaves the comparison."""
    kind, group = own.sums.type, own.sums.group
    left = np.isfinite(own.product_without)
    x, y = own.mean[kind], other.mean[kind]
    new, product = np.where(left, own.mean_without, 0.0), np.where(left, own.product_without, 0.0)
    changes = {
        "n": left - 1.0,
        "a": new - x,
        "b": y * (left - 1.0),
        "ab": (new - x) * y,
        "aa": new**2 - x**2,
        "bb": y**2 * (left - 1.0),
        "true_aa": product - own.product[kind],
        "true_bb": other.product[kind] * (left - 1.0),
    }
    if swapped:
        for one, two in (("a", "b"), ("aa", "bb"), ("true_aa", "true_bb")):
            changes[one], changes[two] = changes[two], changes[one]
    return _Sums(
        *(
            getattr(whole, field.name) + np.bincount(group, changes[field.name], own.sums.n_groups)
            for field in fields(_Sums)
        )
    )


def _statistics(
    sums: _Sums, mean_square_a: float | np.ndarray, mean_square_b: float | np.ndarray
) -> np.ndarray:
    """The items of ITEMS along the last axis."""
    n = sums.n
    with np.errstate(invalid="ignore", divide="ignore"):
        mean_a, mean_b = sums.a / n, sums.b / n
        covariance = (sums.ab - n * mean_a * mean_b) / (n - 1)
        variance_a = (sums.aa - n * mean_a**2) / (n - 1)
        variance_b = (sums.bb - n * mean_b**2) / (n - 1)
        true_a = (sums.true_aa - n * mean_square_a) / (n - 1)
        true_b = (sums.true_bb - n * mean_square_b) / (n - 1)
        r = covariance / np.sqrt(variance_a * variance_b)
    return np.stack([r, covariance, true_a, true_b], axis=-1)


def _counted_once(joined: Estimates, a: _Means, b: _Means) -> Estimates:
    """The estimates without the part of their variance that the jackknife counts twice.

    What is made of products of two noises varies in part by noise × noise, and whichever of the two groups is
    left out takes that part along. In the covariance it is noise of a × noise of b, in a true variance that
    of two groups. Where reliability is low this is the largest part: without the correction intervals are
    wider by up to √2, and a true variance is called 0 that is not.
    """
    both = float((a.noise * b.noise).sum() / (a.sums.n_types - 1) ** 2)
    twice = np.array([both, both, _pairs_of_noise(a), _pairs_of_noise(b)])
    counted = joined.standard_error**2
    counted[0] = counted[1]  # r is the covariance over two variances that are hardly in doubt
    with np.errstate(invalid="ignore", divide="ignore"):
        kept = np.sqrt(np.clip(1.0 - twice / counted, _LEAST_KEPT, 1.0))
    scale = np.where(np.isfinite(kept), kept, 1.0)
    return Estimates(joined.estimate, joined.influence * scale, joined.n_effective, joined.n_groups)


def _pairs_of_noise(one: _Means) -> float:
    """What noise × noise of two groups adds too often to the jackknife variance of the true variance."""
    sums, kind = one.sums, one.sums.type
    square = (sums.total - sums.count * sums.means[kind]) ** 2
    others = np.bincount(kind, square, sums.n_types)[kind] - square
    count = np.bincount(kind, sums.count, sums.n_types)[kind] - sums.count
    count_square = np.bincount(kind, sums.count**2, sums.n_types)[kind] - sums.count**2
    pairs = np.where(np.isfinite(one.product_without), count**2 - count_square, np.inf)
    return float((2.0 * square * others / pairs**2).sum() / (sums.n_types - 1) ** 2)
