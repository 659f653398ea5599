"""Statistics of needs, one row per (need, split, population): per-token values of one layer in, rows of
tables out.

Means and shares are over tokens, with cluster-t intervals over groups of documents; quantiles are exact.
Cost: one sort a row.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
from jaxtyping import Float32

from ..store import SPLITS
from .intervals import Estimates, bounds, critical_value, r_squared_bounds, ratios, share_bounds
from .needs import LOSS_ESTIMATE, needs_in
from .population import TEST, Population

QUANTILES: Final = {f"q{q:02d}": q / 100 for q in (1, 5, 10, 25, 50, 75, 90, 95, 99)}
# Limits that increase.
SHARES: Final = {"share_below_half": 0.5, "share_below_one": 1.0}
TOP_SHARE: Final = 0.05
# `error` is 0 for a linear MLP and 1 where the surrogate says no more than the mean; nearly all of it lies
# below this.
ERROR_RANGE: Final = 1.5
# Other needs have the layer's own scale: bins end at this quantile, one more holds the tail.
RANGE_QUANTILE: Final = 0.995

Needs = Mapping[str, Float32[np.ndarray, "token"]]


def need_rows(needs: Needs, population: Population) -> Iterator[dict[str, Any]]:
    """Rows of the table `needs`, without store and layer."""
    for split_index, split in enumerate(SPLITS):
        for kind in ("body", "sink"):
            rows = population.rows(split_index, kind)
            for need in needs_in(needs):
                key = {"need": need, "split": split, "population": kind}
                yield key | _describe(needs[need][rows].astype(np.float64), population.group[rows])


def _describe(values: np.ndarray, group: np.ndarray) -> dict[str, Any]:
    finite = np.isfinite(values)
    values, group = values[finite], group[finite]
    means = _cluster_means(np.stack([values, *(values < limit for limit in SHARES.values())], axis=1), group)
    low, high = bounds(means, critical_value(means))
    row: dict[str, Any] = {"n_tokens": values.size, "n_groups": means.n_groups}
    for index, name in enumerate(("mean", *SHARES)):
        row |= {name: means.estimate[index], f"{name}_lo": low[index], f"{name}_hi": high[index]}
    low, high = (end[1:] for end in share_bounds(means, critical_value(means)))
    # What lies below a limit lies below a higher one: where a share is 1, all that is known of its lower end
    # by itself is the number of groups, and the share below a lower limit may say more.
    low, high = np.fmax.accumulate(low), np.fmin.accumulate(high[::-1])[::-1]
    for name, least, most in zip(SHARES, low, high, strict=True):
        row |= {f"{name}_lo": least, f"{name}_hi": most}
    return row | _shape(np.sort(values))


def _cluster_means(values: np.ndarray, group: np.ndarray) -> Estimates:
    present, index = np.unique(group, return_inverse=True)
    sums = np.stack([np.bincount(index, column, present.size) for column in values.T], axis=1)
    counts = np.bincount(index, minlength=present.size).astype(np.float64)
    return ratios(sums, np.broadcast_to(counts[:, None], sums.shape))


def _shape(ordered: np.ndarray) -> dict[str, float]:
    """Spread, skew, quantiles and the share of the summed square that the largest values carry; NaN without
    values.
    """
    names = ("sd", "skew", *QUANTILES, "max", "top5_share")
    if ordered.size == 0:
        return dict.fromkeys(names, float("nan"))
    centred = ordered - ordered.mean()
    sd = float(np.sqrt(np.mean(centred**2)))
    squares = ordered**2
    top = squares[ordered.size - max(1, round(TOP_SHARE * ordered.size)) :]
    quantiles = np.quantile(ordered, list(QUANTILES.values()))
    # Below this the spread is the rounding of a constant, and a skew of it would be noise.
    skew = float(np.mean((centred / sd) ** 3)) if sd > 1e-9 * abs(float(ordered[-1])) else float("nan")
    share = float(top.sum() / squares.sum()) if squares.any() else float("nan")
    return dict(zip(names, (sd, skew, *quantiles.tolist(), float(ordered[-1]), share), strict=True))


def histogram_rows(needs: Needs, population: Population, n_bins: int) -> Iterator[dict[str, Any]]:
    """Rows of the table `need_histogram`: test body rows; the last bin of each need is the tail, and the
    first one too of a need that has a sign.
    """
    rows = population.rows(TEST)
    for need in needs_in(needs):
        values = needs[need][rows].astype(np.float64)
        values = values[np.isfinite(values)]
        if not values.size:
            continue
        end = ERROR_RANGE if need == "error" else float(np.quantile(values, RANGE_QUANTILE))
        start = float(np.quantile(values, 1 - RANGE_QUANTILE)) if need == LOSS_ESTIMATE else 0.0
        edges = np.linspace(start, end if end > start else start + 1.0, n_bins + 1)
        if need == LOSS_ESTIMATE:
            edges = np.insert(edges, 0, min(float(values.min()), np.nextafter(start, -np.inf)))
        edges = np.append(edges, max(float(values.max()), np.nextafter(edges[-1], np.inf)))
        counts, _ = np.histogram(values, edges)
        for low, high, count in zip(edges[:-1], edges[1:], counts, strict=True):
            yield {"need": need, "bin_lo": low, "bin_hi": high, "count": int(count)}


def unexplained(
    needs: Needs, population: Population, rows: np.ndarray, contribution: bool = False
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Σ‖y − ŷ‖² and Σ‖y − ȳ‖² per group (of c(y) if asked), numerator and denominator of 1 − R²; and whether
    the group has any of these rows, which is the same for all layers.
    """
    error, centred = ("error_norm", "y_centred_norm") if not contribution else _contribution_names(needs)
    group = population.group[rows]
    n_groups = int(population.group.max(initial=-1)) + 1
    sums = [
        np.bincount(group, needs[name][rows].astype(np.float64) ** 2, n_groups) for name in (error, centred)
    ]
    return sums[0], sums[1], np.bincount(group, minlength=n_groups) > 0


def largest_share(norms: Float32[np.ndarray, "row"]) -> float:
    """The share of Σ‖y − ȳ‖² that the largest row carries: near 1, R² and `error` speak of that row alone."""
    squares = norms.astype(np.float64) ** 2
    return float(squares.max() / squares.sum()) if squares.any() else float("nan")


def _contribution_names(needs: Needs) -> tuple[str, str]:
    """R² of c(y) is that of y where c is a constant factor: then the needs carry no norms of their own for
    it.
    """
    if "contribution_error" in needs:
        return "contribution_error", "contribution_centred"
    return "error_norm", "y_centred_norm"


def r2_interval(sums: tuple[np.ndarray, np.ndarray, np.ndarray]) -> tuple[float, float, float, Estimates]:
    """R² with its pointwise interval. Too few groups for any interval give NaN bounds; an output that does
    not vary has no R² at all, and everything is NaN.
    """
    found = ratios(sums[0][:, None], sums[1][:, None], sums[2])
    low, high = r_squared_bounds(found, critical_value(found))
    return 1.0 - float(found.estimate[0]), float(low[0]), float(high[0]), found
