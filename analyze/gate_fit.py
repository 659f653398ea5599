"""The gates of one layer: matrices of gate rows and labels in, one gate for each need, feature set and size
out.

C is the one of the grid with the least log loss over held-out folds of groups; the gate itself is then fitted
on all gate rows. Weights are given for raw features, p = 1/(1 + exp(−(w·f + b))), so that nobody needs the
means and scales. Probabilities of gate rows are out of fold, and thresholds are chosen on these: test rows
choose nothing. The sizes pca2, pca6 and pca12 see the input through its first principal components (of
standardised features, over all gate rows) and fold into a weight on the input as well; `paper` is the input
at C = 1. Cost: see `logistic`; a set that shares its pieces with another shares their scatter.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int
from scipy.special import expit

from .calibration import threshold_for_cost, threshold_for_share
from .gate_features import BY_NEED, FEATURES
from .gate_rows import Columns, Matrix, Scaling, in_memory
from .held_out import held_out_logits, held_out_loss
from .logistic import Solutions, solve
from .logistic_rows import Labels, Spectrum, scatter, spectrum

COMPONENTS: Final = (2, 6, 12)
PAPER_C: Final = 1.0
# Problems that one call of the solver takes on: more would only take more memory.
PROBLEMS: Final = 160


@dataclass(frozen=True, slots=True, eq=False)
class Gate:
    """One logistic gate, on raw features; without weights where the label has one class only."""

    need: str
    features: str
    size: str
    pieces: tuple[str, ...]
    weight: Float32[np.ndarray, "feature"]  # of all pieces, one behind the other
    bias: float
    scaling: Scaling
    C: float
    threshold: float
    grid: tuple[tuple[float, float], ...]  # (C, held-out log loss)
    held_out: Float32[np.ndarray, "token"]  # p of each gate row, by a gate that has not seen its group
    converged: bool

    @property
    def name(self) -> str:
        return f"{self.features}@{self.size}"


@dataclass(frozen=True, slots=True, eq=False)
class GateRows:
    """The rows that the gates of a layer are fitted on: standardised matrices by piece, needs and labels."""

    matrices: Mapping[str, Matrix]  # those of `by_need` pieces are called PIECE@NEED
    scalings: Mapping[str, Scaling]
    need: Mapping[str, Float32[np.ndarray, "token"]]
    positive: Mapping[str, Bool[np.ndarray, "token"]]
    fold: Int[np.ndarray, "token"]
    n_folds: int

    @property
    def n_rows(self) -> int:
        return self.fold.size

    def keys(self, features: str, need: str) -> tuple[str, ...]:
        """The matrices of a feature set."""
        pieces = FEATURES[features].pieces
        return tuple(f"{piece}@{need}" if piece in BY_NEED else piece for piece in pieces)

    def design(self, keys: Sequence[str]) -> Columns:
        return Columns(self.n_rows, [self.matrices[key] for key in keys])

    def scaling(self, keys: Sequence[str]) -> Scaling:
        parts = [self.scalings[key] for key in keys]
        return Scaling(
            np.concatenate([part.mean for part in parts]), np.concatenate([part.scale for part in parts])
        )

    def labels(self, needs: Sequence[str]) -> Labels:
        known = np.stack([np.isfinite(self.need[need]) for need in needs], axis=1)
        positive = np.stack([self.positive[need] for need in needs], axis=1)
        return Labels(positive, known, self.fold, self.n_folds)


@dataclass(frozen=True, slots=True)
class Rules:
    """How C and thresholds are chosen."""

    c_grid: tuple[float, ...]
    target_share: float | None = None
    target_cost: float | None = None

    @property
    def grid(self) -> tuple[float, ...]:
        """The grid, with the paper's C."""
        return tuple(sorted({*self.c_grid, PAPER_C}))

    def threshold(self, p: Float32[np.ndarray, "token"], need: Float32[np.ndarray, "token"]) -> float:
        """Of held-out gate rows: where p > threshold goes linear."""
        known = np.isfinite(need) & np.isfinite(p)
        if self.target_share is None and self.target_cost is None:
            return 0.5
        if not known.any():
            return float("nan")
        if self.target_share is not None:
            return threshold_for_share(p[known], self.target_share)
        return threshold_for_cost(p[known], need[known], self.target_cost or 0.0)


def fit_gates(rows: GateRows, features: Sequence[str], rules: Rules) -> Iterator[Gate]:
    """Every gate of the layer: needs within sizes within feature sets."""
    scatters = _Scatters(rows)
    for name in features:
        for needs in _batches(rows, name, len(rules.grid) * (rows.n_folds + 1)):
            keys = rows.keys(name, needs[0])
            basis = spectrum(scatters.of(keys))
            design, labels = rows.design(keys), rows.labels(needs)
            solved = solve(design, labels, rules.grid, basis)
            yield from _gates(rows, needs, name, "linear", design, labels, solved, rules, None)
            if name == "input":
                yield from _gates(rows, needs, name, "paper", design, labels, solved, rules, None)
                yield from _component_gates(rows, needs, design, labels, basis, rules)


