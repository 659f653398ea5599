"""The main job on what every installation has: both bundled models, built-in English, from nothing to a
report.

In: an output folder. Out: per model one store per corpus, one study with all analyses and a small measurement
on the live model, and one report. What is there and current is not done again, and then torch is never
loaded. Cost: two and a quarter minutes on two cores.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import __version__
from ..analyze.analyze import analyses_are_current, analyze
from ..analyze.fit import fit, fit_is_current
from ..analyze.settings import FitSettings
from ..collect.bundled_models import BUNDLED, bundled_path
from ..collect.measure_request import measure_is_current
from ..collect.measure_settings import MeasureSettings
from ..collect.settings import HarvestSettings, parse
from ..reports.report import PAGE, report, report_is_current
from ..store import Progress, UsageError, silent
from .steps import Step, file_digest, key_of, store_step

CORPORA = ("docs:stdlib", "docs:python", "docs:scientific")
TOKENS = 30_000
KEEP = "1/4"  # of the sequences: as many rows come from four times as many documents, which intervals go by
SWEEP = {  # two layers of one store, each by itself and both together
    "layers": "1,4",
    "interventions": ("linear", "gated@input:0.5", "random@0.5"),
    "draws": 1,
    "compound": ("cheapest@2",),
    "noise_floor": False,
}
LEAST_TOKENS = 6_000  # with fewer rows some store has too few groups of documents for the folds of a fit


@dataclass(frozen=True, slots=True)
class Quickstart:
    """The steps in order, and one report per model."""

    steps: tuple[Step, ...]
    reports: tuple[Path, ...]


def quickstart(
    out: Path, progress: Progress = silent, *, tokens: int | None = None, models: Sequence[str] = BUNDLED
) -> Quickstart:
    """Collect, fit, analyse, measure and report the bundled models.

    `out` holds `stores/`, `studies/` and a record per store; `tokens` are rows per store.
    """
    tokens = _checked(TOKENS if tokens is None else tokens)
    steps: list[Step] = []
    reports: list[Path] = []
    for model in models:
        stores = [_collect(out, model, corpus, tokens, progress, steps) for corpus in CORPORA]
        study = out / "studies" / model
        steps.append(
            _step(
                f"fit {model}",
                lambda study=study, stores=stores: fit_is_current(study, stores),
                lambda study=study, stores=stores: fit(study, stores, FitSettings(), progress),
            )
        )
        steps.append(
            _step(
                f"analyze {model}",
                lambda study=study: analyses_are_current(study),
                lambda study=study: analyze(study, progress=progress),
            )
        )
        steps.append(_measure(model, study, stores[0].name, progress))
        steps.append(
            _step(
                f"report {model}",
                lambda study=study: report_is_current(study),
                lambda study=study: report(study),
            )
        )
        reports.append(study / PAGE)
    return Quickstart(tuple(steps), tuple(reports))


def _checked(tokens: int) -> int:
    parse({"tokens": tokens})
    if tokens < LEAST_TOKENS:
        raise UsageError(
            f"tokens={tokens}: too few for a fit, whose rows must come from several documents; quickstart "
            f"takes {LEAST_TOKENS} or more, or {TOKENS} where --tokens is left out"
        )
    return tokens


def _collect(out: Path, model: str, corpus: str, tokens: int, progress: Progress, steps: list[Step]) -> Path:
    store = out / "stores" / f"{model}-{corpus.partition(':')[2]}"
    settings = HarvestSettings(model=model, corpus=corpus, tokens=tokens, keep=KEEP, dtype="float32")
    weights = file_digest(bundled_path(model) / "model.safetensors")
    key = key_of(settings=settings.model_dump(), weights=weights, version=__version__)

    def named(stage: str, done: int, total: int, unit: str) -> None:
        progress(f"{stage} {store.name}", done, total, unit)

    def run() -> None:
        # Imported here: a rerun with nothing to do must not load torch.
        from ..collect.harvesting import collect

        collect(settings, store, named)

    steps.append(store_step(f"collect {store.name}", store, out / "records", key, run))
    return store


def _measure(model: str, study: Path, store: str, progress: Progress) -> Step:
    settings = MeasureSettings(model=model, stores=(store,), **SWEEP)

    def run() -> None:
        # Imported here: a rerun with nothing to do must not load torch.
        from ..collect.measuring import measure

        measure(study, settings, progress)

    return _step(f"measure {model}", lambda: measure_is_current(study, settings), run)


def _step(name: str, is_current: Callable[[], bool], run: Callable[[], Any]) -> Step:
    if is_current():
        return Step(name, "current")
    run()
    return Step(name, "done")
