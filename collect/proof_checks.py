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
from .norm_parameters import NormParameters, apply, norm_parameters, normalises, terms
from .proof_passes import Seen

HEAD_ROWS = 16
_Named = tuple[str, Tensor]


def contribution(
    layer: LayerAnatomy, post_norm: NormParameters, mlp_output: Float[Tensor, "row feature"]
) -> Float[Tensor, "row feature"]:
    """c(y) = multiplier · post_norm(y): what the MLP adds to the residual stream."""
    return layer.multiplier * apply(post_norm, mlp_output)


def check_parts(anatomy: Anatomy) -> None:
    """The identities also hold for an MLP that begins or ends with a norm, but then its input or output is
    not the one that goes by that name."""
    for layer in anatomy.layers:
        ends = (
            ("begins", layer.mlp_first, "mlp_input", "norm"),
            ("ends", layer.mlp_last, "mlp_output", "post_norm` or `sum_norm"),
        )
        for how, module, site, name in ends:
            if normalises(module):
                raise ProofFailed(
                    f"start-up proof, layer {layer.index}: the MLP {how} with {type(module).__name__}, which "
                    f"is a norm, so that `{site}` would lie on the wrong side of it. Name it as `{name}` in "
                    "the family's row of nearline/collect/adapters.py (docs/architectures.md)."
                )


def check_width(anatomy: Anatomy, seen: Seen) -> None:
    """Every site is as wide as the residual stream."""
    for (site, layer), rows in seen.items():
        if rows.shape[-1] != anatomy.d_model:
            raise ProofFailed(
                f"start-up proof, layer {layer}: {site} has {rows.shape[-1]} features, the residual stream "
                f"{anatomy.d_model}. The span of the MLP begins or ends inside it: its row in "
                "nearline/collect/adapters.py names the wrong modules (docs/architectures.md)."
            )


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


def check_dtype(anatomy: Anatomy, seen: Seen) -> None:
    """The residual stream is in the dtype by which tolerances and the stored dtype were chosen."""
    for layer in range(anatomy.n_layers):
        found = seen["residual", layer].dtype
        if found != anatomy.dtype:
            names = [str(dtype).removeprefix("torch.") for dtype in (found, anatomy.dtype)]
            raise ProofFailed(
                f"start-up proof, layer {layer}: the residual stream is {names[0]}, the embedding's weights "
                f"are {names[1]}. Load the model in one dtype, for example dtype={names[0]}."
            )


def check_chain(anatomy: Anatomy, seen: Seen) -> None:
    """What leaves a block enters the next: layer numbers mean what they say."""
    for layer in range(1, anatomy.n_layers):
        entered, left = seen["block_input", layer], seen["block_output", layer - 1]
        names = ("block input", entered), ("output of the block before", left)
        require(layer, "block input = output of the block before", row_error(entered, left), 0.0, *names)


def check_norms(anatomy: Anatomy, seen: Seen, norms: Sequence[NormParameters], limit: float) -> float:
    """norm(residual), by the offline formula, is what the MLP received."""
    worst = 0.0
    for layer, norm in zip(anatomy.layers, norms, strict=True):
        residual, received = seen["residual", layer.index].float(), seen["mlp_input", layer.index].float()
        normed = apply(norm, residual)
        error = componentwise_error(normed - received, received, terms(norm, residual))
        names = ("norm(residual)", normed), ("MLP input", received)
        worst = max(worst, require(layer.index, "norm(residual) = MLP input", error, limit, *names))
    return worst


