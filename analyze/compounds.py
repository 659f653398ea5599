"""Several layers at once: interventions on sets of layers in, rows of `compound` and `progressive` out.

What layers cost together is measured, not added up; the sum of their single costs stands beside it, paired
over the same groups, and the excess of the one over the other with its interval. A progressive curve is one
family: its steps were chosen on the gate rows, its costs are of the test rows. Cost: one family a curve.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from .cost_bounds import CHOSEN_ON_TEST, FlopsSaved, bounded, interval, percent
from .influences import difference
from .intervals import Estimates
from .measured import ONE, Scored, Scores

PROGRESSIVE: Final = ("order", "greedy")


def compound_rows(scored: Scored, seed: int) -> list[dict[str, Any]]:
    """Rows of the table `compound`: sets of layers that are no step of a curve."""
    sets = scored.family(lambda item: item.chosen != ONE and item.chosen not in PROGRESSIVE)
    found = []
    for name in dict.fromkeys(item.name for item in sets):
        items = [item for item in sets if item.name == name]
        costs, sums = scored.costs(items), _sums(scored, items)
        excess = bounded(difference(costs, sums), seed)
        (low, high), (least, most) = interval(costs), interval(sums)
        shares = scored.shares(items).estimate
        for at, item in enumerate(items):
            delta, tested = float(costs.estimate[at]), item.chosen_on == "test"
            found.append(
                {
                    **scored.where,
                    "name": name,
                    **item.which,
                    "chosen_on": item.chosen_on,
                    **scored.counts,
                    **_costs(delta, float(low[at]), float(high[at])),
                    "sum_nats": float(sums.estimate[at]),
                    "sum_lo": float(least[at]),
                    "sum_hi": float(most[at]),
                    "excess": float(excess.estimate[at]),
                    **excess.columns(at, "excess_"),
                    "linear_share": float(shares[at]),
                    "verdict": CHOSEN_ON_TEST if tested else excess.verdict(at, scored.groups.size),
                }
            )
    return found


def progressive_rows(scored: Scored, seed: int, flops_saved: FlopsSaved) -> list[dict[str, Any]]:
    """Rows of the table `progressive`: one a step, from one layer on."""
    found = []
    curves = dict.fromkeys((item.name, item.chosen) for item in scored.items if item.chosen in PROGRESSIVE)
    for name, chosen in curves:
        steps = _steps(scored, name, chosen)
        costs, sums = scored.costs(steps), _sums(scored, steps)
        family, (low, high) = bounded(costs, seed), interval(difference(costs, sums))
        added = _added(costs)
        (least, most), shares = interval(added), scored.shares(steps).estimate
        for at, item in enumerate(steps):
            mlp, total = flops_saved(name, item.layers, float(shares[at]))
            of_cost = family.columns(at)
            found.append(
                {
                    **scored.where,
                    "name": name,
                    "chosen": chosen,
                    "step": len(item.layers),
                    "layer": item.layers[-1],
                    "layers": item.shown_layers,
                    **scored.counts,
                    **_costs(float(costs.estimate[at]), of_cost["lo"], of_cost["hi"]),
                    "delta_sim_lo": of_cost["sim_lo"],
                    "delta_sim_hi": of_cost["sim_hi"],
                    "added": float(added.estimate[at]),
                    "added_lo": float(least[at]),
                    "added_hi": float(most[at]),
                    "sum_nats": float(sums.estimate[at]),
                    "excess": float(costs.estimate[at] - sums.estimate[at]),
                    "excess_lo": float(low[at]),
                    "excess_hi": float(high[at]),
                    "linear_share": float(shares[at]),
                    "mlp_flops_saved": mlp,
                    "flops_saved": total,
                }
            )
    return found


def _costs(delta: float, low: float, high: float) -> dict[str, float]:
    return {
        "delta_nats": delta,
        "delta_lo": low,
        "delta_hi": high,
        "ppl_pct": percent(delta),
        "ppl_lo": percent(low),
        "ppl_hi": percent(high),
    }


def _steps(scored: Scored, name: str, chosen: str) -> list[Scores]:
    """The steps of a curve by number of layers; the first may have been measured as a layer by itself."""
    steps = sorted(
        scored.family(lambda item: item.name == name and item.chosen == chosen),
        key=lambda item: len(item.layers),
    )
    if len(steps[0].layers) > 1:
        first = steps[0].layers[0]
        alone = scored.family(lambda item: item.name == name and item.layer == first)
        return alone + steps if len(steps[0].layers) == 2 else steps
    return steps


def _sums(scored: Scored, items: Sequence[Scores]) -> Estimates:
    """Of each set the sum of what its layers cost by themselves; NaN where one of them was not measured."""
    alone = {(item.name, item.layer): item.delta for item in scored.items if item.layer is not None}
    nothing = np.full(scored.groups.size, np.nan)
    each = [[alone.get((item.name, layer), nothing) for layer in item.layers] for item in items]
    return scored.per_token([np.stack(parts).sum(axis=0) for parts in each])


def _added(costs: Estimates) -> Estimates:
    """What each step adds to the one before it."""
    estimate, influence = costs.estimate, costs.influence
    return Estimates(
        np.diff(estimate, prepend=0.0),
        np.diff(influence, axis=1, prepend=0.0),
        costs.n_effective,
        costs.n_groups,
    )
