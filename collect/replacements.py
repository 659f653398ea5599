"""What is computed in place of an MLP: rows of its input in, rows of an output out, on the model's device.

Weights keep the dtype that they are given: the input is cast to it, and what comes out has it too. Cost: d²
multiplications a row, 2·d·k for rank k, none for a constant.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional


class Replacement(Protocol):
    """A function of rows that can be taken to another device."""

    def __call__(self, x: Float[Tensor, "*row feature"]) -> Float[Tensor, "*row feature_out"]: ...

    def on(self, device: torch.device) -> "Replacement": ...


@dataclass(frozen=True, slots=True, eq=False)
class LinearMap:
    """weight @ x + bias."""

    weight: Float[Tensor, "feature_out feature"]
    bias: Float[Tensor, "feature_out"]

    def __call__(self, x: Float[Tensor, "*row feature"]) -> Float[Tensor, "*row feature_out"]:
        return functional.linear(x.to(self.weight.dtype), self.weight, self.bias)

    def on(self, device: torch.device) -> "LinearMap":
        return LinearMap(self.weight.to(device), self.bias.to(device))


@dataclass(frozen=True, slots=True, eq=False)
class LowRankMap:
    """up @ (down @ x) + bias."""

    down: Float[Tensor, "rank feature"]
    up: Float[Tensor, "feature_out rank"]
    bias: Float[Tensor, "feature_out"]

    def __call__(self, x: Float[Tensor, "*row feature"]) -> Float[Tensor, "*row feature_out"]:
        return functional.linear(functional.linear(x.to(self.down.dtype), self.down), self.up, self.bias)

    def on(self, device: torch.device) -> "LowRankMap":
        return LowRankMap(self.down.to(device), self.up.to(device), self.bias.to(device))


@dataclass(frozen=True, slots=True, eq=False)
class Constant:
    """The same output for every row."""

    value: Float[Tensor, "feature_out"]

    def __call__(self, x: Float[Tensor, "*row feature"]) -> Float[Tensor, "*row feature_out"]:
        return self.value.expand(*x.shape[:-1], self.value.numel())

    def on(self, device: torch.device) -> "Constant":
        return Constant(self.value.to(device))
