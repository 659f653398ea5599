"""Find the parts of a live decoder: blocks, MLP spans, the norms around them, the head.

In: a Hugging Face causal language model (a PEFT wrapper is looked through). Out: a frozen `Anatomy` of
references to its own modules; no weight is changed, folded or copied. Cost: attribute look-ups only, so a
model on the meta device will do. Compiled models are refused, because hooks inside compiled code may silently
never fire.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ..store.errors import UsageError
from .adapters import Adapter, adapter_for


@dataclass(frozen=True, slots=True, eq=False)
class LayerAnatomy:
    """One decoder block: contribution = multiplier · post_norm(mlp(norm(residual))). `sum_norm`, where a
    block has one, normalises residual + contribution before it leaves the block."""

    index: int
    block: nn.Module
    norm: nn.Module | None
    mlp_first: nn.Module
    mlp_last: nn.Module
    post_norm: nn.Module | None
    multiplier: float
    parallel: bool
    attention: nn.Module
    sum_norm: nn.Module | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Anatomy:
    """A model as blocks between an embedding and a head. `span` is the MLP's path inside the backbone."""

    model: nn.Module
    backbone: nn.Module
    head: nn.Module
    final_norm: nn.Module
    layers: tuple[LayerAnatomy, ...]
    positions: Tensor | None
    model_type: str
    n_layers: int
    d_model: int
    vocab_size: int
    max_positions: int | None
    parallel: bool
    span: str
    paths: dict[str, str]
    logit_softcap: float | None
    logit_scale: float

    @property
    def dtype(self) -> torch.dtype:
        """The dtype the residual stream is computed in."""
        return next(self.layers[0].mlp_first.parameters()).dtype

    @property
    def device(self) -> torch.device:
        """Where the input ids have to be."""
        return next(self.backbone.parameters()).device


def anatomy(model: nn.Module) -> Anatomy:
    """The parts of `model`. Refuses compiled models, unknown families and models without a head."""
    model = unwrapped(model)
    refuse_compiled(model)
    config = _text_config(model)
    adapter = adapter_for(config.model_type)
    backbone, head = _backbone_and_head(model)
    layers = _layers(backbone, adapter, config)
    prefix = _prefix(model, backbone)
    return Anatomy(
        model=model,
        backbone=backbone,
        head=head,
        final_norm=_part(backbone, adapter.final_norm),
        layers=layers,
        positions=_positions(backbone, adapter),
        model_type=config.model_type,
        n_layers=len(layers),
        d_model=config.hidden_size,
        vocab_size=config.vocab_size,
        max_positions=getattr(config, "max_position_embeddings", None),
        parallel=adapter.parallel(config),
        span=_span(adapter),
        paths=_paths(adapter, prefix),
        logit_softcap=getattr(config, "final_logit_softcapping", None),
        logit_scale=1.0,
    )


def logits(anatomy: Anatomy, hidden: Float[Tensor, "*row feature"]) -> Float[Tensor, "*row vocabulary"]:
    """The model's own logits for rows of final hidden states (after the final norm), in the head's dtype.

    The steps and their order are those of the model, so that a full forward pass gives the same numbers.
    """
    scores = anatomy.head(hidden)
    if anatomy.logit_scale != 1.0:
        scores = scores * anatomy.logit_scale
    if anatomy.logit_softcap is not None:
        scores = torch.tanh(scores / anatomy.logit_softcap) * anatomy.logit_softcap
    return scores


def unwrapped(model: Any) -> Any:
    """The transformers model inside a PEFT wrapper, with its adapters in place; any other model as it is."""
    get_base = getattr(model, "get_base_model", None)
    if not callable(get_base):
        return model
    settings = getattr(model, "active_peft_config", None)
    if getattr(settings, "is_prompt_learning", False):
        raise UsageError(
            "this PEFT model learns a prompt, which lies outside the wrapped model: its activations would "
            "be those of the model without the prompt. Allowed are adapters inside the layers (LoRA and "
            "its kin), or a plain model."
        )
    return get_base()


