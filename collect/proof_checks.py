"""The identities of the start-up proof, each a comparison of captured tensors.

In: what the passes saw. Out: the worst error of each check; `ProofFailed` naming layer, identity and both
magnitudes where an error exceeds its limit (or is not a number). Cost: float64 arithmetic on a few hundred
rows per layer.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from ..store.errors import NotFinite, ProofFailed
from .agreement import componentwise_error, row_error
from .anatomy import Anatomy, LayerAnatomy, logits
from .norm_parameters import NormParameters, apply, terms
from .proof_passes import Seen

HEAD_ROWS = 16
_Named = tuple[str, Tensor]


def contribution(
    layer: LayerAnatomy, post_norm: NormParameters, mlp_output: Float[Tensor, "row feature"]
) -> Float[Tensor, "row feature"]:
    """c(y) = multiplier · post_norm(y): what the MLP adds to the residual stream."""
    return layer.multiplier * apply(post_norm, mlp_output)


def check_finite(anatomy: Anatomy, seen: Seen) -> None:
    """Nothing is infinite or NaN; a half-precision overflow shows here, before anything is stored."""
    for (site, layer), rows in seen.items():
        n_bad = int((~torch.isfinite(rows)).sum())
        if n_bad:
            dtype = str(anatomy.dtype).removeprefix("torch.")
            raise NotFinite(
                f"start-up proof: {site} layer {layer} holds {n_bad} values that are not finite, in "
                f"{dtype}. Load the model with dtype bfloat16 or float32; if it is so there too, its "
                "weights are damaged."
            )


def check_chain(anatomy: Anatomy, seen: Seen) -> None:
    """What leaves a block enters the next: layer numbers mean what they say."""
    for layer in range(1, anatomy.n_layers):
        entered, left = seen["block_input", layer], seen["block_output", layer - 1]
        names = ("block input", entered), ("output of the block before", left)
        _require(layer, "block input = output of the block before", row_error(entered, left), 0.0, *names)


def check_norms(anatomy: Anatomy, seen: Seen, norms: Sequence[NormParameters], limit: float) -> float:
    """norm(residual), by the offline formula, is what the MLP received."""
    worst = 0.0
    for layer, norm in zip(anatomy.layers, norms, strict=True):
        residual, received = seen["residual", layer.index].float(), seen["mlp_input", layer.index].float()
        normed = apply(norm, residual)
        error = componentwise_error(normed - received, received, terms(norm, residual))
        names = ("norm(residual)", normed), ("MLP input", received)
        worst = max(worst, _require(layer.index, "norm(residual) = MLP input", error, limit, *names))
    return worst


def check_identities(
    anatomy: Anatomy, seen: Seen, post_norms: Sequence[NormParameters], limit: float
) -> tuple[float, float]:
    """Worst error of the block's sum, and what leaving the MLP out gives in the least telling layer."""
    worst, without_mlp = 0.0, float("inf")
    for layer, post_norm in zip(anatomy.layers, post_norms, strict=True):
        stream = _stream_before(layer, seen, limit)
        output = seen["block_output", layer.index].double()
        added = contribution(layer, post_norm, seen["mlp_output", layer.index].float()).double()
        rest = output - sum(stream)
        magnitudes = (*stream, added, output)
        error = componentwise_error(rest - added, *magnitudes)
        also = " + attention output" if layer.parallel else ""
        names = (f"block output - (residual{also})", rest), ("contribution", added)
        identity = f"residual{also} + contribution = block output"
        worst = max(worst, _require(layer.index, identity, error, limit, *names))
        without_mlp = min(without_mlp, float(componentwise_error(rest, *magnitudes).max()))
    return worst, without_mlp


def check_batch(batch: Seen, alone: Sequence[Seen], limit: float) -> float:
    """A sequence gives the same rows alone and in a padded batch (root mean square over its rows)."""
    worst = 0.0
    for (site, layer), rows in batch.items():
        start = 0
        for number, one in enumerate(alone):
            single = one[site, layer]
            together = rows[start : start + len(single)]
            start += len(single)
            error = row_error(together, single).square().mean().sqrt()[None]
            names = ("in the batch", together.flatten()[None]), ("alone", single.flatten()[None])
            identity = f"{site} of sequence {number} in a padded batch = {site} of the sequence alone"
            worst = max(worst, _require(layer, identity, error, limit, *names))
    return worst


def check_isolation(before: Seen, after: Seen, untouched: Sequence[int], limit: float) -> float:
    """Rows that a change of document 1 must not reach have stayed."""
    rows = torch.as_tensor(untouched)
    worst = 0.0
    for (site, layer), found in after.items():
        now, then = found[rows], before[site, layer][rows]
        names = ("after the change", now), ("before", then)
        identity = f"{site} of other documents and of earlier rows stays when the end of document 1 changes"
        worst = max(worst, _require(layer, identity, row_error(now, then), limit, *names))
    return worst


def check_logits(
    anatomy: Anatomy,
    hidden: Float[Tensor, "position feature"],
    wanted: Float[Tensor, "position vocabulary"],
    ids: Tensor,
    limit: float,
) -> tuple[float, float]:
    """The head on chunks of rows gives the model's own logits. Also the largest change of nll, in nats."""
    chunked = torch.cat([logits(anatomy, rows) for rows in hidden.split(HEAD_ROWS)]).float().cpu()
    whole = wanted.float().cpu()
    names = ("head on final hidden states", chunked), ("model logits", whole)
    identity = "head(final hidden states) = model logits"
    error = _require(anatomy.n_layers - 1, identity, row_error(chunked, whole), limit, *names)
    nll = [
        torch.nn.functional.cross_entropy(rows[:-1], ids[1:], reduction="none") for rows in (chunked, whole)
    ]
    return error, float((nll[0] - nll[1]).abs().max())


def _stream_before(layer: LayerAnatomy, seen: Seen, limit: float) -> tuple[Tensor, ...]:
    """What the contribution is added to: the residual, in parallel blocks with the attention's output."""
    residual = seen["residual", layer.index].double()
    if not layer.parallel:
        return (residual,)
    entered = seen["block_input", layer.index].double()
    error = componentwise_error(residual - entered, residual, entered)
    names = ("residual", residual), ("block input", entered)
    _require(layer.index, "residual = block input (parallel block)", error, limit, *names)
    return residual, seen["attention_output", layer.index].double()


def _require(
    layer: int, identity: str, error: Float[Tensor, "row"], limit: float, left: _Named, right: _Named
) -> float:
    """The worst error, when all are within the limit. NaN is not."""
    if bool((error <= limit).all()):
        return float(error.max())
    row = int(error.nan_to_num(nan=float("inf")).argmax())
    sizes = ", ".join(f"‖{name}‖ = {float(rows[row].double().norm()):.4g}" for name, rows in (left, right))
    raise ProofFailed(
        f"start-up proof, layer {layer}: [{identity}] does not hold. Worst row {row}: {sizes}; error "
        f"{float(error[row]):.2g}, allowed {limit:.2g}. These tensors are not what they would be called, "
        "so nothing is collected: the model's family needs a row of its own in "
        "nearline/collect/adapters.py."
    )
