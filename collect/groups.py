"""Near-duplicate groups of documents: the unit of split and of every bootstrap.

In: texts, or token ids. Out: one group number per document. Two documents are near-duplicates when they share
more than `threshold` of the n-grams of the one that has fewer of them; groups are the connected components.
A document with fewer than n words counts as one n-gram of its own, so short ones match only when equal.
Words are runs of letters and digits, lower-cased: layout and punctuation do not hide a copy; a text without
any is one word as it stands. Of ids each is a word.
Cost: about 1 s for 10 MB of docstrings; memory 35 bytes a word (50 where many stand in copies) and one slice
of the overlap matrix.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from jaxtyping import Int, Int32, Int64, UInt64
from scipy import sparse
from scipy.sparse.csgraph import connected_components

NGRAM = 13
THRESHOLD = 0.2
ROWS_AT_ONCE = 1024
WORDS_AT_ONCE = 2**20
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # odd, so that multiplying permutes the 64-bit numbers

words_of = re.compile(r"\w+").findall

Words = Int[np.ndarray, "_"]


def near_duplicate_groups(
    documents: Sequence[str] | Sequence[Words], n: int = NGRAM, threshold: float = THRESHOLD
) -> Int32[np.ndarray, " document"]:
    """Group number of each document, counted from 0 in order of first appearance."""
    if len(documents) == 0:
        return np.zeros(0, np.int32)
    document, gram, sizes = repeated_ngrams(numbered_words(documents), n)
    links = overlap_links(shared_incidence(document, gram, len(documents)), sizes, threshold)
    _, labels = connected_components(links, directed=False)
    return first_appearance(labels)


def numbered_words(documents: Sequence[str] | Sequence[Words]) -> list[Words]:
    """Each document as numbers, the same for the same word; a document without words as the number -1."""
    numbers: dict[str, int] = {}
    rows: list[Words] = []
    for document in documents:
        if isinstance(document, str):
            words = words_of(document.lower()) or [document.strip()]
            rows.append(np.array([numbers.setdefault(word, len(numbers)) for word in words], np.int32))
        else:
            rows.append(document if len(document) else np.array([-1], np.int32))
    return rows


def repeated_ngrams(
    words: Sequence[Words], n: int
) -> tuple[Int64[np.ndarray, " gram"], UInt64[np.ndarray, " gram"], Int64[np.ndarray, " document"]]:
    """The hashed n-grams that stand in the corpus more than once, each once a document, as (document, hash)
    pairs sorted by hash; and how many different n-grams each document has, all of them counted."""
    lengths = np.array([len(row) for row in words])
    count = lengths - np.minimum(lengths, n) + 1  # a short document is one window as long as itself
    gram = np.concatenate([hash_ngrams(words[part], n) for part in slices(lengths)])
    ordered = np.sort(gram)
    repeated = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    del ordered
    place = np.flatnonzero(is_among(gram, repeated))
    document, gram = np.searchsorted(np.cumsum(count), place, side="right"), gram[place]
    order = np.lexsort((document, gram))
    sizes = count - np.bincount(document, minlength=len(words))
    document, gram = document[order], gram[order]
    fresh = np.ones(len(gram), bool)
    fresh[1:] = (gram[1:] != gram[:-1]) | (document[1:] != document[:-1])
    document, gram = document[fresh], gram[fresh]
    return document, gram, sizes + np.bincount(document, minlength=len(words))


def slices(lengths: Int64[np.ndarray, " document"]) -> Iterator[slice]:
    """Runs of documents of about WORDS_AT_ONCE words, so that what is made of them stays small."""
    run = (np.cumsum(lengths) - 1) // WORDS_AT_ONCE
    bounds = [0, *(np.flatnonzero(np.diff(run)) + 1).tolist(), len(lengths)]
    return (slice(low, high) for low, high in pairwise(bounds))


def hash_ngrams(words: Sequence[Words], n: int) -> UInt64[np.ndarray, " gram"]:
    """The hash of every n-gram of these documents, in order."""
    lengths = np.array([len(row) for row in words])
    window = np.minimum(lengths, n)
    count = lengths - window + 1
    flat = mix(np.concatenate(words).astype(np.int64).astype(np.uint64) + np.uint64(1))
    starts = np.cumsum(lengths) - lengths
    first = np.arange(int(count.sum())) + np.repeat(starts - (np.cumsum(count) - count), count)
    return hash_windows(flat, first, np.repeat(window, count))


def is_among(values: UInt64[np.ndarray, " any"], known: UInt64[np.ndarray, " sorted"]) -> np.ndarray:
    """Which values are in `known`; in slices, because the search makes an index of each."""
    found = np.zeros(len(values), bool)
    for start in range(0, len(values) if len(known) else 0, WORDS_AT_ONCE):
        part = values[start : start + WORDS_AT_ONCE]
        near = np.minimum(np.searchsorted(known, part), len(known) - 1)
        found[start : start + WORDS_AT_ONCE] = known[near] == part
    return found


def hash_windows(
    words: UInt64[np.ndarray, " word"], first: Int64[np.ndarray, " gram"], length: Int64[np.ndarray, " gram"]
) -> UInt64[np.ndarray, " gram"]:
    """A 64-bit hash of words[first : first + length], order and length included."""
    total = length.astype(np.uint64)
    for step in range(int(length.max())):
        inside = length > step
        total[inside] = mix(total[inside] ^ words[first[inside] + step]) * MULTIPLIER
    return total


def mix(value: UInt64[np.ndarray, " any"]) -> UInt64[np.ndarray, " any"]:
    """A permutation of the 64-bit numbers that spreads neighbours apart."""
    value = value * MULTIPLIER
    return (value ^ (value >> np.uint64(29))) * MULTIPLIER


def shared_incidence(
    document: Int64[np.ndarray, " gram"], gram: UInt64[np.ndarray, " gram"], n_documents: int
) -> sparse.csr_array:
    """Documents × n-grams, only the n-grams that stand in two documents or more; the others join nothing."""
    column = np.cumsum(np.diff(gram, prepend=gram[:1]) != 0)
    kept = np.bincount(column)[column] > 1
    _, column = np.unique(column[kept], return_inverse=True)
    shape = (n_documents, int(column.max(initial=-1)) + 1)
    return sparse.csr_array((np.ones(int(kept.sum()), np.int32), (document[kept], column)), shape=shape)


def overlap_links(
    incidence: sparse.csr_array, sizes: Int64[np.ndarray, " document"], threshold: float
) -> sparse.coo_array:
    """The pairs of documents that share more than `threshold` of the smaller one's n-grams."""
    transposed = incidence.T.tocsr()
    rows, columns = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for start in range(0, len(sizes), ROWS_AT_ONCE):
        overlap = (incidence[start : start + ROWS_AT_ONCE] @ transposed).tocoo()
        row = overlap.row.astype(np.int64) + start
        near = overlap.data > threshold * np.minimum(sizes[row], sizes[overlap.col])
        rows.append(row[near])
        columns.append(overlap.col[near].astype(np.int64))
    row, column = np.concatenate(rows), np.concatenate(columns)
    return sparse.coo_array((np.ones(len(row), bool), (row, column)), shape=(len(sizes), len(sizes)))


def first_appearance(labels: Int32[np.ndarray, " document"]) -> Int32[np.ndarray, " document"]:
    """The same partition with its parts numbered in order of first appearance."""
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int32)
    rank[np.argsort(first)] = np.arange(len(first), dtype=np.int32)
    return rank[inverse]