def check_identities(
    anatomy: Anatomy, seen: Seen, post_norms: Sequence[NormParameters], limit: float
) -> tuple[float, float]:
    """Worst error of the block's sum, and what leaving the MLP out gives in the least telling layer."""
    worst, without_mlp = 0.0, float("inf")
    for layer, post_norm in zip(anatomy.layers, post_norms, strict=True):
        stream = _stream_before(layer, seen, limit)
        whole, output = _sum(layer, seen, limit)
        added = contribution(layer, post_norm, seen["mlp_output", layer.index].float()).double()
        rest = output - sum(stream)
        magnitudes = (*stream, added, output)
        error = componentwise_error(rest - added, *magnitudes)
        also = " + attention output" if layer.parallel else ""
        names = (f"{whole} - (residual{also})", rest), ("contribution", added)
        identity = f"residual{also} + contribution = {whole}"
        worst = max(worst, require(layer.index, identity, error, limit, *names))
        without_mlp = min(without_mlp, float(componentwise_error(rest, *magnitudes).max()))
    return worst, without_mlp


def check_positions(
    entered: Float[Tensor, "position feature"], table: Float[Tensor, "position feature"], limit: float
) -> float:
    """What one token is at another position differs by the table's rows, and by nothing else."""
    differs, rows = (tensor.double() - tensor[0].double() for tensor in (entered, table))
    error = componentwise_error(differs - rows, entered, entered[:1].expand_as(entered), table)
    names = ("embedding - that at position 0", differs), ("position's row - row 0", rows)
    return require(0, "a position adds its row of the table", error, limit, *names)


def check_no_positions(entered: Float[Tensor, "position feature"], limit: float) -> None:
    """Where no table is named, a token enters block 0 the same at every position."""
    first = entered[:1].expand_as(entered)
    error = componentwise_error(entered.double() - first.double(), entered, first)
    names = ("embedding", entered), ("embedding at position 0", first)
    require(
        0, "a token enters alike at every position, where no table of them is named", error, limit, *names
    )


def check_batch(batch: Seen, alone: Sequence[Seen], limit: float, typical: bool = False) -> float:
    """A sequence gives the same rows alone and in a padded batch: by the root mean square over its rows, or,
    where single rows may go other ways, by its typical row."""
    worst = 0.0
    for (site, layer), rows in batch.items():
        start = 0
        for number, one in enumerate(alone):
            single = one[site, layer]
            together = rows[start : start + len(single)]
            start += len(single)
            rows_off = row_error(together, single)
            error = rows_off.median()[None] if typical else rows_off.square().mean().sqrt()[None]
            names = ("in the batch", together.flatten()[None]), ("alone", single.flatten()[None])
            identity = f"{site} of sequence {number} in a padded batch = {site} of the sequence alone"
            worst = max(worst, require(layer, identity, error, limit, *names))
    return worst


def check_isolation(
    before: Seen, after: Seen, untouched: Sequence[slice], limit: float, typical: bool = False
) -> float:
    """Parts that a change of document 1 must not reach have stayed: every row, or each part's typical one."""
    worst = 0.0
    for (site, layer), found in after.items():
        identity = f"{site} of other documents and of earlier rows stays when the end of document 1 changes"
        for rows in untouched:
            now, then = found[rows], before[site, layer][rows]
            names = ("after the change", now), ("before", then)
            error = row_error(now, then)
            if typical:
                error = error.median()[None]
                names = ("after the change", now.flatten()[None]), ("before", then.flatten()[None])
            worst = max(worst, require(layer, identity, error, limit, *names))
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
    error = require(anatomy.n_layers - 1, identity, row_error(chunked, whole), limit, *names)
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
    require(layer.index, "residual = block input (parallel block)", error, limit, *names)
    return residual, seen["attention_output", layer.index].double()


def _sum(layer: LayerAnatomy, seen: Seen, limit: float) -> tuple[str, Tensor]:
    """Name and value of residual + contribution: the block's output, or what its last norm made that of."""
    output = seen["block_output", layer.index]
    if layer.sum_norm is None:
        return "block output", output.double()
    entered = seen["block_sum", layer.index]
    norm = norm_parameters(layer.sum_norm)
    normed = apply(norm, entered.float())
    error = componentwise_error(normed - output.float(), output, terms(norm, entered.float()))
    names = ("norm of the sum", normed), ("block output", output)
    require(layer.index, "norm(residual + contribution) = block output", error, limit, *names)
    return "sum in front of the last norm", entered.double()


def require(
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