def _batches(rows: GateRows, features: str, problems_each: int) -> Iterator[list[str]]:
    """Needs that are solved together: those that see the same features."""
    needs = list(rows.need)
    at_once = 1 if FEATURES[features].by_need else max(1, PROBLEMS // problems_each)
    for start in range(0, len(needs), at_once):
        yield needs[start : start + at_once]


def _component_gates(
    rows: GateRows, needs: Sequence[str], design: Columns, labels: Labels, basis: Spectrum, rules: Rules
) -> Iterator[Gate]:
    """Gates on the first principal components of the input, unscaled as in the paper."""
    most = min(COMPONENTS[-1], basis.values.size)
    scores = np.empty((rows.n_rows, most), np.float32)
    for start, stop, (block,) in design.blocks():
        scores[start:stop] = block @ basis.vectors[:, :most]
    for n_components in COMPONENTS:
        if n_components <= most:
            few = in_memory(np.ascontiguousarray(scores[:, :n_components]))
            solved = solve(few, labels, rules.grid)
            axes = basis.vectors[:, :n_components]
            yield from _gates(rows, needs, "input", f"pca{n_components}", few, labels, solved, rules, axes)


def _gates(
    rows: GateRows,
    needs: Sequence[str],
    features: str,
    size: str,
    design: Columns,
    labels: Labels,
    solved: Solutions,
    rules: Rules,
    axes: Float32[np.ndarray, "feature component"] | None,
) -> Iterator[Gate]:
    """The gate of each need, at the C that its held-out loss chooses (paper: at C = 1)."""
    losses = held_out_loss(design, labels, solved)
    offered = [
        index for index, c in enumerate(rules.grid) if c in ((PAPER_C,) if size == "paper" else rules.c_grid)
    ]
    # The smallest of equals: the stronger penalty; NaN where no row is known, and then nothing is fitted.
    chosen = np.array([offered[int(np.argmin(np.nan_to_num(row[offered], nan=np.inf)))] for row in losses])
    held_out = expit(held_out_logits(design, labels, solved, chosen))
    one_class = (labels.counts()[:, :, -1] == 0).any(axis=0)
    for index, need in enumerate(needs):
        weight = solved.weight[index, -1, chosen[index]]
        weight = weight if axes is None else axes.astype(np.float64) @ weight
        keys = rows.keys(features, need)
        scaling = rows.scaling(keys)
        raw, bias = _on_raw(weight, float(solved.intercept[index, -1, chosen[index]]), scaling)
        p = np.full(rows.n_rows, np.nan, np.float32) if one_class[index] else held_out[:, index].copy()
        yield Gate(
            need,
            features,
            size,
            FEATURES[features].pieces,
            raw,
            float("nan") if one_class[index] else bias,
            scaling,
            rules.grid[chosen[index]],
            rules.threshold(p, rows.need[need]),
            tuple((rules.grid[one], float(losses[index, one])) for one in offered),
            p,
            bool(solved.converged[index, :, chosen[index]].all()),
        )


def _on_raw(
    weight: Float64[np.ndarray, "feature"], intercept: float, scaling: Scaling
) -> tuple[Float32[np.ndarray, "feature"], float]:
    """w and b of raw features; b is that of the rounded w, so that both together are as exact as float64."""
    raw = (weight / scaling.scale).astype(np.float32)
    return raw, intercept - float(raw.astype(np.float64) @ scaling.mean)


class _Scatters:
    """ZᵀZ of feature sets, put together from blocks between two pieces that are computed once."""

    def __init__(self, rows: GateRows) -> None:
        self._rows = rows
        self._known: dict[tuple[str, str], np.ndarray] = {}

    def of(self, keys: Sequence[str]) -> Float32[np.ndarray, "feature feature"]:
        if len(keys) == 1:
            return self._own(keys[0])
        blocks = [[self._between(a, b) for b in keys] for a in keys]
        return np.block(blocks)

    def _own(self, key: str) -> np.ndarray:
        if (key, key) not in self._known:
            found = scatter(self._rows.design([key]))
            if key not in _SHARED:
                return found
            self._known[key, key] = found
        return self._known[key, key]

    def _between(self, a: str, b: str) -> np.ndarray:
        if a == b:
            return self._own(a)
        if (b, a) in self._known:
            return self._known[b, a].T
        if (a, b) not in self._known:
            design = self._rows.design([a, b])
            total = np.zeros(design.widths)
            for _, _, (left, right) in design.blocks():
                total += left.T @ right
            self._known[a, b] = total.astype(np.float32)
        return self._known[a, b]


# Pieces that more than one feature set is made of: only their scatters are kept.
_SHARED: Final = ("token_full", "context_only")
