"""Forward passes of the steps that run a model again, beforehand: losses, measure, finetune.

In: a model of a study and its shape. Out: `Passes` of a step: how often a row passes a block, how often the
head, and the operations of both. Replacements, sets of layers, stages and points are those that the steps
themselves make of the settings (measure_asked.py, tuning_schedule.py). Which layers will be cheapest is not
known: layers spread over the model stand for them. Blocks count whole, whatever replaces their MLP, and rows
as a corpus has them that is long enough. A timing on the clock is not in it. Cost: none.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from ..collect.interventions import parse_interventions
from ..collect.made_with import Unit
from ..collect.measure_asked import (
    LINEAR,
    ROUTERS,
    Asked,
    Entry,
    bare,
    by_default,
    drawn,
    greedily,
    has_sets,
)
from ..collect.measure_settings import MeasureSettings, chosen_set
from ..collect.tuning_arms import COURSES, Course, with_controls
from ..collect.tuning_schedule import Schedule
from .plan_rows import chosen, fit_on, layers_of, rows_of
from .plan_speed import window_of
from .study_settings import ModelStudy, StoreJob
from .study_steps import loss_settings, needs_losses
from .study_tables import Shape

NOISE_TOKENS = 1024  # of each store, in a finer dtype
BATCH_TOKENS = 4096  # of a batch, where nothing else is said; on a GPU four times as many


@dataclass(frozen=True, slots=True)
class Passes:
    """Rows times the blocks and heads that they pass, and operations of these. In training a backward pass
    counts as one or two more.
    """

    blocks: float = 0.0
    heads: float = 0.0
    flops: float = 0.0

    def __add__(self, other: "Passes") -> "Passes":
        return Passes(self.blocks + other.blocks, self.heads + other.heads, self.flops + other.flops)


@dataclass(frozen=True, slots=True)
class _Model:
    """A shape with windows of one length."""

    shape: Shape
    window: int

    def passes(self, rows: float, blocks: float, heads: float = 1.0) -> Passes:
        """Each of these rows through so many blocks and heads."""
        of_block, of_head = block_flops(self.shape, self.window), head_flops(self.shape)
        return Passes(rows * blocks, rows * heads, rows * (blocks * of_block + heads * of_head))

    def base(self, rows: float) -> Passes:
        return self.passes(rows, self.shape.layers)

    def above(self, rows: float, first: float) -> Passes:
        """What a replacement runs: the blocks from its lowest layer upwards, and the head."""
        return self.passes(rows, self.shape.layers - first)


def forward_flops(shape: Shape, length: int) -> float:
    """Operations of one token of a window of `length`."""
    return shape.layers * block_flops(shape, length) + head_flops(shape)


def block_flops(shape: Shape, length: int) -> float:
    """Four projections of attention and two matrices of an MLP, scores and values over half the window."""
    return 2.0 * (4 * shape.d_model**2 + 2 * shape.d_model * shape.d_ff + shape.d_model * length)


def head_flops(shape: Shape) -> float:
    return 2.0 * shape.d_model * shape.vocabulary


# Measurements


def losses_passes(model: ModelStudy, shape: Shape) -> Passes:
    """The measurement behind a fit, where analyses go by what it brings."""
    return _measurement(model, shape, loss_settings(model), known=False)


def measure_passes(model: ModelStudy, shape: Shape) -> Passes:
    """The measurement behind the analyses; what `losses` has measured is taken over."""
    return _measurement(model, shape, model.measure, known=needs_losses(model))


def _measurement(model: ModelStudy, shape: Shape, settings: MeasureSettings, *, known: bool) -> Passes:
    asked = _asked(model, shape, settings)
    stores = [one for one in model.stores if not settings.stores or one.name in settings.stores]
    touched = dict.fromkeys([*([fit_on(model)] if asked.chooses else []), *stores])
    there = {entry.unit for entry in asked.each([LINEAR])} if known else set[Unit]()
    orders = {name: spread(asked.layers) for one in asked.joint for name in (bare(one), greedily(bare(one)))}
    found = Passes()
    for store in touched:
        for own, sized in _windows(shape, store, settings):
            if own or "gate" in settings.splits:
                rows = rows_of(store).gate
                found += _swept(sized, rows, asked.each(asked.on_gate), there if own else ())
        if store == fit_on(model) and asked.chooses and settings.progressive == "greedy":
            found += _greedy(_sized(shape, store), rows_of(store).gate, asked)
    for store in stores:
        rows = rows_of(store).test
        for own, sized in _windows(shape, store, settings):
            entries = [*asked.each(asked.on_test), *asked.sets(orders)]
            found += _swept(sized, rows, entries, there if own else ())
            if own and asked.papers:  # chosen on these rows, which pass the model again
                sets = [
                    Entry(name, one, spread(asked.layers)[:n])
                    for one in asked.joint
                    for name, n in asked.papers
                ]
                found += _swept(sized, rows, sets, {entry.unit for entry in entries})
        if settings.noise_floor:
            sample = rows / max(1, int(rows) // NOISE_TOKENS)
            found += _swept(_sized(shape, store), sample, asked.each([LINEAR]))
        if settings.validate_estimate:
            found += _patches(shape, store, asked)
    return found


def _asked(model: ModelStudy, shape: Shape, settings: MeasureSettings) -> Asked:
    made = model.analyze.features or ROUTERS
    names = settings.interventions or by_default([name for name in ROUTERS if name in made], settings)
    joint = parse_interventions(settings.compound_with) if has_sets(settings) else ()
    layers = chosen(settings.layers, layers_of(model, shape).fitted)
    return Asked(settings, layers, drawn(parse_interventions(names), settings), drawn(joint, settings))


def _windows(shape: Shape, store: StoreJob, settings: MeasureSettings) -> Iterator[tuple[bool, _Model]]:
    """Windows as harvested, then cut to other lengths."""
    yield True, _sized(shape, store)
    for length in settings.sequence_length:
        if length != window_of(store):
            yield False, _Model(shape, length)


def _sized(shape: Shape, store: StoreJob) -> _Model:
    return _Model(shape, window_of(store))


def _swept(
    sized: _Model, rows: float, entries: Sequence[Entry], known: Collection[Unit] = frozenset()
) -> Passes:
    """A base pass and each replacement once, but for those that are known already."""
    units = dict.fromkeys(entry.unit for entry in entries if entry.unit not in known)
    if not units:
        return Passes()
    found = sized.base(rows)
    for unit in units:
        found += sized.above(rows, min(unit.layers))
    return found


def _greedy(sized: _Model, rows: float, asked: Asked) -> Passes:
    """Each step tries every layer that is left, with a base pass of its own."""
    found = Passes()
    order = spread(asked.layers)
    for name in dict.fromkeys(map(bare, asked.joint)):
        for n in range(1, asked.n_steps(order)):
            found += _swept(sized, rows, asked.greedy_step(name, order[:n], order[n:]))
    return found


def _patches(shape: Shape, store: StoreJob, asked: Asked) -> Passes:
    """One row of every sequence of a batch at a time: as many passes as a sequence has patched rows."""
    sized, settings, rows = _sized(shape, store), asked.settings, rows_of(store).test
    batch = float(store.settings.batch_tokens or BATCH_TOKENS)
    batches = min(math.ceil(rows / batch), settings.patches)
    turns = max(1, math.ceil(settings.patches * sized.window / max(rows, 1.0)))
    found = sized.base(batches * batch)
    for layer in asked.layers:
        found += sized.above(batches * batch * turns, layer)
    return found


def spread(layers: Sequence[int]) -> tuple[int, ...]:
    """Layers in an order whose every beginning is spread over all of them: the middle, the quarters, …"""
    n = len(layers)
    halves = 2 ** max(1, n.bit_length())
    order = sorted(range(1, halves), key=lambda at: (halves // (at & -at), at))
    places = dict.fromkeys(at * n // halves for at in order)
    return tuple(layers[place] for place in places)


# Fine-tuning


def finetune_passes(model: ModelStudy, shape: Shape) -> Passes:
    """Every course at each of its learning rates and seeds: its steps, and its points on held-out rows."""
    settings = model.finetune
    if settings is None:
        return Passes()
    fitted = layers_of(model, shape).fitted
    cheapest = chosen_set(settings.layers)
    layers = spread(fitted)[: cheapest[1]] if cheapest else chosen(settings.layers, fitted)
    plan = Schedule(settings, with_controls(settings.arms), layers)
    trained = next((one for one in model.stores if one.name == settings.train_on), fit_on(model))
    scored = [one for one in model.stores if not settings.stores or one.name in settings.stores]
    test = sum((_sized(shape, one).base(rows_of(one).test) for one in scored), Passes())
    gate = _sized(shape, fit_on(model)).base(rows_of(fit_on(model)).gate)
    found = Passes()
    seen: set[object] = set()  # models before the first step, scored once
    for name in plan.courses:
        course, points = COURSES[name], plan.points(name)
        for _ in range(len(plan.learning_rates(name)) + len(plan.other_seeds(name))):
            found += _training(_sized(shape, trained), plan, course, name)
            found += _refits(_sized(shape, trained), rows_of(trained).fit, plan, course)
            for point in points:
                body = "linear" if course.body == "trainable" else course.body
                if not point and course.after is None:
                    if (body, point == points[-1]) in seen:
                        continue
                    seen.add((body, point == points[-1]))
                found += test
                if point == points[-1]:
                    found += gate
    return found


def _training(sized: _Model, plan: Schedule, course: Course, name: str) -> Passes:
    """Forward and back. Where weights everywhere learn, a backward pass is two forward ones; where gates
    alone do, one, down to the lowest of them.
    """
    settings, n_blocks = plan.settings, sized.shape.layers
    steps = sum(stage.steps for stage in plan.stages(name))
    rows = float(steps * settings.batch_sequences * settings.accumulate * sized.window)
    again = n_blocks if settings.gradient_checkpointing else 0
    if course.learns == "gates":
        return sized.passes(rows, 2 * n_blocks - min(plan.layers) + again, 2)
    return sized.passes(rows, 3 * n_blocks + again, 3)


def _refits(sized: _Model, rows: float, plan: Schedule, course: Course) -> Passes:
    """All windows of the fit rows before each stage, where surrogates are fitted anew."""
    anew = plan.settings.refit and plan.settings.schedule != "at_once"
    if not anew or course.body not in ("linear", "trainable"):
        return Passes()
    return sized.passes(rows * len(plan.layers), sized.shape.layers, 0)
