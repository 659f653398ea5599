"""The analyses of a fitted study: which are asked for, which are current, and running the others in order.

In: a study and settings. Out: tables, gates and routing in the study, and a record of each analysis. An
analysis whose stores, fit, prerequisites and settings are those of its record is skipped. All that can be
refused is refused before any work; results wait aside until an analysis is done, so that one that fails or
is stopped leaves what was there. Cost: that of the analyses.
"""

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final, Literal

from ..store import Progress, Study, silent
from ..store.staging import StagedStudy
from .analyses import ANALYSES_BY_NAME, Analysis
from .analyze_settings import ANALYSES, AnalyzeSettings
from .compute import Session, session
from .currency import drop_stale
from .evidence import Evidence
from .gathering import (
    SURROGATES,
    check_files,
    check_fits,
    check_groups,
    check_needs,
    check_pairs,
    check_sites,
    gather,
)
from .needs import NEEDS
from .noise_floor import LOSS

COMPUTED_WITH: Final = ("nearline", "numpy", "scipy", "scikit-learn", "pyarrow", "polars", "dask")
_LOG = logging.getLogger("nearline")
State = Literal["done", "current"]


@dataclass(frozen=True, slots=True)
class Analyzed:
    """What a call of `analyze_steps` did: the analyses in their order, and whether each had to run."""

    study: Study
    states: Mapping[str, State]


def analyze(
    study_path: str | Path, settings: AnalyzeSettings | None = None, progress: Progress = silent
) -> Study:
    """Run the analyses that the settings name over a fitted study; those that are current are skipped."""
    return analyze_steps(study_path, settings, progress).study


def analyze_steps(
    study_path: str | Path, settings: AnalyzeSettings | None = None, progress: Progress = silent
) -> Analyzed:
    """As `analyze`; says of each analysis whether it ran."""
    settings = settings or AnalyzeSettings()
    opened = Study.open(study_path)
    study = StagedStudy(opened.path)
    evidence = gather(study, settings)
    asked = _with_prerequisites(settings.analyses)
    _check(evidence, asked)
    if all(_is_current(evidence, name) for name in asked):
        _LOG.info("analyze: %s is current for these settings; nothing to do", study.path)
        study.tidy()
        current: dict[str, State] = dict.fromkeys(asked, "current")
        return Analyzed(opened, current)
    with ExitStack() as stack:
        workers = stack.enter_context(session(settings, progress))
        stack.enter_context(study.at_work())
        states: dict[str, State] = {name: _step(study, evidence, workers, name, asked) for name in asked}
    return Analyzed(opened, states)


def analyses_are_current(study_path: str | Path, settings: AnalyzeSettings | None = None) -> bool:
    """Whether `analyze` with these arguments would have nothing to do."""
    return not outdated_analyses(study_path, settings)


def outdated_analyses(
    study_path: str | Path, settings: AnalyzeSettings | None = None
) -> dict[str, tuple[dict[str, str], dict[str, Any]]]:
    """The analyses that `analyze` with these arguments would run, with what each would be made from: inputs
    and settings.
    """
    settings = settings or AnalyzeSettings()
    study = Study.open(study_path)
    wanted = _with_prerequisites(settings.analyses)
    if "fit" not in study.provenance():
        return dict.fromkeys(wanted, ({}, {}))
    evidence = gather(study, settings)
    return {
        name: (
            _inputs(evidence, ANALYSES_BY_NAME[name], evidence.layers),
            _resolved(evidence, name, evidence.layers),
        )
        for name in wanted
        if not _is_current(evidence, name)
    }


def _with_prerequisites(names: Sequence[str]) -> list[str]:
    wanted = set(names).union(*(ANALYSES_BY_NAME[name].after for name in names))
    return [name for name in ANALYSES if name in wanted]


def _check(evidence: Evidence, asked: Sequence[str]) -> None:
    """Everything that can be refused before any work."""
    chosen = {name: ANALYSES_BY_NAME[name] for name in asked}
    if "nofly" in evidence.settings.only:  # where it was not named, it says itself what it lacks
        check_pairs(evidence)
    if "nofly" in chosen and len(evidence.stores) > 1 and set(NEEDS) & set(evidence.needs):
        check_fits(evidence)
    if taking := [name for name, one in chosen.items() if one.reads_embedding]:
        check_sites(evidence, taking)
    if any(one.reads_needs for one in chosen.values()):
        check_needs(evidence)
    if "gates" in chosen and evidence.settings.features:
        _check_features(evidence)
    for name, one in chosen.items():
        if one.folds_of is not None:
            check_groups(evidence, one.folds_of, name)
    files = {path for one in chosen.values() for path in _fit_files(evidence, one, evidence.layers)}
    check_files(evidence.study, sorted(files))


