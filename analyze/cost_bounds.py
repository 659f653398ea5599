"""Costs and their differences with bounds: estimates over the groups of one store in, columns of tables out.

A cost is tried against 0 from both sides: it is worse than nothing where the whole interval lies above,
better where it lies below. Of a family (one intervention over the layers) the simultaneous interval decides,
and Holm's p-values count. Cost: that of the simultaneous bounds, 10,000 sign draws a family.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from jaxtyping import Float64

from .influences import holm, intervals, p_values, verdict_above
from .intervals import Estimates, bounds, critical_value

CHOSEN_ON_TEST: Final = "chosen on test"
SHARES_DIFFER: Final = "shares differ"

# (name, layers, share that went linear) → shares of the MLPs' and of all FLOPs that are saved.
FlopsSaved = Callable[[str, tuple[int, ...], float], tuple[float, float]]


@dataclass(frozen=True, slots=True, eq=False)
class Bounded:
    """Estimates of one family with their bounds, each by itself and all at once."""

    estimate: Float64[np.ndarray, "item"]
    lo: Float64[np.ndarray, "item"]
    hi: Float64[np.ndarray, "item"]
    sim_lo: Float64[np.ndarray, "item"]
    sim_hi: Float64[np.ndarray, "item"]
    p_holm: Float64[np.ndarray, "item"]

    def columns(self, item: int, prefix: str = "", simultaneous: bool = True) -> dict[str, float]:
        """`lo` and `hi` of one item (`delta_lo` with the prefix "delta_"), and those of the family."""
        names = ("lo", "hi", "sim_lo", "sim_hi") if simultaneous else ("lo", "hi")
        return {f"{prefix}{name}": float(getattr(self, name)[item]) for name in names}

    def verdict(self, item: int, n_groups: int, null: float = 0.0) -> str:
        """Of "the quantity is above `null`"; "not supported" where the family's interval lies below it."""
        return verdict_above(float(self.sim_lo[item]), float(self.sim_hi[item]), null, n_groups)


def bounded(estimates: Estimates, seed: int, null: float = 0.0) -> Bounded:
    """All bounds of a family; p-values are of "the quantity is `null`", two-sided."""
    found = intervals(estimates, seed)
    return Bounded(estimates.estimate, **found, p_holm=holm(p_values(estimates, null)))


def interval(
    estimates: Estimates,
) -> tuple[Float64[np.ndarray, "item"], Float64[np.ndarray, "item"]]:
    """Bounds of each item by itself."""
    return bounds(estimates, critical_value(estimates))


def percent(nats: float | Float64[np.ndarray, "..."]) -> Any:
    """Change of perplexity in percent for a change of the mean loss: 100 · (exp(nats) − 1), without bound."""
    with np.errstate(over="ignore"):
        return 100.0 * np.expm1(nats)


def perplexity(nats: float) -> float:
    with np.errstate(over="ignore"):
        return float(np.exp(nats))


def combine(parts: Sequence[Estimates], weights: Sequence[float]) -> Estimates:
    """Σ weight · part, item by item, over the same groups: what holds for sums of numbers holds for their
    influences.
    """
    return Estimates(
        sum(
            (w * part.estimate for w, part in zip(weights, parts, strict=True)),
            np.zeros(parts[0].estimate.shape),
        ),
        sum(
            (w * part.influence for w, part in zip(weights, parts, strict=True)),
            np.zeros(parts[0].influence.shape),
        ),
        np.minimum.reduce([part.n_effective for part in parts]),
        parts[0].n_groups,
    )
