"""Floating-point operations of a decoder, by module, from the shapes of its weights.

In: an `Anatomy` (of a model on the meta device too). Out: a frozen `ModelFlops`: operations of one token in
each layer's MLP, attention and other products, and in the head; a multiplication and an addition are two.
Counted are products of matrices: norms, activations, softmax, rotations, look-ups and additions of biases are
left out, as in torch.utils.flop_counter. Of experts those count that a token is sent to. Attention counts the
keys that a token may see, at its length and within a sliding window; a kernel that computes masked scores
too does more, which `masked=True` counts. Cost: a walk over the modules.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

from ..store.errors import UsageError
from .anatomy import Anatomy, LayerAnatomy
from .live_models import config_of

PER_PRODUCT = 2  # a multiplication and an addition
# How configs call the number of experts that a token is sent to, and how many there are.
_ACTIVE = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_EXPERT_CONFIGS = ("ffn_config",)  # configs inside a config
_WIDE_VALUES = ("diffllama",)  # each head reads the values of two


@dataclass(frozen=True, slots=True)
class LayerFlops:
    """One decoder block. All but `per_key` are operations a token; parameters are counted whole."""

    mlp: float
    projections: int  # of attention
    per_key: int  # scores and values of one token with one key, all heads
    window: int | None  # keys at most
    other: float  # products of the block outside attention and MLP
    mlp_parameters: int

    def keys(self, length: int, *, masked: bool = False) -> float:
        """Keys of a token, the mean over the positions of a window of `length`. `masked`: all of them."""
        if masked:
            return float(length)
        seen = length if self.window is None else min(length, self.window)
        # 1 + 2 + … + seen, then `seen` each for the rest.
        return (seen * (seen + 1) / 2 + (length - seen) * seen) / length

    def last_keys(self, length: int) -> int:
        """Keys of one more token behind `length - 1` others."""
        return length if self.window is None else min(length, self.window)

    def attention(self, keys: float) -> float:
        return self.projections + self.per_key * keys


@dataclass(frozen=True)
class ModelFlops:
    """A whole decoder. `head`: the logits of one token, and projections outside of blocks."""

    layers: tuple[LayerFlops, ...]
    head: int
    d_model: int
    parameters: int

    @cached_property
    def mlp(self) -> float:
        """Of all MLPs, a token."""
        return math.fsum(layer.mlp for layer in self.layers)

    @cached_property
    def other(self) -> float:
        return math.fsum(layer.other for layer in self.layers)

    def attention(self, length: int, *, last: bool = False, masked: bool = False) -> float:
        """Of all attentions, a token: the mean over a window of `length`, or its last token."""
        return math.fsum(
            layer.attention(layer.last_keys(length) if last else layer.keys(length, masked=masked))
            for layer in self.layers
        )

    def total(self, length: int, *, last: bool = False) -> float:
        """Of the model as it is, a token."""
        return self.mlp + self.other + self.attention(length, last=last) + self.head


def model_flops(anatomy: Anatomy) -> ModelFlops:
    """The operations of a model's modules, from their shapes."""
    config = config_of(anatomy.model)
    return ModelFlops(
        layers=tuple(_layer(layer, config) for layer in anatomy.layers),
        head=_products(anatomy.head, config) + _around(anatomy, config),
        d_model=anatomy.d_model,
        parameters=sum(weight.numel() for weight in anatomy.model.parameters()),
    )


def gate_flops(d_model: int, hidden: int | None = None) -> int:
    """Of a gate on x, a token: a vector, or a layer of hidden units and a vector on them."""
    return PER_PRODUCT * (d_model if hidden is None else hidden * (d_model + 1))


def span_modules(layer: LayerAnatomy) -> list[nn.Module]:
    """The modules of an MLP's span, each once: the first, the last, and what the block names in between."""
    if layer.mlp_first is layer.mlp_last:
        return list(layer.mlp_first.modules())
    order = list(layer.block.modules())
    first = order.index(layer.mlp_first)
    last = order.index(layer.mlp_last) + sum(1 for _ in layer.mlp_last.modules())
    if last <= first:  # named in another order than they run
        return [*layer.mlp_first.modules(), *layer.mlp_last.modules()]
    return order[first:last]


