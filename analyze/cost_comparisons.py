"""One thing changed at a time: which positions are replaced, and how long the window is.

In: interventions of a store. Out: rows of the tables `sinks` (`linear` against `linear@all`, on the same
tokens) and `context_lengths` (the same layer under windows of two lengths: the same documents, not quite the
same tokens, since every window lacks its first). Each is a difference paired over groups, a family over
layers. Cost: one family a pair.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np

from .cost_bounds import bounded, percent
from .influences import difference
from .intervals import Estimates, ratios
from .measured import ONE, Scored, Scores

EVERYWHERE: Final = "@all"


def sink_rows(scored: Scored, seed: int) -> list[dict[str, Any]]:
    """Rows of the table `sinks`: what it costs to replace position 0 and special tokens as well, on the
    scored rows, which are none of these themselves.
    """
    found = []
    alone = {(item.name, item.layer): item for item in scored.items if item.layer is not None}
    names = [name for name in dict.fromkeys(name for name, _ in alone) if name.endswith(EVERYWHERE)]
    for name in (name.removesuffix(EVERYWHERE) for name in names):
        layers = [layer for one, layer in alone if one == name and (name + EVERYWHERE, layer) in alone]
        if not layers:
            continue
        covered = scored.costs([alone[name, layer] for layer in layers])
        everywhere = scored.costs([alone[name + EVERYWHERE, layer] for layer in layers])
        more = bounded(difference(everywhere, covered), seed)
        for at, layer in enumerate(layers):
            found.append(
                {
                    **scored.where,
                    "layer": layer,
                    "name": name,
                    **scored.counts,
                    "covered_nats": float(covered.estimate[at]),
                    "all_nats": float(everywhere.estimate[at]),
                    "covered_pct": percent(float(covered.estimate[at])),
                    "all_pct": percent(float(everywhere.estimate[at])),
                    "difference": float(more.estimate[at]),
                    **more.columns(at),
                    "p_holm": float(more.p_holm[at]),
                    "verdict": more.verdict(at, scored.groups.size),
                }
            )
    return found


def context_length_rows(scored: Sequence[Scored], seed: int) -> list[dict[str, Any]]:
    """Rows of the table `context_lengths`: every length against the next longer one."""
    found = []
    for store in dict.fromkeys(one.store for one in scored):
        lengths = sorted((one for one in scored if one.store == store), key=lambda one: one.sequence_length)
        for shorter, longer in pairwise(lengths):
            found += _between(shorter, longer, seed)
    return found


def _between(shorter: Scored, longer: Scored, seed: int) -> Iterator[dict[str, Any]]:
    theirs = {(item.name, item.layers): item for item in longer.family(lambda item: item.chosen == ONE)}
    ours = [
        item for item in shorter.family(lambda item: item.chosen == ONE) if (item.name, item.layers) in theirs
    ]
    groups = np.union1d(shorter.groups, longer.groups)
    for name in dict.fromkeys(item.name for item in ours):
        items = [item for item in ours if item.name == name]
        short = _costs(shorter, items, groups)
        long = _costs(longer, [theirs[item.name, item.layers] for item in items], groups)
        more = bounded(difference(long, short), seed)
        for at, item in enumerate(items):
            yield {
                "store": shorter.store,
                "layer": item.layer,
                "name": name,
                "shorter": shorter.sequence_length,
                "longer": longer.sequence_length,
                "n_tokens_shorter": shorter.counts["n_tokens"],
                "n_tokens_longer": longer.counts["n_tokens"],
                "n_groups": int(groups.size),
                "cost_shorter": float(short.estimate[at]),
                "cost_longer": float(long.estimate[at]),
                "difference": float(more.estimate[at]),
                **more.columns(at),
                "p_holm": float(more.p_holm[at]),
                "verdict": more.verdict(at, int(groups.size)),
            }


def _costs(scored: Scored, items: Sequence[Scores], groups: np.ndarray) -> Estimates:
    """Costs over these groups: those without tokens under one of the lengths move nothing there."""
    place = np.searchsorted(groups, scored.groups)
    numerator, denominator = np.zeros((groups.size, len(items))), np.zeros((groups.size, len(items)))
    numerator[place] = np.stack([item.delta for item in items], axis=1)
    denominator[place] = scored.n_tokens[:, None]
    return ratios(numerator, denominator, np.ones(groups.size, bool))
