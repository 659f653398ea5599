"""The paper's δ and its expectation: `loss` and `kl` of the test rows of a layer in, rows of the tables
`losses`, `loss_histogram` and `kl_loss` out.

`kl` is what the model itself expects `loss` to be: the mean over next tokens drawn from its own beliefs. So
E[loss] = E[kl] for a calibrated model, and the difference of their means is what reality adds. The
regression of loss on kl (slope, R²) says how much of δ can be known without the target: where R² is small, a
gate that cannot predict δ may still predict all of the need that there is to know. Slope and R² have
jackknife intervals over groups, from sums per group; the difference of means is a family over layers. Cost: a
few passes and one sort a layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from jaxtyping import Float32, Float64, Int

from .cost_bounds import bounded, interval
from .influences import leave_one_out, transformed_bounds
from .intervals import Estimates, critical_value, ratios, share_bounds, stack
from .rank_agreement import ranked, spearman

QUANTILES: Final = {f"q{q:02d}": q / 100 for q in (1, 5, 10, 25, 50, 75, 90, 95, 99)}
SMALL: Final = 0.05  # nats: the paper's "90 % have |δ| < 0.05"
TOP_SHARE: Final = 0.05
BINS: Final = 60
_RANGE: Final = 0.005  # of rows beyond either end of the histogram, held by one bin each

Values = Float32[np.ndarray, "token"]
Groups = Int[np.ndarray, "token"]


def loss_row(store: str, layer: int, need: str, values: Values, group: Groups) -> dict[str, Any]:
    """A row of `losses`; rows without a value do not count."""
    known = np.isfinite(values)
    found, group = values[known].astype(np.float64), group[known]
    means = _means([found, found < 0.0], group)
    low, high = interval(means)
    least, most = share_bounds(means, critical_value(means))
    ordered = np.sort(found)
    n_top = int(np.ceil(TOP_SHARE * ordered.size))
    total, nothing = float(ordered.sum()), float("nan")
    empty = not ordered.size
    quantiles = np.full(len(QUANTILES), nothing) if empty else np.quantile(ordered, list(QUANTILES.values()))
    return {
        "store": store,
        "layer": layer,
        "need": need,
        "n_tokens": ordered.size,
        "n_groups": means.n_groups,
        "mean": float(means.estimate[0]),
        "mean_lo": float(low[0]),
        "mean_hi": float(high[0]),
        "sd": nothing if empty else float(ordered.std()),
        **dict(zip(QUANTILES, quantiles.tolist(), strict=True)),
        "max": nothing if empty else float(ordered[-1]),
        "median_abs": nothing if empty else float(np.median(np.abs(ordered))),
        "share_negative": float(means.estimate[1]),
        "share_negative_lo": float(least[1]),
        "share_negative_hi": float(most[1]),
        "share_small": nothing if empty else float((np.abs(ordered) < SMALL).mean()),
        "top5_share": float(ordered[ordered.size - n_top :].sum()) / total if total > 0 else nothing,
    }


def histogram_rows(store: str, layer: int, need: str, values: Values) -> list[dict[str, Any]]:
    """Rows of `loss_histogram`: even bins between the outer quantiles, and at either end one bin that reaches
    to the extreme value.
    """
    found = values[np.isfinite(values)].astype(np.float64)
    if not found.size:
        return []
    low, high = np.quantile(found, (_RANGE, 1.0 - _RANGE))
    edges = np.unique(np.concatenate([[found.min()], np.linspace(low, high, BINS + 1), [found.max()]]))
    if edges.size < 2:
        edges = np.array([edges[0], edges[0]])
    count = np.histogram(found, edges)[0] if edges[0] < edges[-1] else np.array([found.size])
    return [
        {
            "store": store,
            "layer": layer,
            "need": need,
            "bin_lo": start,
            "bin_hi": stop,
            "count": n,
        }
        for start, stop, n in zip(edges.tolist(), edges[1:].tolist(), count.tolist(), strict=False)
    ]


@dataclass(frozen=True, slots=True, eq=False)
class KlLoss:
    """One layer: its row of `kl_loss` but for the difference, and the difference."""

    row: dict[str, Any]
    difference: Estimates


def kl_loss(store: str, layer: int, loss: Values, kl: Values, group: Groups) -> KlLoss:
    """Over the rows where both are known."""
    known = np.isfinite(loss) & np.isfinite(kl)
    y, x, group = loss[known].astype(np.float64), kl[known].astype(np.float64), group[known]
    means = _means([y, x, y - x], group)
    slope, r2 = _regression(x, y, group)
    rho = spearman(ranked(x), ranked(y), group)
    bounds = {
        "slope": interval(slope),
        "r2": transformed_bounds(r2, critical_value(r2), "logit"),
        "spearman": transformed_bounds(rho, critical_value(rho), "fisher"),
    }
    row = {
        "store": store,
        "layer": layer,
        "n_tokens": y.size,
        "n_groups": means.n_groups,
        "mean_loss": float(means.estimate[0]),
        "mean_kl": float(means.estimate[1]),
    }
    for name, one in (("slope", slope), ("r2", r2), ("spearman", rho)):
        low, high = bounds[name]
        row |= {name: float(one.estimate[0]), f"{name}_lo": float(low[0]), f"{name}_hi": float(high[0])}
    return KlLoss(
        row, Estimates(means.estimate[2:], means.influence[:, 2:], means.n_effective[2:], means.n_groups)
    )


def kl_loss_rows(layers: Sequence[KlLoss], seed: int) -> list[dict[str, Any]]:
    """Rows of `kl_loss` of one store: the differences are one family."""
    if not layers:
        return []
    found = bounded(stack([layer.difference for layer in layers]), seed)
    return [
        layer.row
        | {"difference": float(found.estimate[at]), "p_holm": float(found.p_holm[at])}
        | found.columns(at, "difference_")
        | {"verdict": found.verdict(at, layer.difference.n_groups)}
        for at, layer in enumerate(layers)
    ]


def _means(values: Sequence[np.ndarray], group: np.ndarray) -> Estimates:
    groups, index = np.unique(group, return_inverse=True)
    sums = np.stack([np.bincount(index, one, groups.size) for one in values], axis=1).astype(np.float64)
    counts = np.bincount(index, minlength=groups.size).astype(np.float64)
    return ratios(sums, np.broadcast_to(counts[:, None], sums.shape))


def _regression(x: np.ndarray, y: np.ndarray, group: np.ndarray) -> tuple[Estimates, Estimates]:
    """Slope and R² of y on x, leaving each group out by its sums."""
    groups, index = np.unique(group, return_inverse=True)
    if not x.size:
        empty = leave_one_out(np.full(1, np.nan), np.zeros((0, 1)), np.zeros(0))
        return empty, empty
    x, y = x - x.mean(), y - y.mean()  # or the sums would cancel
    parts = [np.ones_like(x), x, y, x * x, x * y, y * y]
    sums = np.stack([np.bincount(index, part, groups.size) for part in parts], axis=1)
    whole = _slope_and_r2(sums.sum(axis=0, keepdims=True))
    without = _slope_and_r2(sums.sum(axis=0) - sums)
    found = [leave_one_out(whole[:, k], without[:, [k]], sums[:, 0], unbias=False) for k in (0, 1)]
    return found[0], found[1]


def _slope_and_r2(sums: Float64[np.ndarray, "set sum"]) -> Float64[np.ndarray, "set statistic"]:
    n, x, y, xx, xy, yy = sums.T
    with np.errstate(invalid="ignore", divide="ignore"):
        var_x, cov, var_y = xx - x * x / n, xy - x * y / n, yy - y * y / n
        return np.stack([cov / var_x, cov**2 / (var_x * var_y)], axis=1)
