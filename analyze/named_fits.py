"""Fits beside the main one: the names of stores, or "pooled", in; surrogates of each and needs by them out.

A fit called after a store is fitted on that store's fit rows, the one called `pooled` on those of all
stores together. Needs are of every row of every store, each by a surrogate that has not seen the row's
document: folds are joint (see `joint_folds`), so that a document that stands in several stores has one
fold. Rows of a group that is linked to several folds have no held-out surrogate in the pooled fit; their
needs there are NaN.

Cost: a fit, for all the names of a call together: each store is read once for the moments, which serve its
own and the pooled fit, and once for the needs.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Final

import numpy as np
from jaxtyping import Int32

from ..store import IncompleteError, Study, UsageError
from ..store.names import typed
from .compute import Session
from .engine import Family, Job, Needs, run
from .evidence import Evidence, StoreRows
from .folds import too_few_groups
from .outcome import stacked, write_needs
from .population import FIT, joint_folds, load_population
from .ridge import Surrogate
from .saved_moments import MomentsKeeper, saved_moments
from .settings import FitSettings
from .surrogates import LayerFit
from .tasks import Evaluated, task_bytes

POOLED: Final = "pooled"
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
        _fit(evidence, todo, session, record)


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


def _fit(evidence: Evidence, todo: Sequence[str], session: Session, record: Mapping[str, Any]) -> None:
    settings = FitSettings(**{key: record["settings"][key] for key in SETTINGS})
    layers = _layers(evidence, todo, record)
    folds = _Folds.of(evidence, settings)
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
    saved = saved_moments(
        evidence.study, {n: evidence.stores[n] for n in fitted}, folds.joint, settings, layers
    )
    width = evidence.fitted.reader.d_model
    block = max(store.reader.plan.block for store in evidence.stores.values())
    stage = f"fit of {', '.join(todo)}"
    need = task_bytes(width, block, settings.folds, len(families))
    what = f"{stage}: a layer of width {width} with {settings.folds} folds and blocks of {block} rows"
    at_once = session.at_once(need, what, "or fit with fewer `folds`")
    files: dict[str, list[str]] = {name: [] for name in todo}

    kept_stores = {name: evidence.stores[name] for name in saved.keep}
    with MomentsKeeper(evidence.study, kept_stores, folds.joint, settings, layers) as keeper:

        def sink(layer: int, outcome: _Outcome, kept: Mapping[str, Any]) -> dict[str, Surrogate]:
            for name in todo:
                for store, columns in outcome.needs[name].items():
                    files[name].append(write_needs(evidence.study, layer, store, columns, name))
            keeper.add(layer, kept)
            return outcome.surrogates

        found = run(job, session, _finish, sink, at_once, saved, stage)
        keeper.save()
    for name in todo:
        _record(evidence, name, files[name], [one[name] for one in found], _resolved(record, layers))


def _record(
    evidence: Evidence,
    name: str,
    files: Sequence[str],
    surrogates: Sequence[Surrogate],
    settings: Mapping[str, Any],
) -> None:
    study = evidence.study
    stores = list(evidence.stores) if name == POOLED else [name]
    attrs = {"fit_on": ",".join(stores)}
    outputs = [*files, study.write_surrogates(stacked(settings["layers"], surrogates), attrs, name)]
    before = study.provenance().get(PREFIX + name, {"outputs": {}})["outputs"]
    for output in sorted(set(before) - set(outputs)):
        study.remove_output(output)
    facts = {"versions": {package: metadata.version(package) for package in COMPUTED_WITH}}
    study.record_step(
        PREFIX + name, inputs=_inputs(evidence), settings=settings, outputs=outputs, facts=facts
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Outcome:
    """What is kept of a layer: the full surrogate of each fit, and its needs by store."""

    surrogates: dict[str, Surrogate]
    needs: dict[str, dict[str, Needs]]


def _finish(layer: int, fits: dict[str, LayerFit], needs: dict[str, dict[str, Needs]]) -> _Outcome:
    return _Outcome({name: fit.full for name, fit in fits.items()}, needs)


@dataclass(frozen=True, slots=True, eq=False)
class _Folds:
    """The folds of all stores together."""

    stores: Mapping[str, StoreRows]
    by_hash: Mapping[str, Mapping[str, int]]  # by store: content hash → fold in the pooled fit
    joint: Mapping[str, Int32[np.ndarray, "token"]]  # by store: the same of each row

    @classmethod
    def of(cls, evidence: Evidence, settings: FitSettings) -> "_Folds":
        # The main fit's store first: its folds are then those of the main fit.
        order = [evidence.fit_on, *(name for name in evidence.stores if name != evidence.fit_on)]
        readers = {name: evidence.stores[name].reader for name in order}
        by_hash = joint_folds(readers, settings.folds, settings.seed)
        joint = {name: _of_rows(evidence.stores[name], by_hash[name]) for name in order}
        return cls(evidence.stores, by_hash, joint)

    def family(self, name: str) -> Family:
        """The pooled fit scores by all folds; that of one store only leaves out the documents it has seen."""
        if name == POOLED:
            return Family(name, tuple(self.stores), self.joint)
        seen = self._fitted_documents(name)
        return Family(name, (name,), {other: _of_rows(rows, seen) for other, rows in self.stores.items()})

    def check(self, name: str, n_folds: int) -> None:
        """Enough groups, not all in one fold."""
        store = self.stores[name]
        rows = store.population.rows(FIT)
        rows = rows[self.joint[name][rows] >= 0]
        n_groups, used = store.population.n_groups(rows), np.unique(self.joint[name][rows])
        if n_groups < n_folds:
            raise UsageError(f"store {name}: {too_few_groups(n_groups, n_folds)}")
        if used.size < 2:
            raise UsageError(
                f"store {name}: all its documents to fit are near-duplicates of those in one fold of the "
                "other stores, so that no surrogate of it can be held out: leave it out, or fit with another "
                "`seed`"
            )

    def _fitted_documents(self, name: str) -> dict[str, int]:
        """Content hash → fold, of every document in a group that a store's own fit has seen."""
        store = self.stores[name]
        rows = store.population.rows(FIT)
        groups = np.unique(store.population.group[rows[self.joint[name][rows] >= 0]])
        documents = store.reader.documents
        hashes: list[str] = documents["content_hash"].to_pylist()
        chosen = np.flatnonzero(np.isin(documents["group"].to_numpy(), groups))
        return {hashes[index]: self.by_hash[name][hashes[index]] for index in chosen.tolist()}


def _of_rows(store: StoreRows, folds: Mapping[str, int]) -> Int32[np.ndarray, "token"]:
    return load_population(store.reader, folds, store.name).fold
