"""Rows of the tables `nofly` and `nofly_tokens`: what was found of a pair of stores in, rows out.

Layers of one surrogate, need and key are one family, with simultaneous bounds and Holm's p. Cost: that of the
families' bounds.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from .examples import Texts
from .influences import holm
from .nofly_family import family_bounds, reliable, verdict
from .nofly_task import Found

Row = dict[str, Any]
Pair = tuple[str, str]


def nofly_rows(pair: Pair, results: Sequence[Found], seed: int) -> Iterator[Row]:
    """Rows of `nofly`, family by family in the order of their first layer, layers ascending."""
    families: dict[tuple[str, str, str], list[Found]] = {}
    for one in results:
        families.setdefault((one.column.surrogate, one.column.need, one.key), []).append(one)
    for family in families.values():
        yield from _family_rows(pair, sorted(family, key=_layer), seed)


def _layer(found: Found) -> int:
    return found.column.layer


def _family_rows(pair: Pair, family: Sequence[Found], seed: int) -> Iterator[Row]:
    comparisons = [one.comparison for one in family]
    columns = family_bounds(comparisons, seed)
    adjusted = holm(np.array([one.p_permutation for one in family]))
    told = reliable(comparisons, seed)
    for place, one in enumerate(family):
        found = one.comparison
        interval = {name: float(values[place]) for name, values in columns.items()}
        p_holm = float(adjusted[place])
        yield {
            "store_a": pair[0],
            "store_b": pair[1],
            "surrogate": one.column.surrogate,
            "layer": one.column.layer,
            "need": one.column.need,
            "key": one.key,
            "n_types": found.n_types,
            "n_tokens_a": one.n_tokens[0],
            "n_tokens_b": one.n_tokens[1],
            "n_groups_a": one.n_groups[0],
            "n_groups_b": one.n_groups[1],
            "r": float(found.estimates.estimate[0]),
            "spearman": found.spearman,
            "reliability_a": found.reliability_a,
            "reliability_b": found.reliability_b,
            "ceiling": found.ceiling,
            "r_disattenuated": found.r_disattenuated,
            **interval,
            "p_permutation": one.p_permutation,
            "p_holm": p_holm,
            **one.paper,
            "verdict": verdict(
                interval["r_disattenuated_sim_lo"],
                interval["r_disattenuated_sim_hi"],
                p_holm,
                bool(told[place]),
                found.n_types,
                min(one.n_groups),
            ),
        }


def token_rows(pair: Pair, results: Sequence[Found], texts: Texts) -> Iterator[Row]:
    """Rows of `nofly_tokens`; texts are those of store a."""
    for one in sorted(results, key=lambda found: (found.key, _layer(found))):
        for token in one.top:
            text = texts.text(np.array([token["token_id"]]))
            yield {
                "store_a": pair[0],
                "store_b": pair[1],
                "surrogate": one.column.surrogate,
                "layer": one.column.layer,
                "need": one.column.need,
                "key": one.key,
                **token,
                "text": text or f"⟨{token['token_id']}⟩",
            }
