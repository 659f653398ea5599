"""The fit: sealed stores of one model in, a study of linear surrogates and needs out.

One pass over the fit and test rows gives moments, from which every fold and every alpha is solved; a second
pass gives the needs of all rows, out of fold for rows that were fitted. Cost: two reads of the stores, 3·d²
flops a fitted or tested row and 2·d² a row for the needs, K + 1 eigendecompositions a layer. Memory: a few
blocks and d × d matrices per worker, and about 100 bytes a token row.

The record of the step is written last: a fit that was stopped half-way is not current and runs again.
"""

import logging
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from ..store import Progress, Study, silent
from ..store.names import printable
from ..store.study import PROVENANCE
from .compute import session
from .currency import drop_stale
from .engine import Saved, one_family, run
from .evidence import StoreRows
from .examples import Texts
from .facts import harvest_row, tokenizer_facts
from .layers import layer_source
from .named_fits import stale_fits
from .outcome import Fitted, LayerFinisher, LayerOutcome, stacked, surrogate_rows
from .population import FIT, fold_of_documents, load_population
from .results import to_table
from .saved_moments import MomentsKeeper, moments_are_kept, saved_moments, stale_moments
from .settings import FitSettings
from .stores import Sources, StorePaths, choose_layers, name_stores, open_sources
from .surrogates import LayerMoments
from .tasks import Evaluated, task_bytes

STEP = "fit"
# Raised whenever the same stores and settings give other numbers: older results are then not current.
RESULTS_VERSION = 3
COMPUTED_WITH = ("nearline", "numpy", "scipy", "pyarrow", "polars", "dask")
_LOG = logging.getLogger("nearline")


def fit(
    study_path: str | Path,
    stores: StorePaths,
    settings: FitSettings | None = None,
    progress: Progress = silent,
) -> Study:
    """Fit surrogates and needs of `stores` into the study at `study_path`; nothing is done where they are
    current.
    """
    request = _resolve(stores, settings or FitSettings())
    with _begun(study_path) as study:
        if request.is_current(study):
            _LOG.info("fit: %s is current for these stores and settings; nothing to do", study.path)
        else:
            _fit(study, request, progress)
    return study


@contextmanager
def _begun(path: str | Path) -> Generator[Study]:
    """The study at `path`, new or existing; a new one goes again if nothing was written into it."""
    folder = Path(path)
    made = [one for one in (folder, *folder.parents) if not one.exists()]
    fresh = bool(made) or (folder.is_dir() and not any(folder.iterdir()))
    study = open_study(folder)
    try:
        yield study
    except BaseException:
        if fresh:
            study.discard_unused()
            with suppress(OSError):  # something was written
                for one in made:
                    one.rmdir()
        raise


def _fit(study: Study, request: "_Request", progress: Progress) -> None:
    evaluated = _evaluate(request)
    if replaced := request.replaces(study):
        _LOG.info("fit: %s: replaces the fit %s", study.path, replaced)
    outcomes = _run(study, evaluated, request, progress)
    outputs = _write(study, outcomes, evaluated, request)
    study.write_settings(request.paths, request.resolved)
    _remove_leftovers(study, outputs)
    facts = {
        "rows": {name: store.reader.n_tokens for name, store in evaluated.items()},
        "tokenizers": {name: tokenizer_facts(store.reader) for name, store in evaluated.items()},
        "versions": {name: metadata.version(name) for name in COMPUTED_WITH},
    }
    study.record_step(STEP, inputs=request.inputs, settings=request.resolved, outputs=outputs, facts=facts)
    _drop_fits_of_others(study)
    drop_stale(study)


def fit_is_current(study_path: str | Path, stores: StorePaths, settings: FitSettings | None = None) -> bool:
    """Whether `fit` with these arguments would have nothing to do."""
    request = _resolve(stores, settings or FitSettings())
    return (Path(study_path) / PROVENANCE).exists() and request.is_current(Study.open(study_path))


@dataclass(frozen=True, slots=True)
class _Request:
    """What one call of `fit` asks for, checked: its stores are sealed, comparable and have the layers."""

    paths: Mapping[str, str | Path]
    sources: Sources
    layers: Sequence[int]
    settings: FitSettings

    @property
    def fit_on(self) -> str:
        return self.sources.fit_on

    @property
    def inputs(self) -> dict[str, str]:
        return self.sources.digests

    @property
    def resolved(self) -> dict[str, Any]:
        chosen = {"fit_on": self.fit_on, "layers": list(self.layers), "results_version": RESULTS_VERSION}
        return self.settings.results() | chosen

    def is_current(self, study: Study) -> bool:
        wanted = self.settings.keep_moments and self.sources.fitted is None
        if wanted and not moments_are_kept(study, self.fit_on, self.inputs, self.settings, self.layers):
            return False
        return study.step_is_current(STEP, self.inputs, self.resolved)

    def replaces(self, study: Study) -> str | None:
        """What was other in the fit that is there: its settings, its stores."""
        step = study.provenance().get(STEP)
        if step is None:
            return None
        before, now = step["settings"], self.resolved
        other = [f"{key}={_plain(before[key])}" for key in before if before[key] != now.get(key)]
        other += [f"no {key}" for key in now if key not in before]
        if step["inputs"] != self.inputs:
            names = ", ".join(sorted(step["inputs"]))
            same = set(step["inputs"]) == set(self.inputs)
            other.append(f"stores {names}" + (" of other content" if same else ""))
        return printable(f"with {'; '.join(other)}") if other else None


