"""The steps of a study: collect, fit, losses, analyze, measure, finetune, report, for each of its models.

In: a `Whole`. Out: jobs in the order in which they run. `losses` is there where gates are made of what only
the live model says (`need` of [analyze] or [measure] is loss or kl): a measurement of surrogates alone, which
the measurement behind the analyses takes over. Cost: asking whether a step is current reads the token columns
of its stores and digests its results; torch is loaded by steps that run a model, when they run.
"""

from collections.abc import Callable, Iterator
from typing import Any, Final

from ..analyze.analyze import analyze, outdated_analyses
from ..analyze.currency import stale_steps
from ..analyze.evidence import BROUGHT_BY
from ..analyze.fit import fit
from ..analyze.fit_request import STEP as FIT
from ..analyze.fit_request import resolve
from ..collect.interventions import parse_interventions
from ..collect.measure_request import STEP as MEASURE
from ..collect.measure_request import request_of
from ..collect.measure_settings import MeasureSettings
from ..reports.report import STEP as REPORT
from ..reports.report import report, report_is_current
from ..store import Progress, Study
from ..store.study_files import PROVENANCE
from .reasons import NOT_YET, Why, differences, why_again
from .records import why_collect, write_record
from .shapes import require_shape
from .steps import Job
from .study_settings import ModelStudy, StoreJob, Whole

KINDS: Final = ("collect", "fit", "losses", "analyze", "measure", "finetune", "report")
MEASURED: Final = frozenset(need for need, by in BROUGHT_BY.items() if by == "nearline measure")
_UNTIMED: Final = Why("not timed yet", "not timed before")
_SEALED: Final = "sealed, made with these settings"
# Whatever of a measurement does not change what a token loses where one MLP is linear.
_BESIDE_LOSSES: Final = {
    "interventions": ("linear",),
    "compound": (),
    "progressive": "none",
    "sequence_length": (),
    "validate_estimate": False,
    "timing": False,
}
# Of the settings of a measurement, those that losses depend on.
_OF_LOSSES: Final = (
    "need",
    "dtype",
    "batch_tokens",
    "attention",
    "device",
    "threads",
    "seed",
    "noise_floor",
    "results_version",
)


def jobs_of(whole: Whole) -> tuple[Job, ...]:
    """All steps of all models."""
    return tuple(job for model in whole.models for job in _of_model(whole, model))


def _of_model(whole: Whole, model: ModelStudy) -> Iterator[Job]:
    for store in model.stores:
        yield _collect(whole, model, store)
    yield _job("fit", model, _why_fit(model), lambda progress: fit(*_fitting(model), progress))
    if needs_losses(model):
        settings = loss_settings(model)
        yield _job("losses", model, _why_losses(model, settings), _measuring(model, settings))
    yield _job("analyze", model, _why_analyze(model), _analyzing(model))
    yield _job("measure", model, _why_measure(model), _measuring(model, model.measure))
    if model.finetune is not None:
        yield _job("finetune", model, _why_finetune(model), _finetuning(model))
    yield _job("report", model, _why_report(model), lambda _: report(model.path))


def needs_losses(model: ModelStudy) -> bool:
    """Whether an analysis goes by a need that only a measurement brings."""
    return bool(MEASURED & {*model.analyze.need})


def loss_settings(model: ModelStudy) -> MeasureSettings:
    """The measurement that brings losses: surrogates in the place of each MLP, nothing else."""
    return model.measure.model_copy(update=_BESIDE_LOSSES)


def _job(kind: str, model: ModelStudy, why: Callable[[], Why | None], run: Callable[[Progress], Any]) -> Job:
    return Job(kind, f"{kind} {model.name}", model.name, why, run)


def _collect(whole: Whole, model: ModelStudy, store: StoreJob) -> Job:
    def run(progress: Progress) -> None:
        from ..collect.harvesting import collect
        from ..collect.stopping import stop_on_signals

        def named(stage: str, done: int, total: int, unit: str) -> None:
            progress(f"{stage} {store.name}", done, total, unit)

        require_shape(whole.path, model, store)
        with stop_on_signals() as stop:
            collect(store.settings, store.path, named, stop)
        write_record(whole.records, store)

    return Job(
        "collect",
        f"collect {store.name}",
        model.name,
        lambda: why_collect(whole.records, store),
        run,
        _SEALED,
    )


