"""What one task of a fit does: a range of a layer's blocks in, moments or needs of their rows out.

A task holds one block and fixed buffers, whatever the length of its range. How a store is cut into ranges
depends on the store alone, never on how many workers there are.
"""

import itertools
from dataclasses import dataclass

import numpy as np

from ..store import EnvironmentFault, Reader
from .layers import LayerSource
from .moments import BUFFER_ROWS, MomentBuffers
from .needs import needs_by_fold
from .norms import squared_norms
from .population import FIT, GATE, TEST, Population
from .surrogates import LayerFit, LayerMoments, working_bytes

# A range has at least this many rows per feature, so that joining its moments is under 1 % of making them.
RANGE_ROWS_PER_FEATURE = 128
MAX_RANGES = 8


def block_ranges(n_rows: int, n_blocks: int, n_features: int) -> list[range]:
    """A store's blocks as consecutive ranges: enough for several workers on one layer, few enough to merge
    cheaply.
    """
    n_ranges = max(1, min(MAX_RANGES, n_blocks, n_rows // (RANGE_ROWS_PER_FEATURE * n_features)))
    cuts = [round(n_blocks * index / n_ranges) for index in range(n_ranges + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(cuts)]


def range_moments(
    source: LayerSource, blocks: range, population: Population, buffers: MomentBuffers
) -> LayerMoments:
    """Moments of the body rows of some blocks, per fold of `fit` and for `test`; blocks of other splits are
    not read.
    """
    sums = buffers.sums()
    n_folds = len(sums) - 1
    contribution = None if source.contribution.is_scaling else np.zeros(source.reader.d_model)
    for block in blocks:
        start, stop = source.reader.block_range(block)
        keys = _keys(population, start, stop, n_folds)
        if not (keys >= 0).any():
            continue
        x, y = source.inputs(block)
        for key in np.unique(keys[keys >= 0]).tolist():
            sums[key].add(x, y, np.flatnonzero(keys == key))
        if contribution is not None and (fitted := (keys >= 0) & (keys < n_folds)).any():
            contribution += source.contribution(y[fitted]).sum(axis=0, dtype=np.float64)
    parts = [part.finish() for part in sums]
    return LayerMoments(tuple(parts[:n_folds]), parts[n_folds], contribution)


def range_needs(
    source: LayerSource, blocks: range, population: Population, fit: LayerFit
) -> dict[str, np.ndarray]:
    """Needs of every row of some blocks, in row order; NaN for rows with a masked value."""
    parts: list[dict[str, np.ndarray]] = []
    for block in blocks:
        start, stop = source.reader.block_range(block)
        usable = np.flatnonzero(population.body[start:stop] | population.sink[start:stop])
        residual, x, y = source.block(block)
        if usable.size < stop - start:
            residual, x, y = residual[usable], x[usable], y[usable]
        folds = population.fold[start:stop][usable]
        norm = np.sqrt(squared_norms(residual))
        found = needs_by_fold(x, y, norm, folds, fit.surrogates, source.contribution, fit.mean_contribution)
        parts.append({name: _spread(values, usable, stop - start) for name, values in found.items()})
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _keys(population: Population, start: int, stop: int, n_folds: int) -> np.ndarray:
    """The sum each row of a block belongs to: its fold, `n_folds` for test, −1 for none."""
    split = population.split[start:stop]
    keys = np.where(split == FIT, population.fold[start:stop], np.where(split == TEST, n_folds, -1))
    return np.where(population.body[start:stop] & (split != GATE), keys, -1)


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


def check_memory(n_features: int, block_rows: int, n_folds: int, workers: int, limit_bytes: int) -> int:
    """How many workers fit the memory limit; EnvironmentFault if not even one does."""
    block = 8 * block_rows * n_features * 4
    buffers = (n_folds + 1) * 2 * (BUFFER_ROWS + 1) * n_features * 4
    sums = (n_folds + 2) * 2 * n_features * n_features * 8
    need = max(block + buffers + sums, sums + working_bytes(n_features, n_folds), block + sums)
    if need > limit_bytes:
        raise EnvironmentFault(
            f"fitting a layer of width {n_features} with {n_folds} folds and blocks of {block_rows} rows "
            f"takes {need / 2**30:.2f} GiB, the memory limit is {limit_bytes / 2**30:.2f} GiB: "
            "raise `memory_limit` or lower `folds`"
        )
    return max(1, min(workers, limit_bytes // need))
