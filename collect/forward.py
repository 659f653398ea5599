"""One forward pass without the head: the model's own backbone, its own attention, no cache, no gradient.

In: right-padded ids with the places of real tokens. Out: final hidden states, which `nll.token_nll` turns
into losses a few hundred rows at a time. Cost: the forward pass. No mask is given where nothing is padded:
models then take their plain causal path, and models that know no mask work too.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from .anatomy import Anatomy


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
    output: Any = anatomy.backbone(**inputs, use_cache=False, return_dict=True)
    return output.last_hidden_state


@contextmanager
def evaluating(model: nn.Module, threads: int | None) -> Generator[None]:
    """Inference mode, dropout off and `threads` intra-op threads; afterwards the model is as it was given."""
    training = [module for module in model.modules() if module.training]
    before = torch.get_num_threads()
    try:
        for module in training:
            module.training = False
        if threads is not None:
            torch.set_num_threads(threads)
        with torch.inference_mode():
            yield
    finally:
        torch.set_num_threads(before)
        for module in training:
            module.training = True
