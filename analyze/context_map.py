"""What of the context is the token after all: k̂, a ridge of k on the token embedding, and how it is fitted.

In: the fitted rows of a store with their folds. Out: a `ContextMap` a layer, in the study as the group
`context`. Earlier MLPs and attention write traces of the token into the stream, so k still holds the token:
token_full = t + k̂ is all of it that a linear map finds, context_only = k − k̂ what is left.

The token embedding is the same at every layer, so its scatters and their eigendecompositions (one a fold
left out, one of all rows) are made once; a layer adds its own cross-scatter. Sums are about fixed centres
near the means, so that a fold's can be added and taken out. Cost: 2·d² flops a row and layer, K + 1
eigendecompositions in all, and per layer and fold a few d × d products.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Final

import numpy as np
from jaxtyping import Float32, Float64, Int32

from ..store import Study
from .moments import BUFFER_ROWS, MomentBuffers, merge_all, without
from .norms import squared_norms
from .parts import PartsSource
from .ridge import Spectrum, path_errors, solve, spectrum
from .settings import FitSettings

GROUP: Final = "context"
# The grid of alphas of the surrogates serves here too.
ALPHAS: Final[tuple[float, ...]] = FitSettings().alphas


@dataclass(frozen=True, slots=True, eq=False)
class ContextMap:
    """k̂ = weight @ embedding + bias, at one layer."""

    weight: Float32[np.ndarray, "feature_out feature_in"]
    bias: Float32[np.ndarray, "feature_out"]
    alpha: float
    mean: Float64[np.ndarray, "feature_out"]  # of k over the rows fitted

    def predict(
        self, embedding: Float32[np.ndarray, "token feature_in"]
    ) -> Float32[np.ndarray, "token feature_out"]:
        """k̂ of rows of token embeddings."""
        out = embedding @ self.weight.T
        out += self.bias
        return out


@dataclass(frozen=True, slots=True, eq=False)
class TokenBasis:
    """Scatter of the token embeddings of fitted rows, in its eigenvectors: without each fold, and whole."""

    held_in: tuple[Spectrum, ...]
    whole: Spectrum


def token_basis(source: PartsSource, folds: Int32[np.ndarray, "token"]) -> TokenBasis:
    """One pass over the fitted rows (`folds` ≥ 0), and K + 1 eigendecompositions."""
    n_folds = int(folds.max()) + 1
    sums = MomentBuffers(source.reader.d_model, 1, n_folds).sums()
    for block, rows, of_row in _fitted(source, folds):
        embedding = source.embedding(block, rows)
        nothing = np.zeros((rows.size, 1), np.float32)
        for fold in np.unique(of_row).tolist():
            sums[fold].add(embedding, nothing, np.flatnonzero(of_row == fold))
    parts = [part.finish() for part in sums]
    total = merge_all(parts)
    held_in = tuple(spectrum(without(total, part)) for part in parts)
    return TokenBasis(held_in, spectrum(total))


def fit_context_map(source: PartsSource, folds: Int32[np.ndarray, "token"], basis: TokenBasis) -> ContextMap:
    """The map of one layer: one pass over the fitted rows; alpha has the least squared error over folds."""
    parts, centre = _cross_sums(source, folds, basis.whole.mean_x)
    total = reduce(_added, parts)
    whole = _with_targets(basis.whole, total, basis.whole.mean_x, centre)
    errors = np.zeros(len(ALPHAS))
    for left_out, part in zip(basis.held_in, parts, strict=True):
        fitted = _with_targets(left_out, _less(total, part), basis.whole.mean_x, centre)
        errors += path_errors(fitted, whole, ALPHAS)
    best = solve(whole, ALPHAS[int(np.argmin(errors))])
    return ContextMap(best.weight, best.bias, best.alpha, whole.mean_y)


def to_arrays(maps: Mapping[int, ContextMap]) -> dict[str, Any]:
    """Maps of all layers as arrays of a group."""
    found = list(maps.values())
    return {
        "weight": np.stack([one.weight for one in found]),
        "bias": np.stack([one.bias for one in found]),
        "alpha": np.array([one.alpha for one in found]),
        "mean": (("layer", "feature_out"), np.stack([one.mean for one in found])),
        "layer": np.array(list(maps), np.int32),
    }


def load_context_map(study: Study, layer: int) -> ContextMap:
    """The map of one layer; nothing else is read."""
    one = study.group(GROUP).sel(layer=layer)
    return ContextMap(
        one["weight"].to_numpy(), one["bias"].to_numpy(), float(one["alpha"]), one["mean"].to_numpy()
    )


def load_context_maps(study: Study) -> dict[int, ContextMap]:
    """The maps that `decomposition` wrote, by layer."""
    layers: list[int] = study.group(GROUP)["layer"].to_numpy().tolist()
    return {layer: load_context_map(study, layer) for layer in layers}


@dataclass(frozen=True, slots=True, eq=False)
class _CrossSums:
    """Sums over rows of e (about the basis's mean) and k (about a fixed centre)."""

    n: int
    k: Float64[np.ndarray, "feature_out"]
    product: Float64[np.ndarray, "feature_in feature_out"]
    square: float


def _cross_sums(
    source: PartsSource, folds: np.ndarray, mean_embedding: np.ndarray
) -> tuple[list[_CrossSums], Float32[np.ndarray, "feature_out"]]:
    """The sums of each fold, and the centre of k: the mean over the first block with fitted rows."""
    d, n_folds = source.reader.d_model, int(folds.max()) + 1
    middle, centre = mean_embedding.astype(np.float32), np.zeros(d, np.float32)
    n = [0] * n_folds
    k_sum, square = np.zeros((n_folds, d)), np.zeros(n_folds)
    product, step = np.zeros((n_folds, d, d)), np.empty((d, d), np.float32)
    for block, rows, of_row in _fitted(source, folds):
        parts = source.block(block, rows)
        embedding, k = parts.embedding, parts.k
        if not any(n):
            centre = k.mean(axis=0)
        embedding -= middle
        k -= centre
        for fold in np.unique(of_row).tolist():
            index = np.flatnonzero(of_row == fold)
            n[fold] += index.size
            for start in range(0, index.size, BUFFER_ROWS):
                chosen = index[start : start + BUFFER_ROWS]
                some = k[chosen]
                product[fold] += np.matmul(embedding[chosen].T, some, out=step)
                k_sum[fold] += some.sum(axis=0, dtype=np.float64)
                square[fold] += squared_norms(some).sum(dtype=np.float64)
    return [_CrossSums(*one) for one in zip(n, k_sum, product, square.tolist(), strict=True)], centre


def _fitted(source: PartsSource, folds: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Blocks with fitted rows: their number, the rows within, and the fold of each."""
    for block in range(source.reader.n_blocks):
        start, stop = source.reader.block_range(block)
        rows = np.flatnonzero(folds[start:stop] >= 0)
        if rows.size:
            yield block, rows, folds[start:stop][rows]


def _added(a: _CrossSums, b: _CrossSums) -> _CrossSums:
    return _CrossSums(a.n + b.n, a.k + b.k, a.product + b.product, a.square + b.square)


def _less(total: _CrossSums, part: _CrossSums) -> _CrossSums:
    return _CrossSums(
        total.n - part.n, total.k - part.k, total.product - part.product, total.square - part.square
    )


def _with_targets(basis: Spectrum, sums: _CrossSums, middle: np.ndarray, centre: np.ndarray) -> Spectrum:
    """The spectrum of these rows' embeddings, with the cross-scatter of k in its basis; all about means."""
    mean_k, mean_e = sums.k / max(1, sums.n), basis.mean_x - middle.astype(np.float32)
    scatter = sums.product - np.outer(mean_e * sums.n, mean_k)
    return replace(
        basis,
        mean_y=centre + mean_k,
        syy=max(0.0, sums.square - sums.n * float(mean_k @ mean_k)),
        projected=basis.vectors.T @ scatter,
    )
