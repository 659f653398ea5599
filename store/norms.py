"""Norms recomputed offline: residual rows in, MLP input rows out; raw MLP output in, contribution out.

In: float32 rows (token, feature) and the effective affine a store keeps. Out: float32 rows of the same shape.
Cost: one pass over the rows in tiles that stay in the processor's cache, no temporary larger than a tile. The
store keeps the tensor *before* the norm because every other site can be derived from it; this is that
derivation.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast, get_args

import numpy as np
from jaxtyping import Float, Float32

from .errors import UsageError

if TYPE_CHECKING:
    from .reader import Reader

NormKind = Literal["layernorm", "rmsnorm", "none"]

# 128 Ki float32 values = 512 KiB: a tile and its result stay in the second-level cache of current CPUs.
TILE_VALUES = 1 << 17


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm as the model applies it: weight · normalise(x) + bias, with Gemma's 1 + w folded in already."""

    kind: NormKind
    weight: Float32[np.ndarray, "feature"] | None = None
    bias: Float32[np.ndarray, "feature"] | None = None
    epsilon: float = 0.0

    @property
    def is_identity(self) -> bool:
        return self.kind == "none" and self.weight is None and self.bias is None


def norm_of(reader: "Reader", layer: int) -> Norm:
    """The norm in front of the MLP of one stored layer."""
    index, facts = reader.layers.index(layer), reader.attributes.norm

    def affine(name: str) -> np.ndarray | None:
        values = reader.affine(name)
        return None if values is None else np.ascontiguousarray(values[index], dtype=np.float32)

    return Norm(
        parse_kind(facts.kinds[index]),
        affine("norm_weight"),
        affine("norm_bias"),
        float(facts.epsilons[index]),
    )


def parse_kind(kind: object) -> NormKind:
    """The norm's kind out of a store's attributes."""
    if kind not in get_args(NormKind):
        raise UsageError(f"norm kind {kind!r} is unknown; a store may say {', '.join(get_args(NormKind))}")
    return cast(NormKind, kind)


def apply_norm(
    rows: Float32[np.ndarray, "token feature"],
    norm: Norm,
    out: Float32[np.ndarray, "token feature"] | None = None,
) -> Float32[np.ndarray, "token feature"]:
    """`norm(rows)`; `out` may be `rows` itself."""
    out = np.empty_like(rows) if out is None else out
    tile = max(1, TILE_VALUES // max(1, rows.shape[1]))
    for start in range(0, rows.shape[0], tile):
        _normalise(rows[start : start + tile], norm, out[start : start + tile])
    return out


def _normalise(rows: np.ndarray, norm: Norm, out: np.ndarray) -> None:
    if norm.kind == "layernorm":
        np.subtract(rows, rows.mean(axis=1, keepdims=True), out=out)
        out *= _inverse_scale(out, norm.epsilon)
    elif norm.kind == "rmsnorm":
        np.multiply(rows, _inverse_scale(rows, norm.epsilon), out=out)
    elif out is not rows:
        out[...] = rows
    if norm.weight is not None:
        out *= norm.weight
    if norm.bias is not None:
        out += norm.bias


def _inverse_scale(rows: np.ndarray, epsilon: float) -> np.ndarray:
    mean_square = np.einsum("tf,tf->t", rows, rows) / np.float32(rows.shape[1])
    return (1.0 / np.sqrt(mean_square + np.float32(epsilon)))[:, None]


@dataclass(frozen=True, slots=True)
class Contribution:
    """c(y) = multiplier · post_norm(y): what the residual stream receives of a raw MLP output."""

    post_norm: Norm
    multiplier: float = 1.0

    @property
    def is_scaling(self) -> bool:
        """Whether c is only a constant factor, so that every R² of c(y) equals that of y."""
        return self.post_norm.is_identity

    def __call__(self, rows: Float32[np.ndarray, "token feature"]) -> Float32[np.ndarray, "token feature"]:
        out = apply_norm(rows, self.post_norm)
        if self.multiplier != 1.0:
            out *= np.float32(self.multiplier)
        return out


def squared_norms(rows: Float[np.ndarray, "token feature"]) -> Float[np.ndarray, "token"]:
    """‖row‖² of each row."""
    return np.einsum("tf,tf->t", rows, rows)
