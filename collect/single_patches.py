"""Exact effects of linearising one position: single rows of a store patched in the live model.

In: a model's anatomy, the reader of a store, a `Substitute` for each layer, and the rows to patch. Out: for
each layer and row `loss_single`, the change of the summed loss of the row's sequence, in nats, when the MLP
of that layer is replaced at that one position and nowhere else. It is what `loss_estimate` estimates. Each
pass patches one row of every sequence of a batch: sequences do not see one another. The unchanged model's
losses are from a pass of the same shape. Cost: a base pass for each batch that holds such a row; then, for
each layer, as many passes of the blocks above it as a sequence of the batch has such rows.
"""

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np
import torch
from jaxtyping import Bool, Float64, Int, Int64

from ..store import Reader
from .anatomy import Anatomy
from .measured_windows import WindowBatch
from .passes import Base, Visit
from .substitutes import Substitute
from .substitution import Substitution


def single_patch_losses(
    anatomy: Anatomy,
    reader: Reader,
    substitutes: Mapping[int, Substitute],
    rows: Int64[np.ndarray, "patch"],
    *,
    memory_limit: int,
    tick: Callable[[int], None] = lambda n_tokens: None,
) -> dict[int, Float64[np.ndarray, "patch"]]:
    """`loss_single` of each layer, in the order of `rows` (numbers in the store). The caller holds
    `forward.evaluating`. `tick` is called with the tokens that passed the model once more."""
    rows = np.asarray(rows, np.int64)
    sequence = np.asarray(reader.column("sequence"))
    scored = _later_rows(rows, sequence) & (np.asarray(reader.column("target_id")) >= 0)
    visit = Visit(anatomy, reader, scored, memory_limit=memory_limit)
    found = {layer: np.full(rows.size, np.nan) for layer in substitutes}
    blocks = np.unique(np.searchsorted(_block_starts(reader), rows, side="right") - 1).tolist()
    for batch in visit.batches(blocks):
        places = _places(batch, rows, sequence)
        base = visit.base(batch)
        for layer in sorted(substitutes):
            for turn in places:
                live = Substitution(anatomy, {layer: substitutes[layer]})
                chosen = dataclasses.replace(base.rows, covered=np.isin(base.rows.row, rows[turn]))
                after = visit.under(base, live, [layer], chosen).nll
                found[layer][turn] = _sums(after.double() - base.nll.double(), base, rows[turn], sequence)
                tick(batch.n_rows)
    return found


def _later_rows(
    rows: Int64[np.ndarray, "patch"], sequence: Int[np.ndarray, "token"]
) -> Bool[np.ndarray, "token"]:
    """The rows that a patch may reach: of each sequence those from the first patched one on."""
    first = np.full(int(sequence.max(initial=0)) + 1, sequence.size, np.int64)
    np.minimum.at(first, sequence[rows], rows)
    return np.arange(sequence.size) >= first[sequence]


def _places(
    batch: WindowBatch, rows: Int64[np.ndarray, "patch"], sequence: Int[np.ndarray, "token"]
) -> list[Int64[np.ndarray, "patch"]]:
    """Which patches go together in a pass: at most one of each sequence."""
    here = np.flatnonzero(np.isin(rows, batch.row))
    turns: list[list[int]] = []
    seen: dict[int, int] = {}
    for place in here.tolist():
        one = int(sequence[rows[place]])
        turn = seen[one] = seen.get(one, -1) + 1
        if turn == len(turns):
            turns.append([])
        turns[turn].append(place)
    return [np.array(turn) for turn in turns]


def _sums(
    change: Float64[torch.Tensor, "row"],
    base: Base,
    patched: Int64[np.ndarray, "patch"],
    sequence: Int[np.ndarray, "token"],
) -> Float64[np.ndarray, "patch"]:
    """The change of each patched row's sequence, from that row on: what lies before it cannot have moved."""
    values, of = change.cpu().numpy(), sequence[base.row]
    reached = (of[None, :] == sequence[patched][:, None]) & (base.row[None, :] >= patched[:, None])
    return np.where(reached, values[None, :], 0.0).sum(axis=1)


def _block_starts(reader: Reader) -> Int64[np.ndarray, "block"]:
    return np.array([reader.block_range(block)[0] for block in range(reader.n_blocks)], np.int64)
