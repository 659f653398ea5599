"""One block of a store through the model: its base pass, then every replacement, summed over groups.

In: a visit, the batches of a block, which rows are scored and to which group they belong, the replacements.
Out: a `Piece`, and the losses of single rows. Every replacement of a batch sees exactly the ids, positions
and mask of the base pass. Scores stay on the device until the batch is done; sums are in float64, rows in
their order, so that the same numbers give the same sums. Cost: the passes; 12 bytes a row and replacement.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float32, Float64, Int, Int64
from torch import Tensor

from .made_with import Unit
from .measured_pieces import Piece, Sums, by_group
from .measured_windows import WindowBatch
from .passes import Base, RowScores, Visit
from .substitutes import Substitute
from .substitution import Substitution

# Replaced MLPs by unit, made when they are first used.
Replaced = Callable[[Unit], Mapping[int, Substitute]]
# Called with row numbers of a store, the unit (None: the base), and nll and kl of these rows.
KeepRows = Callable[
    [Int64[np.ndarray, "row"], Unit | None, Float32[np.ndarray, "row"], Float32[np.ndarray, "row"]], None
]
# Called with how many tokens have passed the model once more.
Tick = Callable[[int], None]


@dataclass(frozen=True, slots=True, eq=False)
class ScoredRows:
    """Which rows of a store count, and to which group each belongs."""

    scored: Bool[np.ndarray, "token"]
    group: Int[np.ndarray, "token"]


def measure_block(
    visit: Visit,
    batches: Sequence[WindowBatch],
    rows: ScoredRows,
    units: Sequence[Unit],
    replaced: Replaced,
    keep: KeepRows,
    tick: Tick,
) -> Piece:
    """The base pass and all units on all batches of a block, units of low layers first."""
    units = sorted(units, key=lambda unit: (unit.layers[0], unit.layers, unit.intervention.name))
    totals = _Totals(_groups(batches, rows), units)
    for batch in batches:
        base = visit.base(batch)
        found: list[RowScores] = []
        linear: list[Tensor] = []
        for unit in units:
            live = Substitution(visit.anatomy, replaced(unit))
            found.append(visit.under(base, live, unit.layers))
            linear.append(_linear(live, base, unit))
            tick(batch.row.size)
        nll = _host([base.nll, *(one.nll for one in found)])
        kl, share = _host([one.kl for one in found]), _host(linear)
        at = totals.places(base, rows)
        totals.add_base(at, nll[0])
        keep(base.row, None, nll[0], np.zeros_like(nll[0]))
        for index, unit in enumerate(units):
            totals.add(unit, at, nll[1 + index], kl[index], share[index])
            keep(base.row, unit, nll[1 + index], kl[index])
    return totals.piece()


def counts(batch: WindowBatch, rows: ScoredRows) -> Bool[np.ndarray, "row"]:
    """Rows of a batch that count. One at the head of a window that was cut anew is a sink there, and does
    not: nor in any window, since position 0 is no body row."""
    return (batch.row >= 0) & rows.scored[np.maximum(batch.row, 0)] & batch.covered


def _linear(live: Substitution, base: Base, unit: Unit) -> Float32[Tensor, "row"]:
    """How many of the replaced layers each row went linear in; a sum of p by a soft gate."""
    device = base.nll.device
    parts = [live.linear(layer).reshape(-1).to(device) for layer in unit.layers]
    return torch.stack(parts).sum(dim=0).float().index_select(0, base.where.to(device))


def _groups(batches: Sequence[WindowBatch], rows: ScoredRows) -> Int64[np.ndarray, "group"]:
    found = [rows.group[batch.row[counts(batch, rows)]] for batch in batches]
    return np.unique(np.concatenate(found)).astype(np.int64) if found else np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class _Places:
    """The rows of a batch that count: their places among those that were scored, and the index of their
    group."""

    place: Int64[np.ndarray, "scored"]
    group: Int64[np.ndarray, "scored"]


class _Totals:
    """Sums of a block while it is measured."""

    def __init__(self, groups: Int64[np.ndarray, "group"], units: Sequence[Unit]) -> None:
        self._groups = groups
        self._n_tokens = np.zeros(groups.size, np.int64)
        self._base = np.zeros(groups.size)
        self._sums = {unit: Sums.zeros(groups.size) for unit in units}

    def places(self, base: Base, rows: ScoredRows) -> _Places:
        place = np.flatnonzero(counts(base.batch, rows)[base.place])
        return _Places(place, np.searchsorted(self._groups, rows.group[base.row[place]]))

    def add_base(self, at: _Places, nll: np.ndarray) -> None:
        self._n_tokens += np.bincount(at.group, minlength=self._groups.size)
        self._base += self._summed(at, nll)

    def add(self, unit: Unit, at: _Places, nll: np.ndarray, kl: np.ndarray, linear: np.ndarray) -> None:
        sums = self._sums[unit]
        sums.nll[:] += self._summed(at, nll)
        sums.kl[:] += self._summed(at, kl)
        sums.n_linear[:] += self._summed(at, linear)
        sums.n_covered[:] += len(unit.layers) * np.bincount(at.group, minlength=self._groups.size)

    def piece(self) -> Piece:
        return Piece(self._groups, self._n_tokens, self._base, self._sums)

    def _summed(self, at: _Places, values: np.ndarray) -> Float64[np.ndarray, "group"]:
        return by_group(values[at.place].astype(np.float64), at.group, self._groups.size)


def _host(values: Sequence[Tensor]) -> Float32[np.ndarray, "value row"]:
    """One copy for all of them. They may lie on several devices, where a model is spread."""
    if not values:
        return np.zeros((0, 0), np.float32)
    return torch.stack([value.to(values[0].device) for value in values]).cpu().numpy()
