"""Which rows are fitted, tested and kept apart: a store's token columns in, one frozen `Population` out.

`body` rows enter fits and statistics; `sink` rows (position 0 and special tokens, whose activations are
hundreds of times larger) are reported apart; rows with a masked non-finite value enter nothing. Folds go by
group, and a fitted document carries its fold into every other store that holds the same text, to the whole
group that it is in there, so that needs there are out of fold too. (A near-duplicate that no document of the
two corpora links is not found: stores keep no text.) Cost: about 40 bytes of memory a token row, the only
memory of a fit that grows with the store.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Int, Int32, UInt8

from ..store import SPLITS, Reader, UsageError
from .folds import assign_folds, too_few_groups

FIT, GATE, TEST = (SPLITS.index(split) for split in ("fit", "gate", "test"))
# Instead of a fold: no surrogate of a fold has seen the document; every one has seen a near-duplicate of it.
UNSEEN: Final = -1
LEFT_OUT: Final = -2


@dataclass(frozen=True, slots=True, eq=False)
class Population:
    """Identity of every token row of a store."""

    split: UInt8[np.ndarray, "token"]
    fold: Int32[np.ndarray, "token"]  # UNSEEN: no surrogate of a fold has seen this row's document
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
    hashes, groups, rows = _fit_rows(reader)
    n_stored = int(np.unique(groups[np.unique(_column(reader, "document"))]).size)
    return spread_documents(hashes, groups, rows, n_folds, seed, n_stored)


def spread_documents(
    hashes: Sequence[str],
    groups: Int[np.ndarray, "document"],
    n_fit: Int[np.ndarray, "document"],
    n_folds: int,
    seed: int,
    n_stored_groups: int,
) -> dict[str, int]:
    """Content hash → fold, by group, from how many rows to fit (body rows) each document has.
    `n_stored_groups`, which have any rows, is said where there are too few.
    """
    fitted = _fitted_groups(hashes, groups, n_fit)
    if len(fitted) < n_folds:
        raise too_few_groups(len(fitted), n_folds, n_stored_groups, int(np.unique(groups).size))
    rows = np.array([group.n_rows for group in fitted])
    folds = assign_folds([group.name for group in fitted], rows, n_folds, seed)
    return {h: fold for group, fold in zip(fitted, folds.tolist(), strict=True) for h in group.hashes}


def joint_folds(readers: Mapping[str, Reader], n_folds: int, seed: int) -> dict[str, dict[str, int]]:
    """By store: content hash → fold, for surrogates fitted on the fit rows of all stores together.

    The folds of the first store are those it has alone; each further one gets them beside those before it.
    Each store's mapping has the documents that are fitted in the others too, so that they are scored out of
    fold wherever they stand.
    """
    first, *later = readers
    own = {first: fold_of_documents(readers[first], n_folds, seed)}
    known = dict(own[first])
    for name in later:
        own[name] = folds_beside(readers[name], known, n_folds, seed)
        known |= own[name]
    return {name: known | own[name] for name in readers}


def folds_beside(reader: Reader, known: Mapping[str, int], n_folds: int, seed: int) -> dict[str, int]:
    """Content hash → fold of the documents that a further store fits, beside folds that are settled.

    A group that holds documents with a fold takes it; one with documents of several folds is left out of the
    fit (`LEFT_OUT`): no surrogate would be held out from it. Other groups are spread over the folds.
    """
    groups = _fitted_groups(*_fit_rows(reader))
    linked = [_common_fold({known[h] for h in group.hashes if h in known}) for group in groups]
    filled = [0] * n_folds
    for group, fold in zip(groups, linked, strict=True):
        if fold >= 0:
            filled[fold] += group.n_rows
    free = [index for index, fold in enumerate(linked) if fold == UNSEEN]
    rows = np.array([groups[index].n_rows for index in free], np.int64)
    given = assign_folds([groups[index].name for index in free], rows, n_folds, seed, filled)
    for index, fold in zip(free, given.tolist(), strict=True):
        linked[index] = fold
    return {h: fold for group, fold in zip(groups, linked, strict=True) for h in group.hashes}


@dataclass(frozen=True, slots=True)
class _Group:
    """A group with rows to fit: its name is the smallest content hash that has such rows."""

    name: str
    hashes: tuple[str, ...]  # of all its documents
    n_rows: int


def _fit_rows(reader: Reader) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Of each document of a store: content hash, group, number of rows to fit."""
    hashes: list[str] = reader.documents["content_hash"].to_pylist()
    document = _column(reader, "document")[_body(reader) & (_column(reader, "split") == FIT)]
    return hashes, reader.documents["group"].to_numpy(), np.bincount(document, minlength=len(hashes))


