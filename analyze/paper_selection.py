"""The paper's way of choosing a gate, reproduced to show what it does, beside a gate that was fixed before.

In: gates of several sizes on the same layer and tokens. Out: rows of the table `paper_selection`. The paper
takes, layer by layer, the gate with the lowest perplexity *on the evaluation tokens* over its gate sizes and
trials, and calls a layer better than the original where that minimum lies below the baseline: a choice made
on the test rows, whose score on those same rows is too good. How much too good: the choice is made again
without each group in turn and scored on the group left out, which no choice has seen; the difference is the
bias. The gate named beforehand (`gated@input`) needs none of this, and alone gets a verdict. Cost: one
choice a group.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float64

from .cost_bounds import bounded, interval, percent
from .measured import ONE, Scored, Scores, parse_name


def paper_selection_rows(scored: Scored, seed: int) -> list[dict[str, Any]]:
    """Rows of the table `paper_selection`: layers with at least two gates to choose from."""
    gates = scored.family(lambda item: item.chosen == ONE and item.kind == "gated")
    by_layer: dict[int, list[Scores]] = {}
    for item in gates:
        by_layer.setdefault(item.layers[0], []).append(item)
    candidates = {layer: _candidates(items) for layer, items in sorted(by_layer.items())}
    candidates = {layer: items for layer, items in candidates.items() if len(items) > 1}
    if not candidates:
        return []
    fixed = [_fixed(items) for items in candidates.values()]
    costs = scored.costs(fixed)
    # The claim is that the gated model is better than the original: below 0.
    below = bounded(costs, seed)
    heldout = scored.per_token([_held_out(_stacked(items)) for items in candidates.values()])
    low, high = interval(heldout)
    rows = []
    for at, (layer, items) in enumerate(candidates.items()):
        means = _stacked(items).sum(axis=0) / scored.n_tokens.sum()
        picked = int(np.argmin(means))
        cost, honest = float(means[picked]), float(heldout.estimate[at])
        better = {"supported": "not supported", "not supported": "supported"}
        verdict = below.verdict(at, scored.groups.size)
        rows.append(
            {
                **scored.where,
                "layer": layer,
                "n_candidates": len(items),
                "picked": items[picked].name,
                "fixed": fixed[at].name,
                **scored.counts,
                "picked_nats": cost,
                "picked_pct": percent(cost),
                "picked_below_base": cost < 0.0,
                "heldout_nats": honest,
                "heldout_lo": float(low[at]),
                "heldout_hi": float(high[at]),
                "bias": cost - honest,
                "fixed_nats": float(costs.estimate[at]),
                **below.columns(at, "fixed_"),
                "fixed_pct": percent(float(costs.estimate[at])),
                "p_holm": float(below.p_holm[at]),
                "verdict": better.get(verdict, verdict),
            }
        )
    return rows


def _candidates(items: Sequence[Scores]) -> list[Scores]:
    """The gates on the MLP's input at their own thresholds, of all sizes, as in the paper; where there is
    only one of these, every gate that was measured.
    """
    parsed = [(item, parse_name(item.name)) for item in items]
    sizes = [item for item, words in parsed if words.features == "input" and words.share is None]
    return sizes if len(sizes) > 1 else list(items)


def _fixed(items: Sequence[Scores]) -> Scores:
    """The gate named before anything was measured: the plain one on the input, else the shortest name."""
    plain = [item for item in items if parse_name(item.name).features == "input"]
    return min(plain or items, key=lambda item: (len(item.name), item.name))


def _stacked(items: Sequence[Scores]) -> Float64[np.ndarray, "group candidate"]:
    return np.stack([item.delta for item in items], axis=1)


def _held_out(delta: Float64[np.ndarray, "group candidate"]) -> Float64[np.ndarray, "group"]:
    """Of each group, what the candidate costs there that is best on all other groups."""
    others = delta.sum(axis=0) - delta
    return delta[np.arange(len(delta)), others.argmin(axis=1)]
