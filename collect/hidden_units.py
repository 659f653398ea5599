"""The hidden layer of a gate: out · gelu(weight @ x + bias) of each row, in float32.

In: rows of an MLP's input. Out: what the layer adds to the logit of p(linear); gelu is the exact one, by the
error function. Cost: units · (d + 1) multiplications a row.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float32
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True, eq=False)
class HiddenUnits:
    """Weights of a layer between x and the logit."""

    weight: Float32[Tensor, "unit feature"]
    bias: Float32[Tensor, "unit"]
    out: Float32[Tensor, "unit"]

    @property
    def n(self) -> int:
        return self.bias.numel()

    def __call__(self, x: Float32[Tensor, "row feature"]) -> Float32[Tensor, "row"]:
        return functional.gelu(functional.linear(x, self.weight, self.bias)) @ self.out

    def on(self, device: torch.device) -> "HiddenUnits":
        return HiddenUnits(self.weight.to(device), self.bias.to(device), self.out.to(device))
