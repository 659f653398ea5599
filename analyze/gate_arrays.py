"""gates.zarr: the gates of all layers as arrays that numpy alone can apply. Gates in; arrays and attributes
out.

p(linear) = 1/(1 + exp(−(weight · f + bias))) on raw features f, and linear goes what has p > threshold.
The attribute `described` says how many features a gate has, and of which pieces; what lies behind them is 0.
The value of `token_type` for a token id is in the array of that name at the id's place in `type`, or in
`token_type_grand` where the id is not there; `target_type` likewise. A gate whose label had one
class only has weights of 0 and a bias of NaN: nothing goes linear by it. `converged`: the solver reached the
best weights.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .gate_features import FEATURES, TypeMeans
from .gate_fit import Gate
from .gate_layer import GateTask

Layer = tuple[int, list[Gate], Mapping[str, TypeMeans]]


def gate_arrays(layers: Sequence[Layer], task: GateTask) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arrays with their dims, and attributes, of the group `gates`."""
    gates = layers[0][1]
    needs = list(dict.fromkeys(gate.need for gate in gates))
    names = list(dict.fromkeys(gate.name for gate in gates))
    shape, widest = (len(layers), len(needs), len(names)), max(gate.weight.size for gate in gates)
    vectors = {name: np.full((*shape, widest), fill, np.float32) for name, fill in _VECTORS.items()}
    numbers = {name: np.full(shape, np.nan) for name in ("bias", "threshold", "C")}
    converged = np.zeros(shape, bool)
    for at, (_, found, _) in enumerate(layers):
        for gate in found:
            place, width = (at, needs.index(gate.need), names.index(gate.name)), gate.weight.size
            vectors["weight"][(*place, slice(width))] = gate.weight
            vectors["mean"][(*place, slice(width))] = gate.scaling.mean
            vectors["scale"][(*place, slice(width))] = gate.scaling.scale
            for name, values in numbers.items():
                values[place] = getattr(gate, name)
            converged[place] = gate.converged
    arrays: dict[str, Any] = {name: (_DIMS, values) for name, values in vectors.items()}
    arrays |= {name: (_DIMS[:-1], values) for name, values in numbers.items()}
    arrays["converged"] = (_DIMS[:-1], converged)
    arrays |= _types([types for _, _, types in layers], needs, task)
    arrays["layer"] = (("layer",), np.array([layer for layer, _, _ in layers], np.int32))
    return arrays, _attributes(gates, needs, task)


# Behind a gate's own features a weight is 0, and a feature would be left as it is.
_VECTORS = {"weight": 0.0, "mean": 0.0, "scale": 1.0}
_DIMS = ("layer", "need", "gate", "feature")


def _types(layers: Sequence[Mapping[str, TypeMeans]], needs: Sequence[str], task: GateTask) -> dict[str, Any]:
    """Mean needs by token id of the rows that they are taken over."""
    fit = np.union1d(task.fit.token_id, task.fit.target_id[task.fit.target_id >= 0])
    seen = [one.types for types in layers for one in types.values()]
    ids = np.unique(np.concatenate([fit, *seen])).astype(np.int32)
    arrays: dict[str, Any] = {"type": (("type",), ids)}
    for piece in ("token_type", "target_type"):
        values = [[types[f"{piece}@{need}"].of(ids) for need in needs] for types in layers]
        grand = [[types[f"{piece}@{need}"].grand for need in needs] for types in layers]
        arrays[piece] = (("layer", "need", "type"), np.array(values, np.float32))
        arrays[f"{piece}_grand"] = (("layer", "need"), np.array(grand, np.float32))
    return arrays


def _attributes(gates: Sequence[Gate], needs: Sequence[str], task: GateTask) -> dict[str, Any]:
    described = {}
    for gate in gates:
        described[gate.name] = {
            "features": gate.features,
            "size": gate.size,
            "pieces": list(gate.pieces),
            "n_features": gate.weight.size,
            "available_at_routing": FEATURES[gate.features].available,
        }
    return {
        "fit_on": task.fit_on,
        "needs": list(needs),
        "gates": list(described),
        "described": described,
        "pieces": PIECES,
        "formula": "p(linear) = 1/(1 + exp(-(weight[:n_features] . f + bias))); linear where p > threshold",
    }


PIECES = {
    "x": "input of the MLP: norm(residual)",
    "token": "norm(token embedding)",
    "t": "gamma * centre(token embedding) * s, s the factor of the row's own norm",
    "k": "gamma * centre(residual - stored embedding) * s",
    "p": "gamma * centre(position embedding) * s",
    "token_full": "t + k^, k^ = weight . token embedding + bias of context.zarr",
    "context_only": "k - k^",
    "token_type": "mean need of the token id over fit rows (gate rows for needs that fit rows have none of), "
    "shrunk: array token_type",
    "target_type": "mean need of the target id over the same rows, shrunk: array target_type",
    "position": "log(1 + position)",
    "norm": "|x|",
    "output_norm": "|y|, y the raw output of the MLP",
    "random": "uniform, by row number",
    "oracle": "-need",
}
