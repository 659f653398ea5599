"""Forward passes of a measurement beforehand.

In: what the study will have, and settings. Out: `Passes`. Replacements and sets of layers are those that
a measurement itself makes of the settings (measure_asked.py). Which layers will be cheapest is not known:
layers spread over the model stand for them. A timing on the clock is not in it. Cost: none.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from typing import Final

from ..store.settings import chosen_layers
from .interventions import parse_interventions
from .made_with import Unit
from .measure_asked import (
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
from .measure_settings import MeasureSettings
from .model_shape import ModelShape
from .planned_passes import Passes, Sized, StoreRows, StudyRows, sized_for, spread

NOISE_TOKENS: Final = 1024  # of each store, in a finer dtype


def measure_passes(
    study: StudyRows, settings: MeasureSettings, features: Sequence[str] | None = None, *, known: bool = False
) -> Passes:
    """`features`: of the gates that there will be, all by default. `known`: each layer by itself has been
    measured with its surrogate before, which is taken over."""
    shape, asked = study.shape, _asked(study, settings, ROUTERS if features is None else features)
    stores = study.named(settings.stores)
    own_store = study.fitted_on
    touched = [own_store, *(one for one in stores if one != own_store)] if asked.chooses else stores
    there = {entry.unit for entry in asked.each([LINEAR])} if known else set[Unit]()
    found = Passes()
    for store in touched:
        found += _on_gate_rows(shape, store, asked, there)
        if store == own_store and asked.chooses and settings.progressive == "greedy":
            found += _greedy(sized_for(shape, store), store.gate, asked)
    for store in stores:
        found += _on_test_rows(shape, store, asked, there)
        if settings.noise_floor:
            sample = store.test / max(1, int(store.test) // NOISE_TOKENS)
            found += _swept(sized_for(shape, store), sample, asked.each([LINEAR]))
        if settings.validate_estimate:
            found += _patches(shape, store, asked)
    return found


def _on_gate_rows(shape: ModelShape, store: StoreRows, asked: Asked, there: Collection[Unit]) -> Passes:
    found, rows = Passes(), store.gate
    for own, sized in _windows(shape, store, asked.settings):
        if own or "gate" in asked.settings.splits:
            found += _swept(sized, rows, asked.each(asked.on_gate), there if own else ())
    return found


def _on_test_rows(shape: ModelShape, store: StoreRows, asked: Asked, there: Collection[Unit]) -> Passes:
    """Sets that are chosen on these rows pass the model behind all others, with a base pass of their own."""
    order = spread(asked.layers)
    orders = {name: order for one in asked.joint for name in (bare(one), greedily(bare(one)))}
    entries = [*asked.each(asked.on_test), *asked.sets(orders)]
    papers = [Entry(name, one, order[:n]) for one in asked.joint for name, n in asked.papers]
    found, rows = Passes(), store.test
    for own, sized in _windows(shape, store, asked.settings):
        found += _swept(sized, rows, entries, there if own else ())
        if own:
            found += _swept(sized, rows, papers, {entry.unit for entry in entries})
    return found


def _asked(study: StudyRows, settings: MeasureSettings, features: Sequence[str]) -> Asked:
    made = [name for name in ROUTERS if name in features]
    names = settings.interventions or by_default(made, settings)
    joint = parse_interventions(settings.compound_with) if has_sets(settings) else ()
    layers = chosen_layers(settings.layers, study.layers)
    return Asked(settings, layers, drawn(parse_interventions(names), settings), drawn(joint, settings))


def _windows(shape: ModelShape, store: StoreRows, settings: MeasureSettings) -> Iterator[tuple[bool, Sized]]:
    """Windows as harvested, then cut to other lengths."""
    yield True, sized_for(shape, store)
    for length in settings.sequence_length:
        if length != store.window:
            yield False, Sized(shape, length)


def _swept(
    sized: Sized, rows: float, entries: Sequence[Entry], known: Collection[Unit] = frozenset()
) -> Passes:
    """A base pass and each replacement once, but for those that are known already."""
    units = dict.fromkeys(entry.unit for entry in entries if entry.unit not in known)
    if not units:
        return Passes()
    found = sized.base(rows)
    for unit in units:
        found += sized.above(rows, min(unit.layers))
    return found


def _greedy(sized: Sized, rows: float, asked: Asked) -> Passes:
    """Each step tries every layer that is left, with a base pass of its own."""
    found = Passes()
    order = spread(asked.layers)
    for name in dict.fromkeys(map(bare, asked.joint)):
        for n in range(1, asked.n_steps(order)):
            found += _swept(sized, rows, asked.greedy_step(name, order[:n], order[n:]))
    return found


def _patches(shape: ModelShape, store: StoreRows, asked: Asked) -> Passes:
    """One row of every sequence of a batch at a time: as many passes as a sequence has patched rows."""
    sized, settings, rows = sized_for(shape, store), asked.settings, store.test
    batch = float(store.batch)
    batches = min(math.ceil(rows / batch), settings.patches)
    turns = max(1, math.ceil(settings.patches * sized.window / max(rows, 1.0)))
    found = sized.base(batches * batch)
    for layer in asked.layers:
        found += sized.above(batches * batch * turns, layer)
    return found