def _fitting(model: ModelStudy) -> tuple[Any, Any, Any]:
    return model.path, model.store_paths, model.fit


def _why_fit(model: ModelStudy) -> Callable[[], Why | None]:
    def why() -> Why | None:
        request = resolve(model.store_paths, model.fit)
        if not (model.path / PROVENANCE).exists():
            return NOT_YET
        study = Study.open(model.path)
        if request.is_current(study):
            return None
        kept = Why("moments are to be kept", "moments were to be kept")
        return why_again(study, FIT, request.inputs, request.resolved, kept)

    return why


def _why_losses(model: ModelStudy, settings: MeasureSettings) -> Callable[[], Why | None]:
    def why() -> Why | None:
        study = Study.open(model.path)
        record = study.provenance().get(MEASURE)
        if record is None:
            return NOT_YET
        if MEASURE in stale_steps(study):
            return Why("the surrogates are other ones", "the surrogates were other ones")
        now = request_of(study, settings)
        if missing := [name for name in now.stores if name not in record["settings"]["stores"]]:
            return _unmeasured(missing[0])
        if missing := [layer for layer in now.layers if layer not in record["settings"]["layers"]]:
            return _unmeasured(f"layer {missing[0]}")
        before, asked = (
            {key: one.get(key) for key in _OF_LOSSES} for one in (record["settings"], now.resolved)
        )
        differ = differences(before, asked)
        return Why(differ, differ) if differ else None

    return why


def _unmeasured(what: str) -> Why:
    return Why(f"{what} is not measured yet", f"{what} was not measured")


def _why_analyze(model: ModelStudy) -> Callable[[], Why | None]:
    def why() -> Why | None:
        outdated = outdated_analyses(model.path, model.analyze)
        if not outdated:
            return None
        study = Study.open(model.path)
        found: dict[Why, list[str]] = {}
        for name, made_from in outdated.items():
            found.setdefault(why_again(study, name, *made_from), []).append(name)
        if len(found) == 1:
            return next(iter(found))
        named = [(" and ".join(names), one) for one, names in found.items()]
        return Why(
            "; ".join(f"{names}: {one.now}" for names, one in named),
            "; ".join(f"{names}: {one.then}" for names, one in named),
        )

    return why


def _analyzing(model: ModelStudy) -> Callable[[Progress], Any]:
    return lambda progress: analyze(model.path, model.analyze, progress)


def _why_measure(model: ModelStudy) -> Callable[[], Why | None]:
    def why() -> Why | None:
        study = Study.open(model.path)
        request = request_of(study, model.measure)
        if MEASURE in study.provenance() and request.is_current():
            return None
        return why_again(study, MEASURE, request.inputs, request.resolved, _UNTIMED)

    return why


def _measuring(model: ModelStudy, settings: MeasureSettings) -> Callable[[Progress], Any]:
    def run(progress: Progress) -> None:
        from ..collect.measuring import measure

        measure(model.path, settings, progress)

    return run


def _why_finetune(model: ModelStudy) -> Callable[[], Why | None]:
    def why() -> Why | None:
        from ..collect.tuning_request import STEP, finetune_is_current, tuning_request

        settings = model.finetune
        assert settings is not None
        study = Study.open(model.path)
        if finetune_is_current(study, settings):
            return None
        request = tuning_request(study, settings)
        if request.is_scored():
            return why_again(study, STEP, request.inputs, request.resolved, _UNTIMED)
        return why_again(study, STEP, request.inputs, request.resolved)

    return why


def _finetuning(model: ModelStudy) -> Callable[[Progress], Any]:
    def run(progress: Progress) -> None:
        from ..collect.tuning import finetune

        finetune(model.path, model.finetune, progress)

    return run


def _why_report(model: ModelStudy) -> Callable[[], Why | None]:
    def why() -> Why | None:
        if report_is_current(model.path):
            return None
        known = REPORT in Study.open(model.path).provenance()
        return Why("its tables are other ones", "its tables were other ones") if known else NOT_YET

    return why


def has_gated(settings: MeasureSettings) -> bool:
    """Whether a measurement routes by gates or by what comes with them; by default it does."""
    named = parse_interventions(settings.interventions)
    joint = parse_interventions(settings.compound_with) if settings.compound else ()
    return not named or any(one.features is not None or one.kind == "token_list" for one in (*named, *joint))
