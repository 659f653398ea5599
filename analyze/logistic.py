"""Many logistic regressions over the same rows at once: standardised features, labels, folds and penalties
in; weights and held-out losses out.

Each problem is scikit-learn's: ½‖w‖² + C·Σ log-loss over its own rows, intercept free; a problem is one
label, one part of the rows (all but one fold, or all) and one C. All problems advance together: a step of one
problem is a column of two products of rows and features, so that a grid of C times folds runs at the speed of
a matrix product, where one regression by itself waits for memory.

Method: L-BFGS (Nocedal and Wright 2006, algorithm 7.4) preconditioned by (I + C·s·ZᵀZ)⁻¹, where s, the mean
of p(1−p) over the rows, takes the place of its bound ¼ (Böhning and Lindsay 1988). One eigendecomposition of
ZᵀZ serves every C and fold. The objective is convex: the slope along a step says all that a line search
needs, and the loss itself is not computed. Products of a block of rows are float32, everything else float64.
A problem stops when its next step would move its logits by less than `TOLERANCE` of their size. Cost: 4·n·d
flops a problem and step, n·d² for ZᵀZ. Memory: 24 values a feature and problem, and one block of logits.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from jaxtyping import Bool, Float64, Int

from .logistic_rows import Design, Labels, Spectrum, product, scatter, spectrum, split_weight

# Of the weights, in the norm of the Hessian; of the intercept, in nats.
TOLERANCE: Final = 1e-4
MAX_STEPS: Final = 500
# Pairs of moves and gradient changes that L-BFGS remembers.
MEMORY: Final = 10
# A trial is cut when the slope behind it rises above this share of the slope before it.
OVERSHOOT: Final = 0.25
# After this many cuts in a row only rounding is left between two trials.
MAX_CUTS: Final = 20


@dataclass(frozen=True, slots=True, eq=False)
class Solutions:
    """Weights of standardised features for each label, part and C. Where a part has one class only there is
    no gate: weights are 0.
    """

    weight: Float64[np.ndarray, "label part C feature"]
    intercept: Float64[np.ndarray, "label part C"]
    steps: Int[np.ndarray, "label part C"]
    converged: Bool[np.ndarray, "label part C"]


def solve(
    design: Design, labels: Labels, c_grid: Sequence[float], basis: Spectrum | None = None
) -> Solutions:
    """Every label × part × C. `basis`: the spectrum of ZᵀZ, where it is known already."""
    shape = (labels.positive.shape[1], labels.n_folds + 1, len(c_grid))
    label, part, c = (axis.ravel() for axis in np.indices(shape))
    columns = _Columns(label, part, np.asarray(c_grid, np.float64)[c])
    state = _State(design, labels, basis or spectrum(scatter(design)), columns)
    if state.active.size:
        state.begin()
    for _ in range(MAX_STEPS):
        if not state.active.size:
            break
        state.advance()
    return Solutions(
        weight=np.ascontiguousarray(state.theta[:-1].T).reshape(*shape, -1),
        intercept=state.theta[-1].reshape(shape),
        steps=state.steps.reshape(shape),
        converged=state.converged.reshape(shape),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Columns:
    """Label, part and C of each problem."""

    label: Int[np.ndarray, "problem"]
    part: Int[np.ndarray, "problem"]
    C: Float64[np.ndarray, "problem"]

    def take(self, index: np.ndarray) -> "_Columns":
        return _Columns(self.label[index], self.part[index], self.C[index])


class _State:
    """All problems half-way: weights taken so far with their gradients, the trials under way, and the moves
    that are remembered. `advance` is one pass over the rows.
    """

    def __init__(self, design: Design, labels: Labels, basis: Spectrum, columns: _Columns) -> None:
        n, width = columns.label.size, sum(design.widths) + 1
        self._design, self._labels, self._basis, self._columns = design, labels, basis, columns
        negative, positive = labels.counts()[:, columns.label, columns.part]
        self.theta = np.zeros((width, n))
        # Half a row of each class more: finite where there is only one.
        self.theta[-1] = np.log((positive + 0.5) / (negative + 0.5))
        self.steps, self.converged = np.zeros(n, np.int64), (positive == 0) | (negative == 0)
        self.active = np.flatnonzero(~self.converged)
        self._gradient, self._curvature = np.zeros((width, n)), np.ones(n)
        self._direction, self._slope = np.zeros((width, n)), np.zeros(n)
        self._length, self._cuts = np.ones(n), np.zeros(n, np.int64)
        self._memory: list[tuple[np.ndarray, np.ndarray]] = []  # moves and gradient changes, newest last

    def begin(self) -> None:
        """The first pass, from weights of 0, where problems that differ in C alone see the same slopes."""
        active, columns = self.active, self._columns.take(self.active)
        _, first, same = np.unique(
            np.stack([columns.label, columns.part]), axis=1, return_index=True, return_inverse=True
        )
        theta = self.theta[:, active]
        gradient, curvature = self._evaluate(
            theta[:, first], replace(columns.take(first), C=np.ones(first.size))
        )
        self.steps[active] += 1
        self._take(active, theta, gradient[:, same] * columns.C, curvature[same])
        self.active = active[~self.converged[active]]

    def advance(self) -> None:
        """Every active problem evaluates its trial, then takes it or cuts it."""
        active = self.active
        trial = self.theta[:, active] + self._length[active] * self._direction[:, active]
        gradient, curvature = self._evaluate(trial, self._columns.take(active))
        slope, before = _dot(gradient, self._direction[:, active]), np.abs(self._slope[active])
        cut = (slope > OVERSHOOT * before) & (self._cuts[active] < MAX_CUTS)
        self.steps[active] += 1
        self._cuts[active[cut]] += 1
        # Where a straight line between the two slopes meets zero.
        root = before[cut] / (before[cut] + slope[cut])
        self._length[active[cut]] *= np.clip(root, 0.05, 0.8)
        taken = active[~cut]
        self._remember(taken, trial[:, ~cut], gradient[:, ~cut])
        self._take(taken, trial[:, ~cut], gradient[:, ~cut], curvature[~cut])
        self.active = active[~self.converged[active]]

    def _take(
        self, index: np.ndarray, trial: np.ndarray, gradient: np.ndarray, curvature: np.ndarray
    ) -> None:
        self.theta[:, index], self._gradient[:, index] = trial, gradient
        self._curvature[index] = curvature
        self._length[index], self._cuts[index] = 1.0, 0
        direction = -self._newton(index)
        self._direction[:, index], self._slope[index] = direction, _dot(direction, gradient)
        step, size = self._metric(direction, index), self._metric(trial, index)
        self.converged[index] = (step <= TOLERANCE**2 * size) & (np.abs(direction[-1]) <= TOLERANCE)

    def _remember(self, index: np.ndarray, trial: np.ndarray, gradient: np.ndarray) -> None:
        """Problems that took no trial get a pair of zeros, which changes nothing."""
        move, change = np.zeros_like(self.theta), np.zeros_like(self.theta)
        move[:, index] = trial - self.theta[:, index]
        change[:, index] = gradient - self._gradient[:, index]
        self._memory = [*self._memory[1 - MEMORY :], (move, change)]

    def _newton(self, index: np.ndarray) -> np.ndarray:
        """The inverse Hessian, as far as it is known, times the gradient."""
        out, used = self._gradient[:, index], []
        for whole_move, whole_change in reversed(self._memory):
            move, change = whole_move[:, index], whole_change[:, index]
            product = _dot(move, change)
            inverse = np.divide(1.0, product, out=np.zeros_like(product), where=product > 0)
            share = inverse * _dot(move, out)
            out = out - share * change
            used.append((move, change, inverse, share))
        out = self._precondition(out, index)
        for move, change, inverse, share in reversed(used):
            out += (share - inverse * _dot(change, out)) * move
        return out

    def _scale(self, index: np.ndarray) -> np.ndarray:
        """C·s of each problem; s is Σ p(1−p) over its own rows for each row of the design."""
        return self._columns.C[index] * np.maximum(self._curvature[index] / self._design.n_rows, 1e-12)

    def _precondition(self, gradient: np.ndarray, index: np.ndarray) -> np.ndarray:
        scale, vectors = self._scale(index), self._basis.vectors
        turned = vectors.T @ gradient[:-1].astype(np.float32)
        turned /= (1.0 + self._basis.values[:, None] * scale).astype(np.float32)
        return np.vstack([vectors @ turned, gradient[-1] / (scale * self._design.n_rows)])

    def _metric(self, theta: np.ndarray, index: np.ndarray) -> np.ndarray:
        """‖w‖² in the norm of the preconditioner, intercept apart."""
        turned = self._basis.vectors.T @ theta[:-1].astype(np.float32)
        return np.einsum(
            "fp,fp,fp->p", turned, turned, 1.0 + self._basis.values[:, None] * self._scale(index)
        )

    def _evaluate(self, theta: np.ndarray, columns: _Columns) -> tuple[np.ndarray, np.ndarray]:
        """Gradient of each problem, and Σ p(1−p) over its rows."""
        labels, parts = self._labels, split_weight(theta[:-1], self._design)
        sums = [np.zeros(part.shape) for part in parts]
        shift, curvature = np.zeros(theta.shape[1]), np.zeros(theta.shape[1])
        for start, stop, pieces in self._design.blocks():
            rest = _residual(product(pieces, parts, theta[-1]), labels, slice(start, stop), columns)
            for total, piece in zip(sums, pieces, strict=True):
                total += piece.T @ rest
            shift += rest.sum(axis=0, dtype=np.float64)
            # p(1−p) = |p − y|·(1 − |p − y|) for either label.
            curvature += np.abs(rest).sum(axis=0, dtype=np.float64) - np.einsum("tp,tp->p", rest, rest)
        gradient = np.vstack([*sums, shift]) * columns.C
        gradient[:-1] += theta[:-1]
        return gradient, curvature


def _residual(logits: np.ndarray, labels: Labels, rows: slice, columns: _Columns) -> np.ndarray:
    """p − y in place of the logits, 0 in rows that a problem does not train on. Written as ±1/(1 +
    exp(±logit)) with the sign that keeps the digits of what is nearly 0.
    """
    sign = np.where(labels.positive[rows], np.float32(-1.0), np.float32(1.0))
    sign *= labels.known[rows]
    sign = sign[:, columns.label]
    out = np.multiply(logits, -sign, out=logits)
    with np.errstate(over="ignore"):
        np.exp(out, out=out)
    out += np.float32(1.0)
    np.divide(sign, out, out=out)
    parts = np.arange(labels.n_folds + 1)
    out *= (labels.fold[rows, None] != parts)[:, columns.part]
    return out


def _dot(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.einsum("fp,fp->p", a, b)
