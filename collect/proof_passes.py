"""The forward passes of the start-up proof: what every site showed, as rows.

In: an `Anatomy` and sequences of token ids. Out: `Seen`, a copy of each site's rows (row, feature) on the
CPU, sequence after sequence, padding left out. Cost: one forward pass each; memory: one tensor per site and
layer.
"""

from collections.abc import Sequence
from contextlib import suppress

import torch
from jaxtyping import Bool, Float, Float32, Int
from torch import Tensor

from .anatomy import Anatomy
from .capture import GRADIENTS, Capture, Sink
from .forward import accepted, last_hidden
from .nll import NO_TARGET, token_nll, token_nll_and_slope

Seen = dict[tuple[str, int], Tensor]


def padded_pass(anatomy: Anatomy, ids: Sequence[Int[Tensor, "_"]], sites: Sequence[str]) -> Seen:
    """All sequences in one batch, padded on the right, with mask and positions given, as a harvest does."""
    mask, inputs = _padded(anatomy, ids)
    seen: Seen = {}
    with Capture(anatomy, _keeper(seen, mask.bool()), sites=sites) as capture:
        anatomy.backbone(**accepted(anatomy.backbone, inputs))
        capture.check_counts()
    return seen


def gradient_pass(anatomy: Anatomy, ids: Sequence[Int[Tensor, "_"]], layers: Sequence[int]) -> Seen:
    """As `padded_pass`, and back again from the summed loss of predicting each next token: the sites that a
    gradient is checked by, and the gradients."""
    mask, inputs = _padded(anatomy, ids)
    sites = ["mlp_output", "block_sum", *GRADIENTS]
    seen: Seen = {}
    with Capture(anatomy, _keeper(seen, mask.bool()), sites=sites, layers=layers) as capture:
        with capture.graph():
            output = anatomy.backbone(**accepted(anatomy.backbone, inputs))
            rows = last_hidden(output)[mask.bool().to(anatomy.device)]
        capture.pull_back(rows, token_nll_and_slope(anatomy, rows, _targets(ids))[1])
        capture.check_counts()
    return seen


def padded_losses(anatomy: Anatomy, ids: Sequence[Int[Tensor, "_"]]) -> Float32[Tensor, "row"]:
    """Of predicting each next token, in nats, all sequences in one batch; sequence after sequence, without
    their last rows."""
    mask, inputs = _padded(anatomy, ids)
    output = anatomy.backbone(**accepted(anatomy.backbone, inputs))
    target = _targets(ids)
    rows = last_hidden(output)[mask.bool().to(anatomy.device)]
    return token_nll(anatomy, rows, target)[(target != NO_TARGET).to(rows.device)]


def plain_pass(
    anatomy: Anatomy, ids: Int[Tensor, "position"], sites: Sequence[str]
) -> tuple[Seen, Float[Tensor, "position feature"], Float[Tensor, "position vocabulary"]]:
    """One sequence through the whole model, without mask or positions: sites, final hidden states, logits."""
    seen: Seen = {}
    hidden: list[Tensor] = []
    everywhere = torch.ones(1, len(ids), dtype=torch.bool)
    handle = anatomy.backbone.register_forward_hook(lambda _, args, out: hidden.append(last_hidden(out)))
    try:
        with Capture(anatomy, _keeper(seen, everywhere), sites=sites) as capture:
            inputs: dict[str, Tensor | None] = {"input_ids": ids[None].to(anatomy.device)}
            output = anatomy.model(**accepted(anatomy.model, inputs))
            capture.check_counts()
    finally:
        handle.remove()
    return seen, hidden[0][0], output.logits[0]


def embedding_pass(anatomy: Anatomy, ids: Int[Tensor, "position"]) -> Float[Tensor, "position feature"]:
    """What enters block 0 for one sequence; the pass ends there."""
    seen: list[Tensor] = []

    def stop(site: str, layer: int, tensor: Tensor) -> None:
        seen.append(tensor[0].detach().cpu().clone())
        raise _Enough

    inputs: dict[str, Tensor | None] = {"input_ids": ids[None].to(anatomy.device)}
    with Capture(anatomy, stop, sites=["embedding"], layers=[]), suppress(_Enough):
        anatomy.backbone(**accepted(anatomy.backbone, inputs))
    return seen[0]


class _Enough(Exception):
    """Ends a forward pass."""


def _padded(
    anatomy: Anatomy, ids: Sequence[Int[Tensor, "_"]]
) -> tuple[Int[Tensor, "sequence position"], dict[str, Tensor | None]]:
    """Where the tokens are, and the inputs of a batch."""
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(one) for one in ids], batch_first=True)
    padded = torch.nn.utils.rnn.pad_sequence(list(ids), batch_first=True)
    positions = torch.arange(padded.shape[1]).expand_as(padded)
    names = ("input_ids", "attention_mask", "position_ids")
    there = [value.to(anatomy.device) for value in (padded, mask, positions)]
    return mask, dict(zip(names, there, strict=True))


def _targets(ids: Sequence[Int[Tensor, "_"]]) -> Int[Tensor, "row"]:
    none = torch.tensor([NO_TARGET])
    return torch.cat([part for one in ids for part in (one[1:], none)])


def _keeper(seen: Seen, mask: Bool[Tensor, "sequence position"]) -> Sink:
    def keep(site: str, layer: int, tensor: Tensor) -> None:
        # Indexing by a mask copies, which matters: the model may go on in place.
        seen[site, layer] = tensor.detach().cpu()[mask]

    return keep
