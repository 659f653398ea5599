"""The fit: sealed stores of one model in, a study of linear surrogates and needs out.

One pass over the fit and test rows gives moments, from which every fold and every alpha is solved; a second
pass gives the needs of all rows, out of fold for rows that were fitted. Cost: two reads of the stores, 3·d²
flops a fitted or tested row and 2·d² a row for the needs, K + 1 eigendecompositions a layer. Memory: a few
blocks and d × d matrices per worker, and about 100 bytes a token row.

Results wait aside until all are there: a fit that fails or is stopped leaves the one before it as it was.
"""

import logging
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from ..store import Progress, Study, silent
from ..store.names import printable
from ..store.staging import StagedStudy
from ..store.study_files import PROVENANCE
from .compute import session
from .currency import drop_stale
from .engine import Saved, one_family, run
from .evidence import StoreRows
from .examples import Texts
from .facts import harvest_row, tokenizer_facts
from .fit_request import STEP, Request, resolve
from .layers import layer_source
from .named_fits import remove_unrecorded, stale_fits
from .outcome import Fitted, LayerFinisher, LayerOutcome, stacked, surrogate_rows
from .population import FIT, fold_of_documents, load_population
from .results import to_table
from .saved_moments import MomentsKeeper, saved_moments, stale_moments
from .settings import FitSettings
from .stores import StorePaths
from .surrogates import LayerMoments
from .tasks import Evaluated, task_bytes

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
    request = resolve(stores, settings or FitSettings())
    with _begun(study_path) as study:
        if request.is_current(study):
            _LOG.info("fit: %s is current for these stores and settings; nothing to do", study.path)
            study.tidy()
        else:
            _fit(study, request, progress)
    return Study(study.path)


@contextmanager
def _begun(path: str | Path) -> Generator[StagedStudy]:
    """The study at `path`, new or existing; a new one goes again if nothing was written into it."""
    folder = Path(path)
    made = [one for one in (folder, *folder.parents) if not one.exists()]
    fresh = bool(made) or (folder.is_dir() and not any(folder.iterdir()))
    study = StagedStudy(open_study(folder).path)
    try:
        yield study
    except BaseException:
        if fresh:
            study.discard_unused()
            with suppress(OSError):  # something was written
                for one in made:
                    one.rmdir()
        raise


def _fit(study: StagedStudy, request: Request, progress: Progress) -> None:
    evaluated = _evaluate(request)
    with study.at_work(), ExitStack() as stack:
        if replaced := request.replaces(study):
            _LOG.info("fit: %s: replaces the fit %s", study.path, replaced)
        outcomes, keeper = _run(study, evaluated, request, progress, stack)
        outputs = _write(study, outcomes, evaluated, request)
        study.commit(outputs, list(study.provenance().get(STEP, {"outputs": {}})["outputs"]))
        study.write_settings(request.paths, request.resolved)
        facts = {
            "rows": {name: store.reader.n_tokens for name, store in evaluated.items()},
            "tokenizers": {name: tokenizer_facts(store.reader) for name, store in evaluated.items()},
            "versions": {name: metadata.version(name) for name in COMPUTED_WITH},
        }
        study.record_step(
            STEP, inputs=request.inputs, settings=request.resolved, outputs=outputs, facts=facts
        )
        keeper.save()
        _drop_fits_of_others(study)
        drop_stale(study)


def fit_is_current(study_path: str | Path, stores: StorePaths, settings: FitSettings | None = None) -> bool:
    """Whether `fit` with these arguments would have nothing to do."""
    request = resolve(stores, settings or FitSettings())
    return (Path(study_path) / PROVENANCE).exists() and request.is_current(Study.open(study_path))


def open_study(path: str | Path) -> Study:
    """The study at `path`, new or existing."""
    folder = Path(path)
    taken = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    return Study.open(folder) if taken else Study.create(folder)


def _evaluate(request: Request) -> dict[str, Evaluated]:
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
    study: Study,
    evaluated: Mapping[str, Evaluated],
    request: Request,
    progress: Progress,
    stack: ExitStack,
) -> tuple[list[LayerOutcome], MomentsKeeper]:
    """Every layer, and the moments that wait to be kept; what that takes is closed with `stack`."""
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
    workers = stack.enter_context(session(settings, progress))
    keeper = stack.enter_context(MomentsKeeper(study, kept, job.folds, settings, layers))
    at_once = workers.at_once(task_bytes(width, block, settings.folds), what, "or lower `folds`")

    def sink(layer: int, outcome: LayerOutcome, moments: Mapping[str, LayerMoments]) -> LayerOutcome:
        keeper.add(layer, moments)
        return outcome.written(study)

    return run(job, workers, finish, sink, at_once, saved), keeper


def _fitted_facts(request: Request, evaluated: Mapping[str, Evaluated]) -> Fitted:
    n_folds, source = request.settings.folds, request.sources.fitted
    if source is not None:
        return Fitted(request.fit_on, tuple(source.n_fit_groups(k) for k in range(n_folds + 1)))
    population = evaluated[request.fit_on].population
    rows = population.rows(FIT)
    first = [rows[population.fold[rows] < k] for k in range(n_folds + 1)]
    return Fitted(request.fit_on, tuple(population.n_groups(found) for found in first))


def _write(
    study: Study, outcomes: Sequence[LayerOutcome], evaluated: Mapping[str, Evaluated], request: Request
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


def _drop_fits_of_others(study: Study) -> None:
    """Named fits and moments of stores, folds or alphas that are not those of this fit, or of nobody."""
    steps = study.provenance()
    for name in (*stale_fits(steps), *stale_moments(steps)):
        study.drop_step(name)
        _LOG.info("fit: %s: removed %s, which was of the fit before", study.path, printable(name))
    remove_unrecorded(study)
