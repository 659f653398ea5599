"""A layer's MLP inputs cut into clusters: blocks of x in, principal components, centres and the cluster of
each row out.

Components are those of standardised x: in many models a few features are a hundred times larger than the
rest, and the clusters of x as it stands would be theirs. (The gates on components standardise too.) Scatter
and components come from all fit rows in one pass; k-means runs on the components of at most `SAMPLE_ROWS` fit
rows, drawn by seed; a last pass finds the nearest centre of each row. Cost: three passes over residuals, of
which the first two read fit blocks only; 2·d² flops a fit row; memory one block, a few d × d matrices and the
sample's components, whatever the number of rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import scipy.linalg
from jaxtyping import Float32, Float64, Int16, Int64
from sklearn.cluster import KMeans
from threadpoolctl import threadpool_limits

from ..store import Reader
from .layers import LayerSource
from .moments import BUFFER_ROWS, MomentBuffers, MomentSums
from .norms import apply_norm

SAMPLE_ROWS: Final = 20_000
# A feature that moves less than this share of its mean is a constant with rounding.
_CONSTANT: Final = 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class Components:
    """Principal components of standardised rows: (x − mean) @ projection."""

    mean: Float32[np.ndarray, "feature"]
    projection: Float32[np.ndarray, "feature component"]
    explained: float  # share of the standardised variance

    def of(self, x: Float32[np.ndarray, "token feature"]) -> Float32[np.ndarray, "token component"]:
        return (x - self.mean) @ self.projection


@dataclass(frozen=True, slots=True, eq=False)
class Partition:
    """Clusters of a layer's rows, by the nearest centre."""

    components: Components
    centres: Float32[np.ndarray, "cluster component"]

    def of(self, x: Float32[np.ndarray, "token feature"]) -> Int16[np.ndarray, "token"]:
        squares = np.einsum("kc,kc->k", self.centres, self.centres)
        distance = squares - 2.0 * (self.components.of(x) @ self.centres.T)
        return distance.argmin(axis=1).astype(np.int16)


def fit_partition(
    source: LayerSource, rows: Int64[np.ndarray, "row"], n_clusters: int, n_components: int, seed: int
) -> Partition:
    """Components of the named rows, and k-means on a sample of them."""
    components = fit_components(source, rows, n_components)
    rng = np.random.default_rng((seed, source.layer))
    if rows.size > SAMPLE_ROWS:
        rows = rows[np.sort(rng.choice(rows.size, SAMPLE_ROWS, replace=False))]
    sample = np.concatenate([components.of(x) for x in inputs(source, rows)])
    # More clusters than different rows would be empty ones.
    n_clusters = min(n_clusters, len(np.unique(sample, axis=0)))
    means = KMeans(n_clusters, random_state=int(rng.integers(2**31)))
    # OpenMP counts threads for each thread that calls it: a limit set elsewhere does not hold here.
    with threadpool_limits(1, user_api="openmp"):
        means.fit(sample)
    return Partition(components, means.cluster_centers_.astype(np.float32))


def fit_components(source: LayerSource, rows: Int64[np.ndarray, "row"], n_components: int) -> Components:
    """The first components of the named rows; fewer where fewer features vary."""
    width = source.reader.d_model
    sums = MomentSums(MomentBuffers(width, 1))
    for x in inputs(source, rows):
        sums.add(x, np.zeros((len(x), 1), np.float32))
    moments = sums.finish()
    sd = np.sqrt(np.diag(moments.cxx) / moments.n)
    varies = sd > _CONSTANT * np.abs(moments.mean_x)
    scale = np.where(varies, 1.0 / np.where(varies, sd, 1.0), 0.0)
    values, vectors = _largest(moments.cxx / moments.n * np.outer(scale, scale), n_components)
    explained = float(values.sum() / varies.sum()) if varies.any() else float("nan")
    return Components(
        moments.mean_x.astype(np.float32), (vectors * scale[:, None]).astype(np.float32), explained
    )


def _largest(
    correlation: Float64[np.ndarray, "feature feature"], n_components: int
) -> tuple[Float64[np.ndarray, "component"], Float64[np.ndarray, "feature component"]]:
    width = correlation.shape[0]
    first = max(0, width - n_components)
    values, vectors = scipy.linalg.eigh(
        correlation, subset_by_index=(first, width - 1), overwrite_a=True, check_finite=False
    )
    return np.maximum(values[::-1], 0.0), vectors[:, ::-1]


def assign(
    source: LayerSource, rows: Int64[np.ndarray, "row"], partition: Partition
) -> Int16[np.ndarray, "row"]:
    """The cluster of each of the named rows."""
    found = [partition.of(x) for x in inputs(source, rows)]
    return np.concatenate(found) if found else np.empty(0, np.int16)


def inputs(
    source: LayerSource, rows: Int64[np.ndarray, "row"]
) -> Iterator[Float32[np.ndarray, "token feature"]]:
    """MLP inputs of the named rows (rising numbers), block by block; blocks without any are not read."""
    reader = source.reader
    for block in range(reader.n_blocks):
        start, stop = reader.block_range(block)
        wanted = rows[slice(*np.searchsorted(rows, (start, stop)))] - start
        if not wanted.size:
            continue
        residual = reader.rows("residual", source.layer, block, block + 1)
        if wanted.size < stop - start:
            residual = residual[wanted]
        yield apply_norm(residual, source.norm, out=residual)


def working_bytes(reader: Reader, n_components: int) -> int:
    """Memory of one layer at work: two blocks, buffers, four d × d matrices, the sample's components."""
    width, rows = reader.d_model, int(reader.plan.block_rows.max())
    blocks = 3 * rows * width * 4
    return blocks + 2 * BUFFER_ROWS * width * 4 + 5 * width**2 * 8 + 3 * SAMPLE_ROWS * n_components * 4
