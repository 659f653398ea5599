"""Moments summed where the model runs: rows of a layer in, the float64 sums of `analyze.moments` out.

Rows are cast to the storage dtype first and normed in float32 after that, as whoever reads them from a store
would have them. Each product takes at most 2048 centred rows in float32, with TF32 and its like off, and is
added in float64: the arithmetic of `analyze.moments.MomentSums`, operation for operation. Memory: two d × d
sums in float64 for each sum of each layer. Cost: 4·d² flops a row and a few passes over the rows.
"""

import math
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float32, Int
from torch import Tensor

from ..analyze.moments import Moments
from ..analyze.surrogates import LayerMoments
from .needs import PRODUCT_ROWS
from .norm_parameters import NormParameters


class DeviceNorm:
    """`analyze.norms.apply_norm` on a device; its parameters go there once."""

    def __init__(self, norm: NormParameters) -> None:
        self._norm = norm
        self._there: dict[torch.device, tuple[Tensor | None, Tensor | None]] = {}

    @property
    def is_identity(self) -> bool:
        return self._norm.kind == "none" and self._norm.weight is None and self._norm.bias is None

    def __call__(self, rows: Float32[Tensor, "row feature"]) -> Float32[Tensor, "row feature"]:
        """The normed rows, never the memory of `rows` itself: the model may write there."""
        weight, bias = self._on(rows.device)
        out = rows - rows.mean(dim=1, keepdim=True) if self._norm.kind == "layernorm" else rows.clone()
        if self._norm.kind != "none":
            out *= 1.0 / torch.sqrt(out.square().mean(dim=1, keepdim=True) + self._norm.eps)
        if weight is not None:
            out *= weight
        if bias is not None:
            out += bias
        return out

    def _on(self, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
        if device not in self._there:
            parts = [self._norm.weight, self._norm.bias]
            weight, bias = (
                None if part is None else torch.tensor(part, dtype=torch.float32, device=device)
                for part in parts
            )
            self._there[device] = weight, bias
        return self._there[device]


class DeviceSums:
    """All sums of one layer, on the device of its tensors: `add` rows to one of them, then `moments`."""

    def __init__(self, n_sums: int, width: int, device: torch.device) -> None:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(n_sums, *shape, dtype=torch.float64, device=device)

        self._n = [0] * n_sums
        self._mean_x, self._mean_y, self._cyy = zeros(width), zeros(width), zeros(width)
        self._cxx, self._cxy = zeros(width, width), zeros(width, width)
        self._contribution = torch.zeros(width, dtype=torch.float64, device=device)

    def add(
        self,
        number: int,
        x: Float32[Tensor, "row feature"],
        y: Float32[Tensor, "row target"],
        index: Int[Tensor, "chosen"],
    ) -> None:
        """Take the chosen rows into one sum."""
        with full_precision():
            for chosen in index.split(PRODUCT_ROWS):
                self._add(number, x.index_select(0, chosen), y.index_select(0, chosen))

    def add_contribution(self, rows: Float32[Tensor, "row target"]) -> None:
        self._contribution += rows.sum(dim=0, dtype=torch.float64)

    def _add(self, number: int, x: Tensor, y: Tensor) -> None:
        """`MomentSums._flush`: x and y are ours, and are centred in place."""
        n, before = len(x), self._n[number]
        between, share = before * n / (before + n), n / (before + n)
        dx, dy = _centre(x) - self._mean_x[number], _centre(y) - self._mean_y[number]
        self._cyy[number] += y.double().square().sum(dim=0) + between * dy * dy
        # One more row carries the between-part term of Chan.
        x = torch.cat([x, (math.sqrt(between) * dx).float()[None]])
        y = torch.cat([y, (math.sqrt(between) * dy).float()[None]])
        self._cxx[number] += x.T @ x
        self._cxy[number] += x.T @ y
        self._mean_x[number] += share * dx
        self._mean_y[number] += share * dy
        self._n[number] += n

    def moments(self, n_folds: int, *, with_contribution: bool) -> LayerMoments:
        """On the host; sums are in the order folds, test, sink rows of fit, sink rows of test."""
        names = ("mean_x", "mean_y", "cxx", "cxy", "cyy")
        arrays = [getattr(self, f"_{name}").cpu().numpy() for name in names]
        parts = [Moments(n, *(array[index] for array in arrays)) for index, n in enumerate(self._n)]
        contribution: np.ndarray | None = self._contribution.cpu().numpy() if with_contribution else None
        return LayerMoments(tuple(parts[:n_folds]), parts[n_folds], contribution, *parts[n_folds + 1 :])


@contextmanager
def full_precision() -> Generator[None, None, None]:
    """Float32 products in float32: no TF32, no bfloat16 pieces; the settings before come back."""
    mkldnn: Any = torch.backends.mkldnn
    if not hasattr(torch.backends.cuda.matmul, "fp32_precision"):  # before torch 2.9
        with _set_to(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "highest"):
            yield
        return
    with ExitStack() as stack:
        for backend in (torch.backends.cuda.matmul, mkldnn.matmul):
            read, write = (
                partial(getattr, backend, "fp32_precision"),
                partial(setattr, backend, "fp32_precision"),
            )
            stack.enter_context(_set_to(read, write, "ieee"))
        yield


@contextmanager
def _set_to(read: Callable[[], str], write: Callable[[str], Any], value: str) -> Generator[None, None, None]:
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)


def _centre(rows: Float32[Tensor, "row feature"]) -> Float[Tensor, "feature"]:
    """Centre in place; their float64 mean. The second step takes up the first one's rounding."""
    mean = torch.zeros(rows.shape[1], dtype=torch.float64, device=rows.device)
    for _ in range(2):
        shift = rows.mean(dim=0)
        rows -= shift
        mean += shift
    return mean
