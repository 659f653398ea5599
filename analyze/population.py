"""Which rows are fitted, tested and kept apart: a store's token columns in, one frozen `Population` out.

`body` rows enter fits and statistics; `sink` rows (position 0 and special tokens, whose activations are
hundreds of times larger) are reported apart; rows with a masked non-finite value enter nothing. Folds go by
group, and a document of a fitted group carries its fold into every other store that holds the same text, so
that its needs there are out of fold too. (A near-duplicate with other bytes in another corpus is not found:
stores keep no text.) Cost: about 40 bytes of memory a token row, the only memory of a
fit that grows with the store.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Int32, UInt8

from ..store import SPLITS, Reader, UsageError
from .folds import assign_folds, too_few_groups

FIT, GATE, TEST = (SPLITS.index(split) for split in ("fit", "gate", "test"))


@dataclass(frozen=True, slots=True, eq=False)
class Population:
    """Identity of every token row of a store."""

    split: UInt8[np.ndarray, "token"]
    fold: Int32[np.ndarray, "token"]  # −1: no surrogate of a fold has seen this row's document
    group: Int32[np.ndarray, "token"]
    document: Int32[np.ndarray, "token"]
    sequence: Int32[np.ndarray, "token"]
    position: Int32[np.ndarray, "token"]
    token_id: Int32[np.ndarray, "token"]
    target_id: Int32[np.ndarray, "token"]
    special: Bool[np.ndarray, "token"]
    body: Bool[np.ndarray, "token"]
    sink: Bool[np.ndarray, "token"]

    def rows(self, split: int, population: str = "body") -> np.ndarray:
        """Row numbers of one split's body or sink rows."""
        member = self.body if population == "body" else self.sink
        return np.flatnonzero(member & (self.split == split))

    def n_groups(self, rows: np.ndarray) -> int:
        return int(np.unique(self.group[rows]).size)

    def to_table(self) -> pa.Table:
        """The table `tokens/rows` of a study."""
        return pa.table(
            {
                "token": np.arange(self.split.size, dtype=np.int64),
                "split": pa.DictionaryArray.from_arrays(self.split.astype(np.int8), list(SPLITS)).cast(
                    pa.string()
                ),
                "fold": self.fold,
                "group": self.group,
                "document": self.document,
                "sequence": self.sequence,
                "position": self.position,
                "token_id": self.token_id,
                "target_id": self.target_id,
                "special": self.special,
            }
        )


def fold_of_documents(reader: Reader, n_folds: int, seed: int) -> dict[str, int]:
    """Content hash → fold, for every document of a group with rows to fit in the store that is fitted."""
    documents = reader.documents
    hashes: list[str] = documents["content_hash"].to_pylist()
    groups = documents["group"].to_numpy()
    document = _column(reader, "document")[_body(reader) & (_column(reader, "split") == FIT)]
    rows = np.bincount(document, minlength=len(hashes))
    smallest: dict[int, str] = {}
    for content_hash, group, n_rows in zip(hashes, groups.tolist(), rows, strict=True):
        if n_rows:
            smallest[group] = min(content_hash, smallest.get(group, content_hash))
    fitted = sorted(smallest)
    if len(fitted) < n_folds:
        n_stored = np.unique(groups[np.unique(_column(reader, "document"))]).size
        raise too_few_groups(len(fitted), n_folds, int(n_stored), reader.attributes.corpus.n_groups)
    group_rows = np.bincount(groups[document], minlength=int(groups.max(initial=-1)) + 1)[fitted]
    folds = assign_folds([smallest[group] for group in fitted], group_rows, n_folds, seed)
    by_group = dict(zip(fitted, folds.tolist(), strict=True))
    return {h: by_group[g] for h, g in zip(hashes, groups.tolist(), strict=True) if g in by_group}


def load_population(reader: Reader, folds: Mapping[str, int], name: str) -> Population:
    """The token rows of a store; `folds` comes from `fold_of_documents` of the store that is fitted."""
    documents = reader.documents
    document = _column(reader, "document")
    group = documents["group"].to_numpy().astype(np.int32)
    fold = np.array([folds.get(h, -1) for h in documents["content_hash"].to_pylist()], np.int32)
    body, valid = _body(reader), _column(reader, "valid").astype(bool)
    population = Population(
        split=_column(reader, "split"),
        fold=fold[document],
        group=group[document],
        document=document,
        sequence=_column(reader, "sequence"),
        position=_column(reader, "position"),
        token_id=_column(reader, "token_id"),
        target_id=_column(reader, "target_id"),
        special=_column(reader, "special").astype(bool),
        body=body,
        sink=valid & ~body,
    )
    _check_groups(population, name)
    if not population.rows(TEST).size:
        raise UsageError(
            f"store {name}: no row of the test split can be scored (position 0 and special tokens do not "
            "count): harvest more tokens"
        )
    return population


def _check_groups(population: Population, name: str) -> None:
    fitted, tested = (np.unique(population.group[population.split == split]) for split in (FIT, TEST))
    if (shared := np.intersect1d(fitted, tested)).size:
        raise UsageError(
            f"store {name}: group {shared[0]} of near-duplicate documents is both in fit and in test: "
            "its held-out scores would not be held out; harvest it again"
        )


def _column(reader: Reader, name: str) -> np.ndarray:
    return np.asarray(reader.column(name))


def _body(reader: Reader) -> np.ndarray:
    special, valid = _column(reader, "special").astype(bool), _column(reader, "valid").astype(bool)
    return valid & ~special & (_column(reader, "position") != 0)
