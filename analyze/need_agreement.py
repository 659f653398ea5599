"""Do the needs agree on which tokens need the nonlinearity? Needs of the test rows of each layer in, rows of
the table `need_agreement` out: Spearman's ρ of every two, with intervals over groups, simultaneous over the
layers of a store. Cost: one sort a need, one pass a pair.
"""

from collections.abc import Collection, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
from jaxtyping import Float32, Int

from .influences import holm, intervals, p_values, verdict_above
from .intervals import Estimates, stack
from .noise_floor import LOSS, NOISE
from .rank_agreement import ranked, spearman

Needs = Mapping[str, Float32[np.ndarray, "token"]]


def pairs_of_needs(
    needs: Needs, group: Int[np.ndarray, "token"]
) -> tuple[int, dict[tuple[str, str], Estimates]]:
    """ρ of every two needs over the rows where all are known, and the number of these rows."""
    known = np.logical_and.reduce([np.isfinite(values) for values in needs.values()])
    places = {name: ranked(values[known]) for name, values in needs.items()}
    pairs = combinations(places, 2)
    return int(known.sum()), {
        (one, other): spearman(places[one], places[other], group[known]) for one, other in pairs
    }


def agreement_rows(
    store: str,
    layers: Sequence[int],
    found: Sequence[tuple[int, Mapping[tuple[str, str], Estimates]]],
    seed: int,
    refused: Collection[int] = (),
) -> list[dict[str, Any]]:
    """Rows of the table, pair by pair; `found` holds what `pairs_of_needs` gave for each layer. Layers whose
    loss is `refused` get no verdict that rests on it.
    """
    rows = []
    for pair in dict.fromkeys(pair for _, of_layer in found for pair in of_layer):
        there = [
            (layer, n, of_layer[pair])
            for layer, (n, of_layer) in zip(layers, found, strict=True)
            if pair in of_layer
        ]
        family = stack([one for _, _, one in there])
        bounds, p = intervals(family, seed, scale="fisher"), holm(p_values(family))
        for at, (layer, n_tokens, own) in enumerate(there):
            of_row = {name: float(np.clip(values[at], -1.0, 1.0)) for name, values in bounds.items()}
            noise = LOSS in pair and layer in refused
            rows.append(
                {
                    "store": store,
                    "layer": layer,
                    "need_a": pair[0],
                    "need_b": pair[1],
                    "n_tokens": n_tokens,
                    "n_groups": own.n_groups,
                    "spearman": float(family.estimate[at]),
                    **of_row,
                    "p_holm": float(p[at]),
                    "verdict": NOISE
                    if noise
                    else verdict_above(of_row["sim_lo"], of_row["sim_hi"], 0.0, own.n_groups),
                }
            )
    return rows
