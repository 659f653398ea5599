"""How much of a loss is rounding: the same δ in the compute dtype and in a finer one in, rows of the table
`noise_floor` out.

The floor is the median of |δ − δ of the finer dtype|, over rows that were measured in both. It is set against
the median |δ| *of the finer dtype*: where rounding is all there is, the coarse δ is as large as the floor by
itself and would never fall below it. Where the floor is the larger one, which half of the tokens counts as
easy is decided by rounding, and verdicts on labels made of `loss` are refused. `labels_changed` says it
directly: the share of rows that change sides of their median. Cost: a few sorts.
"""

from collections.abc import Collection, Mapping
from typing import Any, Final

import numpy as np
import pyarrow as pa
from jaxtyping import Float, Int

from ..store import Study
from .cost_bounds import interval
from .intervals import ratios
from .rank_agreement import ranked, spearman

NOISE: Final = "below the noise floor"
LOSS: Final = "loss"


def noise_floor_row(
    store: str,
    layer: int,
    dtypes: tuple[str, str],
    loss: Float[np.ndarray, "token"],
    finer_loss: Float[np.ndarray, "token"],
    base_change: Float[np.ndarray, "token"],
    group: Int[np.ndarray, "token"],
) -> dict[str, Any]:
    """One row. `dtypes`: compute dtype and finer one. `loss`, `finer_loss`: δ of the same rows in each, nats;
    `base_change`: base loss in the compute dtype less that in the finer one. Rows where any is not finite do
    not count.
    """
    known = np.isfinite(loss) & np.isfinite(finer_loss) & np.isfinite(base_change)
    coarse, fine, base = (values[known].astype(np.float64) for values in (loss, finer_loss, base_change))
    change, group = coarse - fine, group[known]
    groups, index = np.unique(group, return_inverse=True)
    mean = ratios(
        np.bincount(index, change, groups.size)[:, None],
        np.bincount(index, minlength=groups.size).astype(np.float64)[:, None],
    )
    low, high = interval(mean)
    floor, typical = _median(np.abs(change)), _median(np.abs(fine))
    sides = [values <= _median(values) for values in (coarse, fine)]
    nothing = float("nan")
    return {
        "store": store,
        "layer": layer,
        "dtype": dtypes[0],
        "finer_dtype": dtypes[1],
        "n_tokens": change.size,
        "n_groups": groups.size,
        "median_abs_loss": typical,
        "floor": floor,
        "floor_q95": float(np.quantile(np.abs(change), 0.95)) if change.size else nothing,
        "base_floor": _median(np.abs(base)),
        "mean_difference": float(mean.estimate[0]),
        "mean_lo": float(low[0]),
        "mean_hi": float(high[0]),
        "spearman": float(spearman(ranked(coarse), ranked(fine), group).estimate[0]),
        "labels_changed": float(np.mean(sides[0] != sides[1])) if change.size else nothing,
        "labels_usable": bool(floor <= typical),
    }


def refused_labels(noise: pa.Table) -> dict[str, set[int]]:
    """By store, the layers whose `loss` may not label tokens; what was not measured is not refused."""
    refused: dict[str, set[int]] = {}
    rows: list[Mapping[str, Any]] = noise.to_pylist()
    for row in rows:
        if not row["labels_usable"]:
            refused.setdefault(row["store"], set()).add(row["layer"])
    return refused


def refused_in(study: Study) -> dict[str, set[int]]:
    """The same of a study; nothing is refused where no floor was measured."""
    return refused_labels(study.table("noise_floor")) if study.has_table("noise_floor") else {}


def above_noise(table: pa.Table, study: Study, fit_on: str) -> pa.Table:
    """A table of labels without the verdicts that the noise floor of its study refuses."""
    return without_label_verdicts(table, refused_in(study), fit_on)


def without_label_verdicts(table: pa.Table, refused: Mapping[str, Collection[int]], fit_on: str) -> pa.Table:
    """A table of labels (columns store, layer, need, verdict) whose verdicts on `loss` are `NOISE` at the
    layers that are refused in the row's own store, or in the one that the labels' cut comes from.
    """
    columns = (table[name].to_pylist() for name in ("store", "layer", "need", "verdict"))
    verdicts = [
        NOISE if need == LOSS and any(layer in refused.get(name, ()) for name in (store, fit_on)) else verdict
        for store, layer, need, verdict in zip(*columns, strict=True)
    ]
    at = table.schema.get_field_index("verdict")
    return table.set_column(at, table.schema.field(at), pa.array(verdicts, pa.string()))


def _median(values: np.ndarray) -> float:
    return float(np.median(values)) if values.size else float("nan")
