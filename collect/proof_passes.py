"""The forward passes of the start-up proof: what every site showed, as rows.

In: an `Anatomy` and sequences of token ids. Out: `Seen`, a copy of each site's rows (row, feature) on the
CPU, sequence after sequence, padding left out. Cost: one forward pass each; memory: one tensor per site and
layer.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .anatomy import Anatomy
from .capture import Capture, Sink, first_tensor

Seen = dict[tuple[str, int], Tensor]


def padded_pass(anatomy: Anatomy, ids: Sequence[Int[Tensor, "_"]], sites: Sequence[str]) -> Seen:
    """All sequences in one batch, padded on the right, with mask and positions given, as a harvest does."""
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(one) for one in ids], batch_first=True)
    padded = torch.nn.utils.rnn.pad_sequence(list(ids), batch_first=True)
    positions = torch.arange(padded.shape[1]).expand_as(padded)
    inputs = {"input_ids": padded, "attention_mask": mask, "position_ids": positions}
    seen: Seen = {}
    with Capture(anatomy, _keeper(seen, mask.bool()), sites=sites) as capture:
        there = {name: value.to(anatomy.device) for name, value in inputs.items()}
        anatomy.backbone(**there, use_cache=False)
        capture.check_counts()
    return seen


def plain_pass(
    anatomy: Anatomy, ids: Int[Tensor, "position"], sites: Sequence[str]
) -> tuple[Seen, Float[Tensor, "position feature"], Float[Tensor, "position vocabulary"]]:
    """One sequence through the whole model, without mask or positions: sites, final hidden states, logits."""
    seen: Seen = {}
    hidden: list[Tensor] = []
    everywhere = torch.ones(1, len(ids), dtype=torch.bool)
    handle = anatomy.backbone.register_forward_hook(lambda _, args, out: hidden.append(_last_hidden(out)))
    try:
        with Capture(anatomy, _keeper(seen, everywhere), sites=sites) as capture:
            output = anatomy.model(input_ids=ids[None].to(anatomy.device), use_cache=False)
            capture.check_counts()
    finally:
        handle.remove()
    return seen, hidden[0][0], output.logits[0]


def _keeper(seen: Seen, mask: Bool[Tensor, "sequence position"]) -> Sink:
    def keep(site: str, layer: int, tensor: Tensor) -> None:
        # Indexing by a mask copies, which matters: the model may go on in place.
        seen[site, layer] = tensor.detach().cpu()[mask]

    return keep


def _last_hidden(output: object) -> Tensor:
    found = getattr(output, "last_hidden_state", None)
    return found if isinstance(found, Tensor) else first_tensor(output)
