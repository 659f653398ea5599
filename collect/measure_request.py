"""What one call of `measure` asks for, checked against the study, before any model is loaded.

In: a study and settings. Out: a frozen `Request` (stores, layers, interventions, sets, lengths of windows)
with the digests and settings that its results depend on, or one sentence on what is missing. Torch is not
loaded: a rerun with nothing to do must not wait for it. Cost: the token columns of the stores, and a digest
of the fit's files.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from ..analyze.analyze_settings import AnalyzeSettings
from ..analyze.evidence import Evidence
from ..analyze.gathering import SURROGATES, check_files, gather
from ..analyze.population import GATE, TEST, UNSEEN
from ..store import Study, UsageError
from .gate_digests import Gates, require_gates
from .interventions import Intervention, check_rank, parse_interventions
from .measure_asked import LINEAR as LINEAR
from .measure_asked import ROUTERS, Asked, by_default, drawn, has_sets
from .measure_checks import check_gradient, check_lengths, check_need, check_sets
from .measure_inputs import inputs_of, routes_of, rows_path
from .measure_settings import MeasureSettings
from .measured_windows import own_length

STEP: Final = "measure"
TIMING: Final = "timing"
# Raised whenever the same stores, settings and model give other numbers: older results are then not current.
RESULTS_VERSION: Final = 2


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """What to measure. `singles`: replacements of one layer; `joint`: of sets of layers; draws apart."""

    evidence: Evidence
    settings: MeasureSettings
    stores: tuple[str, ...]
    singles: tuple[Intervention, ...]
    joint: tuple[Intervention, ...]
    lengths: tuple[int, ...]  # of windows, beside those that were harvested
    inputs: Mapping[str, str]
    routes: Mapping[str, str]  # of these inputs, those that only some replacements depend on
    resolved: Mapping[str, Any]

    @property
    def key(self) -> dict[str, Any]:
        """What every number of this measurement depends on, beside the model and its arithmetic."""
        settings = {name: self.resolved[name] for name in ("need", "seed", "dtype", "results_version")}
        return {
            "surrogates": self.inputs[SURROGATES],
            **settings,
            "batch_tokens": self.settings.batch_tokens,
        }

    @property
    def store_digests(self) -> dict[str, str]:
        """Of the stores that are touched, with the split of their rows: what numbers of a store depend on."""
        return {
            name: f"{self.inputs[name]} {self.inputs[rows_path(self.study, name)]}" for name in self.touched
        }

    @property
    def touched(self) -> tuple[str, ...]:
        """The stores that pass through the model; layers are chosen on the one that was fitted."""
        return tuple(dict.fromkeys((*((self.evidence.fit_on,) if self.chooses else ()), *self.stores)))

    @property
    def study(self) -> Study:
        return self.evidence.study

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(self.evidence.layers)

    @property
    def asked(self) -> Asked:
        """What follows from settings alone."""
        return Asked(self.settings, self.layers, self.singles, self.joint)

    @property
    def chooses(self) -> bool:
        """Whether layers have to be chosen by what they cost on gate rows."""
        return self.asked.chooses

    @property
    def on_gate(self) -> tuple[Intervention, ...]:
        """Replacements of one layer that are measured on gate rows."""
        return self.asked.on_gate

    @property
    def on_test(self) -> tuple[Intervention, ...]:
        """Replacements of one layer that are measured on test rows."""
        return self.asked.on_test

    def windows(self, store: str) -> tuple[int | None, ...]:
        """The lengths of windows to measure a store with; None: as harvested."""
        own = own_length(self.evidence.stores[store].reader)
        return (None, *(length for length in self.lengths if length != own))

    def scored(self, store: str, split: int) -> np.ndarray:
        """Which rows of a store count in a split: held-out body rows with a target."""
        rows = self.evidence.stores[store]
        found = np.zeros(rows.population.split.size, bool)
        if split == GATE:
            found[rows.population.rows(GATE)] = True
            found &= rows.population.fold == UNSEEN
        else:
            found[self.evidence.test_rows(store)] = True
        return found & (rows.population.target_id >= 0)

    def is_current(self) -> bool:
        timed = not self.settings.timing or TIMING in self.study.provenance()
        return timed and self.study.step_is_current(STEP, self.inputs, self.resolved)


def measure_is_current(study_path: str | Path, settings: MeasureSettings | None = None) -> bool:
    """Whether `measure` with these arguments would have nothing to do. Loads no model."""
    study = Study.open(study_path)
    return STEP in study.provenance() and request_of(study, settings or MeasureSettings()).is_current()


def request_of(study: Study, settings: MeasureSettings) -> Request:
    """What these settings ask of a study; everything that can be refused without the model is refused."""
    evidence = gather(study, AnalyzeSettings(layers=settings.layers, need=(settings.need,)))
    check_files(study, [SURROGATES])
    stores = _stores(evidence, settings)
    singles, joint, gates = _interventions(evidence, settings)
    check_sets(evidence, settings)
    check_lengths(evidence, stores, settings)
    if settings.validate_estimate:
        check_gradient(evidence, stores)
    chosen = {
        "stores": list(stores),
        "layers": list(evidence.layers),
        "interventions": [one.name for one in singles],
        "compound_with": [one.name for one in joint],
        "sequence_length": list(settings.sequence_length),
        "dtype": _dtype(evidence, settings),
        "results_version": RESULTS_VERSION,
    }
    used = list(dict.fromkeys((LINEAR, *singles, *joint)))
    fixed, routes = inputs_of(evidence, stores), routes_of(evidence, stores, used, gates, settings)
    request = Request(
        evidence,
        settings,
        stores,
        singles,
        joint,
        settings.sequence_length,
        fixed | routes,
        routes,
        settings.results() | chosen,
    )
    _check_rows(request)
    return request


def _stores(evidence: Evidence, settings: MeasureSettings) -> tuple[str, ...]:
    there = list(evidence.stores)
    for name in settings.stores:
        if name not in there:
            raise UsageError(
                f"stores={name}: {evidence.study.path} has {', '.join(there)}; `nearline fit` takes more in"
            )
    return tuple(name for name in there if not settings.stores or name in settings.stores)


def _interventions(
    evidence: Evidence, settings: MeasureSettings
) -> tuple[tuple[Intervention, ...], tuple[Intervention, ...], Gates | None]:
    """Replacements of single layers and of sets, as asked for or by default, all of them possible here."""
    named = parse_interventions(settings.interventions)
    joint = parse_interventions(settings.compound_with) if has_sets(settings) else ()
    if not named:
        gates = require_gates(
            evidence.study, [("interventions", "input@linear", settings.need)], evidence.layers
        )
        assert gates is not None
        there = [features for features in ROUTERS if features in gates.features(settings.need)]
        named = parse_interventions(by_default(there, settings))
    wanted = [
        (one.name, None if one.features is None else f"{one.features}@{one.size}", one.need or settings.need)
        for one in (*named, *joint)
        if one.features is not None or one.kind == "token_list"
    ]
    gates = require_gates(evidence.study, wanted, evidence.layers)
    for one in (*named, *joint):
        check_need(evidence, one, settings)
        check_rank(one, evidence.fitted.reader.d_model)
    return drawn(named, settings), drawn(joint, settings), gates


def _check_rows(request: Request) -> None:
    """There is something to score, and something to choose on where layers are chosen."""
    for name in request.stores:
        if not request.scored(name, TEST).any():
            raise UsageError(
                f"store {name}: no row of its test split is held out and has a target, so no cost can be "
                "measured: harvest more tokens"
            )
    fit_on = request.evidence.fit_on
    if request.chooses and not request.scored(fit_on, GATE).any():
        raise UsageError(
            f"store {fit_on}: no row of its gate split can be scored, and layers are chosen on these rows: "
            "harvest more tokens, or name sets of layers such as --compound 2+5+7 without progressive"
        )


def _dtype(evidence: Evidence, settings: MeasureSettings) -> str:
    """The compute dtype: that of the harvests, which may not differ."""
    if settings.dtype != "auto":
        return settings.dtype
    found = {name: one.reader.attributes.compute.dtype for name, one in evidence.stores.items()}
    if len(set(found.values())) > 1:
        said = ", ".join(f"{name} in {dtype}" for name, dtype in found.items())
        raise UsageError(f"stores were harvested in different dtypes ({said}): name one with --dtype")
    return next(iter(found.values()))
