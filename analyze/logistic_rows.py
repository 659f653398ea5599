"""What logistic regressions are fitted to: rows of standardised features in blocks, labels and folds; and the
products of blocks and weights that everything is made of.

Products of a block are float32, their sums over blocks float64, always in the order of the blocks. Cost:
2·n·d flops a column of weights, n·d² for the scatter.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import scipy.linalg
from jaxtyping import Bool, Float32, Float64, Int

Pieces = Sequence[Float32[np.ndarray, "row _"]]


@runtime_checkable
class Design(Protocol):
    """Rows of standardised features, block by block, always in the same blocks."""

    @property
    def widths(self) -> tuple[int, ...]: ...

    @property
    def n_rows(self) -> int: ...

    def blocks(self) -> Iterator[tuple[int, int, Pieces]]:
        """(first row, row behind the last, the features side by side in pieces)."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Labels:
    """What is to be told apart: the `known` rows of each label count, the others enter nothing; `fold` of
    each row goes by group.
    """

    positive: Bool[np.ndarray, "token label"]
    known: Bool[np.ndarray, "token label"]
    fold: Int[np.ndarray, "token"]
    n_folds: int

    def counts(self) -> Int[np.ndarray, "2 label part"]:
        """Negative and positive rows of each part; part k leaves fold k out, the last one nothing."""
        found = np.zeros((2, self.positive.shape[1], self.n_folds + 1), np.int64)
        for index, member in enumerate((~self.positive & self.known, self.positive & self.known)):
            found[index, :, -1] = member.sum(axis=0)
            for fold in range(self.n_folds):
                found[index, :, fold] = found[index, :, -1] - member[self.fold == fold].sum(axis=0)
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Spectrum:
    """ZᵀZ = vectors · diag(values) · vectorsᵀ, the largest first."""

    values: Float64[np.ndarray, "component"]
    vectors: Float32[np.ndarray, "feature component"]


def scatter(design: Design) -> Float32[np.ndarray, "feature feature"]:
    """ZᵀZ over all rows. In float32, as the spectrum is: it steers steps and names axes, and solutions do not
    inherit its rounding.
    """
    width = sum(design.widths)
    total = np.zeros((width, width))
    for _, _, pieces in design.blocks():
        rows = pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis=1)
        total += rows.T @ rows
    return total.astype(np.float32)


def spectrum(scatter: Float32[np.ndarray, "feature feature"]) -> Spectrum:
    values, vectors = scipy.linalg.eigh(scatter, driver="evd", check_finite=False)
    return Spectrum(np.maximum(values[::-1], 0.0).astype(np.float64), np.ascontiguousarray(vectors[:, ::-1]))


def logits(
    design: Design, weight: Float64[np.ndarray, "feature column"], intercept: Float64[np.ndarray, "column"]
) -> Iterator[tuple[int, int, Float32[np.ndarray, "row column"]]]:
    """w·z + b of every row, block by block."""
    parts = split_weight(weight, design)
    for start, stop, pieces in design.blocks():
        yield start, stop, product(pieces, parts, intercept)


def split_weight(weight: np.ndarray, design: Design) -> list[np.ndarray]:
    return np.split(np.ascontiguousarray(weight, np.float32), np.cumsum(design.widths)[:-1])


def product(pieces: Pieces, parts: Sequence[np.ndarray], intercept: np.ndarray) -> np.ndarray:
    out = pieces[0] @ parts[0]
    for piece, part in zip(pieces[1:], parts[1:], strict=True):
        out += piece @ part
    out += intercept.astype(np.float32)
    return out
