"""How far probabilities can be trusted, and what routing by them costs: p(easy), labels and needs in; Brier
score, calibration bins and line, share-versus-need curves and thresholds out.

Tokens of equal score are never told apart: they go linear together or not at all, and on a curve their needs
accrue evenly. Cost: one sort a call.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from jaxtyping import Bool, Float, Float64, Int
from scipy.special import expit, logit

from .intervals import critical_value, ratios, share_bounds

_NEWTON_STEPS: Final = 50
_CONVERGED: Final = 1e-10
# A slope of this size on the logit scale is a separated sample on its way to infinity.
_LARGEST: Final = 1e3
_CLIP: Final = 1e-12  # p of exactly 0 or 1 has no logit


def brier(p: Float[np.ndarray, "token"], positive: Bool[np.ndarray, "token"]) -> float:
    """Mean squared distance of p from the label; NaN without tokens."""
    if not p.size:
        return float("nan")
    return float(np.mean((p.astype(np.float64) - positive) ** 2))


def calibration_bins(
    p: Float[np.ndarray, "token"],
    positive: Bool[np.ndarray, "token"],
    group: Int[np.ndarray, "token"],
    n_bins: int = 10,
) -> list[dict[str, Any]]:
    """Rows of the table `gate_calibration`, without its keys: bins between quantiles of p, with the mean p
    and the share of positive tokens, whose interval is by group. Bins that ties leave empty are left out.
    """
    if not p.size:
        return []
    values = p.astype(np.float64)
    inner = np.quantile(values, np.linspace(0.0, 1.0, n_bins + 1))[1:-1]
    which = np.searchsorted(inner, values)
    groups, index = np.unique(group, return_inverse=True)
    rows = []
    for number in np.unique(which).tolist():
        inside = which == number
        counts = np.bincount(index[inside], minlength=groups.size)
        found = ratios(np.bincount(index[inside], positive[inside], groups.size)[:, None], counts[:, None])
        low, high = share_bounds(found, critical_value(found))
        rows.append(
            {
                "bin": number,
                "n_tokens": int(inside.sum()),
                "predicted": float(values[inside].mean()),
                "observed": float(found.estimate[0]),
                "observed_lo": float(low[0]),
                "observed_hi": float(high[0]),
            }
        )
    return rows


def calibration_line(
    p: Float[np.ndarray, "token"], positive: Bool[np.ndarray, "token"]
) -> tuple[float, float]:
    """Slope and intercept of a logistic regression of the label on logit(p) (Cox 1958): 1 and 0 where p is
    calibrated, a slope below 1 where it is overconfident. NaN where p or the label is constant, or p
    separates the classes.
    """
    nothing = (float("nan"), float("nan"))
    if positive.all() or not positive.any() or p.min() == p.max():
        return nothing
    x = logit(np.clip(p.astype(np.float64), _CLIP, 1.0 - _CLIP))
    design, y = np.stack([x, np.ones_like(x)], axis=1), positive.astype(np.float64)
    line = np.array([0.0, logit(y.mean())])
    loss = _log_loss(design @ line, y)
    for _ in range(_NEWTON_STEPS):
        fitted = expit(design @ line)
        hessian = design.T @ (design * (fitted * (1.0 - fitted))[:, None])
        if np.linalg.cond(hessian) > 1.0 / np.finfo(np.float64).eps:
            return nothing
        step = np.linalg.solve(hessian, design.T @ (y - fitted))
        # Newton may overshoot far from the solution; half steps never do in a convex problem.
        while (tried := _log_loss(design @ (line + step), y)) > loss and np.abs(step).max() > _CONVERGED:
            step = step / 2.0
        line, loss = line + step, tried
        if abs(line[0]) > _LARGEST:
            return nothing
        if np.abs(step).max() <= _CONVERGED * (1.0 + np.abs(line).max()):
            return float(line[0]), float(line[1])
    return nothing


def _log_loss(z: np.ndarray, y: np.ndarray) -> float:
    return float(np.sum(np.logaddexp(0.0, z) - y * z))


def need_curve(
    score: Float[np.ndarray, "token"],
    need: Float[np.ndarray, "token"],
    shares: Sequence[float] | Float64[np.ndarray, "share"],
) -> Float64[np.ndarray, "share"]:
    """Share of all need that the tokens with the highest scores carry, at each share of tokens; NaN where all
    need together is not positive.
    """
    taken, carried = _cumulative(score, need)[1:]
    if not carried[-1] > 0:
        return np.full(len(shares), np.nan)
    return np.interp(np.asarray(shares) * taken[-1], taken, carried) / carried[-1]


def threshold_for_share(p: Float[np.ndarray, "token"], share: float) -> float:
    """The lowest threshold above which no more than this share of tokens lies."""
    values, taken, _ = _cumulative(p, np.zeros_like(p))
    return _below(values, int(np.flatnonzero(taken <= share * p.size * (1.0 + 1e-12))[-1]))


def threshold_for_cost(p: Float[np.ndarray, "token"], need: Float[np.ndarray, "token"], cost: float) -> float:
    """The lowest threshold above which tokens carry no more than the share `cost` of all need; infinite, so
    that nothing goes linear, where all need together is not positive.
    """
    values, _, carried = _cumulative(p, need)
    if not carried[-1] > 0:
        return float("inf")
    return _below(values, int(np.flatnonzero(carried <= cost * carried[-1] * (1.0 + 1e-12))[-1]))


def _cumulative(score: np.ndarray, need: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Distinct scores from the highest down; tokens at or above the first k of them, and their needs, k from
    0.
    """
    values, rank = np.unique(-score, return_inverse=True)
    taken = np.cumsum(np.bincount(rank, minlength=values.size))
    carried = np.cumsum(np.bincount(rank, need.astype(np.float64), values.size))
    return -values, np.append(0, taken), np.append(0.0, carried)


def _below(values: np.ndarray, n_values: int) -> float:
    """A threshold that just the first `n_values` of these falling values exceed."""
    if n_values < values.size:
        return float(values[n_values])
    return float(np.nextafter(values[-1], -np.inf)) if values.size else float("inf")
