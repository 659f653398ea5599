"""A gate in an export: its numbers as plain JSON values, its vectors as named tensors, and back.

In: a `GateRouter`. Out: what config.json says of it and what gates.safetensors holds, and from both the
router again, checked piece by piece. What the model itself has (its table of positions) is left out. Hidden
units on x are `hidden` in the first ({"units": 32, "activation": "gelu"}; no such key without them) and
hidden.weight (unit × d), hidden.bias, hidden.out in the second. Cost: none beyond the vectors.
"""

import math
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from ..store.errors import FormatError
from ..store.parsing import get_bool, get_int, get_list, get_number, get_object, get_str
from .gate_routing import NARROW, OF_STREAM, OF_TOKEN, OF_X, GateRouter, Piece
from .hidden_units import HiddenUnits

_PIECES: Final = frozenset((*OF_X, *OF_TOKEN, *OF_STREAM, *NARROW))
_KEYS: Final = ("bias", "threshold", "centred", "eps", "grand_mean", "pieces")
_HIDDEN: Final = "hidden"
_GELU: Final = "gelu"  # the exact one
_MAX_UNITS: Final = 2**16


def gate_facts(gate: GateRouter) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Numbers and vectors of a gate. Tables of positions are the model's own; mean needs of token types are
    kept where the gate looks at them."""
    vectors: dict[str, Tensor] = {}
    for piece in gate.pieces:
        parts = {"own": piece.own, "token": piece.token}
        vectors |= {f"{piece.name}.{name}": one for name, one in parts.items() if one is not None}
    if any(piece.name == "token_type" for piece in gate.pieces):
        vectors |= {"types": gate.types, "type_means": gate.type_means}
    facts = {
        "bias": _spelt(gate.bias),
        "threshold": _spelt(gate.threshold),
        "centred": gate.centred,
        "eps": gate.eps,
        "grand_mean": _spelt(gate.grand_mean),
        "pieces": [{"name": piece.name, "weight": piece.weight} for piece in gate.pieces],
    }
    if (hidden := gate.hidden) is not None:
        facts[_HIDDEN] = {"units": hidden.n, "activation": _GELU}
        vectors |= {f"{_HIDDEN}.{name}": getattr(hidden, name) for name in _shapes(hidden.n, 0)}
    return facts, vectors


def router_of(
    data: object, vectors: Mapping[str, Tensor], d_model: int, where: str, *, hidden: bool
) -> GateRouter:
    """The gate of `gate_facts`. `hidden`: whether it may have hidden units."""
    facts = get_object(data, where)
    hides = hidden and _HIDDEN in facts
    get_object(facts, where, keys=(*_KEYS, _HIDDEN) if hides else _KEYS)
    pieces = [
        _piece(piece, vectors, d_model, f"{where}.pieces") for piece in get_list(facts, "pieces", where, dict)
    ]
    known = {
        "types",
        "type_means",
        *(f"{piece.name}.{part}" for piece in pieces for part in ("own", "token")),
    }
    if hides:
        known |= {f"{_HIDDEN}.{name}" for name in _shapes(0, 0)}
    if foreign := sorted(vectors.keys() - known):
        raise FormatError(f"{where}: {foreign[0][:80]!r} is of nothing that this gate has")
    types = vectors.get("types", torch.zeros(0, dtype=torch.long))
    means = vectors.get("type_means", torch.zeros(0))
    if types.dtype != torch.long or means.dtype != torch.float32 or types.shape != means.shape:
        raise FormatError(f"{where}: types and type_means do not belong together")
    return GateRouter(
        pieces=tuple(pieces),
        bias=_number(facts, "bias", where),
        threshold=_number(facts, "threshold", where),
        centred=get_bool(facts, "centred", where),
        eps=None if facts["eps"] is None else get_number(facts, "eps", where),
        positions=None,
        types=types,
        type_means=means,
        grand_mean=_number(facts, "grand_mean", where),
        hidden=_hidden(facts[_HIDDEN], vectors, d_model, f"{where}.{_HIDDEN}") if hides else None,
    )


def _hidden(data: object, vectors: Mapping[str, Tensor], d_model: int, where: str) -> HiddenUnits:
    facts = get_object(data, where, keys=("units", "activation"))
    get_str(facts, "activation", where, allowed=(_GELU,))
    wanted = _shapes(get_int(facts, "units", where, 1, _MAX_UNITS), d_model)
    found = {name: one for name in wanted if (one := vectors.get(f"{_HIDDEN}.{name}")) is not None}
    if {name: tuple(one.shape) for name, one in found.items() if one.dtype == torch.float32} != wanted:
        needs = ", ".join(f"{name} {shape}" for name, shape in wanted.items())
        shown = ", ".join(f"{name} {tuple(one.shape)} {one.dtype}" for name, one in found.items())
        raise FormatError(f"{where}: needs float32 {needs}, found {shown or 'nothing'}")
    return HiddenUnits(**found)


def _shapes(units: int, d_model: int) -> dict[str, tuple[int, ...]]:
    return {"weight": (units, d_model), "bias": (units,), "out": (units,)}


def _piece(data: object, vectors: Mapping[str, Tensor], d_model: int, where: str) -> Piece:
    facts = get_object(data, where, keys=("name", "weight"))
    name = get_str(facts, "name", where, allowed=_PIECES)
    own, token = vectors.get(f"{name}.own"), vectors.get(f"{name}.token")
    wanted = {"own": name not in NARROW, "token": name in ("token_full", "context_only")}
    for part, vector in {"own": own, "token": token}.items():
        fits = vector is not None and vector.shape == (d_model,) and vector.dtype == torch.float32
        if (vector is None) is wanted[part] or (wanted[part] and not fits):
            raise FormatError(f"{where}: {name} needs {'' if wanted[part] else 'no '}{part} of {d_model}")
    return Piece(name, own=own, token=token, weight=get_number(facts, "weight", where))


def _spelt(value: float) -> float | str:
    """A number as JSON can hold it; a gate that never opens has a bias of NaN."""
    return value if math.isfinite(value) else str(value)


def _number(data: dict[str, Any], key: str, where: str) -> float:
    if isinstance(data[key], str):
        return float(get_str(data, key, where, allowed=("nan", "inf", "-inf")))
    return get_number(data, key, where)
