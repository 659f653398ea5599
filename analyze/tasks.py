"""What one task of a fit does: a range of a layer's blocks in, moments or needs of their rows out.

A task holds one block and fixed buffers, whatever the length of its range. How a store is cut into ranges
depends on the store alone, never on how many workers there are.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int32

from ..store import Reader
from .layers import LayerSource
from .moments import BUFFER_ROWS, MomentBuffers
from .needs import needs_by_fold
from .norms import squared_norms
from .population import FIT, LEFT_OUT, TEST, UNSEEN, Population
from .surrogates import LayerFit, LayerMoments, working_bytes

# A range has at least this many rows per feature, so that joining its moments is under 1 % of making them.
RANGE_ROWS_PER_FEATURE = 128
MAX_RANGES = 8
# Sink rows are few: one or two of a sequence.
SINK_BUFFER_ROWS = 256


def block_ranges(n_rows: int, n_blocks: int, n_features: int) -> list[range]:
    """A store's blocks as consecutive ranges: enough for several workers on one layer, few enough to merge
    cheaply.
    """
    n_ranges = max(1, min(MAX_RANGES, n_blocks, n_rows // (RANGE_ROWS_PER_FEATURE * n_features)))
    cuts = [round(n_blocks * index / n_ranges) for index in range(n_ranges + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(cuts)]


def range_moments(
    source: LayerSource,
    blocks: range,
    population: Population,
    folds: Int32[np.ndarray, "token"],
    buffers: MomentBuffers,
    sink_buffers: MomentBuffers,
) -> LayerMoments:
    """Moments of the body rows of some blocks, per fold of `fit` and for `test`, and of their sink rows;
    blocks of other splits are not read. `folds`: of every row of the store, below 0 where it enters no
    moments.
    """
    sums, sinks = buffers.sums(), sink_buffers.sums()
    n_folds = len(sums) - 1
    contribution = None if source.contribution.is_scaling else np.zeros(source.reader.d_model)
    for block in blocks:
        start, stop = source.reader.block_range(block)
        keys = _keys(population, folds, start, stop, n_folds)
        if not (keys >= 0).any():
            continue
        x, y = source.inputs(block)
        for key in np.unique(keys[keys >= 0]).tolist():
            held = sums[key] if key <= n_folds else sinks[key - n_folds - 1]
            held.add(x, y, np.flatnonzero(keys == key))
        if contribution is not None and (fitted := (keys >= 0) & (keys < n_folds)).any():
            contribution += source.contribution(y[fitted]).sum(axis=0, dtype=np.float64)
    parts, (fit_sinks, test_sinks) = [part.finish() for part in sums], [part.finish() for part in sinks]
    return LayerMoments(tuple(parts[:n_folds]), parts[n_folds], contribution, fit_sinks, test_sinks)


def range_needs(
    source: LayerSource,
    blocks: range,
    population: Population,
    by: Sequence[tuple[LayerFit, Int32[np.ndarray, "token"]]],
) -> list[dict[str, np.ndarray]]:
    """Needs of every row of some blocks, in row order, by each of several fits with the fold whose surrogate
    scores each row of the store. NaN for rows with a masked value, and for those that a fit leaves out.
    """
    parts: list[list[dict[str, np.ndarray]]] = [[] for _ in by]
    for block in blocks:
        start, stop = source.reader.block_range(block)
        usable = population.body[start:stop] | population.sink[start:stop]
        residual, x, y = source.block(block)
        gradient = source.gradient(block)
        if gradient is not None:
            gradient[~target_follows(population, start, stop)] = np.nan
        norm = np.sqrt(squared_norms(residual))
        del residual
        for place, (fit, all_folds) in zip(parts, by, strict=True):
            folds = all_folds[start:stop]
            scored = np.flatnonzero(usable & (folds != LEFT_OUT))
            whole = scored.size == stop - start
            at = slice(None) if whole else scored
            found = needs_by_fold(
                x[at],
                y[at],
                norm[at],
                folds[at],
                fit.surrogates,
                source.contribution,
                fit.mean_contribution,
                None if gradient is None else gradient[at],
            )
            place.append({name: _spread(values, scored, stop - start) for name, values in found.items()})
    return [{name: np.concatenate([part[name] for part in found]) for name in found[0]} for found in parts]


def target_follows(population: Population, start: int, stop: int) -> Bool[np.ndarray, "row"]:
    """Whether a row of a block or a later one of its sequence has a target; sequences end within blocks."""
    sequence, has = population.sequence[start:stop], population.target_id[start:stop] >= 0
    place = np.arange(stop - start)
    first = np.flatnonzero(np.r_[True, sequence[1:] != sequence[:-1]])
    last = np.maximum.reduceat(np.where(has, place, -1), first)
    return place <= np.repeat(last, np.diff(np.r_[first, stop - start]))


def _keys(population: Population, folds: np.ndarray, start: int, stop: int, n_folds: int) -> np.ndarray:
    """The sum each row of a block belongs to: its fold, `n_folds` for test; of sinks, `n_folds` + 1 for fit
    and + 2 for test; below 0 for none.
    """
    split, fold = population.split[start:stop], folds[start:stop]
    fitted, tested = (split == FIT) & (fold >= 0), (split == TEST) & (fold == UNSEEN)
    body = np.where(fitted, fold, np.where(tested, n_folds, -1))
    sink = np.where(fitted, n_folds + 1, np.where(tested, n_folds + 2, -1))
    return np.where(population.body[start:stop], body, np.where(population.sink[start:stop], sink, -1))


def _spread(values: np.ndarray, index: np.ndarray, n_rows: int) -> np.ndarray:
    if index.size == n_rows:
        return values
    out = np.full(n_rows, np.nan, np.float32)
    out[index] = values
    return out


@dataclass(frozen=True, slots=True)
class Evaluated:
    """A store that surrogates are evaluated on: its layers' sources and its rows."""

    name: str
    sources: dict[int, LayerSource]
    population: Population

    @property
    def reader(self) -> Reader:
        return next(iter(self.sources.values())).reader

    def n_rows(self, blocks: range) -> int:
        return self.reader.block_range(blocks[-1])[1] - self.reader.block_range(blocks[0])[0]

    def ranges(self) -> list[range]:
        reader = self.reader
        return block_ranges(reader.n_tokens, reader.n_blocks, reader.d_model)


def task_bytes(n_features: int, block_rows: int, n_folds: int, n_fits: int = 1) -> int:
    """Working memory of one task of a fit at most: moments of a range, a solve, or needs by `n_fits` fits."""
    block = 8 * block_rows * n_features * 4
    matrix = n_features * n_features * 8
    buffers = ((n_folds + 1) * (BUFFER_ROWS + 1) + 2 * (SINK_BUFFER_ROWS + 1)) * 2 * n_features * 4
    sums = (n_folds + 4) * 2 * matrix
    surrogates = n_fits * (n_folds + 1) * matrix // 2
    return max(block + buffers + sums, sums + working_bytes(n_features, n_folds), block + surrogates + matrix)
