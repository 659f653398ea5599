"""Estimates from influences: what each group moves in, intervals, differences and p-values out.

A statistic that is no ratio of sums (an AUC, a correlation, a share of variance) comes with the influence
of each group on it, by its own formula or by leaving the group out (`leave_one_out`). From there on
everything is as for ratios: Student's quantile at the effective number of groups, simultaneous bounds from
random signs. Cost: O(groups · items).
"""

from collections.abc import Sequence

import numpy as np
import scipy.special
from jaxtyping import Float64

from .intervals import MIN_GROUPS, Estimates, bounds, critical_value, share_bounds, simultaneous_value


def from_influence(
    estimate: Float64[np.ndarray, "item"],
    influence: Float64[np.ndarray, "group item"],
    weight: Float64[np.ndarray, "group item"] | Float64[np.ndarray, "group"],
) -> Estimates:
    """Estimates whose groups weigh `weight` (rows, say): the effective number of groups is (Σw)²/Σw²."""
    weights = weight if weight.ndim == 2 else np.broadcast_to(weight[:, None], influence.shape)
    with np.errstate(invalid="ignore", divide="ignore"):
        share = weights / weights.sum(axis=0)
        n_effective = 1.0 / (share**2).sum(axis=0)
    return Estimates(estimate, influence, n_effective, int(influence.shape[0]))


def leave_one_out(
    estimate: Float64[np.ndarray, "item"],
    without: Float64[np.ndarray, "group item"],
    weight: Float64[np.ndarray, "group item"] | Float64[np.ndarray, "group"],
    unbias: bool = True,
) -> Estimates:
    """Jackknife over groups: `without[g]` is the statistic of all groups but g. With `unbias`, the estimate
    loses its bias of order 1/groups (Quenouille 1956).
    """
    n_groups = without.shape[0]
    # Scaled as in `ratios`: the variance is (G − 1)/G · Σ(centred influence)², that of the jackknife.
    influence = estimate - without
    value = estimate + (n_groups - 1) * influence.mean(axis=0) if unbias and n_groups > 1 else estimate
    return from_influence(value, influence, weight)


def side_by_side(parts: Sequence[Estimates]) -> Estimates:
    """One estimate that depends on several independent sets of groups (two stores): their influences follow
    one another, each centred and scaled to its own set's variance.
    """
    n_groups = sum(part.n_groups for part in parts)
    rows = []
    for part in parts:
        if not part.n_groups:
            continue
        centred = part.influence - part.influence.mean(axis=0)
        # `standard_error` multiplies by (G − 1)/G of all groups; each set has its own factor.
        factor = (part.n_groups - 1) / part.n_groups * n_groups / max(n_groups - 1, 1)
        rows.append(centred * np.sqrt(factor))
    with np.errstate(invalid="ignore", divide="ignore"):
        variances = np.stack([part.standard_error**2 for part in parts])
        # Welch and Satterthwaite: degrees of freedom of a sum of variances.
        each = np.stack([np.maximum(part.n_effective - 1.0, 0.5) for part in parts])
        freedom = variances.sum(axis=0) ** 2 / (variances**2 / each).sum(axis=0)
    influence = np.concatenate(rows) if rows else parts[0].influence
    return Estimates(parts[0].estimate, influence, freedom + 1.0, n_groups)


def difference(larger: Estimates, smaller: Estimates) -> Estimates:
    """larger − smaller over the same groups, paired."""
    return Estimates(
        larger.estimate - smaller.estimate,
        larger.influence - smaller.influence,
        np.minimum(larger.n_effective, smaller.n_effective),
        larger.n_groups,
    )


def transformed_bounds(
    estimates: Estimates, critical: Float64[np.ndarray, "item"], scale: str
) -> tuple[Float64[np.ndarray, "item"], Float64[np.ndarray, "item"]]:
    """Bounds that are symmetric on another scale and stay inside its range: "logit" for an AUC or a share in
    (0, 1), "fisher" for a correlation in (−1, 1). Where an AUC or share is 0 or 1 itself, Wilson's bound at
    the effective number of groups: never wrong in few documents is not never wrong.
    """
    value, error = estimates.estimate, estimates.standard_error
    forward, back, slope = _SCALES[scale]
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        centre, half = forward(value), critical * error * slope(value)
        low, high = back(centre - half), back(centre + half)
    edge = ~np.isfinite(centre)
    plain_low, plain_high = bounds(estimates, critical)
    if scale == "logit":
        whole = (value == 0.0) | (value == 1.0)
        least, most = share_bounds(estimates, critical)
        plain_low, plain_high = np.where(whole, least, plain_low), np.where(whole, most, plain_high)
    return np.where(edge, plain_low, low), np.where(edge, plain_high, high)


_SCALES = {
    "logit": (
        scipy.special.logit,
        scipy.special.expit,
        lambda value: 1.0 / (value * (1.0 - value)),
    ),
    "fisher": (np.arctanh, np.tanh, lambda value: 1.0 / (1.0 - value**2)),
}


def intervals(
    estimates: Estimates, seed: int, scale: str | None = None
) -> dict[str, Float64[np.ndarray, "item"]]:
    """`lo`, `hi` of each item by itself, `sim_lo`, `sim_hi` for all items at once."""
    found = {}
    for prefix, critical in (("", critical_value(estimates)), ("sim_", simultaneous_value(estimates, seed))):
        pair = (
            bounds(estimates, critical) if scale is None else transformed_bounds(estimates, critical, scale)
        )
        found[f"{prefix}lo"], found[f"{prefix}hi"] = pair
    return found


def p_values(estimates: Estimates, null: float = 0.0, one_sided: bool = False) -> Float64[np.ndarray, "item"]:
    """Of "the quantity is `null`" (one-sided: "is at most `null`"), by Student's t; NaN without a spread."""
    with np.errstate(invalid="ignore", divide="ignore"):
        t = (estimates.estimate - null) / estimates.standard_error
    freedom = np.maximum(estimates.n_effective - 1.0, 0.5)
    tail = scipy.special.stdtr(freedom, -t if one_sided else -np.abs(t))
    return tail if one_sided else 2.0 * tail


def holm(p: Float64[np.ndarray, "item"]) -> Float64[np.ndarray, "item"]:
    """Holm's adjusted p-values (1979) of one family; NaN stays NaN and does not count."""
    adjusted = np.full(p.shape, np.nan)
    known = np.flatnonzero(np.isfinite(p))
    order = known[np.argsort(p[known], kind="stable")]
    scaled = p[order] * np.arange(order.size, 0, -1)
    adjusted[order] = np.minimum(np.maximum.accumulate(scaled), 1.0)
    return adjusted


def verdict_above(low: float, high: float, null: float, n_groups: int, margin: float = 0.0) -> str:
    """Whether "the quantity is above `null`" holds. It is "not supported" where the interval shows that the
    quantity is below null + margin; else an interval that holds `null` cannot tell.
    """
    if n_groups < MIN_GROUPS:
        return "too few documents"
    if low > null:
        return "supported"
    if high < null + margin:
        return "not supported"
    return "cannot tell"
