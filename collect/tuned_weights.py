"""Weights in training: those that learn, those that stand in for MLPs, kept as safetensors and put back.

Cost: a copy of the weights.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors.torch import load_file, save
from torch import Tensor, nn

from ..store import durable
from .linearised import SUBMODULE


def trained(model: Any) -> dict[str, Float[Tensor, "..."]]:
    """The weights that learn, as they are now."""
    return {name: weight.detach() for name, weight in model.named_parameters() if weight.requires_grad}


def standing(model: Any) -> dict[str, Float[Tensor, "..."]]:
    """The weights that learn, and those that stand in for MLPs."""
    ours = {name: one for name, one in model.named_parameters() if f".{SUBMODULE}." in f".{name}"}
    return trained(model) | {name: one.detach() for name, one in ours.items()}


def save_weights(weights: Mapping[str, Tensor], path: Path) -> None:
    durable.write_file(path, save({name: one.contiguous().cpu() for name, one in weights.items()}))


def load_weights(path: Path) -> dict[str, Tensor]:
    return load_file(path)


def put_weights(model: nn.Module, weights: Mapping[str, Tensor], *, some: bool = False) -> None:
    """Into the weights of these names, in place. `some`: those that have no place are left out."""
    there = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in weights.items():
            if name in there or not some:
                there[name].copy_(value)
