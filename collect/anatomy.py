"""Find the parts of a live decoder: blocks, MLP spans, the norms around them, the head.

In: a Hugging Face causal language model (a PEFT wrapper is looked through). Out: a frozen `Anatomy` of
references to its own modules; no weight is changed, folded or copied (but for an offloaded model's table of
positions, which is read). Cost: attribute look-ups only, so a model on the meta device will do; a family
without a row in adapters.py is run three times (tracing.py).
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ..store.errors import UsageError
from .adapters import Adapter, adapter_of
from .live_models import backbone_and_head, max_positions_of, refuse_compiled
from .live_models import config_of as config_of
from .live_models import unwrapped as unwrapped
from .refused_families import refuse_family
from .residence import in_memory, runs_on


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
    def routes_from(self) -> int | None:
        """The first layer that sends each row to a few of many experts; None where none does."""
        routing = (
            layer.index
            for layer in self.layers
            if any(name.rpartition(".")[2] == "experts" for name, _ in layer.block.named_modules())
        )
        return next(routing, None)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the residual stream: the embedding's, also where other weights are packed into
        integers; where its own are, that of the first weight that is not. The proof looks at the stream."""
        weights = (_embedding(self.model).weight, *self.backbone.parameters())
        return next(one.dtype for one in weights if one.is_floating_point() and one.dtype.itemsize > 1)

    @property
    def device(self) -> torch.device:
        """Where the input ids have to be."""
        return runs_on(_embedding(self.model))


def anatomy(model: nn.Module) -> Anatomy:
    """The parts of `model`: by its family's row, or traced where there is none. Refuses compiled models,
    families that cannot be harvested and models without a head."""
    model = unwrapped(model)
    refuse_compiled(model)
    config = config_of(model)
    refuse_family(config)
    from .tracing import needs_weights, traced  # which imports this module

    adapter = adapter_of(config)
    if adapter is not None:
        try:
            return _by_row(model, config, adapter)
        except _OtherNames:  # somebody's own code under the name of a family
            if needs_weights(model):
                raise
    return traced(model)


class _OtherNames(UsageError):
    """The modules of a model are not called as its family's row says."""


def _by_row(model: nn.Module, config: Any, adapter: Adapter) -> Anatomy:
    base, head = backbone_and_head(model)
    backbone = _part(base, adapter.backbone) if adapter.backbone else base
    layers = _layers(backbone, adapter)
    positions, table = _positions(backbone, adapter)
    prefix = _prefix(model, backbone)
    return Anatomy(
        model=model,
        backbone=backbone,
        head=head,
        layers=layers,
        positions=positions,
        model_type=config.model_type,
        n_layers=len(layers),
        d_model=config.hidden_size,
        vocab_size=config.vocab_size,
        max_positions=max_positions_of(config),
        parallel=adapter.parallel,
        span=_span(adapter),
        paths=_paths(adapter, prefix) | ({} if table is None else {"positions": f"{prefix}{table}"}),
        logit_softcap=getattr(config, "final_logit_softcapping", None),
        logit_scale=adapter.logit_scale,
    )


def logits(anatomy: Anatomy, hidden: Float[Tensor, "*row feature"]) -> Float[Tensor, "*row vocabulary"]:
    """The model's own logits for rows of final hidden states (after the final norm), in the head's dtype.

    The steps and their order are those of the model, so that a full forward pass gives the same numbers (but
    for the last bit where a family divides by what is a factor here).
    """
    scores = anatomy.head(hidden)
    if anatomy.logit_scale != 1.0:
        scores = scores * anatomy.logit_scale
    if anatomy.logit_softcap is not None:
        scores = torch.tanh(scores / anatomy.logit_softcap) * anatomy.logit_softcap
    return scores


def _part(parent: nn.Module, name: str) -> nn.Module:
    try:
        return parent.get_submodule(name)
    except AttributeError:
        have = ", ".join(child for child, _ in parent.named_children())
        raise _OtherNames(
            f"{type(parent).__name__} has no module {name!r}, which this family should have; it has: "
            f"{have}. Use the model class that transformers ships for this family, or give the model loaded: "
            "then its parts are found by running it."
        ) from None


def _layers(backbone: nn.Module, adapter: Adapter) -> tuple[LayerAnatomy, ...]:
    blocks = [block for _, block in _part(backbone, adapter.blocks).named_children()]
    return tuple(_layer(index, block, adapter) for index, block in enumerate(blocks))


def _layer(index: int, block: nn.Module, adapter: Adapter) -> LayerAnatomy:
    def perhaps(name: str | None) -> nn.Module | None:
        return None if name is None else _part(block, name)

    return LayerAnatomy(
        index=index,
        block=block,
        norm=perhaps(adapter.norm),
        mlp_first=_part(block, adapter.mlp_first),
        mlp_last=_part(block, adapter.mlp_last),
        post_norm=perhaps(adapter.post_norm),
        multiplier=adapter.multiplier,
        parallel=adapter.parallel,
        attention=_part(block, adapter.attention),
        sum_norm=perhaps(adapter.sum_norm),
    )


def _positions(backbone: nn.Module, adapter: Adapter) -> tuple[Tensor, str] | tuple[None, None]:
    """The table, whose row p is what position p adds, and its path: learned ones are a module's weight,
    computed ones a buffer."""
    if adapter.positions is None:
        return None, None
    parent, _, name = adapter.positions.rpartition(".")
    owner = _part(backbone, parent)
    if not isinstance(getattr(owner, name, None), Tensor):
        owner, parent, name = _part(backbone, adapter.positions), adapter.positions, "weight"
    return in_memory(owner, name)[adapter.position_offset :], f"{parent}.{name}".removeprefix(".")


def _embedding(model: Any) -> Any:
    return model.get_input_embeddings()


def _span(adapter: Adapter) -> str:
    first = f"{adapter.blocks}.{{i}}.{adapter.mlp_first}"
    if adapter.mlp_first == adapter.mlp_last:
        return first
    return f"{first}…{adapter.blocks}.{{i}}.{adapter.mlp_last}"


def _prefix(model: nn.Module, backbone: nn.Module) -> str:
    return next(f"{name}." for name, module in model.named_modules() if module is backbone)


def _paths(adapter: Adapter, prefix: str) -> dict[str, str]:
    """Where each part lies in the model; `residual` is the module that reads the residual: the norm, or the
    MLP where there is none."""
    block = f"{prefix}{adapter.blocks}.{{i}}"
    names = {
        "norm": adapter.norm,
        "residual": adapter.norm or adapter.mlp_first,
        "attention": adapter.attention,
        "mlp_first": adapter.mlp_first,
        "mlp_last": adapter.mlp_last,
        "post_norm": adapter.post_norm,
        "sum_norm": adapter.sum_norm,
    }
    return {"block": block} | {part: f"{block}.{name}" for part, name in names.items() if name is not None}
