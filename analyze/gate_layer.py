"""One layer's gates, start to finish: what a worker is sent in; fitted gates and what they are worth on the
test rows of every store out.

The worker reads the gate rows of the store that is fitted once, and the test rows of each store once. Memory:
the matrices of the gate rows up to a budget (what does not fit is spilled), one block and its parts, four
bytes a test row and gate.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float32, Int, Int64
from scipy.special import expit

from ..store import Reader
from .context_map import ContextMap
from .gate_features import (
    FEATURES,
    WIDE,
    TypeMeans,
    held_out_means,
    random_scores,
    type_means,
    wide_pieces,
)
from .gate_fit import PROBLEMS, Gate, GateRows, Rules, fit_gates
from .gate_rows import InMemory, Matrix, gate_rows, standardise
from .gate_scores import Scored, Worth, score_rows, worth
from .logistic import MEMORY
from .norms import squared_norms
from .parts import PartsSource, parts_source
from .population import Population

Column = Float32[np.ndarray, "token"]


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """Identity of some rows of a store, in the order of the store."""

    rows: Int64[np.ndarray, "token"]
    group: Int[np.ndarray, "token"]
    token_id: Int[np.ndarray, "token"]
    target_id: Int[np.ndarray, "token"]
    position: Int[np.ndarray, "token"]

    @classmethod
    def of(cls, population: Population, rows: Int[np.ndarray, "token"]) -> "Tokens":
        names = ("group", "token_id", "target_id", "position")
        return cls(rows.astype(np.int64), *(getattr(population, name)[rows] for name in names))


@dataclass(frozen=True, slots=True, eq=False)
class GateTask:
    """What the layers share."""

    fit_on: str
    readers: Mapping[str, Reader]
    fit: Tokens  # of `fit_on`: token types are averaged over these,
    gate: Tokens  # and gates fitted on these
    fold: Int[np.ndarray, "token"]  # of the gate rows
    n_folds: int
    tests: Mapping[str, Tokens]
    features: tuple[str, ...]
    rules: Rules
    seed: int
    budget_bytes: int

    @property
    def wide(self) -> list[str]:
        wanted = {piece for name in self.features for piece in FEATURES[name].pieces}
        return [piece for piece in WIDE if piece in wanted]


@dataclass(frozen=True, slots=True, eq=False)
class RowNeeds:
    """Needs of some rows, and ‖y‖."""

    need: Mapping[str, Column]
    output_norm: Column


@dataclass(frozen=True, slots=True, eq=False)
class LayerItem:
    """What one layer brings: needs by rows, and at or below which need a token of each store is easy."""

    layer: int
    fit_on: str
    context_map: ContextMap
    fit: RowNeeds
    gate: RowNeeds
    tests: Mapping[str, RowNeeds]
    cuts: Mapping[str, Mapping[str, float]]  # by store and need
    labels: Sequence[Mapping[str, Any]]  # rows of `gate_labels`


@dataclass(frozen=True, slots=True, eq=False)
class LayerGates:
    """Gates of a layer; `p` and `worth` of each store, gates in their order."""

    layer: int
    gates: list[Gate]
    p: dict[str, Float32[np.ndarray, "token gate"]]
    worth: dict[str, list[Worth]]
    types: dict[str, TypeMeans]  # by PIECE@NEED
    labels: Sequence[Mapping[str, Any]]
    unfinished: list[str]  # gates whose solver stopped at its limit of steps


def layer_gates(task: GateTask, item: LayerItem) -> LayerGates:
    """Fit and score every gate of a layer."""
    source = parts_source(task.readers[task.fit_on], item.layer)
    types = _types(task, item)
    with ExitStack() as stack:
        rows = _fitted_rows(task, item, source, types, stack)
        gates = list(fit_gates(rows, task.features, task.rules))
    needs = list(item.gate.need)
    gates.sort(key=lambda gate: needs.index(gate.need))
    unfinished = [f"{gate.name} for {gate.need}" for gate in gates if not gate.converged]
    found = LayerGates(item.layer, gates, {}, {}, types, item.labels, unfinished)
    for store, tokens in task.tests.items():
        where = source if store == task.fit_on else parts_source(task.readers[store], item.layer)
        narrow = narrow_pieces(tokens, item.tests[store], types, task.seed)
        logits = score_rows(where, tokens.rows, gates, narrow, item.context_map)
        found.p[store] = p = expit(logits, out=logits)
        found.worth[store] = [
            _worth(gate, p[:, index], tokens, item, store) for index, gate in enumerate(gates)
        ]
    return found


def layer_bytes(n_features: int, block_rows: int, n_needs: int, n_folds: int, n_c: int) -> int:
    """What a worker takes beside the matrices of the gate rows: parts of a block, scatters and eigenvectors
    of the widest set, weights, directions and memory of the problems that are solved together.
    """
    widest = 2 * n_features + 1
    problems = min(max(PROBLEMS, (n_folds + 1) * (n_c + 1)), n_needs * (n_folds + 1) * (n_c + 1))
    parts = 9 * block_rows * n_features * 4
    spectra = 40 * widest * widest
    return max(parts, spectra + (24 + 2 * MEMORY) * widest * problems * 8) + 32 * 2**20


def narrow_pieces(
    tokens: Tokens, needs: RowNeeds, types: Mapping[str, TypeMeans], seed: int
) -> dict[str, Column]:
    """Everything that is one number a row, but for the norm of x; pieces `by_need` as PIECE@NEED."""
    found = {
        "position": np.log1p(tokens.position.astype(np.float32)),
        "output_norm": needs.output_norm,
        "random": random_scores(tokens.rows, seed),
    }
    for need, values in needs.need.items():
        found[f"oracle@{need}"] = -values
        found[f"token_type@{need}"] = types[f"token_type@{need}"].of(tokens.token_id)
        found[f"target_type@{need}"] = types[f"target_type@{need}"].of(tokens.target_id)
    return found


def _types(task: GateTask, item: LayerItem) -> dict[str, TypeMeans]:
    """Mean needs of token types, by input and by target token, over fit rows alone; over gate rows where fit
    rows have none of this need (a measurement gives fit rows none, which their surrogates have seen).
    """
    found: dict[str, TypeMeans] = {}
    for need, values in item.fit.need.items():
        tokens = task.fit
        if not np.isfinite(values).any():
            tokens, values = task.gate, item.gate.need[need]
        found[f"token_type@{need}"] = type_means(tokens.token_id, values)
        found[f"target_type@{need}"] = type_means(tokens.target_id, values)
    return found


def _held_out_types(task: GateTask, item: LayerItem) -> dict[str, Column]:
    """Mean needs of token types for gate rows, where these rows are what they are made of: each fold's by
    the other folds, or a gate would be fitted on a feature that holds its own label.
    """
    found: dict[str, Column] = {}
    for need, values in item.gate.need.items():
        if np.isfinite(item.fit.need[need]).any():
            continue
        for piece, ids in (("token_type", task.gate.token_id), ("target_type", task.gate.target_id)):
            found[f"{piece}@{need}"] = held_out_means(ids, values, task.fold, task.n_folds)
    return found


def _fitted_rows(
    task: GateTask, item: LayerItem, source: PartsSource, types: Mapping[str, TypeMeans], stack: ExitStack
) -> GateRows:
    """The gate rows as standardised matrices, one pass over their blocks."""
    tokens = task.gate
    n, width = tokens.rows.size, item.context_map.bias.size
    wide = stack.enter_context(gate_rows(n, dict.fromkeys(task.wide, width), task.budget_bytes))
    pieces = narrow_pieces(tokens, item.gate, types, task.seed) | _held_out_types(task, item)
    narrow = {name: _complete(values) for name, values in pieces.items()}
    narrow["norm"] = np.empty(n, np.float32)
    for block in range(source.reader.n_blocks):
        first, last = source.reader.block_range(block)
        start, stop = np.searchsorted(tokens.rows, (first, last)).tolist()
        if start < stop:
            parts = source.block(block, tokens.rows[start:stop] - first)
            for name, values in wide_pieces(parts, item.context_map, task.wide).items():
                wide[name].write(start, values)
            narrow["norm"][start:stop] = np.sqrt(squared_norms(parts.x))
    # Copies: they are standardised in place.
    own: dict[str, Matrix] = {name: InMemory(values[:, None].copy()) for name, values in narrow.items()}
    matrices = wide | own
    scalings = {name: standardise(n, matrix) for name, matrix in matrices.items()}
    cuts = item.cuts[item.fit_on]
    positive = {need: values <= cuts[need] for need, values in item.gate.need.items()}
    return GateRows(matrices, scalings, item.gate.need, positive, task.fold, task.n_folds)


def _complete(values: Column) -> Column:
    """The mean where there is no value: such a row has no label and enters no fit."""
    finite = np.isfinite(values)
    if finite.all():
        return values
    middle = values[finite].mean(dtype=np.float64) if finite.any() else 0.0
    return np.where(finite, values, np.float32(middle))


def _worth(gate: Gate, p: Column, tokens: Tokens, item: LayerItem, store: str) -> Worth:
    """On the rows whose need is known."""
    need = item.tests[store].need[gate.need]
    known = np.isfinite(need)
    own = item.gate.need[gate.need]
    own = own[np.isfinite(own)]
    share = float(np.mean(own <= item.cuts[item.fit_on][gate.need])) if own.size else float("nan")
    values = need[known]
    easy = values <= item.cuts[store][gate.need]
    scored = Scored(values, easy, tokens.group[known], tokens.token_id[known], share)
    return worth(gate, p[known], scored)
