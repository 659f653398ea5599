"""Fits beside the main one: the names of stores, or "pooled", in; surrogates of each and needs by them out.

A fit called after a store is fitted on that store's fit rows, the one called `pooled` on those of all
stores together. Needs are of every row of every store, each by a surrogate that has not seen the row's
document: folds are joint (see `joint_folds`), so that a document that stands in several stores has one
fold. Rows of a group that is linked to several folds have no held-out surrogate in the pooled fit; their
needs there are NaN.

Results wait aside until all fits of a call are there. Cost: a fit, for all the names of a call together:
each store is read once for the moments, which serve its own and the pooled fit, and once for the needs.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Final

from ..store import IncompleteError, Study, UsageError
from ..store.names import printable, typed
from ..store.staging import StagedStudy
from .compute import Session
from .engine import Job, Needs, run
from .evidence import Evidence
from .named_folds import POOLED, JointFolds
from .outcome import stacked, write_needs
from .ridge import Surrogate
from .saved_moments import MomentsKeeper, saved_moments
from .settings import FitSettings
from .surrogates import LayerFit
from .tasks import Evaluated, task_bytes

PREFIX: Final = "fit@"
# Raised whenever the same stores and settings give other numbers.
RESULTS_VERSION: Final = 1
COMPUTED_WITH: Final = ("nearline", "numpy", "scipy", "pyarrow", "dask")
# Settings of the main fit that a named one takes over.
SETTINGS: Final = ("alpha", "alphas", "folds", "seed", "fit_on")
_LOG = logging.getLogger("nearline")


def surrogate_of(evidence: Evidence, name: str) -> str | None:
    """The name under which needs of a fit stand in the study; None for the main fit."""
    return None if name == evidence.fit_on else name


def ensure(evidence: Evidence, names: Sequence[str], session: Session) -> None:
    """Make the fits of these names that are not current; the store of the main fit needs none."""
    wanted = [name for name in dict.fromkeys(names) if surrogate_of(evidence, name) is not None]
    for name in wanted:
        if name != POOLED and name not in evidence.stores:
            raise UsageError(f"no store {name!r} to fit: it has {', '.join(evidence.stores)}, and {POOLED}")
    record = _main_fit(evidence.study)
    todo = [name for name in wanted if not _is_current(evidence, name, record)]
    for name in wanted:
        if name not in todo:
            _LOG.info("fit: the fit of %s is current", name)
    if todo:
        with StagedStudy.writing(evidence.study) as study:
            _fit(evidence, study, todo, session, record)


def stale_fits(steps: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Recorded named fits that the main fit has left behind: other stores, folds or alphas."""
    main = steps["fit"]
    return [
        name
        for name, step in steps.items()
        if name.startswith(PREFIX)
        and (
            step["inputs"] != main["inputs"]
            or any(step["settings"].get(key) != main["settings"].get(key) for key in SETTINGS)
        )
    ]


def remove_unrecorded(study: Study) -> None:
    """Remove files of named fits that no step has recorded: of processes that died before they could."""
    recorded = {output for step in study.provenance().values() for output in step["outputs"]}
    files = [path for path in study.path.glob("tokens/need@*/**/*") if path.is_file()]
    for path in [*files, *study.path.glob("surrogates@*.zarr")]:
        output = path.relative_to(study.path).as_posix()
        if output not in recorded:
            study.remove_output(output)
            _LOG.info("fit: %s: removed %s, which no fit has recorded", study.path, printable(output))


def _main_fit(study: Study) -> Mapping[str, Any]:
    record = study.provenance().get("fit")
    if record is None:
        raise IncompleteError(
            f"{study.path} is not fitted yet: run `nearline fit {typed(study.path)} STORE…` first"
        )
    return record


def _inputs(evidence: Evidence) -> dict[str, str]:
    return {name: str(store.reader.digest) for name, store in evidence.stores.items()}


def _resolved(record: Mapping[str, Any], layers: Sequence[int]) -> dict[str, Any]:
    chosen = {key: record["settings"][key] for key in SETTINGS}
    return chosen | {"layers": list(layers), "results_version": RESULTS_VERSION}


