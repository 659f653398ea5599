"""How far `loss_estimate` can be trusted: exact patches of single positions in, table `estimate` out.

`loss_estimate` is the first-order effect of linearising one position of one layer on all later targets of its
sequence; `loss_single` is that effect measured, for a sample of rows. Each store and layer gets Spearman's ρ
of the two over all rows of the sample; the bias, mean(estimate − loss_single) in nats; the slope of
loss_single on the estimate (least squares); and ρ among rows at like positions, since both grow with the part
of the window that is left: ranks are taken within bins of the number of targets that follow, and correlated
over all bins. Beside it, where `loss` is at hand (the layer linearised at every position at once), Σ estimate
is set against Σ loss of each sequence: there the effects of positions on one another come in, which no first
order knows. Intervals are by group (each left out in turn), simultaneous over the layers of a store. Cost:
sorting the sample once for each group.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import scipy.stats
from jaxtyping import Bool, Float, Float64, Int, Int64

from .influences import intervals, leave_one_out, verdict_above
from .intervals import Estimates, ratios, stack
from .schemas import INT, TEXT, reals, schema

ESTIMATE_SCHEMAS: Final = {
    "estimate": schema(
        store=TEXT,
        layer=INT,
        n_patches=INT,
        n_groups=INT,
        **reals("spearman spearman_lo spearman_hi spearman_sim_lo spearman_sim_hi"),
        **reals("mean_estimate mean_loss_single bias bias_lo bias_hi slope slope_lo slope_hi"),
        **reals("within_position within_position_lo within_position_hi"),
        n_sequences=INT,
        **reals("sequence_spearman sequence_spearman_lo sequence_spearman_hi sequence_bias sequence_slope"),
        verdict=TEXT,
    ),
}
# At like positions: at most so many bins, each of at least so many rows.
MOST_BINS: Final = 8
LEAST_IN_BIN: Final = 12

Statistic = Callable[[Float64[np.ndarray, "row"], Float64[np.ndarray, "row"], np.ndarray], float]


@dataclass(frozen=True, slots=True, eq=False)
class Patches:
    """Rows of a store that were patched one at a time at a layer."""

    estimate: Float[np.ndarray, "patch"]  # nats
    loss_single: Float[np.ndarray, "patch"]  # nats
    group: Int[np.ndarray, "patch"]
    following: Int[np.ndarray, "patch"]  # targets of the sequence from this row on


@dataclass(frozen=True, slots=True, eq=False)
class Sequences:
    """Sums over sequences in which every row's losses are known."""

    estimate: Float64[np.ndarray, "sequence"]
    loss: Float64[np.ndarray, "sequence"]
    group: Int[np.ndarray, "sequence"]
    n_rows: Int[np.ndarray, "sequence"]  # that have a loss


def sample_patches(
    candidates: Int64[np.ndarray, "row"],
    estimate: Float[np.ndarray, "token"],
    group: Int[np.ndarray, "token"],
    n_patches: int,
    seed: int,
) -> Int64[np.ndarray, "patch"]:
    """Rows to patch, sorted: of those among `candidates` that have an estimate, by chance, but from each
    group in turn until enough are there, so that as many documents as possible speak."""
    rows = candidates[np.isfinite(estimate[candidates])]
    rng = np.random.default_rng((seed, 17))
    rows = rng.permutation(rows)
    order = np.argsort(group[rows], kind="stable")
    sorted_groups = group[rows][order]
    starts = np.flatnonzero(np.r_[True, sorted_groups[1:] != sorted_groups[:-1]])
    place = np.arange(rows.size) - np.repeat(starts, np.diff(np.r_[starts, rows.size]))
    turn = np.empty(rows.size, np.int64)
    turn[order] = place  # how many rows of its group come before a row
    return np.sort(rows[np.argsort(turn, kind="stable")[:n_patches]])


def targets_following(
    sequence: Int[np.ndarray, "token"], target_id: Int[np.ndarray, "token"]
) -> Int64[np.ndarray, "token"]:
    """Of each row, how many rows of its sequence from itself on have a target."""
    has = (target_id >= 0).astype(np.int64)
    last = np.flatnonzero(np.r_[sequence[1:] != sequence[:-1], True])
    before = np.cumsum(has) - has
    total = np.cumsum(has)[last]
    lengths = np.diff(np.r_[-1, last])
    return np.repeat(total, lengths) - before


def sequence_sums(
    estimate: Float[np.ndarray, "token"],
    loss: Float[np.ndarray, "token"],
    sequence: Int[np.ndarray, "token"],
    group: Int[np.ndarray, "token"],
    target_id: Int[np.ndarray, "token"],
) -> Sequences:
    """Sums over the sequences whose targets all have a `loss`. Rows without an estimate (sinks, which keep
    their MLP) count as 0."""
    first = np.flatnonzero(np.r_[True, sequence[1:] != sequence[:-1]])
    has = target_id >= 0
    wanting = np.add.reduceat((has & ~np.isfinite(loss)).astype(np.int64), first)
    n_rows = np.add.reduceat(has.astype(np.int64), first)
    whole = (wanting == 0) & (n_rows > 0)
    sums = [
        np.add.reduceat(np.nan_to_num(values.astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0), first)
        for values in (estimate, np.where(has, loss, 0.0))
    ]
    return Sequences(sums[0][whole], sums[1][whole], group[first][whole], n_rows[whole])


