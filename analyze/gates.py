"""Gates: who needs the nonlinearity, told from the input alone. A fitted study in; gates, routing and tables
out.

A gate is a logistic regression on one feature set of a layer: is a token among the easier half (or another
share) of its store? It is fitted on the `gate` rows of `fit_on`, in folds of groups, and scored on the
held-out rows of every store. A layer is one work item. Written: `gates.zarr`, `tokens/routing`, the tables
`gates`, `gate_cv`, `gate_labels`, `gate_curves`, `gate_calibration` and `gate_differences`. Cost: three reads
of the gate and test rows a layer, 4·n·d flops for each of folds × C × about eight steps × feature sets;
memory of a worker: see `gate_layer`, within the memory limit whatever the number of rows.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np
import pyarrow as pa
from jaxtyping import Float32, Int

from ..store import UsageError
from .analyze_settings import AnalyzeSettings
from .compute import Session
from .compute_tasks import Here, Task
from .context_map import load_context_map
from .evidence import Evidence, StoreRows
from .folds import assign_folds
from .gate_arrays import gate_arrays
from .gate_features import TypeMeans, choose_features
from .gate_fit import Gate, Rules
from .gate_layer import GateTask, LayerGates, LayerItem, RowNeeds, Tokens, layer_bytes, layer_gates
from .gate_scores import Worth
from .gate_tables import Family, calibration_table, curve_table, difference_table, gate_table
from .labels import FEW_NEGATIVE, LOWER_QUARTER, MEDIAN, easy_cut
from .noise_floor import above_noise
from .population import FIT, GATE
from .results import to_table

Y_NORM: Final = "y_norm"
# Gate rows of a layer that take more are spilled: it costs a twentieth of the time, and memory is then the
# same for any number of rows.
IN_MEMORY_BYTES: Final = 256 * 2**20
_LOG = logging.getLogger("nearline")


def run(evidence: Evidence, session: Session) -> list[str]:
    """Fit and score the gates of every layer; the paths written."""
    settings, study = evidence.settings, evidence.study
    task, workers = shared_task(evidence, session)
    items = [
        Task(
            layer_gates,
            Here(partial(layer_item, evidence, task, layer)),
            weight=1,
            label=f"gates of layer {layer}",
        )
        for layer in evidence.layers
    ]
    sink = partial(_keep, evidence, task)
    done = session.run(task, items, lambda _, found: sink(found), "gates", workers, unit="layers")
    families = _families(evidence, done)
    tables: dict[str, Iterable[Mapping[str, Any]]] = {
        "gates": gate_table(families, settings.seed),
        "gate_cv": (row for layer in done for row in _cv_rows(evidence, layer)),
        "gate_labels": (row for layer in done for row in layer.labels),
        "gate_curves": curve_table(families),
        "gate_calibration": calibration_table(families),
        "gate_differences": difference_table(families, settings.seed, settings.margin),
    }
    arrays, attrs = gate_arrays([(one.layer, one.gates, one.types) for one in done], task)
    written = {name: to_table(name, rows) for name, rows in tables.items()}
    for name in ("gates", "gate_differences"):
        written[name] = above_noise(written[name], study, evidence.fit_on)
    return [
        *(path for layer in done for path in layer.paths),
        study.write_group("gates", arrays, attrs),
        *(study.write_table(name, table) for name, table in written.items()),
    ]


def gate_folds(fitted: StoreRows, settings: AnalyzeSettings) -> Int[np.ndarray, "token"]:
    """The fold of each gate row, by its group; UsageError where groups are too few or not held out."""
    population = fitted.population
    rows = population.rows(GATE)
    groups, index = np.unique(population.group[rows], return_inverse=True)
    if groups.size < settings.folds:
        raise UsageError(
            f"store {fitted.name} has {groups.size} group{'s' * (groups.size != 1)} of documents in its gate "
            f"split, too few for the {settings.folds} folds of gates: harvest more tokens, or lower `folds`"
        )
    others = np.unique(population.group[population.split != GATE])
    if (shared := np.intersect1d(groups, others)).size:
        raise UsageError(
            f"store {fitted.name}: group {shared[0]} of near-duplicate documents is in gate and in another "
            "split: its held-out scores would not be held out; harvest it again"
        )
    documents = fitted.reader.documents
    texts: list[str] = documents["content_hash"].to_pylist()
    group_of: list[int] = documents["group"].to_pylist()
    stored = sorted(texts[document] for document in np.unique(population.document[rows]).tolist())
    group_of_text = dict(zip(texts, group_of, strict=True))
    smallest = {group_of_text[text]: text for text in reversed(stored)}
    names = [smallest[group] for group in groups.tolist()]
    return assign_folds(names, np.bincount(index), settings.folds, settings.seed)[index]


def shared_task(evidence: Evidence, session: Session) -> tuple[GateTask, int]:
    """What all layers share, and how many may be at work at once."""
    settings, fitted = evidence.settings, evidence.fitted
    reader, population = fitted.reader, fitted.population
    features = choose_features(settings.features, reader.position_embedding is not None)
    fold = gate_folds(fitted, settings)
    block = max(store.reader.plan.block for store in evidence.stores.values())
    floor = layer_bytes(reader.d_model, block, len(evidence.needs), settings.folds, len(settings.c_grid))
    workers = session.at_once(floor, "gates", "or name fewer `features`")
    task = GateTask(
        evidence.fit_on,
        {name: store.reader for name, store in evidence.stores.items()},
        Tokens.of(population, population.rows(FIT)),
        Tokens.of(population, population.rows(GATE)),
        fold,
        settings.folds,
        {n: Tokens.of(s.population, evidence.test_rows(n)) for n, s in evidence.stores.items()},
        features,
        Rules(settings.c_grid, settings.target_share, settings.target_cost),
        settings.seed,
        min(IN_MEMORY_BYTES, settings.memory_limit_bytes // workers - floor),
    )
    return task, workers


def layer_item(evidence: Evidence, task: GateTask, layer: int) -> LayerItem:
    """Needs of a layer, read where the study is."""
    names, needs = (*evidence.needs, Y_NORM), evidence.needs

    def at(columns: Mapping[str, np.ndarray], tokens: Tokens) -> RowNeeds:
        return RowNeeds({need: columns[need][tokens.rows] for need in needs}, columns[Y_NORM][tokens.rows])

    tests: dict[str, RowNeeds] = {}
    cuts: dict[str, dict[str, float]] = {}
    labels: list[dict[str, Any]] = []
    fit = gate = RowNeeds({}, np.zeros(0, np.float32))
    for name, store in evidence.stores.items():
        columns = evidence.need_columns(layer, name, names)
        tests[name] = at(columns, task.tests[name])
        gate_rows = store.population.rows(GATE)
        cuts[name] = {}
        for need in needs:
            found = label_row(columns[need][gate_rows], tests[name].need[need], evidence.settings.label)
            cuts[name][need] = found["cut"]
            labels.append({"store": name, "layer": layer, "need": need} | found)
        if name == evidence.fit_on:
            fit, gate = at(columns, task.fit), at(columns, task.gate)
    return LayerItem(
        layer, evidence.fit_on, load_context_map(evidence.study, layer), fit, gate, tests, cuts, labels
    )


def label_row(
    gate: Float32[np.ndarray, "token"], test: Float32[np.ndarray, "test"], rule: str | float
) -> dict[str, Any]:
    """What counts as easy in a store: a row of `gate_labels` without its keys."""
    gate, test = gate[np.isfinite(gate)], test[np.isfinite(test)]
    cut = easy_cut(gate, "paper" if isinstance(rule, str) else rule)
    name = f"quantile {rule:g}" if not isinstance(rule, str) else _paper_rule(gate)

    def share(values: np.ndarray, below: np.ndarray) -> float:
        return float(below.mean()) if values.size else float("nan")

    return {
        "rule": name,
        "cut": cut,
        "share_gate": share(gate, gate <= cut),
        "share_test": share(test, test <= cut),
        "share_below_half": share(test, test < 0.5),
        "share_below_one": share(test, test < 1.0),
    }


def _paper_rule(gate: np.ndarray) -> str:
    few = gate.size > 0 and np.mean(gate < 0) < FEW_NEGATIVE
    return f"paper: quantile {LOWER_QUARTER if few else MEDIAN:g}"


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """What stays of a layer once its routing is written."""

    layer: int
    gates: list[Gate]
    worth: dict[str, list[Worth]]
    types: dict[str, TypeMeans]
    labels: Sequence[Mapping[str, Any]]
    paths: list[str]


def _keep(evidence: Evidence, task: GateTask, found: LayerGates) -> _Kept:
    """Write p(linear) of the scored rows, and of the gate rows out of fold."""
    paths = []
    for need in evidence.needs:
        chosen = [index for index, gate in enumerate(found.gates) if gate.need == need]
        for store, tokens in task.tests.items():
            rows, p = tokens.rows, [found.p[store][:, index] for index in chosen]
            if store == evidence.fit_on:
                rows = np.concatenate([rows, task.gate.rows])
                p = [
                    np.concatenate([one, found.gates[index].held_out])
                    for one, index in zip(p, chosen, strict=True)
                ]
            order = np.argsort(rows, kind="stable")
            columns = {found.gates[index].name: one[order] for index, one in zip(chosen, p, strict=True)}
            table = pa.table({"token": rows[order]} | columns)
            paths.append(evidence.study.write_routing(found.layer, need, store, table))
    if found.unfinished:
        _LOG.warning(
            "gates: layer %d: the solver stopped before the best weights of %s; a smaller C helps",
            found.layer,
            ", ".join(found.unfinished),
        )
    gates = [replace(gate, held_out=np.zeros(0, np.float32)) for gate in found.gates]
    return _Kept(found.layer, gates, found.worth, found.types, found.labels, paths)


def _families(evidence: Evidence, done: Sequence[_Kept]) -> list[Family]:
    """Gates over layers: by store, then need, then gate."""
    if not done:
        return []
    population = evidence.fitted.population
    gate_rows = population.rows(GATE)
    extra = {
        "fit_on": evidence.fit_on,
        "n_gate_tokens": int(gate_rows.size),
        "n_gate_groups": population.n_groups(gate_rows),
    }
    layers = [layer.layer for layer in done]
    return [
        Family(
            store,
            gate.need,
            gate.features,
            gate.size,
            layers,
            [layer.worth[store][index] for layer in done],
            [extra] * len(done),
        )
        for store in evidence.stores
        for index, gate in enumerate(done[0].gates)
    ]


def _cv_rows(evidence: Evidence, layer: _Kept) -> Iterable[dict[str, Any]]:
    for gate in layer.gates:
        key = {"store": evidence.fit_on, "layer": layer.layer, "need": gate.need}
        for c, loss in gate.grid:
            yield key | {
                "features": gate.features,
                "size": gate.size,
                "C": c,
                "log_loss": loss,
                "chosen": c == gate.C,
            }
