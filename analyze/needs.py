"""How much each token needs the nonlinearity of a layer, offline: rows of x, y, residual and a surrogate in,
one value a row out.

error = ‖y − ŷ‖ / √(‖y − ȳ‖² + τ²), bounded where y is small; error_raw = ‖y − ŷ‖/‖y‖; error_norm = ‖y − ŷ‖;
error_stream = ‖c(y) − c(ŷ)‖/‖residual‖ with c the contribution to the residual stream; where the gradient
is stored, loss_estimate = ⟨∂L/∂y, ŷ − y⟩, in nats, the first-order effect on the sequence's loss of
replacing y by ŷ at this one position. ȳ and τ² are those of the rows that the surrogate was fitted on, so
for a fit row, whose surrogate has not seen its fold, the whole value is out of fold. Cost: one product of
d² flops·2 a row and a few passes over the rows.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Final

import numpy as np
from jaxtyping import Float32, Int32

from .norms import Contribution, squared_norms
from .ridge import Surrogate

NEEDS: Final = ("error", "error_raw", "error_norm", "error_stream")
# A need too, of stores with the site `mlp_output_grad`; NaN where no target follows.
LOSS_ESTIMATE: Final = "loss_estimate"
# Written to the study, one float32 column each, in this order.
COLUMNS: Final = (*NEEDS, "y_norm", "y_centred_norm")
# Kept beside them while fitting: the two norms that R² of the contribution is made of.
CONTRIBUTION: Final = ("contribution_error", "contribution_centred")

Columns = Mapping[str, Float32[np.ndarray, "token"]]


def needs_in(columns: Collection[str]) -> tuple[str, ...]:
    """The needs among these columns."""
    return tuple(name for name in (*NEEDS, LOSS_ESTIMATE) if name in columns)


def row_needs(
    x: Float32[np.ndarray, "token feature"],
    y: Float32[np.ndarray, "token target"],
    residual_norm: Float32[np.ndarray, "token"],
    surrogate: Surrogate,
    contribution: Contribution,
    mean_contribution: np.ndarray | None = None,
    gradient: Float32[np.ndarray, "token target"] | None = None,
) -> dict[str, Float32[np.ndarray, "token"]]:
    """Every column of `COLUMNS` for these rows; those of `CONTRIBUTION` too if the mean contribution is
    given, and `LOSS_ESTIMATE` if the gradient is.
    """
    predicted = surrogate.predict(x)
    stream = {} if mean_contribution is None else _contribution(y, predicted, contribution, mean_contribution)
    np.subtract(y, predicted, out=predicted)
    error = np.sqrt(squared_norms(predicted))
    estimate = {} if gradient is None else {LOSS_ESTIMATE: -np.einsum("tf,tf->t", gradient, predicted)}
    np.subtract(y, surrogate.mean_y.astype(np.float32), out=predicted)
    centred = squared_norms(predicted)
    y_norm = np.sqrt(squared_norms(y))
    stream_error = stream.get("contribution_error", np.float32(abs(contribution.multiplier)) * error)
    return {
        "error": _ratio(error, np.sqrt(centred + np.float32(surrogate.spread))),
        "error_raw": _ratio(error, y_norm),
        "error_norm": error,
        "error_stream": _ratio(stream_error, residual_norm),
        "y_norm": y_norm,
        "y_centred_norm": np.sqrt(centred),
        **estimate,
        **stream,
    }


def needs_by_fold(
    x: Float32[np.ndarray, "token feature"],
    y: Float32[np.ndarray, "token target"],
    residual_norm: Float32[np.ndarray, "token"],
    folds: Int32[np.ndarray, "token"],
    surrogates: Sequence[Surrogate],
    contribution: Contribution,
    mean_contribution: np.ndarray | None = None,
    gradient: Float32[np.ndarray, "token target"] | None = None,
) -> dict[str, Float32[np.ndarray, "token"]]:
    """Needs of each row by the surrogate that left its fold out; −1 stands for the last surrogate, fitted on
    everything.
    """
    present = np.unique(folds)
    if present.size < 2:
        chosen = surrogates[int(present[0]) if present.size else -1]
        return row_needs(x, y, residual_norm, chosen, contribution, mean_contribution, gradient)
    columns: dict[str, np.ndarray] = {}
    for fold in present.tolist():
        index = np.flatnonzero(folds == fold)
        part = row_needs(
            x[index],
            y[index],
            residual_norm[index],
            surrogates[fold],
            contribution,
            mean_contribution,
            None if gradient is None else gradient[index],
        )
        for name, values in part.items():
            columns.setdefault(name, np.empty(folds.size, np.float32))[index] = values
    return columns


def _contribution(
    y: np.ndarray, predicted: np.ndarray, contribution: Contribution, mean: np.ndarray
) -> dict[str, np.ndarray]:
    """‖c(y) − c(ŷ)‖ and ‖c(y) − mean c(y)‖ where c is more than a constant factor."""
    true = contribution(y)
    error = contribution(predicted)
    np.subtract(true, error, out=error)
    true -= mean.astype(np.float32)
    return {
        "contribution_error": np.sqrt(squared_norms(error)),
        "contribution_centred": np.sqrt(squared_norms(true)),
    }


def _ratio(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    """numerator / denominator, NaN where the denominator is 0."""
    out = np.full_like(numerator, np.nan)
    return np.divide(numerator, denominator, out=out, where=denominator > 0)