def _is_current(evidence: Evidence, name: str, record: Mapping[str, Any]) -> bool:
    """With these layers at least."""
    step = evidence.study.provenance().get(PREFIX + name)
    if step is None or not set(step["settings"].get("layers", ())) >= set(evidence.layers):
        return False
    settings = _resolved(record, step["settings"]["layers"])
    return evidence.study.step_is_current(PREFIX + name, _inputs(evidence), settings)


def _layers(evidence: Evidence, todo: Sequence[str], record: Mapping[str, Any]) -> list[int]:
    """The layers asked for, and those that the fits had before: what is there stays there."""
    steps, inputs = evidence.study.provenance(), _inputs(evidence)
    layers = set(evidence.layers)
    for name in todo:
        step = steps.get(PREFIX + name)
        if step is not None and step["inputs"] == inputs:
            layers |= set(step["settings"].get("layers", ())) & set(record["settings"]["layers"])
    return sorted(layers)


def _fit(
    evidence: Evidence,
    study: StagedStudy,
    todo: Sequence[str],
    session: Session,
    record: Mapping[str, Any],
) -> None:
    settings = FitSettings(**{key: record["settings"][key] for key in SETTINGS})
    layers = _layers(evidence, todo, record)
    folds = JointFolds.of(evidence, settings)
    families = tuple(folds.family(name) for name in todo)
    fitted = [name for name in evidence.stores if any(name in family.fitted for family in families)]
    for name in fitted:
        folds.check(name, settings.folds)
    stores = {
        name: Evaluated(name, {layer: store.source(layer) for layer in layers}, store.population)
        for name, store in evidence.stores.items()
    }
    job = Job(
        layers, stores, families, settings.rules, settings.folds, {name: folds.joint[name] for name in fitted}
    )
    saved = saved_moments(study, {n: evidence.stores[n] for n in fitted}, folds.joint, settings, layers)
    width = evidence.fitted.reader.d_model
    block = max(store.reader.plan.block for store in evidence.stores.values())
    stage = f"fit of {', '.join(todo)}"
    need = task_bytes(width, block, settings.folds, len(families))
    what = f"{stage}: a layer of width {width} with {settings.folds} folds and blocks of {block} rows"
    at_once = session.at_once(need, what, "or fit with fewer `folds`")
    files: dict[str, list[str]] = {name: [] for name in todo}

    kept_stores = {name: evidence.stores[name] for name in saved.keep}
    with MomentsKeeper(study, kept_stores, folds.joint, settings, layers) as keeper:

        def sink(layer: int, outcome: _Outcome, kept: Mapping[str, Any]) -> dict[str, Surrogate]:
            for name in todo:
                for store, columns in outcome.needs[name].items():
                    files[name].append(write_needs(study, layer, store, columns, name))
            keeper.add(layer, kept)
            return outcome.surrogates

        found = run(job, session, _finish, sink, at_once, saved, stage)
        for name in todo:
            surrogates = [one[name] for one in found]
            files[name].append(_write_surrogates(evidence, study, layers, name, surrogates))
        _commit(study, files)
        for name in todo:
            study.record_step(
                PREFIX + name,
                inputs=_inputs(evidence),
                settings=_resolved(record, layers),
                outputs=files[name],
                facts={"versions": {package: metadata.version(package) for package in COMPUTED_WITH}},
            )
        keeper.save()


def _write_surrogates(
    evidence: Evidence, study: Study, layers: Sequence[int], name: str, surrogates: Sequence[Surrogate]
) -> str:
    stores = list(evidence.stores) if name == POOLED else [name]
    return study.write_surrogates(stacked(layers, surrogates), {"fit_on": ",".join(stores)}, name)


def _commit(study: StagedStudy, outputs: Mapping[str, Sequence[str]]) -> None:
    steps = study.provenance()
    before = [path for name in outputs for path in steps.get(PREFIX + name, {"outputs": {}})["outputs"]]
    study.commit([path for paths in outputs.values() for path in paths], before)


@dataclass(frozen=True, slots=True, eq=False)
class _Outcome:
    """What is kept of a layer: the full surrogate of each fit, and its needs by store."""

    surrogates: dict[str, Surrogate]
    needs: dict[str, dict[str, Needs]]


def _finish(layer: int, fits: dict[str, LayerFit], needs: dict[str, dict[str, Needs]]) -> _Outcome:
    return _Outcome({name: fit.full for name, fit in fits.items()}, needs)
