"""What replaced MLPs save: operations from shapes at the shares that were measured, and seconds on the clock.

In: a measurement and its model. Out: the function by which tables of costs name a saving, the table `budget`,
and, on request, the table `timing`, which is a step of its own: no two runs give the same seconds. Cost: none
for operations; for seconds see `timing`.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np
import pyarrow as pa
from jaxtyping import Int

from ..analyze.cost_bounds import FlopsSaved
from ..analyze.population import TEST
from ..store import Reader, UsageError
from .anatomy import Anatomy
from .budget import Configuration, budget, flops_saved
from .flops import ModelFlops, model_flops
from .interventions import Intervention, parse_intervention
from .measure_asked import LINEAR, bare
from .measure_request import Request
from .measured_sets import Measured
from .measured_windows import own_length
from .substitutes import substitutes_of
from .timing import TimingRules, prompts_of, timings

GATED: Final = "gated@input"
_LOG = logging.getLogger("nearline")


def flops_of(net: Anatomy) -> ModelFlops | None:
    """Operations of the model's modules; None where its config does not say enough to count them."""
    try:
        return model_flops(net)
    except UsageError as error:
        _LOG.warning("measure: no savings are named: %s", error)
        return None


def saved_by(request: Request, flops: ModelFlops | None) -> FlopsSaved | None:
    """Savings in windows as harvested in the store that was fitted."""
    if flops is None:
        return None
    return flops_saved(flops, own_length(request.evidence.fitted.reader), covered=_covered(request))


def budget_table(request: Request, found: Measured, flops: ModelFlops | None) -> dict[str, pa.Table]:
    """The table `budget` by its name: every replacement of test rows, at the share that went linear."""
    if flops is None:
        return {}
    length = own_length(request.evidence.fitted.reader)
    return {"budget": budget(flops, _configurations(found), [length], covered=_covered(request))}


def timing_table(request: Request, net: Anatomy, found: Measured) -> pa.Table:
    """The table `timing`: all measured layers linear, the cheapest ones, and all of them gated."""
    reader = request.evidence.fitted.reader
    texts, rules = timed_texts(reader, TimingRules(threads=request.settings.threads))
    special = reader.attributes.tokenizer.special_ids
    return timings(net, _timed(request, net, found), texts, special, rules)


def timed_texts(reader: Reader, rules: TimingRules) -> tuple[Int[np.ndarray, "text position"], TimingRules]:
    """Texts of a store, and the rules with as many tokens as its windows have."""
    length = min(rules.prompt_length + rules.n_steps, int(reader.plan.length.max()))
    steps = min(rules.n_steps, max(1, length // 8))
    rules = replace(rules, prompt_length=length - steps, n_steps=steps)
    texts = prompts_of(reader, max(rules.batch_sizes), length)
    if not len(texts):
        raise UsageError(f"timing: store {reader.path} has no window of {length} tokens")
    return np.resize(texts, (max(rules.batch_sizes), length)), rules


def _timed(request: Request, net: Anatomy, found: Measured) -> list[tuple[Configuration, Mapping[int, Any]]]:
    sets: list[tuple[Intervention, tuple[int, ...]]] = [(LINEAR, request.layers)]
    order = found.orders.get(LINEAR.name)
    if order is not None and len(order) > 5:
        sets.append((LINEAR, tuple(sorted(order[:5]))))
    gated = parse_intervention(GATED)
    if gated in (*request.singles, *request.joint):
        sets.append((gated, request.layers))
    return [
        (
            Configuration(one.name, layers),
            substitutes_of(request.study, one, layers, net.dtype, anatomy=net, need=request.settings.need),
        )
        for one, layers in sets
    ]


def _configurations(found: Measured) -> list[Configuration]:
    """Of test rows in windows as harvested; draws of random routing together."""
    totals: dict[tuple[str, tuple[int, ...], str], list[float]] = {}
    lengths: dict[str, int] = {}
    for part in found.parts:
        if part.split != TEST or lengths.setdefault(part.store, part.length) != part.length:
            continue
        for entry in dict.fromkeys(part.entries):
            sums = part.piece.units[entry.unit]
            total = totals.setdefault((bare(entry.intervention), entry.unit.layers, part.store), [0.0, 0.0])
            total[0] += float(sums.n_linear.sum())
            total[1] += float(sums.n_covered.sum())
    return [
        Configuration(name, layers, linear / covered if covered else None, store)
        for (name, layers, store), (linear, covered) in totals.items()
    ]


def _covered(request: Request) -> float:
    """The share of test tokens that the fit covers."""
    population = request.evidence.fitted.population
    return float(population.body[population.split == TEST].mean())
