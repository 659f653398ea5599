"""What a model is trained on, and what it is scored on: windows of the stores of a study.

In: readers of stores, and which of their rows count. Out: windows of the fit split in an order that seed and
step number decide, and batches of held-out windows with the rows to score. No text is needed: a store holds
the token ids of its windows. A document is refused that is scored in any store, or is a near-duplicate of
one that is. Cost: the token columns of the stores.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Int, Int64
from torch import Tensor
from torch.utils.data import Dataset

from ..analyze.population import FIT, GATE, TEST
from ..store import Reader, UsageError
from ..store.names import printable
from .measured_windows import Cut, WindowBatch, block_windows

IGNORED = -100  # a label that enters no loss
Documents = Int[np.ndarray, "document"]
_NAMES = {GATE: "gate", TEST: "test"}


@dataclass(frozen=True, slots=True, eq=False)
class Windows:
    """Token ids of windows, and the document each is of."""

    ids: tuple[Int64[np.ndarray, "position"], ...]
    document: Int[np.ndarray, "window"]

    def order(self, seed: int, n: int) -> Int64[np.ndarray, "n"]:
        """The first n windows in training order: one permutation after the other, each of all windows."""
        epochs = max(1, -(-n // len(self.ids)))
        drawn = [np.random.default_rng((seed, epoch)).permutation(len(self.ids)) for epoch in range(epochs)]
        return np.concatenate(drawn)[:n]

    def tokens(self, order: Int64[np.ndarray, "n"]) -> tuple[int, int]:
        """Tokens of these windows, and of each of them once."""
        sizes = np.array([one.size for one in self.ids])
        return int(sizes[order].sum()), int(sizes[np.unique(order)].sum())


def training_windows(reader: Reader, split: int = FIT) -> Windows:
    """The windows of one split of a store."""
    plan = reader.plan
    ids: list[np.ndarray] = []
    document: list[int] = []
    for block in np.flatnonzero(plan.block_split == split).tolist():
        row0, _ = plan.block_range(block)
        token_id = np.asarray(reader.column_block("token_id", block)).astype(np.int64)
        for sequence in plan.sequences_of(block):
            start, stop = (int(plan.row_offsets[sequence + end]) - row0 for end in (0, 1))
            ids.append(token_id[start:stop])
            document.append(int(plan.document[sequence]))
    return Windows(tuple(ids), np.array(document, np.int64))


def require_unseen(
    store: str, windows: Windows, readers: Mapping[str, Reader], scored: Mapping[tuple[str, int], Documents]
) -> None:
    """UsageError where a document that is trained on is scored, or where one of either's near-duplicates is
    the other's. `scored`: numbers of documents by store and split. A near-duplicate need not have rows.
    """
    documents = readers[store].documents
    groups, hashes = documents["group"].to_numpy(), _hashes(readers[store])
    learned = np.isin(groups, groups[np.unique(windows.document)])
    for (name, split), chosen in scored.items():
        theirs = readers[name].documents["group"].to_numpy()
        held_out = np.isin(theirs, theirs[chosen])
        seen = learned & np.isin(hashes, _hashes(readers[name])[held_out])
        if seen.any():
            key = documents["key"][int(np.flatnonzero(seen)[0])].as_py()
            raise UsageError(
                f"document {printable(str(key))[:80]!r} of store {store} would be trained on, or one much "
                f"like it, and stands among the {_NAMES[split]} documents of store {name}: what is scored is "
                "never trained on; name other --stores, or another --train-on"
            )


def _hashes(reader: Reader) -> np.ndarray:
    return np.array(reader.documents["content_hash"].to_pylist(), dtype=str)


class Batches(Dataset[dict[str, Tensor]]):
    """Windows in training order, for a `Trainer` that takes them one after the other."""

    def __init__(self, windows: Windows, order: Int64[np.ndarray, "n"]) -> None:
        self._windows, self._order = windows, order

    def __len__(self) -> int:
        return self._order.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": torch.from_numpy(self._windows.ids[int(self._order[index])])}


def collate(windows: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Padded on the right. Every token of a window but its first is a target."""
    ids = [one["input_ids"] for one in windows]
    width = max(one.numel() for one in ids)
    mask = torch.stack([torch.arange(width) < one.numel() for one in ids])
    padded = torch.zeros(len(ids), width, dtype=torch.long)
    padded[mask] = torch.cat(ids)
    return {
        "input_ids": padded,
        "attention_mask": mask.long(),
        "labels": padded.masked_fill(~mask, IGNORED),
    }


@dataclass(frozen=True, slots=True, eq=False)
class ScoredBatch:
    """A batch, and the places (in `batch.row`) of its scored rows with the index of each row's group."""

    batch: WindowBatch
    place: Int64[np.ndarray, "row"]
    group: Int64[np.ndarray, "row"]


@dataclass(frozen=True, slots=True, eq=False)
class ScoredRows:
    """What is scored of one split of a store. `groups`: their numbers in the store."""

    store: str
    split: str
    groups: Int64[np.ndarray, "group"]
    n_tokens: Int64[np.ndarray, "group"]
    batches: tuple[ScoredBatch, ...]


def scored_rows(
    store: str,
    reader: Reader,
    split: int,
    scored: Bool[np.ndarray, "token"],
    group: Int[np.ndarray, "token"],
) -> ScoredRows:
    """The held-out windows of a split, in the batches of the harvest."""
    numbers = np.unique(group[scored]).astype(np.int64)
    batches: list[ScoredBatch] = []
    for block in np.flatnonzero(reader.plan.block_split == split).tolist():
        for batch in block_windows(reader, block, Cut()):
            place = np.flatnonzero(scored[batch.row])
            if place.size:
                of_row = np.searchsorted(numbers, group[batch.row[place]])
                batches.append(ScoredBatch(batch, place, of_row))
    n_tokens = np.bincount(np.searchsorted(numbers, group[scored]), minlength=numbers.size)
    return ScoredRows(store, _NAMES[split], numbers, n_tokens.astype(np.int64), tuple(batches))
