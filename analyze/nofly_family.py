"""Bounds and verdicts over the layers of one comparison of two corpora: what `compare` found at each layer
in, columns of the table `nofly` out.

r_disattenuated is a ratio whose denominator may be anything once reliability is low, so its bounds are those
of Fieller (1954): all ρ for which Cov(a, b) − ρ·√(V_a·V_b) is not told from 0. They lie above 0 exactly where
the covariance does, and do not exist where the denominator itself is not told from 0. Layers share one set of
groups, and simultaneous bounds use it. Cost: O(groups · layers · draws).
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
from jaxtyping import Bool, Float64

from .influences import transformed_bounds
from .intervals import MIN_GROUPS, Estimates, bounds, critical_value, simultaneous_value
from .nofly_statistics import ITEMS, MIN_TYPES, Comparison

SIGNIFICANT: Final = 0.05
# A correlation of what is not noise below this, for sure, is no transfer of the kind that a list would need.
TRANSFERS: Final = 0.5
COVARIANCE, TRUE_A, TRUE_B = (ITEMS.index(name) for name in ITEMS[1:])

Column = Float64[np.ndarray, "layer"]


def family_bounds(layers: Sequence[Comparison], seed: int) -> dict[str, Column]:
    """r_lo, r_hi, and the bounds of r_disattenuated, each by itself and for all layers at once; NaN: none."""
    r = _stacked([layer.estimates for layer in layers], 0)
    r_low, r_high = transformed_bounds(r, critical_value(r), "fisher")
    ratio = disattenuated(layers)
    found = {"r_lo": r_low, "r_hi": r_high}
    for infix, critical in (("", critical_value(ratio)), ("sim_", simultaneous_value(ratio, seed))):
        pairs = [fieller(layer, float(value)) for layer, value in zip(layers, critical, strict=True)]
        found[f"r_disattenuated_{infix}lo"] = np.array([low for low, _ in pairs])
        found[f"r_disattenuated_{infix}hi"] = np.array([high for _, high in pairs])
    return found


def disattenuated(layers: Sequence[Comparison]) -> Estimates:
    """r_disattenuated of each layer, linearised: influences for what layers have in common."""
    columns, freedom = [], []
    for layer in layers:
        estimates = layer.estimates
        top, bottom, slope = _ratio(layer)
        influence = (top - layer.r_disattenuated * bottom) / slope
        columns.append(influence)
        freedom.append(estimates.n_effective[[COVARIANCE, TRUE_A, TRUE_B]].min())
    return Estimates(
        np.array([layer.r_disattenuated for layer in layers]),
        np.stack(columns, axis=1),
        np.array(freedom),
        layers[0].estimates.n_groups,
    )


def fieller(layer: Comparison, critical: float) -> tuple[float, float]:
    """Bounds of all ρ with |Cov − ρ·P| ≤ critical · its standard error, P = √(V_a·V_b); NaN: none."""
    top, bottom, geometric = _ratio(layer)
    factor = critical**2 * (layer.estimates.n_groups - 1) / layer.estimates.n_groups
    covariance = float(layer.estimates.estimate[COVARIANCE])
    a = geometric**2 - factor * float((bottom**2).sum())
    b = covariance * geometric - factor * float((top * bottom).sum())
    c = covariance**2 - factor * float((top**2).sum())
    if not (a > 0 and b**2 >= a * c):
        return float("nan"), float("nan")
    half = np.sqrt(b**2 - a * c)
    return float((b - half) / a), float((b + half) / a)


def _ratio(layer: Comparison) -> tuple[np.ndarray, np.ndarray, float]:
    """Centred influences on Cov(a, b) and on P = √(V_a·V_b), and P; NaN where V_a or V_b is not above 0."""
    estimates = layer.estimates
    centred = estimates.influence - estimates.influence.mean(axis=0)
    true_a, true_b = (float(estimates.estimate[item]) for item in (TRUE_A, TRUE_B))
    if not (true_a > 0 and true_b > 0):
        nothing = np.full(centred.shape[0], np.nan)
        return nothing, nothing, float("nan")
    geometric = float(np.sqrt(true_a * true_b))
    bottom = geometric / 2 * (centred[:, TRUE_A] / true_a + centred[:, TRUE_B] / true_b)
    return centred[:, COVARIANCE], bottom, geometric


def reliable(layers: Sequence[Comparison], seed: int) -> Bool[np.ndarray, "layer"]:
    """Whether the true variances of a and of b are told from 0, for all layers at once."""
    told = np.ones(len(layers), bool)
    for item in (TRUE_A, TRUE_B):
        variance = _stacked([layer.estimates for layer in layers], item)
        told &= bounds(variance, simultaneous_value(variance, seed))[0] > 0
    return told


def verdict(low: float, high: float, p_holm: float, reliable: bool, n_types: int, n_groups: int) -> str:
    """Whether "the need of tokens carries over" holds.

    It does where r_disattenuated is above 0 for all layers at once and the shuffled needs agree; it does not
    where it is below TRANSFERS for sure and not above 0. Both need a true variance in each store: where means
    are noise, r near 0 says nothing about tokens.
    """
    if n_groups < MIN_GROUPS:
        return "too few documents"
    if n_types < MIN_TYPES or not reliable:
        return "cannot tell"
    if low > 0 and p_holm <= SIGNIFICANT:
        return "supported"
    if low <= 0 and high < TRANSFERS:
        return "not supported"
    return "cannot tell"


def _stacked(layers: Sequence[Estimates], item: int) -> Estimates:
    return Estimates(
        np.array([one.estimate[item] for one in layers]),
        np.stack([one.influence[:, item] for one in layers], axis=1),
        np.array([one.n_effective[item] for one in layers]),
        layers[0].n_groups,
    )
