"""What stands in for chosen MLPs while a model is trained, and takes part in its gradients.

In: an `Anatomy`, the surrogate of each chosen layer, a `Body` (what stands in) and where gates start. Out:
the same model with those MLPs replaced until `remove`: the weights that stand in are a submodule of the
module where the MLP's span ends, so that they move, are cast, saved and trained with the model. The rows that
the fit left out (position 0, special tokens) keep the MLP. Cost: a d × d product a row and layer; a soft gate
computes the MLP too.

A gate gives g in (0, 1) to each covered row from its MLP input: σ(w·x + b), or σ(v·gelu(Ux + c) + b) with 32
hidden units (the paper's). w and v start at 0, so that g starts at the same value everywhere.
"""

import inspect
import math
from collections.abc import Mapping
from typing import Final, Literal

import torch
from jaxtyping import Bool, Float, Float32, Int
from torch import Tensor, nn

from ..store.errors import ProofFailed, UsageError
from .anatomy import Anatomy
from .linearised import SUBMODULE
from .linearised_rows import Rows
from .replacements import LinearMap
from .residence import runs_on
from .substituted_span import Division, Span, is_replaced
from .substitution import divides_of
from .tuning_arms import Body

HIDDEN: Final = 32
GateKind = Literal["linear", "mlp"]
GATED: Final = ("soft", "scaled", "hard")
HALF: Final = 0.5  # a hard gate sends rows below it to the surrogate


class Gate(nn.Module):
    """g of each row, in float32."""

    def __init__(self, width: int, kind: GateKind, start: float, seed: int) -> None:
        super().__init__()
        self.out = nn.Linear(HIDDEN if kind == "mlp" else width, 1)
        self.hidden = nn.Linear(width, HIDDEN) if kind == "mlp" else None
        with torch.no_grad():
            self.out.weight.zero_()
            self.out.bias.fill_(math.log(start / (1.0 - start)))
            if self.hidden is not None:
                drawn = torch.randn(HIDDEN, width, generator=torch.Generator().manual_seed(seed))
                self.hidden.weight.copy_(drawn / math.sqrt(width))
                self.hidden.bias.zero_()

    def forward(self, x: Float[Tensor, "row feature"]) -> Float32[Tensor, "row"]:
        with torch.autocast(x.device.type, enabled=False):
            x = x.float()
            if self.hidden is not None:
                x = nn.functional.gelu(self.hidden(x))
            return torch.sigmoid(self.out(x))[:, 0]


class TunedLayer(nn.Module):
    """The weights that stand in for one MLP. `g`: the gate of each covered row in the last pass, in its
    graph.
    """

    def __init__(self, layer: int, body: Body, surrogate: LinearMap, gate: Gate | None, rows: Rows) -> None:
        super().__init__()
        self.layer, self.gate = layer, gate
        self.body: Body = body
        self.weight, self.bias = (
            nn.Parameter(one.clone(), requires_grad=False) for one in (surrogate.weight, surrogate.bias)
        )
        self._rows = rows
        self.g: Float32[Tensor, "covered"] | None = None

    def refit(self, surrogate: LinearMap) -> None:
        """Take these weights instead, where they are."""
        with torch.no_grad():
            self.weight.copy_(surrogate.weight)
            self.bias.copy_(surrogate.bias)

    def replacement(self, x: Float[Tensor, "*row feature"]) -> Float[Tensor, "*row feature"]:
        if self.body == "scaled":
            return torch.zeros_like(x)
        if self.body in ("mean", "zero"):
            return self.bias.to(x.dtype).expand(*x.shape[:-1], -1)
        return nn.functional.linear(x, self.weight, self.bias)

    def divide(self, x: Float[Tensor, "*row feature"]) -> Division:
        """Where the rows of this call go."""
        flat = x.reshape(-1, x.shape[-1])
        rows = self._rows
        if rows.token_id.numel() != len(flat):
            raise ProofFailed(
                f"layer {self.layer}: its MLP was given {len(flat)} rows in a pass over "
                f"{rows.token_id.numel()} tokens: the model cuts rows here and cannot be trained this way"
            )
        covered = rows.covered.to(x.device)
        if self.gate is not None:
            g = self.gate(flat)
            self.g = g[covered]
            if self.body == "hard":
                return _divided(covered & (g < HALF))
            return Division(torch.where(covered, 1.0 - g, 0.0), "mixed")
        return _divided(covered, *rows.split(x.device))


