"""What the arms of a fine-tuning compute when they run: operations from shapes at the shares of their gates.

In: the operations of the model's modules (flops.py) and the gates of every arm. Out: rows of the table
`finetune_work`. A soft gate saves nothing: it needs the MLP, the surrogate and itself for every row. Cost:
none. Seconds are in tuned_timing.py.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..analyze.population import TEST
from .flops import PER_PRODUCT, ModelFlops, gate_flops
from .measured_windows import own_length
from .tuned_layers import GATED, HIDDEN
from .tuning_arms import ARMS, COURSES, Body
from .tuning_request import TuningRequest


def work_rows(
    request: TuningRequest, flops: ModelFlops | None, gates: Sequence[Mapping[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Rows of `finetune_work`: every arm, seed and store at the end. `flops` None: savings are unknown."""
    last = _at_the_end(gates)
    for arm in request.arms:
        body = COURSES[ARMS[arm].last].body
        for seed in request.settings.seeds if ARMS[arm].against else request.settings.seeds[:1]:
            for store in request.stores:
                rows = request.evidence.stores[store]
                population = rows.population
                covered = float(population.body[population.split == TEST].mean())
                of_gates = {layer: last[arm, seed, store, layer] for layer in request.layers if body in GATED}
                shares = {layer: _share(body, of_gates.get(layer)) * covered for layer in request.layers}
                won = 0.0 if flops is None else _won(flops, body, request.settings.gate, shares)
                total = math.nan if flops is None else flops.total(own_length(rows.reader))
                yield {
                    "arm": arm,
                    "seed": seed,
                    "store": store,
                    "layers": ",".join(map(str, sorted(request.layers))) if body != "mlp" else "",
                    "mean_gate": _mean([gate for gate, _ in of_gates.values()]),
                    "share_linear": _mean(list(shares.values())),
                    "mlp_flops_saved": math.nan if flops is None else won / flops.mlp,
                    "flops_saved": won / total,
                }


def _at_the_end(gates: Sequence[Mapping[str, Any]]) -> dict[tuple[str, int, str, int], tuple[float, float]]:
    """Mean gate and share of rows below 0.5, at each arm's own learning rate, in its last step."""
    found: dict[tuple[str, int, str, int], tuple[int, tuple[float, float]]] = {}
    for row in gates:
        if row["chosen"] and row["split"] == "test":
            key = (row["arm"], row["seed"], row["store"], row["layer"])
            if key not in found or found[key][0] <= row["step"]:
                found[key] = (row["step"], (row["mean_gate"], row["share_linear"]))
    return {key: values for key, (_, values) in found.items()}


def _share(body: Body, gate: tuple[float, float] | None) -> float:
    """Of covered rows, those that need no MLP."""
    if body == "hard":
        assert gate is not None
        return gate[1]
    return 0.0 if body in ("mlp", "soft", "scaled") else 1.0


def _won(flops: ModelFlops, body: Body, kind: str, shares: Mapping[int, float]) -> float:
    """Operations a token that are not needed any more, less those that came."""
    d = flops.d_model
    a_map = PER_PRODUCT * d * d if body in ("linear", "trainable", "soft", "hard") else 0
    a_gate = 0 if body not in GATED else gate_flops(d, None if kind == "linear" else HIDDEN)
    won = 0.0
    for layer, share in shares.items():
        mapped = 1.0 if body == "soft" else share
        won += share * flops.layers[layer].mlp - mapped * a_map - a_gate
    return won


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan
