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

from ..store import Progress, Reader, Study, silent
from ..store.names import printable
from ..store.study import PROVENANCE
from .engine import Job, run
from .examples import Texts
from .facts import harvest_row, tokenizer_facts
from .layers import layer_source
from .outcome import LayerOutcome, LayerWriter, stacked, surrogate_rows
from .population import fold_of_documents, load_population
from .results import to_table
from .settings import FitSettings
from .stores import StorePaths, choose_layers, fit_store, name_stores, open_stores
from .tasks import Evaluated, check_memory

STEP = "fit"
# Raised whenever the same stores and settings give other numbers: older results are then not current.
RESULTS_VERSION = 2
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
    readers, layers, fitted_name, settings = request.readers, request.layers, request.fit_on, request.settings
    evaluated = _evaluate(readers, layers, fitted_name, settings)
    if replaced := request.replaces(study):
        _LOG.info("fit: %s: replaces the fit %s", study.path, replaced)
    outcomes = _run(study, layers, evaluated, fitted_name, settings, progress)
    outputs = _write(study, outcomes, evaluated, fitted_name, settings)
    study.write_settings(request.paths, request.resolved)
    _remove_leftovers(study, outputs)
    facts = {
        "rows": {name: reader.n_tokens for name, reader in readers.items()},
        "tokenizers": {name: tokenizer_facts(reader) for name, reader in readers.items()},
        "versions": {name: metadata.version(name) for name in COMPUTED_WITH},
    }
    study.record_step(STEP, inputs=request.inputs, settings=request.resolved, outputs=outputs, facts=facts)
    _drop_what_was_made_of_others(study)


def fit_is_current(study_path: str | Path, stores: StorePaths, settings: FitSettings | None = None) -> bool:
    """Whether `fit` with these arguments would have nothing to do."""
    request = _resolve(stores, settings or FitSettings())
    return (Path(study_path) / PROVENANCE).exists() and request.is_current(Study.open(study_path))


@dataclass(frozen=True, slots=True)
class _Request:
    """What one call of `fit` asks for, checked: its stores are sealed, comparable and have the layers."""

    paths: Mapping[str, str | Path]
    readers: Mapping[str, Reader]
    layers: Sequence[int]
    fit_on: str
    settings: FitSettings

    @property
    def inputs(self) -> dict[str, str]:
        return {name: str(reader.digest) for name, reader in self.readers.items()}

    @property
    def resolved(self) -> dict[str, Any]:
        chosen = {"fit_on": self.fit_on, "layers": list(self.layers), "results_version": RESULTS_VERSION}
        return self.settings.results() | chosen

    def is_current(self, study: Study) -> bool:
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
    readers = open_stores(named, settings.allow)
    return _Request(named, readers, choose_layers(readers, settings), fit_store(readers, settings), settings)


def open_study(path: str | Path) -> Study:
    """The study at `path`, new or existing."""
    folder = Path(path)
    return Study.open(folder) if folder.exists() and any(folder.iterdir()) else Study.create(folder)


def _evaluate(
    readers: Mapping[str, Reader], layers: Sequence[int], fitted_name: str, settings: FitSettings
) -> dict[str, Evaluated]:
    folds = fold_of_documents(readers[fitted_name], settings.folds, settings.seed)
    evaluated: dict[str, Evaluated] = {}
    for name, reader in readers.items():
        sources = {layer: layer_source(reader, layer) for layer in layers}
        evaluated[name] = Evaluated(name, sources, load_population(reader, folds, name))
    return evaluated


def _run(
    study: Study,
    layers: Sequence[int],
    evaluated: Mapping[str, Evaluated],
    fitted_name: str,
    settings: FitSettings,
    progress: Progress,
) -> list[LayerOutcome]:
    fitted, stores = evaluated[fitted_name], list(evaluated.values())
    block = max(store.reader.plan.block for store in stores)
    limit = settings.memory_limit_bytes
    workers = check_memory(fitted.reader.d_model, block, settings.folds, settings.n_workers, limit)
    if workers < settings.n_workers:
        _LOG.warning("fit: %d of %d workers fit into %s", workers, settings.n_workers, settings.memory_limit)
    texts = {store.name: Texts(store.reader) for store in stores}
    writer = LayerWriter(study, fitted, stores, texts, settings)
    return run(Job(layers, fitted, stores, settings.rules, settings.folds), workers, writer, progress)


def _write(
    study: Study,
    outcomes: Sequence[LayerOutcome],
    evaluated: Mapping[str, Evaluated],
    fitted_name: str,
    settings: FitSettings,
) -> list[str]:
    """Write everything that is not written layer by layer; the paths of all files of the step."""
    stores = list(evaluated)
    tables: dict[str, Iterable[Mapping[str, Any]]] = {
        "harvest": (harvest_row(s.name, s.reader, s.population, Texts(s.reader)) for s in evaluated.values()),
        "surrogates": surrogate_rows(outcomes, stores, settings),
        "alphas": [row for outcome in outcomes for row in outcome.alphas],
        "needs": _by_store(stores, [row for outcome in outcomes for row in outcome.needs]),
        "need_histogram": _by_store(stores, [row for outcome in outcomes for row in outcome.histograms]),
        "examples": _by_store(stores, [row for outcome in outcomes for row in outcome.examples]),
    }
    return [
        *(path for outcome in outcomes for path in outcome.files),
        *(study.write_rows(store.name, store.population.to_table()) for store in evaluated.values()),
        study.write_surrogates(stacked(outcomes), {"fit_on": fitted_name}),
        *(study.write_table(name, to_table(name, rows)) for name, rows in tables.items()),
    ]


def _by_store(stores: Sequence[str], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of a store together, layers and all else in the order they came."""
    return sorted(rows, key=lambda row: stores.index(row["store"]))


def _drop_what_was_made_of_others(study: Study) -> None:
    """A report of tables that have been replaced: nobody may take it for one of these results."""
    steps = study.provenance()
    outputs = steps[STEP]["outputs"]
    for name, step in steps.items():
        tables = {key: digest for key, digest in step["inputs"].items() if key.startswith("tables/")}
        if name != STEP and any(outputs.get(key) != digest for key, digest in tables.items()):
            study.drop_step(name)
            removed = ", ".join(step["outputs"])
            _LOG.info("fit: %s: removed %s, which was of the results before", study.path, printable(removed))


def _remove_leftovers(study: Study, outputs: Sequence[str]) -> None:
    """Files of an earlier fit with other stores or layers: nobody may take them for results of this one."""
    step = study.provenance().get(STEP)
    for name in sorted(set(step["outputs"]) - set(outputs)) if step else ():
        (study.path / name).unlink(missing_ok=True)
        if not any((study.path / name).parent.iterdir()):
            (study.path / name).parent.rmdir()
