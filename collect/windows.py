"""Cutting documents into windows, windows at block ends, and a block's windows into batches.

In: token counts of documents, in the order in which they enter. Out: windows with exact row counts, and
groups of windows that fit one forward pass. Pure arithmetic. Cost: a few microseconds a window; nothing is
held but the windows of one document.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

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
    """The numbers that steer the cutting of documents into windows, blocks and batches."""

    sequence_length: int
    min_length: int
    batch_tokens: int
    seed: int
    bos_id: int | None

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
    """The windows of one split in seeded order; a cut window's remainder comes back first."""

    order: Int[np.ndarray, "member"]
    lengths: Int[np.ndarray, "document"]
    cutting: Cutting
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

    def _next(self) -> Window | None:
        while not self._pending and self._cursor < len(self.order):
            document = int(self.order[self._cursor])
            self._cursor += 1
            self._pending.extend(self._windows(document, int(self.lengths[document])))
        return self._pending.popleft() if self._pending else None

    def _windows(self, document: int, n_tokens: int) -> Iterator[Window]:
        bos, payload = self.cutting.bos_rows, self.cutting.payload
        for start in range(0, n_tokens, payload):
            rows = min(payload, n_tokens - start) + bos
            if rows >= self.cutting.min_length:
                yield Window(document, start, rows)

    def _cut(self, window: Window, rows: int) -> Window:
        bos = self.cutting.bos_rows
        rest = Window(window.document, window.start + rows - bos, window.rows - rows + bos)
        if rest.rows >= self.cutting.min_length:
            self._pending.appendleft(rest)
        return window._replace(rows=rows)


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
