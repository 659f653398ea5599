"""The surrogate of a layer cut to rank k: a fitted study in, two thin matrices whose product stands in out.

Σ‖y − ŷ‖² + λ‖W‖² under rank k is smallest at U_k U_kᵀ W (reduced-rank ridge, see `curves.rank_path`), where
U_k are the leading eigenvectors of W (G + λI) Wᵀ, the scatter of the fitted values with the rows that stand
for the penalty. W and λ are in the study; G, the scatter of the MLP's inputs, is read from the moments that
the study keeps or was fitted on, or else summed once more over the fitted rows. Cost: that pass, 2·d² flops a
row, and one eigendecomposition a layer.
"""

from collections.abc import Callable

import numpy as np
import scipy.linalg
from jaxtyping import Float32, Float64

from ..store import IncompleteError, Study
from ..store.names import typed
from .analyze_settings import AnalyzeSettings
from .gathering import gather
from .moments import MomentBuffers, merge_all
from .moments_file import is_moments_folder, open_moments
from .norms import apply_norm
from .population import FIT
from .saved_moments import PREFIX, stale_moments


def cut_to_rank(
    weight: Float32[np.ndarray, "target feature"],
    penalty: float,
    scatter: Float64[np.ndarray, "feature feature"],
    rank: int,
) -> tuple[Float32[np.ndarray, "target rank"], Float32[np.ndarray, "rank feature"]]:
    """(up, down), whose product is the best map of this rank (all of W where it has no more)."""
    wide = weight.astype(np.float64)
    fitted = wide @ scatter @ wide.T + penalty * (wide @ wide.T)
    _, vectors = scipy.linalg.eigh(fitted, driver="evd", check_finite=False)
    up = vectors[:, ::-1][:, :rank]
    return up.astype(np.float32), (up.T @ wide).astype(np.float32)


def cut_bias(
    up: Float32[np.ndarray, "target rank"],
    bias: Float32[np.ndarray, "target"],
    mean_y: Float64[np.ndarray, "target"],
) -> Float32[np.ndarray, "target"]:
    """The intercept beside it: ŷ = ȳ + U Uᵀ W (x − x̄), and W x̄ = ȳ − bias."""
    wide = up.astype(np.float64)
    return (mean_y - wide @ (wide.T @ (mean_y - bias))).astype(np.float32)


def input_scatter(study: Study, layer: int) -> Float64[np.ndarray, "feature feature"]:
    """G of the rows that the layer's surrogate was fitted on, about their mean."""
    load = _kept(study, layer)
    if load is not None:
        return load()
    evidence = gather(study, AnalyzeSettings(layers=str(layer)))
    reader, norm = evidence.fitted.reader, evidence.fitted.source(layer).norm
    fitted = evidence.fitted.population.rows(FIT)
    sums = MomentBuffers(reader.d_model, 1).sums()[0]
    for block in range(reader.n_blocks):
        first, last = reader.block_range(block)
        start, stop = np.searchsorted(fitted, (first, last)).tolist()
        if start < stop:
            x = reader.rows("residual", layer, block, block + 1)
            apply_norm(x, norm, out=x)
            sums.add(x, np.zeros((x.shape[0], 1), np.float32), fitted[start:stop] - first)
    return sums.finish().cxx


def _kept(study: Study, layer: int) -> Callable[[], np.ndarray] | None:
    """Moments that are there already: of the folder that was fitted, or beside the study."""
    steps = study.provenance()
    if "fit" not in steps:
        raise IncompleteError(
            f"{study.path} is not fitted yet: run `nearline fit {typed(study.path)} STORE…` first"
        )
    fit_on = steps["fit"]["settings"]["fit_on"]
    where, name = study.stores()[fit_on], PREFIX + fit_on
    if is_moments_folder(where):
        folder = where
    elif name in steps and name not in stale_moments(steps):
        folder = study.path / name
    else:
        return None
    source = open_moments(folder)
    return lambda: merge_all(list(source.layer(layer).folds)).cxx
