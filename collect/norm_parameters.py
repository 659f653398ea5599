"""The affine form of a norm module: kind, effective weight, bias and epsilon, as the store keeps them.

In: a norm module (LayerNorm, an RMSNorm, one that multiplies by 1 + w; or None). Out: `NormParameters` in
float32, and `apply` as the float32 formula that is used offline. Class names are not trusted: every known
formula is tried on a probe and the module's own answer decides. Cost: one forward pass of the norm over a
handful of rows.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from ..store.errors import UsageError

NormKind = Literal["layernorm", "rmsnorm", "none"]

# The probe runs in float64 through float32 code, or in 16 bits; a wrong formula is off by 0.05 or more.
PROBE_TOLERANCE = 2e-2
PROBE_SEED = 20
_EPSILON_NAMES = ("eps", "variance_epsilon", "epsilon")


@dataclass(frozen=True, slots=True, eq=False)
class NormParameters:
    """y = weight · normalise(x) + bias; absent parts are None. kind "none": y = x."""

    kind: NormKind
    weight: Float[np.ndarray, "feature"] | None
    bias: Float[np.ndarray, "feature"] | None
    eps: float


NO_NORM = NormParameters("none", None, None, 0.0)


def norm_parameters(norm: nn.Module | None) -> NormParameters:
    """Effective affine of `norm` (1 + w already added where the module does so)."""
    if norm is None:
        return NO_NORM
    weight, bias = _vector(norm, "weight"), _vector(norm, "bias")
    eps = _epsilon(norm)
    candidates = [
        NormParameters(kind, effective, bias, eps)
        for kind in ("layernorm", "rmsnorm")
        for effective in ([None] if weight is None else [weight, 1.0 + weight])
    ]
    probe = _probe(norm, weight)
    with torch.no_grad():
        wanted = norm.forward(probe).float()
    errors = [_relative_error(apply(candidate, probe.float()), wanted) for candidate in candidates]
    best = int(np.argmin(errors))
    if not errors[best] <= PROBE_TOLERANCE:
        raise UsageError(
            f"{type(norm).__name__} is neither a LayerNorm nor an RMSNorm with weight w or 1 + w: the best "
            f"of these is off by {errors[best]:.2g} (allowed {PROBE_TOLERANCE:g}). This family needs its "
            "own formula."
        )
    return candidates[best]


def apply(norm: NormParameters, residual: Float[Tensor, "*row feature"]) -> Float[Tensor, "*row feature"]:
    """The offline formula on a float32 tensor."""
    if norm.kind == "none":
        return residual
    centred = residual
    if norm.kind == "layernorm":
        centred = residual - residual.mean(-1, keepdim=True)
    scaled = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + norm.eps)
    if norm.weight is not None:
        scaled = scaled * torch.tensor(norm.weight).to(scaled)
    if norm.bias is not None:
        scaled = scaled + torch.tensor(norm.bias).to(scaled)
    return scaled


def terms(norm: NormParameters, residual: Float[Tensor, "*row feature"]) -> Float[Tensor, "*row feature"]:
    """Sum of |terms| that the formula adds up in each feature: the scale of its rounding errors."""
    if norm.kind == "none":
        return residual.abs()
    mean = (
        residual.mean(-1, keepdim=True) if norm.kind == "layernorm" else torch.zeros_like(residual[..., :1])
    )
    centred = residual - mean
    factor = torch.rsqrt(centred.square().mean(-1, keepdim=True) + norm.eps)
    size = (residual.abs() + mean.abs()) * factor
    if norm.weight is not None:
        size = size * torch.tensor(norm.weight).to(size).abs()
    if norm.bias is not None:
        size = size + torch.tensor(norm.bias).to(size).abs()
    return size


def _vector(norm: nn.Module, name: str) -> Float[np.ndarray, "feature"] | None:
    value = getattr(norm, name, None)
    if not isinstance(value, Tensor):
        return None
    if value.is_meta:
        raise UsageError(
            f"the {name} of {type(norm).__name__} is not in memory (offloaded, or a model without "
            "weights). Load the model whole, on one device."
        )
    return value.detach().float().cpu().numpy().copy()


def _epsilon(norm: nn.Module) -> float:
    for name in _EPSILON_NAMES:
        value = getattr(norm, name, None)
        if value is not None:
            return float(value)
    raise UsageError(
        f"{type(norm).__name__} has no epsilon under {', '.join(_EPSILON_NAMES)}: this norm is not known "
        "here."
    )


def _probe(norm: nn.Module, weight: np.ndarray | None) -> Tensor:
    """Rows with a mean, at a large and at a small scale, so that centring and epsilon both matter."""
    n_features = _n_features(norm, weight)
    generator = torch.Generator().manual_seed(PROBE_SEED)
    rows = torch.randn(6, n_features, generator=generator) + 0.7
    rows = rows * torch.tensor([1.0, 1.0, 4.0, 4.0, 0.05, 0.05])[:, None]
    like = next(norm.parameters(), None)
    return rows if like is None else rows.to(device=like.device, dtype=like.dtype)


def _n_features(norm: nn.Module, weight: np.ndarray | None) -> int:
    if weight is not None:
        return int(weight.shape[0])
    shape = getattr(norm, "normalized_shape", None)
    return int(shape[-1]) if shape else 64


def _relative_error(got: Tensor, wanted: Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm().clamp_min(torch.finfo(torch.float32).tiny))
