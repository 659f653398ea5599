"""Cutting documents into windows, windows at block ends, and a block's windows into batches.

In: token counts of documents, in the order in which they enter. Out: windows with exact row counts, and
groups of windows that fit one forward pass. Pure arithmetic and a hash. Where only a share of the windows is
kept, a hash of seed, content and place decides on each: neither the order nor other documents do.
Cost: a few microseconds a window; nothing is held but the windows of one document.
"""

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple

import blake3
import numpy as np
from jaxtyping import Int

from ..store.errors import UsageError


class Window(NamedTuple):
    """Consecutive tokens of a document that pass the model together; `rows` counts the BOS row too."""

    document: int
    start: int
    rows: int


@dataclass(frozen=True, slots=True)
class Cutting:
    """The numbers that steer the cutting of documents into windows, blocks and batches. `keep` is the share
    of the windows to keep; None: all."""

    sequence_length: int
    min_length: int
    batch_tokens: int
    seed: int
    bos_id: int | None
    keep: Fraction | None = None

    def __post_init__(self) -> None:
        if self.min_length > self.sequence_length:
            raise UsageError(
                f"min_length={self.min_length} is above sequence_length={self.sequence_length}: "
                "no window would be long enough. Lower min_length."
            )
        if self.batch_tokens < self.sequence_length:
            raise UsageError(
                f"batch_tokens={self.batch_tokens} is below sequence_length={self.sequence_length}: "
                f"one window would not fit. Use at least {self.sequence_length}."
            )

    @property
    def bos_rows(self) -> int:
        return int(self.bos_id is not None)

    @property
    def payload(self) -> int:
        """Tokens of the document that one full window takes."""
        return self.sequence_length - self.bos_rows


@dataclass(slots=True)
class Supply:
    """The windows of one split in seeded order; a cut window's remainder comes back first. `keys` are content
    hashes; `bos_places` are the places in documents where the BOS token itself stands: no window opens there,
    or it would stand behind the window's own."""

    order: Int[np.ndarray, "member"]
    lengths: Int[np.ndarray, "document"]
    cutting: Cutting
    keys: Sequence[str]
    bos_places: Mapping[int, Collection[int]] = field(default_factory=dict)
    _pending: deque[Window] = field(default_factory=deque)
    _cursor: int = 0

    def take(self, wanted: int) -> list[Window]:
        """Windows of exactly `wanted` rows in all, or of fewer when this split has no more."""
        chosen: list[Window] = []
        while wanted > 0 and (window := self._next()) is not None:
            if window.rows > wanted:
                window = self._cut(window, wanted)
            chosen.append(window)
            wanted -= window.rows
        return chosen

    @property
    def rows(self) -> int:
        """Rows of all its windows, before any is cut."""
        return sum(window.rows for document in self.order for window in self._windows(int(document)))

    def _next(self) -> Window | None:
        while not self._pending and self._cursor < len(self.order):
            document = int(self.order[self._cursor])
            self._cursor += 1
            self._pending.extend(self._windows(document))
        return self._pending.popleft() if self._pending else None

    def _windows(self, document: int) -> Iterator[Window]:
        bos, payload, n_tokens = self.cutting.bos_rows, self.cutting.payload, int(self.lengths[document])
        everything, least = self.cutting.keep is None, self.cutting.min_length
        for start in self._starts(document, n_tokens):
            rows = min(payload, n_tokens - start) + bos
            if rows >= least and (everything or self._keeps(document, start)):
                yield Window(document, start, rows)

    def _starts(self, document: int, n_tokens: int) -> Iterable[int]:
        if document not in self.bos_places:
            return range(0, n_tokens, self.cutting.payload)
        starts = [self._opening(document, 0)]
        while starts[-1] < n_tokens:
            starts.append(self._opening(document, starts[-1] + self.cutting.payload))
        return starts[:-1]

    def _keeps(self, document: int, start: int) -> bool:
        share = self.cutting.keep
        assert share is not None
        drawn = hash64("keep", self.cutting.seed, f"{self.keys[document]}\0{start}")
        return drawn * share.denominator < share.numerator * 2**64

    def _opening(self, document: int, start: int) -> int:
        """The first place from `start` on where a window may open."""
        places = self.bos_places.get(document, ()) if self.cutting.bos_rows else ()
        while start in places:
            start += 1
        return start

    def _cut(self, window: Window, rows: int) -> Window:
        bos, stop = self.cutting.bos_rows, window.start + window.rows
        start = self._opening(window.document, window.start + rows - bos)
        rest = Window(window.document, start, stop - start)
        if rest.rows >= self.cutting.min_length and rest.rows > bos:
            self._pending.appendleft(rest)
        return window._replace(rows=rows)


def hash64(purpose: str, seed: int, key: str) -> int:
    """A number below 2^64 that looks drawn at random, the same on every machine."""
    return int.from_bytes(blake3.blake3(f"{purpose}\0{seed}\0{key}".encode()).digest()[:8], "big")


def batches(rows: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Indices of sequences, longest first, in groups whose padded size stays within `batch_tokens`."""
    order = sorted(range(len(rows)), key=lambda index: -rows[index])
    batch: list[int] = []
    for index in order:
        if batch and (len(batch) + 1) * rows[batch[0]] > batch_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch
