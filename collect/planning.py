"""Which rows a store will hold, in which order, in which block, batch and split: fixed before the model runs.

In: how many tokens each document has, its group, its content hash, and a few numbers. Out: a `Plan`, and per
document the rows stored and the tokens dropped. Pure numpy and hashing, deterministic: the same input and
seed give the same plan on every machine. Cost: one pass over the windows, a few microseconds each.

The rules: a document is cut into windows of at most `sequence_length` rows, BOS included where the policy
adds it; a window with fewer than `min_length` rows (a tail) is dropped, and so are those that `keep` leaves
out. A block takes windows of one split, in seeded order, until it is exactly full; the last one is cut there,
and its remainder opens that split's next block as a new sequence (or is dropped, if it became too short). So
only a cut's first half can have fewer than `min_length` rows. The first split that runs out when its turn
comes ends the store: going on without it would leave the rest of the store without that split.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int, UInt8

from ..store.errors import UsageError
from ..store.plan import PATTERN, SPLITS, Plan
from .windows import Cutting, Supply, Window, batches, hash64

FRACTIONS = (0.4, 0.2, 0.4)
NOWHERE: Mapping[int, Collection[int]] = {}


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, and of each document the `rows` stored (BOS rows included) and the tokens `dropped`, not
    stored. `note` says that the corpus was shorter than asked for."""

    plan: Plan
    rows: Int[np.ndarray, "document"]
    dropped: Int[np.ndarray, "document"]
    note: str | None


def assign_splits(
    groups: Int[np.ndarray, "document"],
    keys: Sequence[str],
    *,
    fractions: Sequence[float] = FRACTIONS,
    seed: int = 0,
) -> UInt8[np.ndarray, "document"]:
    """The split of each document: its group's smallest key (a content hash) decides, so that a document goes
    to the same split in every corpus that holds it, and near-duplicates never stand on two sides."""
    smallest: dict[int, str] = {}
    for group, key in zip(groups.tolist(), keys, strict=True):
        smallest[group] = min(key, smallest.get(group, key))
    bounds = np.cumsum(fractions)[:-1]
    split_of = {
        group: int(np.searchsorted(bounds, hash64("split", seed, key) / 2**64, side="right"))
        for group, key in smallest.items()
    }
    splits = np.array([split_of[group] for group in groups.tolist()], np.uint8)
    counts = np.bincount([split_of[group] for group in smallest], minlength=len(SPLITS))
    if (counts == 0).any():
        absent = " and ".join(name for name, count in zip(SPLITS, counts, strict=True) if not count)
        raise UsageError(
            f"too few documents: {len(keys):,} documents in {len(smallest):,} groups of near-duplicates "
            f"leave the {absent} split without any. Give more documents, or another seed."
        )
    return splits


def reachable_tokens(
    lengths: Int[np.ndarray, "document"],
    splits: UInt8[np.ndarray, "document"],
    cutting: Cutting,
    tokens: int,
    keys: Sequence[str] = (),
) -> int:
    """About how many rows a plan can reach, `tokens` at most: the split that runs out first decides.
    Cuts at block ends may drop a few rows more. Where a share is kept, `keys` say which windows."""
    share = np.array([PATTERN.count(name) / len(PATTERN) for name in SPLITS])
    if cutting.keep is not None:
        members = [np.flatnonzero(splits == code) for code in range(len(SPLITS))]
        supply = np.array([Supply(member, lengths, cutting, keys).rows for member in members])
        return min(tokens, int((supply / share).min()))
    full, tail = np.divmod(np.asarray(lengths, np.int64), cutting.payload)
    tail_rows = np.where(tail > 0, tail + cutting.bos_rows, 0)
    tail_rows[tail_rows < cutting.min_length] = 0
    rows = full * cutting.sequence_length + tail_rows
    supply = np.bincount(splits, weights=rows, minlength=len(SPLITS))
    return min(tokens, int((supply / share).min()))


