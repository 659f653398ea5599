"""The cost of each intervention: interventions of one store in, rows of the table `interventions` out.

The cost is Δ = Σ (nll − base nll) / Σ tokens over the test rows, in nats a token, paired over groups of
documents: one ratio, linearised, with Student's quantile at the effective number of groups. One intervention
over the layers of a store is a family with simultaneous bounds, and by these a layer is called worse or
better than the original. In percent of perplexity the bounds are transformed, not computed anew. What was
chosen on the test rows themselves gets its interval and no verdict. Cost: about 0.1 s a family.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from .cost_bounds import CHOSEN_ON_TEST, FlopsSaved, bounded, interval, percent, perplexity
from .measured import ONE, Scored, Scores, read_measured


def intervention_rows(scored: Scored, seed: int, flops_saved: FlopsSaved) -> list[dict[str, Any]]:
    """Rows of the table `interventions`: a family is one intervention over the layers, over the steps of a
    progressive curve, or over the sets of layers that were not chosen as such a curve.
    """
    families: dict[tuple[str, str], list[Scores]] = {}
    for item in scored.items:
        role = item.chosen if item.chosen in (ONE, "order", "greedy") else "set"
        families.setdefault((item.name, role), []).append(item)
    return [row for items in families.values() for row in _family_rows(scored, items, seed, flops_saved)]


def _family_rows(
    scored: Scored, items: Sequence[Scores], seed: int, flops_saved: FlopsSaved
) -> list[dict[str, Any]]:
    costs = scored.costs(items)
    found, kl = bounded(costs, seed), scored.per_token([item.kl for item in items])
    kl_low, kl_high = interval(kl)
    shares = scored.shares(items).estimate
    base = scored.per_token([item.base for item in items]).estimate
    rows = []
    for at, item in enumerate(items):
        mlp, total = flops_saved(item.name, item.layers, float(shares[at]))
        delta = float(costs.estimate[at])
        of_delta = found.columns(at, "delta_")
        rows.append(
            {
                **scored.where,
                "name": item.name,
                "kind": item.kind,
                **item.which,
                "chosen_on": item.chosen_on,
                "fit_positions": "body",
                "replaced_positions": "all" if item.name.endswith("@all") else "body",
                **scored.counts,
                "n_draws": item.of_draws.size,
                "base_ppl": perplexity(float(base[at])),
                "ppl": perplexity(float(base[at]) + delta),
                "delta_nats": delta,
                **of_delta,
                "ppl_pct": percent(delta),
                **{name.replace("delta_", "ppl_"): percent(value) for name, value in of_delta.items()},
                "p_holm": float(found.p_holm[at]),
                "kl": float(kl.estimate[at]),
                "kl_lo": float(kl_low[at]),
                "kl_hi": float(kl_high[at]),
                "draw_sd": float(item.of_draws.std(ddof=1)) if item.of_draws.size > 1 else float("nan"),
                "linear_share": float(shares[at]),
                "mlp_flops_saved": mlp,
                "flops_saved": total,
                "verdict": CHOSEN_ON_TEST
                if item.chosen_on == "test"
                else found.verdict(at, scored.groups.size),
            }
        )
    return rows


def layer_costs(
    measured: pa.Table,
    store: str,
    split: str = "gate",
    name: str = "linear",
    sequence_length: int | None = None,
) -> Mapping[int, float]:
    """Cost of each layer by itself, nats a token: what layers are chosen by, on the rows of `split`. Of
    several window lengths the first in the table, unless one is named.
    """
    for scored in read_measured(measured, split):
        if scored.store == store and sequence_length in (None, scored.sequence_length):
            items = scored.family(lambda item: item.chosen == ONE and item.name == name)
            estimate = scored.costs(items).estimate.tolist()
            return {item.layers[0]: cost for item, cost in zip(items, estimate, strict=True)}
    return {}


def cheapest(costs: Mapping[int, float], n_layers: int) -> tuple[int, ...]:
    """The layers that cost least, cheapest first; NaN comes last, ties go to the lower layer."""
    order = sorted(costs, key=lambda layer: (np.isnan(costs[layer]), costs[layer], layer))
    return tuple(order[:n_layers])
