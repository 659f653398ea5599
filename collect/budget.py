"""What interventions save on paper: operations and parameters of configurations, at the shares measured.

In: the operations of a model's modules (flops.py) and `Configuration`s: the name of an intervention, its
layers, the share of tokens that went linear. Out: rows of the table `budget`, and the function by which
tables of costs name a saving. What comes in place of an MLP is charged: a surrogate of d² multiplications for
the tokens sent to it, a gate for all tokens. Cost: none; no model runs.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from ..analyze.budget_tables import DECODE, ORIGINAL, PREFILL, to_budget_table
from ..analyze.gate_features import FEATURES
from .flops import PER_PRODUCT, LayerFlops, ModelFlops, gate_flops
from .interventions import Intervention, parse_intervention

_TWICE = ("token_full", "context_only")  # pieces with a vector on the token embedding too
_NO_VECTOR = ("position", "token_type", "random")
_NO_MAP = ("none", "mean", "zero")


@dataclass(frozen=True, slots=True)
class Configuration:
    """An intervention on a set of layers. `share`: of the tokens that the fit covers, those that went linear,
    the mean over the layers; None: all, or what the name says. `store`: where it was measured."""

    name: str
    layers: tuple[int, ...]
    share: float | None = None
    store: str | None = None


@dataclass(frozen=True, slots=True)
class Spent:
    """Operations a token of the layers replaced, and parameters."""

    mlp: float
    surrogate: float
    gate: float
    parameters_came: int


def budget(
    flops: ModelFlops,
    configurations: Iterable[Configuration],
    lengths: Sequence[int],
    *,
    covered: float = 1.0,
) -> pa.Table:
    """The table `budget`: the original, then each configuration, at each length, as prefill and decode.
    `covered`: the share of all tokens that the fit covers; the others keep the MLP."""
    rows = [
        _row(flops, one, length, phase, covered)
        for one in (Configuration(ORIGINAL, ()), *dict.fromkeys(configurations))
        for length in lengths
        for phase in (PREFILL, DECODE)
    ]
    return to_budget_table("budget", rows)


def flops_saved(
    flops: ModelFlops, length: int, *, covered: float = 1.0
) -> Callable[[str, tuple[int, ...], float], tuple[float, float]]:
    """(name, layers, share) → shares of the operations of all MLPs, and of the whole model, that are saved
    in a window of `length` tokens. `share` is of covered tokens; NaN: as the name says."""

    def saved(name: str, layers: tuple[int, ...], share: float) -> tuple[float, float]:
        one = parse_intervention(name)
        spent = spent_by(flops, one, layers, None if math.isnan(share) else share, covered)
        before = math.fsum(flops.layers[layer].mlp for layer in layers)
        won = before - (spent.mlp + spent.surrogate + spent.gate)
        return won / flops.mlp, won / flops.total(length)

    return saved


def spent_by(
    flops: ModelFlops,
    one: Intervention,
    layers: Sequence[int],
    share: float | None = None,
    covered: float = 1.0,
    hidden: int | None = None,
) -> Spent:
    """What these layers cost a token under an intervention. `hidden`: units of a gate on x that has some."""
    of_covered = share_of(one) if share is None else share
    replaced = of_covered if one.everywhere else of_covered * covered
    # A soft gate runs both ways for every token.
    mlp, surrogate = (1.0, 1.0) if one.kind == "soft" else (1.0 - replaced, replaced)
    return Spent(
        mlp=mlp * math.fsum(flops.layers[layer].mlp for layer in layers),
        surrogate=surrogate * _map_flops(flops, one) * len(layers),
        gate=_gate_flops(flops, one, hidden) * len(layers),
        parameters_came=(_map_parameters(flops, one) + _gate_parameters(flops, one, hidden)) * len(layers),
    )


def share_of(one: Intervention) -> float:
    """The share of covered tokens that goes linear by the name alone; NaN where only measuring says it."""
    if one.kind == "none":
        return 0.0
    if not one.is_routed:
        return 1.0
    return float("nan") if one.share is None else one.share


def _row(flops: ModelFlops, one: Configuration, length: int, phase: str, covered: float) -> Mapping[str, Any]:
    last = phase == DECODE
    original, attention = flops.total(length, last=last), flops.attention(length, last=last)
    intervention = parse_intervention("none" if one.name == ORIGINAL else one.name)
    spent = spent_by(flops, intervention, one.layers, one.share, covered)
    of_covered = share_of(intervention) if one.share is None else one.share
    untouched = [layer for at, layer in enumerate(flops.layers) if at not in one.layers]
    mlp = spent.mlp + math.fsum(layer.mlp for layer in untouched)
    total = mlp + spent.surrogate + spent.gate + flops.other + attention + flops.head
    there = sum(_parameters(flops.layers[layer]) for layer in one.layers)
    return {
        "store": one.store,
        "name": one.name,
        "kind": ORIGINAL if one.name == ORIGINAL else intervention.kind,
        "layers": ",".join(str(layer) for layer in one.layers),
        "n_layers": len(one.layers),
        "phase": phase,
        "sequence_length": length,
        "share": of_covered if intervention.everywhere else of_covered * covered,
        "mlp_flops": mlp,
        "attention_flops": attention,
        "other_flops": flops.other,
        "surrogate_flops": spent.surrogate,
        "gate_flops": spent.gate,
        "head_flops": float(flops.head),
        "total_flops": total,
        "original_flops": original,
        "mlp_flops_saved": (flops.mlp - mlp - spent.surrogate - spent.gate) / flops.mlp,
        "flops_saved": (original - total) / original,
        "parameters": flops.parameters,
        "parameters_saved": (there if intervention.everywhere else 0) - spent.parameters_came,
        "parameters_saved_at_most": (0 if keeps_mlp(intervention) else there) - spent.parameters_came,
    }


def keeps_mlp(one: Intervention) -> bool:
    """Whether covered tokens need the MLP too, so that it cannot be thrown away."""
    return one.kind == "none" or one.is_routed


def _parameters(layer: LayerFlops) -> int:
    return layer.mlp_parameters


def _map_flops(flops: ModelFlops, one: Intervention) -> float:
    """Of what is computed instead of the MLP, for one token."""
    if one.kind in _NO_MAP:
        return 0.0
    return PER_PRODUCT * float(_map_size(flops, one))


def _map_size(flops: ModelFlops, one: Intervention) -> int:
    d = flops.d_model
    return d * d if one.rank is None else 2 * d * one.rank


def _map_parameters(flops: ModelFlops, one: Intervention) -> int:
    if one.kind in ("none", "zero"):
        return 0
    return flops.d_model + (0 if one.kind == "mean" else _map_size(flops, one))


def _gate_flops(flops: ModelFlops, one: Intervention, hidden: int | None) -> float:
    if hidden is not None:
        return float(gate_flops(flops.d_model, hidden))
    return float(_vectors(one) * gate_flops(flops.d_model))


def _gate_parameters(flops: ModelFlops, one: Intervention, hidden: int | None) -> int:
    """One weight a feature and a bias. Mean needs of token types are a look-up table and not counted."""
    if one.features is None:
        return 0
    if hidden is not None:
        return hidden * (flops.d_model + 2) + 1
    pieces = FEATURES[one.features].pieces
    narrow = sum(piece in (*_NO_VECTOR, "norm") for piece in pieces)
    return (len(pieces) - narrow) * flops.d_model + narrow + 1


def _vectors(one: Intervention) -> int:
    """How many products of d numbers a gate computes for a token."""
    if one.features is None:
        return 0
    pieces = FEATURES[one.features].pieces
    return sum(0 if piece in _NO_VECTOR else 2 if piece in _TWICE else 1 for piece in pieces)
