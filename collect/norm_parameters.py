"""The affine form of a norm module: kind, effective weight, bias and epsilon, as the store keeps them.

In: a norm module (LayerNorm, an RMSNorm, one that multiplies by 1 + w; or None). Out: `NormParameters` in
float32, and `apply` as the float32 formula that is used offline. Class names are not trusted: every known
formula is tried on a probe and the module's own answer decides. Cost: one forward pass of the norm over a
handful of rows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from ..store.errors import UsageError
from .peft_state import acting_module
from .residence import at_hand

NormKind = Literal["layernorm", "rmsnorm", "none"]

# The probe runs in float64 through float32 code, or in 16 bits; a wrong formula is off by 0.05 or more.
PROBE_TOLERANCE = 2e-2
PROBE_SEED = 20
_EPSILON_NAMES = ("eps", "variance_epsilon", "epsilon")
# Tried in turn where a module keeps its epsilon to itself (OLMo writes it into the formula).
_EPSILONS = (1e-5, 1e-6, 1e-8, 1e-12, *(torch.finfo(dtype).eps for dtype in (torch.float32, torch.bfloat16)))


@dataclass(frozen=True, slots=True, eq=False)
class NormParameters:
    """y = weight · normalise(x) + bias; absent parts are None. kind "none": y = x."""

    kind: NormKind
    weight: Float[np.ndarray, "feature"] | None
    bias: Float[np.ndarray, "feature"] | None
    eps: float


NO_NORM = NormParameters("none", None, None, 0.0)


def norm_parameters(norm: nn.Module | None) -> NormParameters:
    """Effective affine of `norm` (1 + w already added where the module does so), also of an offloaded one."""
    if norm is None:
        return NO_NORM
    norm = acting_module(norm)
    with at_hand(norm):
        return _parameters(norm)


def _parameters(norm: nn.Module) -> NormParameters:
    weight, bias = _vector(norm, "weight"), _vector(norm, "bias")
    candidates = [
        NormParameters(kind, effective, bias, eps)
        for kind in ("layernorm", "rmsnorm")
        for effective in ([None] if weight is None else [weight, 1.0 + weight])
        for eps in _epsilons(norm)
    ]
    probe = _probe(norm, weight)
    with torch.no_grad():
        wanted = norm.forward(probe).float()
    probe, wanted = probe.cpu(), wanted.cpu()
    errors = [_relative_error(apply(candidate, probe.float()), wanted) for candidate in candidates]
    best = int(np.argmin(errors))
    if not errors[best] <= PROBE_TOLERANCE:
        raise UsageError(
            f"{type(norm).__name__} is neither a LayerNorm nor an RMSNorm with weight w or 1 + w: the best "
            f"of these is off by {errors[best]:.2g} (allowed {PROBE_TOLERANCE:g}). This family needs its "
            "own formula."
        )
    return candidates[best]


def is_norm(module: nn.Module) -> bool:
    """Whether a known formula gives what `module` gives."""
    return _holds(module, lambda: norm_parameters(module).kind != "none")


def normalises(module: nn.Module) -> bool:
    """Whether twice the input gives the same output, as with every norm, of known formula or not."""

    def invariant() -> bool:
        with at_hand(module), torch.no_grad():
            probe = _probe(module, _vector(module, "weight"))[:4]
            once, twice = module.forward(probe).float(), module.forward(2 * probe).float()
        return bool(once.any()) and _relative_error(twice, once) <= PROBE_TOLERANCE

    return _holds(module, invariant)


def _holds(module: nn.Module, question: Callable[[], bool]) -> bool:
    """The answer for a module that could be a norm: one without a matrix among its weights."""
    if any(weight.ndim > 1 for weight in module.parameters()):
        return False
    try:
        return question()
    except Exception:
        # Any module may be asked, and may do anything with a probe that is not meant for it: no norm.
        return False


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


def _epsilons(norm: nn.Module) -> tuple[float, ...]:
    """The module's own, or those to try."""
    found = (getattr(norm, name, None) for name in _EPSILON_NAMES)
    return next(((float(value),) for value in found if value is not None), _EPSILONS)


def _probe(norm: nn.Module, weight: np.ndarray | None) -> Tensor:
    """Rows with a mean, at large and small scales, so that centring and epsilon both matter: the last rows'
    variance is of the order of the epsilons."""
    n_features = _n_features(norm, weight)
    generator = torch.Generator().manual_seed(PROBE_SEED)
    rows = torch.randn(8, n_features, generator=generator) + 0.7
    rows = rows * torch.tensor([1.0, 1.0, 4.0, 4.0, 0.05, 0.05, 2e-3, 5e-4])[:, None]
    like = next(norm.parameters(), None)
    return rows if like is None else rows.to(device=like.device, dtype=like.dtype)


def _n_features(norm: nn.Module, weight: np.ndarray | None) -> int:
    if weight is not None:
        return int(weight.shape[0])
    shape = getattr(norm, "normalized_shape", None)
    return int(shape[-1]) if shape else 64


def _relative_error(got: Tensor, wanted: Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm().clamp_min(torch.finfo(torch.float32).tiny))
