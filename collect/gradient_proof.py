"""The start-up proof of gradients, and the power of two that each layer's are stored with.

In: an `Anatomy`, sequences of token ids, the layers whose gradients are wanted. Out: the errors found, for
the store's attributes, or `ProofFailed`; and exponents. What is proved, for every layer:

  pulled   the gradient at the MLP's output is that at the block's output, taken back through the contribution
           (and the norm of the sum, in blocks that have one), by the formula used offline
  ends     it is exactly zero where no target follows
  batch    a sequence alone gives the rows it gives in a padded batch
  slope    a step along it at the lowest layer changes the summed loss by as much as it says

Cost: a forward and a backward pass over the proof's sequences, the same for each alone, and two forward
passes; for the exponents one more of both, over the plan's first batch.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..store.dtypes import GRADIENT, MOST_EXPONENT
from ..store.errors import ProofFailed
from . import proof_checks as checks
from .agreement import row_error
from .anatomy import Anatomy, LayerAnatomy
from .buffers import Shape
from .capture import Capture, first_tensor
from .forward import final_hidden, inputs_of
from .nll import token_nll_and_slope
from .norm_parameters import apply, norm_parameters
from .proof import short_sequences, tolerances
from .proof_passes import Seen, gradient_pass, padded_losses
from .rows import Batch

# The largest |value| of the first batch is stored below 2^7: in float16 it may be 500 times as large later,
# and values 10^6 times smaller still have all their digits.
STORED_BELOW = 7
# Taken back by another formula, a gradient is rounded a few times more than a sum of two terms is.
PULLED_FACTOR = 8
STEP_NATS = 0.02  # a token, by which the loss is to change
# The part of a step's effect that is not first order, and the rounding of the losses. On tiny models of 60
# families: up to 0.005 in float32, 0.03 in bfloat16. Where a step sends a row to other experts, its loss
# jumps: up to 0.2 there.
SLOPE_TOLERANCE = {torch.float32: 0.02, torch.bfloat16: 0.15, torch.float16: 0.05}
SLOPE_TOLERANCE_OF_EXPERTS = 0.6


def prove_gradient(
    anatomy: Anatomy,
    sequences: Sequence[Int[np.ndarray, "_"] | Int[Tensor, "_"]],
    layers: Sequence[int] | None = None,
) -> dict[str, float]:
    """Errors and tolerances of these checks, beside those of `prove`."""
    limits, ids = tolerances(anatomy.dtype), short_sequences(sequences, anatomy.vocab_size)
    chosen = list(range(anatomy.n_layers)) if layers is None else list(layers)
    seen = gradient_pass(anatomy, ids, chosen)
    checks.check_finite(anatomy, {key: rows for key, rows in seen.items() if key[0] == GRADIENT})
    pulled_limit = PULLED_FACTOR * limits.identity
    pulled = max(_check_pulled(anatomy.layers[layer], seen, pulled_limit) for layer in chosen)
    _check_ends(ids, {layer: seen[GRADIENT, layer] for layer in chosen})
    batch = _check_batch(anatomy, ids, chosen, seen, limits.batch)
    routes = anatomy.routes_from is not None
    slope_limit = SLOPE_TOLERANCE_OF_EXPERTS if routes else SLOPE_TOLERANCE[anatomy.dtype]
    slope = _check_slope(anatomy, ids, min(chosen), seen[GRADIENT, min(chosen)], slope_limit)
    return {
        "gradient_error": pulled,
        "gradient_batch_error": batch,
        "gradient_slope_error": slope,
        "gradient_tolerance": pulled_limit,
        "gradient_batch_tolerance": limits.batch,
        "gradient_slope_tolerance": slope_limit,
    }


def gradient_exponents(anatomy: Anatomy, shape: Shape, batch: Batch, target: np.ndarray) -> tuple[int, ...]:
    """Of each stored layer, from the plan's first batch; none where the storage dtype has the range of
    float32. The sum of losses is not divided by their number, so a model in float16 needs no loss scaling."""
    if shape.storage_dtype != "float16":
        return ()
    largest: dict[int, Tensor] = {}

    def measure(site: str, layer: int, tensor: Tensor) -> None:
        largest[layer] = tensor.abs().amax().float()

    where = torch.from_numpy(np.flatnonzero(batch.mask))
    with Capture(anatomy, measure, sites=[GRADIENT], layers=shape.layers) as capture:
        with capture.graph():
            hidden = final_hidden(anatomy, inputs_of(batch.ids, batch.mask, anatomy.device))
            rows = hidden.reshape(-1, hidden.shape[-1]).index_select(0, where.to(hidden.device))
        capture.pull_back(rows, token_nll_and_slope(anatomy, rows, torch.from_numpy(target))[1])
    return tuple(_exponent(float(largest[layer])) for layer in shape.layers)


def _exponent(largest: float) -> int:
    if not 0 < largest < math.inf:  # what is not finite is refused where it is stored
        return 0
    return max(-MOST_EXPONENT, min(MOST_EXPONENT, STORED_BELOW - math.frexp(largest)[1]))


def _check_pulled(layer: LayerAnatomy, seen: Seen, limit: float) -> float:
    there = seen["block_output_grad", layer.index].double()
    y = seen["mlp_output", layer.index].double().requires_grad_()
    with torch.enable_grad():
        if layer.sum_norm is not None:
            entered = seen["block_sum", layer.index].double().requires_grad_()
            left = apply(norm_parameters(layer.sum_norm), entered)
            (there,) = torch.autograd.grad([left], [entered], [there])
        added = checks.contribution(layer, norm_parameters(layer.post_norm), y)
        (wanted,) = torch.autograd.grad([added], [y], [there])
    found = seen[GRADIENT, layer.index]
    identity = "gradient at the MLP's output = that at the block's output, through the contribution"
    names = ("gradient", found), ("taken back", wanted)
    return checks.require(layer.index, identity, row_error(found, wanted), limit, *names)


def _check_ends(ids: Sequence[Tensor], gradients: dict[int, Tensor]) -> None:
    """The last row of a sequence predicts nothing here, and nothing comes behind it."""
    last = np.cumsum([len(one) for one in ids]) - 1
    for layer, rows in gradients.items():
        if bool(rows[last].any()):
            raise ProofFailed(
                f"start-up proof, layer {layer}: the gradient is not zero in the last row of a sequence, "
                f"which has no target. Rows do not look backwards alone here: leave {GRADIENT} out."
            )


def _check_batch(
    anatomy: Anatomy, ids: Sequence[Tensor], layers: Sequence[int], batch: Seen, limit: float
) -> float:
    alone = [gradient_pass(anatomy, [one], layers) for one in ids]
    # In 16 bits rounding sends single rows to other experts, whose rows' gradients then differ everywhere.
    typical = anatomy.routes_from is not None and anatomy.dtype != torch.float32
    rows = {(GRADIENT, layer): batch[GRADIENT, layer] for layer in layers}
    return checks.check_batch(rows, alone, limit, typical=typical)


def _check_slope(
    anatomy: Anatomy,
    ids: Sequence[Tensor],
    layer: int,
    gradient: Float[Tensor, "row feature"],
    limit: float,
) -> float:
    n_targets = sum(len(one) - 1 for one in ids)
    square = float(gradient.double().square().sum())
    if not square:
        return 0.0
    step = STEP_NATS * n_targets / square
    losses = []
    for sign in (1, -1):
        with _moved(anatomy.layers[layer].mlp_last, ids, sign * step * gradient.float()):
            losses.append(float(padded_losses(anatomy, ids).double().sum()))
    said, found = 2 * step * square, losses[0] - losses[1]
    error = abs(found - said) / said
    if not error <= limit:
        raise ProofFailed(
            f"start-up proof, layer {layer}: a step along the gradient should change the summed loss by "
            f"{said:.4g} nats and changes it by {found:.4g}: error {error:.2g}, allowed {limit:.2g}. What "
            f"this model gives for a gradient is not the slope of its loss: leave {GRADIENT} out."
        )
    return error


class _moved:
    """Inside, `module` gives its output and `by`, rows of the sequences `ids` in a padded batch."""

    def __init__(self, module: nn.Module, ids: Sequence[Tensor], by: Float[Tensor, "row feature"]) -> None:
        rows = by.split([len(one) for one in ids])
        self._module, self._by = module, torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)

    def __enter__(self) -> None:
        self._handle = self._module.register_forward_hook(self._add)

    def __exit__(self, *_: object) -> None:
        self._handle.remove()

    def _add(self, _: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        tensor = first_tensor(output)
        changed = tensor + self._by.reshape(tensor.shape).to(tensor)
        if isinstance(output, Tensor):
            return changed
        return type(output)(changed if part is tensor else part for part in output)
