"""The forward passes of a measurement: batches of a store's windows, as they were harvested or cut anew.

In: a reader, a block, and the length of the windows. Out: padded ids and, for each real place in them, its
row in the store, its target and its position. Harvested windows keep their batches, so that the base pass
gives the stored losses again. Shorter windows are cut from each sequence alone, front to back, each with the
BOS in front where the harvest put one; a piece shorter than the harvest's `min_length` is left out. Cost:
copies of small integer arrays; no forward pass.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Bool, Int, Int32, Int64

from ..store import Reader, UsageError
from .windows import batches as batched

ADDED: Final = -1  # in place of a row number: a BOS that the store has no row of here
_COLUMNS: Final = ("token_id", "target_id", "position", "special", "valid")


@dataclass(frozen=True, slots=True, eq=False)
class WindowBatch:
    """One forward pass. All arrays but `ids` and `mask` have one entry for each place in `mask`, in order."""

    ids: Int64[np.ndarray, "sequence position"]
    mask: Bool[np.ndarray, "sequence position"]
    row: Int64[np.ndarray, "row"]  # number in the store, or ADDED
    token_id: Int32[np.ndarray, "row"]
    target_id: Int32[np.ndarray, "row"]
    position: Int32[np.ndarray, "row"]  # inside the window
    covered: Bool[np.ndarray, "row"]  # rows as those that surrogates are fitted on

    @property
    def n_rows(self) -> int:
        return self.row.size


@dataclass(frozen=True, slots=True)
class Cut:
    """How windows are cut: `length` None keeps those that were harvested, batches and all."""

    length: int | None = None
    batch_tokens: int | None = None  # of windows cut anew; None: as in the harvest


def check_length(reader: Reader, store: str, length: int) -> None:
    """UsageError where a store's windows are too short to cut ones of `length` from them."""
    longest = int(reader.plan.length.max())
    if length > longest:
        raise UsageError(
            f"sequence_length={length}: the windows of store {store} have at most {longest} tokens, and "
            f"longer ones cannot be made of them; harvest a store with sequence_length={length} or more and "
            "fit it into the study"
        )


def own_length(reader: Reader) -> int:
    """What the harvested windows of a store are called in a sweep over lengths."""
    return int(reader.plan.sequence_length)


def block_windows(reader: Reader, block: int, cut: Cut) -> Iterator[WindowBatch]:
    """The forward passes of a block."""
    plan = reader.plan
    row0, _ = plan.block_range(block)
    columns = {name: np.asarray(reader.column_block(name, block)) for name in _COLUMNS}
    offsets = plan.row_offsets
    sequences = plan.sequences_of(block)
    pieces = [np.arange(offsets[one], offsets[one + 1]) for one in range(sequences.start, sequences.stop)]
    if cut.length is None:
        for batch in plan.batches_of(block):
            chosen = [pieces[one - sequences.start] for one in batch]
            yield _window_batch(chosen, row0, columns, plan.bos_id, kept_position=True)
        return
    short = [
        piece
        for sequence, rows in zip(sequences, pieces, strict=True)
        for piece in _cut(rows, cut.length, plan.min_length, bos=bool(plan.bos[sequence]))
    ]
    room = max(cut.batch_tokens or plan.batch_tokens, cut.length)
    for chosen in batched([piece.size for piece in short], room):
        yield _window_batch([short[one] for one in chosen], row0, columns, plan.bos_id, kept_position=False)


def _cut(
    rows: Int[np.ndarray, "row"], length: int, least: int, *, bos: bool
) -> Iterator[Int[np.ndarray, "row"]]:
    """Pieces of a sequence, each at most `length` rows, its BOS counted."""
    payload = rows[int(bos) :]
    step = length - int(bos)
    for start in range(0, payload.size, step):
        piece = payload[start : start + step]
        # The first piece has the BOS that is stored; the others get one that is not.
        head = rows[:1] if start == 0 else np.array([ADDED])
        whole = np.concatenate([head, piece]) if bos else piece
        if whole.size >= min(least, length):
            yield whole


def _window_batch(
    pieces: Sequence[Int[np.ndarray, "row"]],
    row0: int,
    columns: Mapping[str, np.ndarray],
    bos_id: int | None,
    *,
    kept_position: bool,
) -> WindowBatch:
    row = np.concatenate(pieces).astype(np.int64)
    lengths = np.array([piece.size for piece in pieces])
    added = row == ADDED
    at = np.where(added, 0, row - row0)
    token = np.where(added, bos_id if bos_id is not None else 0, columns["token_id"][at]).astype(np.int32)
    target = np.where(added, -1, columns["target_id"][at]).astype(np.int32)
    position = (
        columns["position"][at]
        if kept_position
        else np.concatenate([np.arange(length) for length in lengths])
    ).astype(np.int32)
    mask = np.arange(lengths.max())[None, :] < lengths[:, None]
    ids = np.zeros(mask.shape, np.int64)
    ids[mask] = token
    usable = columns["valid"][at].astype(bool) & ~columns["special"][at].astype(bool) & ~added
    return WindowBatch(ids, mask, row, token, target, position, usable & (position != 0))


def some_sequences(batch: WindowBatch, chosen: Sequence[int]) -> WindowBatch | None:
    """A batch with these of its sequences alone; None for none."""
    if not chosen:
        return None
    sequence = np.repeat(np.arange(batch.mask.shape[0]), batch.mask.sum(axis=1))
    kept = np.isin(sequence, chosen)
    mask = batch.mask[list(chosen)]
    width = int(mask.sum(axis=1).max())
    columns = {
        name: getattr(batch, name)[kept] for name in ("row", "token_id", "target_id", "position", "covered")
    }
    return WindowBatch(batch.ids[list(chosen), :width], mask[:, :width], **columns)
