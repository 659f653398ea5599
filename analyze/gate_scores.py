"""Gates on rows that they have not seen: blocks of a store and gates of a layer in, logits out; logits,
labels and needs in, what a gate is worth out.

All gates of a layer are scored in one pass over the test blocks. Every gate is linear in the stored parts, so
k̂ needs no product of its own: a weight w on k̂ = A·e + a is the weight Aᵀw on e and a constant. Cost: one
read of the test blocks, 2·d flops a row, gate and piece; four bytes a test row and gate.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int, Int64

from .auc import auc, auc_within, average_precision
from .calibration import brier, calibration_bins, calibration_line, need_curve
from .context_map import ContextMap
from .gate_features import BY_NEED, FEATURES, WIDE
from .gate_fit import Gate
from .intervals import Estimates
from .norms import squared_norms
from .parts import Parts, PartsSource

SHARES: Final = tuple(round(0.05 * step, 2) for step in range(21))

Narrow = Mapping[str, Float32[np.ndarray, "token"]]


def score_rows(
    source: PartsSource,
    rows: Int64[np.ndarray, "token"],
    gates: Sequence[Gate],
    narrow: Narrow,
    context_map: ContextMap,
) -> Float32[np.ndarray, "token gate"]:
    """w·f + b of each of the rows (increasing) by each gate. `narrow`: pieces of one number a row, but for
    the norm of x, which is taken here.
    """
    out = np.empty((rows.size, len(gates)), np.float32)
    weights = _fold(gates, context_map)
    for block in range(source.reader.n_blocks):
        first, last = source.reader.block_range(block)
        start, stop = np.searchsorted(rows, (first, last)).tolist()
        if start < stop:
            parts = source.block(block, rows[start:stop] - first)
            part = out[start:stop]
            part[...] = weights.bias
            for piece, (columns, weight) in weights.wide.items():
                part[:, columns] += _rows(parts, piece) @ weight
            for piece, (columns, weight) in weights.narrow.items():
                values = np.sqrt(squared_norms(parts.x)) if piece == "norm" else narrow[piece][start:stop]
                part[:, columns] += values[:, None] * weight
    return out


@dataclass(frozen=True, slots=True, eq=False)
class _Weights:
    """Weights by stored part or narrow piece, of those gates that look at it."""

    bias: Float32[np.ndarray, "gate"]
    wide: dict[str, tuple[np.ndarray, np.ndarray]]  # gates, (feature, gate)
    narrow: dict[str, tuple[np.ndarray, np.ndarray]]


def _fold(gates: Sequence[Gate], context_map: ContextMap) -> _Weights:
    width = context_map.bias.size
    bias = np.array([gate.bias for gate in gates])
    wide: dict[str, dict[int, np.ndarray]] = {}
    narrow: dict[str, dict[int, np.ndarray]] = {}
    for index, gate in enumerate(gates):
        at = 0
        for piece in gate.pieces:
            size = width if piece in WIDE else 1
            weight, at = gate.weight[at : at + size], at + size
            if piece in ("token_full", "context_only"):
                stored, sign = ("t", 1.0) if piece == "token_full" else ("k", -1.0)
                of_token = sign * weight.astype(np.float64)
                bias[index] += of_token @ context_map.bias
                wide.setdefault(stored, {})[index] = weight
                held = wide.setdefault("embedding", {}).setdefault(index, np.zeros(width))
                held += of_token
            elif piece in WIDE:
                wide.setdefault(piece, {})[index] = weight
            else:
                key = f"{piece}@{gate.need}" if piece in BY_NEED else piece
                narrow.setdefault(key, {})[index] = weight
    stacked = {piece: _stack(found) for piece, found in wide.items()}
    if "embedding" in stacked:
        columns, weight = stacked["embedding"]
        folded = context_map.weight.T @ weight.astype(np.float32)
        stacked["embedding"] = columns, folded
    return _Weights(
        bias.astype(np.float32),
        {piece: (columns, weight.astype(np.float32)) for piece, (columns, weight) in stacked.items()},
        {piece: _stack(found) for piece, found in narrow.items()},
    )


def _stack(found: Mapping[int, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    return np.array(list(found)), np.stack(list(found.values()), axis=1)


def _rows(parts: Parts, piece: str) -> np.ndarray:
    rows = getattr(parts, piece)
    assert rows is not None  # `choose_features` leaves out what the model lacks
    return rows


@dataclass(frozen=True, slots=True, eq=False)
class Worth:
    """What one gate is worth on the test rows of a store: the row of `gates` without keys and simultaneous
    bounds, the area behind it and that among tokens of one type, and the rows of `gate_curves` and
    `gate_calibration`.
    """

    row: dict[str, Any]
    area: Estimates
    within: Estimates
    curve: Float64[np.ndarray, "share"]
    calibration: list[dict[str, Any]]


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """The rows of a store where a need is known."""

    need: Float32[np.ndarray, "token"]
    positive: Bool[np.ndarray, "token"]
    group: Int[np.ndarray, "token"]
    token_id: Int[np.ndarray, "token"]
    expected: float  # share of easy rows among the gate rows: what is predicted without features


def worth(gate: Gate, p: Float32[np.ndarray, "token"], scored: Scored) -> Worth:
    """By p and not by logits: tokens that should be tied (of one type, say) have logits that differ by
    rounding, and whoever reads the routing finds the same numbers.
    """
    usable = bool(p.size) and bool(np.isfinite(p).all())
    area = auc(p, scored.positive, scored.group)
    within = auc_within(p, scored.positive, scored.group, scored.token_id)
    linear = p > gate.threshold
    total = float(scored.need.sum(dtype=np.float64))
    carried = float(scored.need[linear].sum(dtype=np.float64))
    nan = float("nan")
    slope, intercept = calibration_line(p, scored.positive) if usable else (nan, nan)
    row = {
        "available_at_routing": FEATURES[gate.features].available,
        "n_parameters": gate.weight.size + 1,
        "n_tokens": p.size,
        "n_groups": area.n_groups,
        "base_rate": float(scored.positive.mean()) if p.size else nan,
        "auc": float(area.estimate[0]),
        "ap": average_precision(p, scored.positive) if usable else nan,
        "brier": brier(p, scored.positive) if usable else nan,
        "brier_base": brier(np.full(p.size, scored.expected), scored.positive),
        "calibration_slope": slope,
        "calibration_intercept": intercept,
        "share": float(linear.mean()) if usable else nan,
        "need_share": carried / total if usable and total > 0 else nan,
        "threshold": gate.threshold,
        "C": gate.C,
    }
    curve = need_curve(p, scored.need, SHARES) if usable else np.full(len(SHARES), nan)
    bins = calibration_bins(p, scored.positive, scored.group) if usable else []
    return Worth(row, area, within, curve, bins)