def _check_features(evidence: Evidence) -> None:
    from .gate_features import choose_features
    from .parts import parts_source

    source = parts_source(evidence.fitted.reader, evidence.layers[0])
    choose_features(evidence.settings.features, has_positions=source.positions is not None)


def _step(study: StagedStudy, evidence: Evidence, workers: Session, name: str, asked: Sequence[str]) -> State:
    """Run one analysis unless it is current, put its results in place and record it."""
    analysis = ANALYSES_BY_NAME[name]
    if _is_current(evidence, name):
        _LOG.info("analyze: %s: current", name)
        return "current"
    if name not in evidence.settings.analyses:
        later = [other for other in asked if name in ANALYSES_BY_NAME[other].after]
        _LOG.info("analyze: %s: runs first, %s uses it", name, " and ".join(later))
    outputs = analysis.run(evidence, workers)
    before = study.provenance().get(name, {"outputs": {}})["outputs"]
    study.commit(outputs, list(before))
    study.record_step(
        name,
        inputs=_inputs(evidence, analysis, evidence.layers),
        settings=_resolved(evidence, name, evidence.layers),
        outputs=outputs,
        facts={"versions": {package: metadata.version(package) for package in COMPUTED_WITH}},
    )
    drop_stale(study, keep=asked)
    return "done"


def _is_current(evidence: Evidence, name: str) -> bool:
    """A prerequisite that was not asked for itself may cover more layers than are asked for."""
    study, layers = evidence.study, list(evidence.layers)
    record = study.provenance().get(name)
    if record is None:
        return False
    if name not in evidence.settings.analyses and set(record["settings"]["layers"]) >= set(layers):
        layers = record["settings"]["layers"]
    inputs = _inputs(evidence, ANALYSES_BY_NAME[name], layers)
    return study.step_is_current(name, inputs, _resolved(evidence, name, layers))


def _resolved(evidence: Evidence, name: str, layers: Sequence[int]) -> dict[str, Any]:
    """The settings that the results depend on."""
    fixed = {"layers": list(layers), "fit_on": evidence.fit_on}
    return evidence.settings.results(name) | fixed | {"results_version": ANALYSES_BY_NAME[name].version}


def _inputs(evidence: Evidence, analysis: Analysis, layers: Sequence[int]) -> dict[str, str]:
    """Digests of all that the results depend on: stores by name, files of other steps by their path."""
    steps = evidence.study.provenance()
    files = {path: digest for step in steps.values() for path, digest in step["outputs"].items()}
    used = _fit_files(evidence, analysis, layers)
    found = {name: str(store.reader.digest) for name, store in evidence.stores.items()}
    found |= {path: files.get(path, "not recorded") for path in used}
    named = [f"fit@{name}" for name in (*evidence.stores, "pooled")] if analysis.reads_named_fits else []
    for step in (*analysis.after, *named):
        found |= steps[step]["outputs"] if step in steps else {}
    return found


def _fit_files(evidence: Evidence, analysis: Analysis, layers: Sequence[int]) -> list[str]:
    """Files of the fit, and of steps that brought the needs asked for, which an analysis reads."""
    study = evidence.study
    rows = [study.rows_path(name).relative_to(study.path).as_posix() for name in evidence.stores]
    columns = {*evidence.needs, *NEEDS} if analysis.reads_needs else set[str]()
    needs = [
        path
        for store in evidence.stores
        for layer in layers
        for path, found in (evidence.need_files(layer, store) if columns else {}).items()
        if columns & set(found)
    ]
    # Where verdicts on labels made of `loss` are refused.
    floor = study.table_path("noise_floor") if analysis.reads_needs and LOSS in evidence.needs else None
    noise = [floor.relative_to(study.path).as_posix()] if floor is not None and floor.exists() else []
    return [*rows, *needs, *noise, *([SURROGATES] if analysis.reads_surrogates else [])]