def _layer(layer: LayerAnatomy, config: Any) -> LayerFlops:
    span = span_modules(layer)
    names = {module: name for name, module in layer.block.named_modules()}
    attention = set(layer.attention.modules()) - set(span)
    rest = [module for module in names if module not in attention and module not in set(span)]
    per_key = PER_PRODUCT * sum(_widths(layer.attention, config))
    return LayerFlops(
        mlp=sum(_own_products(module, names.get(module, ""), config) for module in span),
        projections=round(sum(_own_products(module, names[module], config) for module in attention)),
        per_key=per_key,
        window=_window(layer, config),
        other=sum(_own_products(module, names[module], config) for module in rest),
        mlp_parameters=sum(weight.numel() for module in span for weight in module.parameters(recurse=False)),
    )


def _products(module: nn.Module, config: Any) -> int:
    return round(sum(_own_products(part, name, config) for name, part in module.named_modules()))


def _own_products(module: nn.Module, name: str, config: Any) -> float:
    """Operations a token with the matrices that this module holds itself."""
    share = _active_share(config) if "experts" in name.split(".") else 1.0
    return PER_PRODUCT * share * sum(_matrices(module))


def _matrices(module: nn.Module) -> Iterator[int]:
    """Sizes of the matrices of a module. Packed weights have other shapes than what they stand for."""
    if isinstance(module, nn.Embedding):
        return
    width = getattr(module, "in_features", None), getattr(module, "out_features", None)
    # A wrapper (LoRA's) may name the features of what it wraps.
    holds = any(True for _ in (*module.parameters(recurse=False), *module.buffers(recurse=False)))
    if holds and isinstance(width[0], int) and isinstance(width[1], int):
        yield width[0] * width[1]
        return
    for name, weight in module.named_parameters(recurse=False):
        if weight.ndim > 1 and not name.endswith("bias"):
            yield weight.numel()


def _active_share(config: Any) -> float:
    """The share of its experts that a token is sent to."""
    configs = [config, *(one for key in _EXPERT_CONFIGS if (one := getattr(config, key, None)) is not None)]

    def first(names: tuple[str, ...]) -> int | None:
        found = (getattr(one, name, None) for one in configs for name in names)
        return next((value for value in found if isinstance(value, int) and value > 0), None)

    active, there = first(_ACTIVE), first(_EXPERTS)
    if active is None or there is None:
        raise UsageError(
            f"the config of a {config.model_type} model does not say how many of its experts a token is "
            f"sent to (none of {', '.join(_ACTIVE)}, or none of {', '.join(_EXPERTS)}): its operations "
            "cannot be counted"
        )
    return active / there


def _widths(attention: nn.Module, config: Any) -> tuple[int, int]:
    """Widths of all query heads together, for scores and for values: each head reads every key, also where
    several of them share keys."""
    heads = config.num_attention_heads
    own = getattr(attention, "head_dim", None) or getattr(config, "head_dim", None)
    scores = getattr(attention, "qk_head_dim", None) or own or config.hidden_size // heads
    values = getattr(attention, "v_head_dim", None) or scores
    if config.model_type in _WIDE_VALUES:
        values = 2 * values
    return heads * scores, heads * values


def _window(layer: LayerAnatomy, config: Any) -> int | None:
    """Keys at most that a token of this layer sees; None where it sees all before it."""
    kinds = getattr(config, "layer_types", None) or getattr(config, "attention_layers", None)
    if kinds is not None:
        sliding = kinds[layer.index] in ("sliding_attention", "local")
        found = getattr(config, "sliding_window", None) or getattr(config, "window_size", None)
        return found if sliding else None
    if not getattr(config, "use_sliding_window", True):
        return None
    return getattr(config, "sliding_window", None) or None


def _around(anatomy: Anatomy, config: Any) -> int:
    """Products of the backbone outside of its blocks (OPT-350m projects into and out of the stream)."""
    inside = {module for layer in anatomy.layers for module in layer.block.modules()}
    return round(
        sum(
            _own_products(module, name, config)
            for name, module in anatomy.backbone.named_modules()
            if module not in inside
        )
    )
