"""What one call of `finetune` asks for, checked against the study, before any model is loaded.

In: a study and settings. Out: a frozen `TuningRequest` (layers in the order in which they are replaced,
courses with their stages and points, stores) with the digests that its results depend on, or one sentence on
what is missing. Torch is not loaded. Cost: the token columns of the stores.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from jaxtyping import Bool, Int

from ..analyze.analyze_settings import AnalyzeSettings
from ..analyze.cost_rows import cheapest, layer_costs
from ..analyze.evidence import Evidence
from ..analyze.gathering import SURROGATES, check_files, gather
from ..analyze.population import GATE, TEST, UNSEEN
from ..analyze.stores import spell_layers
from ..store import IncompleteError, Study, UsageError
from ..store.names import typed
from ..store.settings import parse_layers
from .measure_inputs import recorded_digest, rows_path
from .measure_settings import chosen_set
from .tuning_arms import with_controls
from .tuning_schedule import Schedule
from .tuning_settings import FinetuneSettings

STEP: Final = "finetune"
TIMING: Final = "finetune_timing"  # a step of its own: no two runs give the same seconds
_SCORES: Final = "finetune_scores"
# Raised whenever the same stores, settings and model give other numbers: older results are then not current.
RESULTS_VERSION: Final = 3


@dataclass(frozen=True, slots=True, eq=False)
class TuningRequest:
    """What to train and to score. `layers`: in the order in which they are replaced. `goes_on`: as in a
    `Schedule`."""

    evidence: Evidence
    settings: FinetuneSettings
    arms: tuple[str, ...]
    layers: tuple[int, ...]
    stores: tuple[str, ...]
    train_on: str
    inputs: Mapping[str, str]
    goes_on: bool = True

    @property
    def study(self) -> Study:
        return self.evidence.study

    @property
    def schedule(self) -> Schedule:
        """Courses with their stages and points."""
        return Schedule(self.settings, self.arms, self.layers, self.goes_on)

    def scored(self, store: str, split: int) -> Bool[np.ndarray, "token"]:
        """Held-out body rows with a target."""
        rows = self.evidence.stores[store]
        found = np.zeros(rows.population.split.size, bool)
        if split == TEST:
            found[self.evidence.test_rows(store)] = True
        else:
            found[rows.population.rows(GATE)] = True
            found &= rows.population.fold == UNSEEN
        return found & (rows.population.target_id >= 0)

    def scored_documents(self) -> dict[tuple[str, int], Int[np.ndarray, "document"]]:
        """By store and split: what test losses are of, and what learning rates are chosen by."""
        wanted = [*((name, TEST) for name in self.stores), (self.evidence.fit_on, GATE)]
        return {
            (name, split): np.unique(self.evidence.stores[name].population.document[self.scored(name, split)])
            for name, split in wanted
        }

    def is_current(self) -> bool:
        if not self.is_scored():
            return False
        return not self.is_timed or self.study.step_is_current(
            TIMING, self.timing_inputs, self.timing_settings
        )

    def is_scored(self) -> bool:
        """Whether only seconds can be missing."""
        return self.study.step_is_current(STEP, self.inputs, self.resolved)

    @property
    def is_timed(self) -> bool:
        """Whether seconds are asked for, and linear layers are there to be timed."""
        return self.settings.timing and "linear" in self.schedule.courses

    @property
    def timing_inputs(self) -> dict[str, str]:
        """Seconds are of the models that have these scores."""
        path = self.study.table_path(_SCORES).relative_to(self.study.path).as_posix()
        return {**self.inputs, path: recorded_digest(self.study, path)}

    @property
    def timing_settings(self) -> dict[str, Any]:
        return {"layers": list(self.layers)}

    @property
    def resolved(self) -> dict[str, Any]:
        """Settings as they came out."""
        chosen = {
            "arms": list(self.arms),
            "layers": list(self.layers),
            "stores": list(self.stores),
            "train_on": self.train_on,
            "results_version": RESULTS_VERSION,
        }
        return self.settings.results() | chosen


def finetune_is_current(study: Study, settings: FinetuneSettings) -> bool:
    """Whether `finetune` with these arguments would have nothing to do. Loads no model."""
    return STEP in study.provenance() and tuning_request(study, settings).is_current()


def tuning_request(study: Study, settings: FinetuneSettings) -> TuningRequest:
    """What these settings ask of a study; everything that can be refused without the model is refused."""
    evidence = gather(study, AnalyzeSettings())
    check_files(study, [SURROGATES])
    names = list(evidence.stores)
    for name in (*settings.stores, *([settings.train_on] if settings.train_on else [])):
        if name not in names:
            raise UsageError(f"{name!r} is no store of {study.path}; it has {', '.join(names)}")
    stores = tuple(name for name in names if not settings.stores or name in settings.stores)
    layers = _layers(evidence, settings)
    used = dict.fromkeys((evidence.fit_on, *stores, settings.train_on or evidence.fit_on))
    paths = [SURROGATES, *(rows_path(study, name) for name in used)]
    inputs = {path: recorded_digest(study, path) for path in paths}
    inputs |= {name: str(evidence.stores[name].reader.digest) for name in used}
    request = TuningRequest(
        evidence,
        settings,
        with_controls(settings.arms),
        layers,
        stores,
        settings.train_on or evidence.fit_on,
        inputs,
    )
    _check_rows(request)
    return request


def _layers(evidence: Evidence, settings: FinetuneSettings) -> tuple[int, ...]:
    """Layers in the order in which they are replaced."""
    study, chosen = evidence.study, chosen_set(settings.layers)
    costs = layer_costs(study.table("measured"), evidence.fit_on) if study.has_table("measured") else {}
    if (chosen or settings.schedule == "cheapest") and not costs:
        raise IncompleteError(
            f"layers={settings.layers}, schedule={settings.schedule}: layers are chosen by what they cost, "
            f"and {study.path} has no measurement yet: run `nearline measure {typed(study.path)}` first, or "
            "name layers such as --layers 3,5-8"
        )
    order = list(cheapest(costs, len(costs)))
    layers = order[: chosen[1]] if chosen else _given(settings.layers)
    if missing := [layer for layer in layers if layer not in evidence.layers]:
        raise UsageError(
            f"layers={settings.layers}: layer {missing[0]} was not fitted; {study.path} has "
            f"{spell_layers(evidence.layers)}"
        )
    if settings.schedule == "cheapest":
        if unknown := [layer for layer in layers if layer not in costs]:
            raise IncompleteError(
                f"schedule=cheapest: the cost of layer {unknown[0]} was not measured; {study.path} has those "
                f"of {spell_layers(sorted(order))}: run `nearline measure {typed(study.path)}` with all "
                "layers, or name layers of these"
            )
        return tuple(sorted(layers, key=order.index))
    if settings.schedule == "random":
        return tuple(np.random.default_rng(settings.seeds[0]).permutation(sorted(layers)).tolist())
    return tuple(layers if settings.schedule == "given" else sorted(layers))


def _given(text: str) -> list[int]:
    """Layers in the order in which they are written."""
    return list(dict.fromkeys(layer for part in text.split(",") for layer in parse_layers(part)))


def _check_rows(request: TuningRequest) -> None:
    for name in request.stores:
        if not request.scored(name, TEST).any():
            raise UsageError(f"store {name}: no row of its test split can be scored: harvest more `tokens`")
    if not request.scored(request.evidence.fit_on, GATE).any():
        raise UsageError(
            f"store {request.evidence.fit_on}: no row of its gate split can be scored, and learning rates "
            "are chosen on these rows: harvest more `tokens`"
        )