def estimate_rows(
    store: str,
    patches: Mapping[int, Patches],
    sequences: Mapping[int, Sequences] | None = None,
    seed: int = 0,
) -> Iterator[dict[str, Any]]:
    """Rows of the table for one store, layers ascending; its layers are one family."""
    layers = sorted(patches)
    rank = [_over_rows(_spearman, patches[layer]) for layer in layers]
    bounds = intervals(stack(rank), seed, "fisher")
    for place, layer in enumerate(layers):
        found = patches[layer]
        simultaneous = {name: float(values[place]) for name, values in bounds.items()}
        yield {
            "store": store,
            "layer": layer,
            "n_patches": int(found.estimate.size),
            "n_groups": rank[place].n_groups,
            "spearman": float(rank[place].estimate[0]),
            **{f"spearman_{name}": value for name, value in simultaneous.items()},
            "mean_estimate": float(found.estimate.mean(dtype=np.float64)),
            "mean_loss_single": float(found.loss_single.mean(dtype=np.float64)),
            **_with_bounds("bias", _bias(found), seed),
            **_with_bounds("slope", _over_rows(_slope, found), seed),
            **_with_bounds("within_position", _over_rows(_within, found), seed, "fisher"),
            **_sequence_columns(None if sequences is None else sequences.get(layer), seed),
            "verdict": verdict_above(
                simultaneous["sim_lo"], simultaneous["sim_hi"], 0.0, rank[place].n_groups
            ),
        }


def to_estimate_table(rows: Iterable[Mapping[str, Any]]) -> pa.Table:
    """The table `estimate`; a row with other columns is refused."""
    wanted, found = ESTIMATE_SCHEMAS["estimate"], list(rows)
    for row in found:
        if list(row) != wanted.names:
            raise ValueError(
                f"table estimate: row and columns differ: {sorted(set(row) ^ set(wanted.names))}"
            )
    return pa.table(
        [pa.array([row[field.name] for row in found], field.type) for field in wanted], schema=wanted
    )


def _with_bounds(name: str, found: Estimates, seed: int, scale: str | None = None) -> dict[str, float]:
    ends = intervals(found, seed, scale)
    return {
        name: float(found.estimate[0]),
        f"{name}_lo": float(ends["lo"][0]),
        f"{name}_hi": float(ends["hi"][0]),
    }


def _sequence_columns(found: Sequences | None, seed: int) -> dict[str, Any]:
    names = "spearman spearman_lo spearman_hi bias slope".split()
    if found is None or found.loss.size < 3:
        n_sequences = 0 if found is None else int(found.loss.size)
        return {"n_sequences": n_sequences} | {f"sequence_{name}": float("nan") for name in names}
    rank = _jackknife(_spearman, found.estimate, found.loss, np.zeros(found.loss.size), found.group)
    return {
        "n_sequences": int(found.loss.size),
        **_with_bounds("sequence_spearman", rank, seed, "fisher"),
        "sequence_bias": float((found.estimate - found.loss).sum() / found.n_rows.sum()),  # nats a token
        "sequence_slope": _slope(found.estimate, found.loss, np.zeros(0)),
    }


def _bias(found: Patches) -> Estimates:
    groups, index = np.unique(found.group, return_inverse=True)
    excess = found.estimate.astype(np.float64) - found.loss_single
    sums = np.bincount(index, excess, groups.size)[:, None]
    return ratios(sums, np.bincount(index, minlength=groups.size)[:, None])


def _over_rows(statistic: Statistic, found: Patches) -> Estimates:
    bins = _bins(found.following)
    return _jackknife(statistic, found.estimate, found.loss_single, bins, found.group)


def _jackknife(
    statistic: Statistic, x: np.ndarray, y: np.ndarray, bins: np.ndarray, group: np.ndarray
) -> Estimates:
    """Each group left out in turn; the estimate is the plain one."""
    x, y = x.astype(np.float64), y.astype(np.float64)
    groups, index, counts = np.unique(group, return_inverse=True, return_counts=True)
    without = [
        statistic(x[kept], y[kept], bins[kept]) for kept in (index != one for one in range(groups.size))
    ]
    estimate = np.array([statistic(x, y, bins)])
    return leave_one_out(estimate, np.array(without)[:, None], counts.astype(np.float64), unbias=False)


def _bins(following: Int[np.ndarray, "patch"]) -> Int64[np.ndarray, "patch"]:
    """Bins of like positions, about equally full."""
    n_bins = int(np.clip(following.size // LEAST_IN_BIN, 1, MOST_BINS))
    edges = np.quantile(following, np.linspace(0, 1, n_bins + 1)[1:-1])
    return np.searchsorted(edges, following, side="right")


def _spearman(x: np.ndarray, y: np.ndarray, _: np.ndarray) -> float:
    return _pearson(scipy.stats.rankdata(x), scipy.stats.rankdata(y))


def _within(x: np.ndarray, y: np.ndarray, bins: np.ndarray) -> float:
    """Of ranks within bins, each bin's between −1/2 and 1/2."""
    return _pearson(_ranks_within(x, bins), _ranks_within(y, bins))


def _ranks_within(values: np.ndarray, bins: np.ndarray) -> np.ndarray:
    out = np.zeros(values.size)
    for one in np.unique(bins):
        here: Bool[np.ndarray, "row"] = bins == one
        out[here] = (scipy.stats.rankdata(values[here]) - 0.5) / here.sum() - 0.5
    return out


def _slope(x: np.ndarray, y: np.ndarray, _: np.ndarray) -> float:
    centred = x - x.mean() if x.size else x
    square = float(centred @ centred)
    return float(centred @ y) / square if square > 0 else float("nan")


def _pearson(x: np.ndarray, y: np.ndarray) -> float:
    if x.size < 2:
        return float("nan")
    x, y = x - x.mean(), y - y.mean()
    size = float(np.sqrt((x @ x) * (y @ y)))
    return float(x @ y) / size if size > 0 else float("nan")
