"""From a plan to the rows themselves: token columns of a block, and the padded input of a batch.

In: a plan and the token ids of each document. Out: the 1-D arrays that a block stores beside its activations,
and, for each forward pass, ids with the places where its rows stand. Cost: copies of small integer arrays.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int, Int32

from ..store.errors import NearlineError
from ..store.plan import Plan


@dataclass(frozen=True, slots=True)
class Batch:
    """One forward pass: right-padded `ids`; the places in `mask` are rows `row0:row1` of the block, in
    order."""

    row0: int
    row1: int
    ids: Int[np.ndarray, "sequence position"]
    mask: Bool[np.ndarray, "sequence position"]

    @property
    def padded(self) -> bool:
        return not self.mask.all()


def block_columns(
    plan: Plan, number: int, ids: Sequence[Int32[np.ndarray, "_"]], special_ids: Sequence[int]
) -> dict[str, np.ndarray]:
    """The token arrays of block `number`, but for `nll`. The target is the document's next token, also where
    the window ends; -1 where the document does."""
    sequences = plan.sequences_of(number)
    pieces = [_sequence(plan, sequence, ids[plan.document[sequence]]) for sequence in sequences]
    lengths = plan.length[sequences]
    token_id = np.concatenate([token for token, _ in pieces])
    return {
        "token_id": token_id,
        "target_id": np.concatenate([target for _, target in pieces]),
        "position": np.concatenate([np.arange(length, dtype=np.int32) for length in lengths]),
        "sequence": np.repeat(np.asarray(sequences, np.int32), lengths),
        "document": np.repeat(plan.document[sequences], lengths),
        "split": np.full(len(token_id), plan.block_split[number], np.uint8),
        "special": np.isin(token_id, np.asarray(special_ids, np.int32)),
        "valid": np.ones(len(token_id), bool),
    }


def block_batches(plan: Plan, number: int, token_id: Int32[np.ndarray, "row"]) -> Iterator[Batch]:
    """The forward passes of block `number`, in row order."""
    row0 = 0
    for sequences in plan.batches_of(number):
        rows = plan.length[sequences]
        mask = np.arange(rows.max())[None, :] < rows[:, None]
        padded = np.zeros(mask.shape, np.int64)
        row1 = row0 + int(rows.sum())
        padded[mask] = token_id[row0:row1]
        yield Batch(row0, row1, padded, mask)
        row0 = row1


def _sequence(plan: Plan, sequence: int, ids: Int32[np.ndarray, "_"]) -> tuple[np.ndarray, np.ndarray]:
    start, length, bos = int(plan.start[sequence]), int(plan.length[sequence]), bool(plan.bos[sequence])
    stop = start + length - bos
    head = np.array([plan.bos_id] if bos else [], np.int32)
    token = np.concatenate([head, ids[start:stop]]).astype(np.int32)
    if bos and length > 1 and token[1] == plan.bos_id:
        raise NearlineError(f"sequence {sequence} of the plan would open with two BOS tokens; this is a bug.")
    target = ids[start + 1 - bos : stop + 1].astype(np.int32)
    return token, np.concatenate([target, np.full(length - len(target), -1, np.int32)])