def _plain(value: object) -> str:
    return (
        ",".join(map(_plain, value))
        if isinstance(value, list)
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )


def _resolve(stores: StorePaths, settings: FitSettings) -> _Request:
    named = name_stores(stores)
    sources = open_sources(named, settings)
    return _Request(named, sources, choose_layers({**sources.readers, **sources.moments}, settings), settings)


def open_study(path: str | Path) -> Study:
    """The study at `path`, new or existing."""
    folder = Path(path)
    return Study.open(folder) if folder.exists() and any(folder.iterdir()) else Study.create(folder)


def _evaluate(request: "_Request") -> dict[str, Evaluated]:
    """The stores with rows, as the surrogates see them."""
    sources, settings = request.sources, request.settings
    if sources.fitted is not None:
        folds: Mapping[str, int] = sources.fitted.folds
    else:
        folds = fold_of_documents(sources.readers[request.fit_on], settings.folds, settings.seed)
    evaluated: dict[str, Evaluated] = {}
    for name, reader in sources.readers.items():
        layers = {layer: layer_source(reader, layer) for layer in request.layers}
        evaluated[name] = Evaluated(name, layers, load_population(reader, folds, name))
    return evaluated


def _run(
    study: Study, evaluated: Mapping[str, Evaluated], request: "_Request", progress: Progress
) -> list[LayerOutcome]:
    settings, layers = request.settings, request.layers
    job = one_family(evaluated, request.fit_on, layers, settings.rules, settings.folds, extras=True)
    texts = {store.name: Texts(store.reader) for store in evaluated.values()}
    finish = LayerFinisher(_fitted_facts(request, evaluated), list(evaluated.values()), texts, settings)
    rows = {name: StoreRows(name, evaluated[name].reader, evaluated[name].population) for name in job.folds}
    saved = saved_moments(study, rows, job.folds, settings, layers)
    if request.sources.fitted is not None:
        saved = Saved({request.fit_on: request.sources.fitted.layer})
    width = next(iter(evaluated.values())).reader.d_model
    block = max(store.reader.plan.block for store in evaluated.values())
    what = f"fit: a layer of width {width} with {settings.folds} folds and blocks of {block} rows"
    kept = {name: rows[name] for name in saved.keep}
    with (
        session(settings, progress) as workers,
        MomentsKeeper(study, kept, job.folds, settings, layers) as keeper,
    ):
        at_once = workers.at_once(task_bytes(width, block, settings.folds), what, "or lower `folds`")

        def sink(layer: int, outcome: LayerOutcome, moments: Mapping[str, LayerMoments]) -> LayerOutcome:
            keeper.add(layer, moments)
            return outcome.written(study)

        outcomes = run(job, workers, finish, sink, at_once, saved)
        keeper.save()
    return outcomes


def _fitted_facts(request: "_Request", evaluated: Mapping[str, Evaluated]) -> Fitted:
    n_folds, source = request.settings.folds, request.sources.fitted
    if source is not None:
        return Fitted(request.fit_on, tuple(source.n_fit_groups(k) for k in range(n_folds + 1)))
    population = evaluated[request.fit_on].population
    rows = population.rows(FIT)
    first = [rows[population.fold[rows] < k] for k in range(n_folds + 1)]
    return Fitted(request.fit_on, tuple(population.n_groups(found) for found in first))


def _write(
    study: Study, outcomes: Sequence[LayerOutcome], evaluated: Mapping[str, Evaluated], request: "_Request"
) -> list[str]:
    """Write everything that is not written layer by layer; the paths of all files of the step."""
    stores = list(evaluated)
    tables: dict[str, Iterable[Mapping[str, Any]]] = {
        "harvest": (harvest_row(s.name, s.reader, s.population, Texts(s.reader)) for s in evaluated.values()),
        "surrogates": surrogate_rows(outcomes, stores, request.settings),
    }
    surrogates = [outcome.surrogate for outcome in outcomes]
    for name in outcomes[0].tables:
        rows = [row for outcome in outcomes for row in outcome.tables[name]]
        tables[name] = _by_store(list(request.inputs), rows)
    return [
        *(path for outcome in outcomes for path in outcome.files),
        *(study.write_rows(store.name, store.population.to_table()) for store in evaluated.values()),
        study.write_surrogates(stacked(request.layers, surrogates), {"fit_on": request.fit_on}),
        *(study.write_table(name, to_table(name, rows)) for name, rows in tables.items()),
    ]


def _by_store(stores: Sequence[str], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of a store together, layers and all else in the order they came."""
    return sorted(rows, key=lambda row: stores.index(row["store"]))


def _remove_leftovers(study: Study, outputs: Sequence[str]) -> None:
    """Files of an earlier fit with other stores or layers: nobody may take them for results of this one."""
    step = study.provenance().get(STEP)
    for name in sorted(set(step["outputs"]) - set(outputs)) if step else ():
        study.remove_output(name)


def _drop_fits_of_others(study: Study) -> None:
    """Named fits and moments of stores, folds or alphas that are not those of this fit."""
    steps = study.provenance()
    for name in (*stale_fits(steps), *stale_moments(steps)):
        study.drop_step(name)
        _LOG.info("fit: %s: removed %s, which was of the fit before", study.path, printable(name))