def _fitted_groups(hashes: Sequence[str], groups: np.ndarray, rows: np.ndarray) -> list[_Group]:
    members: dict[int, list[int]] = {int(group): [] for group in np.unique(groups[rows > 0])}
    for index, group in enumerate(groups.tolist()):
        if group in members:
            members[group].append(index)
    return [
        _Group(
            min(hashes[index] for index in found if rows[index]),
            tuple(hashes[index] for index in found),
            int(rows[found].sum()),
        )
        for found in members.values()
    ]


def _common_fold(folds: set[int]) -> int:
    """The fold of a group whose documents have these."""
    folds = folds - {UNSEEN}
    return UNSEEN if not folds else folds.pop() if len(folds) == 1 else LEFT_OUT


def load_population(reader: Reader, folds: Mapping[str, int], name: str) -> Population:
    """The token rows of a store; `folds` comes from `fold_of_documents` of the store that is fitted, or is
    this store's of `joint_folds`.

    A group takes the fold of its documents that are fitted elsewhere. Rows of a group with several (fold
    `LEFT_OUT`) are neither body nor sink: every surrogate has seen a near-duplicate of them.
    """
    document = _column(reader, "document")
    fold, group = _document_folds(reader, folds), reader.documents["group"].to_numpy().astype(np.int32)
    fold = fold[document]
    usable = _column(reader, "valid").astype(bool) & (fold != LEFT_OUT)
    body = _body(reader) & usable
    population = Population(
        split=_column(reader, "split"),
        fold=fold,
        group=group[document],
        document=document,
        sequence=_column(reader, "sequence"),
        position=_column(reader, "position"),
        token_id=_column(reader, "token_id"),
        target_id=_column(reader, "target_id"),
        special=_column(reader, "special").astype(bool),
        body=body,
        sink=usable & ~body,
    )
    _check_groups(population, reader.documents["content_hash"].to_pylist(), name)
    if not population.rows(TEST).size:
        raise UsageError(
            f"store {name}: no row of the test split can be scored (position 0 and special tokens do not "
            "count): harvest more tokens"
        )
    return population


def _document_folds(reader: Reader, folds: Mapping[str, int]) -> np.ndarray:
    """The fold of each document of a store: that of its group."""
    groups = reader.documents["group"].to_numpy().tolist()
    found: dict[int, set[int]] = {}
    for content_hash, group in zip(reader.documents["content_hash"].to_pylist(), groups, strict=True):
        found.setdefault(group, set()).add(folds.get(content_hash, UNSEEN))
    common = {group: _common_fold(of_documents) for group, of_documents in found.items()}
    return np.array([common[group] for group in groups], np.int32)


def _check_groups(population: Population, hashes: Sequence[str], name: str) -> None:
    """No group and no text may stand in two splits: what is learned on one would be scored on the other."""
    text = np.unique(np.asarray(hashes), return_inverse=True)[1][population.document]
    for one, other in combinations((FIT, GATE, TEST), 2):
        left, right = population.split == one, population.split == other
        for kind, labels in (("group", population.group), ("text", text)):
            if not (shared := np.intersect1d(labels[left], labels[right])).size:
                continue
            what = (
                f"group {shared[0]} of near-duplicate documents"
                if kind == "group"
                else f"the text of content hash {hashes[population.document[text == shared[0]][0]][:16]}"
            )
            raise UsageError(
                f"store {name}: {what} is both in {SPLITS[one]} and in {SPLITS[other]}: "
                "its held-out scores would not be held out; harvest it again"
            )


def _column(reader: Reader, name: str) -> np.ndarray:
    return np.asarray(reader.column(name))


def _body(reader: Reader) -> np.ndarray:
    special, valid = _column(reader, "special").astype(bool), _column(reader, "valid").astype(bool)
    return valid & ~special & (_column(reader, "position") != 0)