def build_plan(
    lengths: Int[np.ndarray, "document"],
    splits: UInt8[np.ndarray, "document"],
    keys: Sequence[str],
    *,
    tokens: int,
    block: int,
    cutting: Cutting,
    fractions: Sequence[float] = FRACTIONS,
    bos_places: Mapping[int, Collection[int]] = NOWHERE,
) -> Planned:
    """Cut, order and batch the documents into at most `tokens` rows. `lengths` count tokens without BOS, and
    `bos_places` are where documents hold it all the same: no window opens there."""
    order = seeded_order(keys, cutting.seed)
    supplies = [
        Supply(order[splits[order] == code], lengths, cutting, keys, bos_places)
        for code in range(len(SPLITS))
    ]
    blocks: list[list[Window]] = []
    block_split: list[int] = []
    left, ended_by = tokens, None
    while left > 0:
        code = SPLITS.index(PATTERN[len(blocks) % len(PATTERN)])
        wanted = min(block, left)
        windows = supplies[code].take(wanted)
        rows = sum(window.rows for window in windows)
        if rows:
            blocks.append(windows)
            block_split.append(code)
        left -= rows
        if rows < wanted:
            ended_by = SPLITS[code]
            break
    total = tokens - left
    _require_all_splits(block_split, total, block, ended_by, cutting)
    plan = _assemble(blocks, block_split, total, block, cutting, tuple(float(share) for share in fractions))
    rows, stored = per_document(plan, len(lengths))
    dropped = np.asarray(lengths, np.int64) - stored
    note = _shortage(total, tokens, ended_by, cutting)
    return Planned(plan, rows.astype(np.int32), dropped.astype(np.int32), note)


def seeded_order(keys: Sequence[str], seed: int) -> Int[np.ndarray, "document"]:
    """Documents in the order of a hash of seed and content; numpy promises no shuffle across versions."""
    hashes = np.array([hash64("order", seed, key) for key in keys], np.uint64)
    return np.argsort(hashes, kind="stable")


def _assemble(
    blocks: list[list[Window]],
    block_split: list[int],
    total: int,
    block: int,
    cutting: Cutting,
    fractions: tuple[float, ...],
) -> Plan:
    ordered: list[Window] = []
    sequence_batch: list[int] = []
    sequence_block: list[int] = []
    n_batches = 0
    for number, windows in enumerate(blocks):
        for batch in batches([window.rows for window in windows], cutting.batch_tokens):
            ordered.extend(windows[index] for index in batch)
            sequence_batch.extend([n_batches] * len(batch))
            sequence_block.extend([number] * len(batch))
            n_batches += 1
    document, start, length = np.array(ordered, np.int32).T
    return Plan(
        n_tokens=total,
        block=block,
        sequence_length=cutting.sequence_length,
        min_length=cutting.min_length,
        batch_tokens=cutting.batch_tokens,
        seed=cutting.seed,
        bos_id=cutting.bos_id,
        pattern=PATTERN,
        fractions=fractions,
        document=np.ascontiguousarray(document),
        start=np.ascontiguousarray(start),
        length=np.ascontiguousarray(length),
        bos=np.full(len(ordered), cutting.bos_id is not None),
        sequence_batch=np.array(sequence_batch, np.int32),
        sequence_block=np.array(sequence_block, np.int32),
        block_split=np.array(block_split, np.uint8),
        block_rows=np.array([sum(window.rows for window in windows) for windows in blocks], np.int32),
    )


def per_document(plan: Plan, n_documents: int) -> tuple[np.ndarray, np.ndarray]:
    """Of each document the rows in the plan, and its tokens in the plan (rows without BOS)."""
    rows = np.bincount(plan.document, weights=plan.length, minlength=n_documents).astype(np.int64)
    bos = np.bincount(plan.document, weights=plan.bos, minlength=n_documents).astype(np.int64)
    return rows, rows - bos


def _require_all_splits(
    block_split: list[int], total: int, block: int, ended_by: str | None, cutting: Cutting
) -> None:
    missing = [name for code, name in enumerate(SPLITS) if code not in block_split]
    if not missing:
        return
    if ended_by is not None:
        raise UsageError(
            f"too few tokens: the {ended_by} split ran out after {total:,} rows, before the store had a "
            f"block of each split (block={block:,}, windows under min_length={cutting.min_length} rows are "
            f"dropped{_kept(cutting)}). Give a larger corpus or a smaller block."
        )
    raise UsageError(
        f"too few tokens: {total:,} rows in blocks of {block:,} leave no block for {' and '.join(missing)}; "
        f"a store needs three blocks at least. Raise tokens, or set block to {max(total // 3, 1):,} or less."
    )


def _shortage(total: int, tokens: int, ended_by: str | None, cutting: Cutting) -> str | None:
    if total == tokens:
        return None
    return (
        f"the corpus holds only {total:,} usable tokens (its {ended_by} split is used up{_kept(cutting)}): "
        f"tokens lowered from {tokens:,}"
    )


def _kept(cutting: Cutting) -> str:
    return "" if cutting.keep is None else f", keep={cutting.keep} leaves out the other windows"
