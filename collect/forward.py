"""One forward pass without the head: the model's own backbone, its own attention, no cache; a gradient only
where `Capture` was asked for one.

In: right-padded ids with the places of real tokens. Out: final hidden states, which `nll.token_nll` turns
into losses a few hundred rows at a time. Cost: the forward pass. No mask is given where nothing is padded:
models then take their plain causal path. A backbone is given only what its signature names: BLOOM knows no
positions, other models no mask (padding stands on the right, where causal attention never looks).
"""

import inspect
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from .anatomy import Anatomy
from .capture import first_tensor


def inputs_of(
    ids: Int[np.ndarray, "sequence position"],
    mask: Bool[np.ndarray, "sequence position"],
    device: torch.device,
) -> dict[str, Tensor | None]:
    """`input_ids`, `attention_mask` (None where nothing is padded) and `position_ids`, which always start
    at 0."""
    positions = torch.arange(ids.shape[1]).expand(ids.shape)
    return {
        "input_ids": torch.from_numpy(ids).to(device),
        "attention_mask": None if mask.all() else torch.from_numpy(mask.astype(np.int64)).to(device),
        "position_ids": positions.to(device),
    }


def final_hidden(
    anatomy: Anatomy, inputs: dict[str, Tensor | None]
) -> Float[Tensor, "sequence position feature"]:
    """What the head reads: the last hidden states after the final norm."""
    return last_hidden(anatomy.backbone(**accepted(anatomy.backbone, inputs)))


def accepted(backbone: nn.Module, inputs: dict[str, Tensor | None]) -> dict[str, Any]:
    """Of these arguments, and of "no cache", those that the backbone's forward names. What it would only
    swallow in its `**kwargs` could end up anywhere, so it is not given."""
    known = inspect.signature(backbone.forward).parameters
    given = {**inputs, "use_cache": False}
    if "input_ids" not in known:  # wrapped by something that takes whatever comes
        return given
    return {name: value for name, value in given.items() if name in known}


def last_hidden(output: Any) -> Tensor:
    """The hidden states in a backbone's answer, whether it is a tuple or has names."""
    found = getattr(output, "last_hidden_state", None)
    return found if isinstance(found, Tensor) else first_tensor(output)


@contextmanager
def evaluating(model: nn.Module, threads: int | None, *, gradients: bool = False) -> Generator[None]:
    """Inference mode, dropout off and `threads` intra-op threads; afterwards the model is as it was given.
    `gradients`: a pass may be differentiated, with respect to activations alone: no weight asks for one."""
    training = [module for module in model.modules() if module.training]
    learning = [weight for weight in model.parameters() if gradients and weight.requires_grad]
    before = torch.get_num_threads()
    try:
        for module in training:
            module.training = False
        for weight in learning:
            weight.requires_grad_(False)
        if threads is not None:
            torch.set_num_threads(threads)
        # What is made in inference mode (a table of rotations that a model keeps, say) can enter no graph.
        with torch.inference_mode(not gradients), torch.no_grad():
            yield
    finally:
        torch.set_num_threads(before)
        for module in training:
            module.training = True
        for weight in learning:
            weight.requires_grad_(True)