class Tuned:
    """`Tuned(anatomy, special_ids)`; `replace(layer, …)` one layer after the other; `remove()` in the end."""

    def __init__(self, anatomy: Anatomy, special_ids: tuple[int, ...]) -> None:
        if any(is_replaced(one.mlp_first) or is_replaced(one.mlp_last) for one in anatomy.layers):
            raise UsageError("MLPs of this model are replaced already: load the model anew")
        self._anatomy, self._divides = anatomy, divides_of(anatomy)
        self._rows = Rows(special_ids, _parameters(anatomy.backbone))
        self._spans: dict[int, Span] = {}
        self.layers: dict[int, TunedLayer] = {}
        self._handle = anatomy.backbone.register_forward_pre_hook(self._rows.begin, with_kwargs=True)

    def replace(
        self,
        layer: int,
        body: Body,
        surrogate: LinearMap,
        *,
        gate: GateKind = "linear",
        start: float = 0.5,
        seed: int = 0,
    ) -> None:
        """Put `body` in the place of a layer's MLP; `mlp` leaves it. `surrogate`: weights of the linear
        bodies; of `mean` and `zero` the bias alone counts, which is what is put there.
        """
        if body == "mlp":
            return
        parts = self._anatomy.layers[layer]
        made = None
        if body in GATED:
            made = Gate(self._anatomy.d_model, gate, start, seed=seed * 1_000_003 + layer)
        tuned = TunedLayer(layer, body, surrogate, made, self._rows).to(runs_on(parts.mlp_first))
        parts.mlp_last.add_module(SUBMODULE, tuned)
        self.layers[layer] = tuned
        span = Span(parts.mlp_first, parts.mlp_last, tuned, divides=self._divides(parts))
        self._spans[layer] = span
        span.enter()

    def mean_gate(self) -> Float32[Tensor, ""] | None:
        """The mean of g over rows and layers of the last pass, in its graph; None without gates."""
        found = [one.g.mean() for one in self.layers.values() if one.g is not None and one.g.numel()]
        return torch.stack(found).mean() if found else None

    def gates(self) -> Mapping[int, Float32[Tensor, "covered"]]:
        """g of the covered rows of the last pass, by layer."""
        return {layer: one.g.detach() for layer, one in self.layers.items() if one.g is not None}

    def remove(self) -> None:
        """Leave the MLPs as they were. Weights that were trained stay trained."""
        for layer, span in self._spans.items():
            span.leave()
            self._anatomy.layers[layer].mlp_last._modules.pop(SUBMODULE, None)
        self._spans.clear()
        self.layers.clear()
        self._handle.remove()


def _divided(
    linear: Bool[Tensor, "row"],
    replaced: Int[Tensor, "some"] | None = None,
    others: Int[Tensor, "others"] | None = None,
) -> Division:
    """Each row on one way. `replaced`, `others`: their numbers, where they are known already."""
    if replaced is None or others is None:
        replaced, others = linear.nonzero()[:, 0], (~linear).nonzero()[:, 0]
    if not replaced.numel() or not others.numel():
        return Division(linear.float(), "replaced" if replaced.numel() else "mlp")
    return Division(linear.float(), "divided", replaced, others)


def _parameters(backbone: nn.Module) -> tuple[str, ...]:
    return tuple(inspect.signature(backbone.forward).parameters)