def refuse_compiled(model: nn.Module) -> None:
    """Raise UsageError when the model or one of its modules goes through torch.compile."""
    for name, module in model.named_modules():
        if _is_compiled(module):
            where = f"its module {name!r}" if name else "the model"
            raise UsageError(
                f"{where} is compiled (torch.compile), and hooks inside compiled code may never fire. Give "
                "the uncompiled model; nearline needs no compilation."
            )


def _is_compiled(module: nn.Module) -> bool:
    # Names, not types: importing torch._dynamo costs seconds and is needed by nothing else here.
    return (
        type(module).__name__ == "OptimizedModule"
        or getattr(module, "_compiled_call_impl", None) is not None
        or hasattr(module.forward, "_torchdynamo_orig_callable")
    )


def _text_config(model: nn.Module) -> Any:
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        raise UsageError(
            f"{type(model).__name__} has no transformers config. Give a causal language model of Hugging "
            "Face transformers (for example from AutoModelForCausalLM.from_pretrained)."
        )
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        raise UsageError(
            f"{type(model).__name__} attends to an encoder. Give a decoder-only causal language model."
        )
    return config


def _backbone_and_head(model: Any) -> tuple[nn.Module, nn.Module]:
    backbone = model.base_model
    head = model.get_output_embeddings()
    if backbone is model or head is None:
        raise UsageError(
            f"{type(model).__name__} has no language-model head, and the loss of a token needs one. Load "
            "it with AutoModelForCausalLM instead of AutoModel."
        )
    return backbone, head


def _part(parent: nn.Module, name: str) -> nn.Module:
    try:
        return parent.get_submodule(name)
    except AttributeError:
        have = ", ".join(child for child, _ in parent.named_children())
        raise UsageError(
            f"{type(parent).__name__} has no module {name!r}, which this family should have; it has: "
            f"{have}. Use the model class that transformers ships for this family."
        ) from None


def _layers(backbone: nn.Module, adapter: Adapter, config: Any) -> tuple[LayerAnatomy, ...]:
    blocks = [block for _, block in _part(backbone, adapter.blocks).named_children()]
    return tuple(_layer(index, block, adapter, config) for index, block in enumerate(blocks))


def _layer(index: int, block: nn.Module, adapter: Adapter, config: Any) -> LayerAnatomy:
    return LayerAnatomy(
        index=index,
        block=block,
        norm=_part(block, adapter.norm),
        mlp_first=_part(block, adapter.mlp_first),
        mlp_last=_part(block, adapter.mlp_last),
        post_norm=None if adapter.post_norm is None else _part(block, adapter.post_norm),
        multiplier=adapter.multiplier(config),
        parallel=adapter.parallel(config),
        attention=_part(block, adapter.attention),
    )


def _positions(backbone: nn.Module, adapter: Adapter) -> Tensor | None:
    if adapter.positions is None:
        return None
    weight = _part(backbone, adapter.positions).weight
    assert isinstance(weight, Tensor)
    return weight


def _span(adapter: Adapter) -> str:
    first = f"{adapter.blocks}.{{i}}.{adapter.mlp_first}"
    if adapter.mlp_first == adapter.mlp_last:
        return first
    return f"{first}…{adapter.blocks}.{{i}}.{adapter.mlp_last}"


def _prefix(model: nn.Module, backbone: nn.Module) -> str:
    return next(f"{name}." for name, module in model.named_modules() if module is backbone)


def _paths(adapter: Adapter, prefix: str) -> dict[str, str]:
    block = f"{prefix}{adapter.blocks}.{{i}}"
    paths = {
        "block": block,
        "norm": f"{block}.{adapter.norm}",
        "attention": f"{block}.{adapter.attention}",
        "mlp_first": f"{block}.{adapter.mlp_first}",
        "mlp_last": f"{block}.{adapter.mlp_last}",
        "final_norm": f"{prefix}{adapter.final_norm}",
    }
    if adapter.post_norm is not None:
        paths["post_norm"] = f"{block}.{adapter.post_norm}"
    if adapter.positions is not None:
        paths["positions"] = f"{prefix}{adapter.positions}"
    return paths
