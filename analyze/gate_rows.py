"""Feature matrices of the rows that gates are fitted on: rows block by block in, standardised blocks out, as
often as a solver asks.

They lie in memory where all of them fit the budget, else in files of a scratch folder that is always removed;
both give the same blocks, and so the same bytes of everything that is computed from them. Features are
standardised once, by mean and standard deviation of all rows, not once more for each fold: that is a change
of the penalty by a factor 1 ± O(1/√n), sees no label, and lets all folds share one matrix. Cost: each row is
written once and rewritten once; a spilled matrix is read at the speed of the page cache. Memory when spilled:
one block of `BLOCK_ROWS` rows of each matrix.
"""

import os
import tempfile
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float32, Float64

from ..store import EnvironmentFault

BLOCK_ROWS: Final = 2048
# A feature whose spread is below this share of its mean holds rounding of float32 only: it is constant.
CONSTANT: Final = 1e-6

Block = Float32[np.ndarray, "row feature"]


@runtime_checkable
class Matrix(Protocol):
    """Rows of one kind of feature."""

    @property
    def width(self) -> int: ...

    def write(self, start: int, rows: Block) -> None: ...

    def read(self, start: int, stop: int) -> Block:
        """Rows [start, stop), valid until the next call."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class InMemory:
    """A matrix as an array."""

    rows: Block

    @property
    def width(self) -> int:
        return self.rows.shape[1]

    def write(self, start: int, rows: Block) -> None:
        self.rows[start : start + len(rows)] = rows

    def read(self, start: int, stop: int) -> Block:
        return self.rows[start:stop]


@dataclass(frozen=True, slots=True, eq=False)
class Spilled:
    """A matrix in a file, seen through a buffer of one block."""

    descriptor: int
    buffer: Block

    @property
    def width(self) -> int:
        return self.buffer.shape[1]

    def write(self, start: int, rows: Block) -> None:
        left, at = _bytes_of(np.ascontiguousarray(rows)), start * self.width * 4
        try:
            while left.size:
                written = os.pwrite(self.descriptor, left.data, at)
                left, at = left[written:], at + written
        except OSError as error:
            raise EnvironmentFault(
                f"gates: rows do not fit into the scratch folder {tempfile.gettempdir()} ({error.strerror}): "
                "raise `memory_limit`, or let TMPDIR name a folder with more room"
            ) from None

    def read(self, start: int, stop: int) -> Block:
        part = self.buffer[: stop - start]
        left, at = _bytes_of(part), start * self.width * 4
        while left.size:
            found = os.preadv(self.descriptor, [left.data], at)
            if not found:
                raise EnvironmentFault(f"gates: a scratch file in {tempfile.gettempdir()} was cut short")
            left, at = left[found:], at + found
        return part


def _bytes_of(rows: Block) -> np.ndarray:
    return rows.reshape(-1).view(np.uint8)


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """Several matrices side by side: the `Design` that a solver reads."""

    n_rows: int
    matrices: Sequence[Matrix]

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(matrix.width for matrix in self.matrices)

    def blocks(self) -> Iterator[tuple[int, int, list[Block]]]:
        for start in range(0, self.n_rows, BLOCK_ROWS):
            stop = min(self.n_rows, start + BLOCK_ROWS)
            yield start, stop, [matrix.read(start, stop) for matrix in self.matrices]


@dataclass(frozen=True, slots=True, eq=False)
class Scaling:
    """What was taken from each feature and what it was divided by; a constant feature is divided by 1."""

    mean: Float32[np.ndarray, "feature"]
    scale: Float32[np.ndarray, "feature"]


@contextmanager
def gate_rows(
    n_rows: int, widths: Mapping[str, int], budget_bytes: int
) -> Generator[dict[str, Matrix], None, None]:
    """Matrices by name, with room for `n_rows` rows; in memory where they take no more than the budget."""
    if 4 * n_rows * sum(widths.values()) <= budget_bytes:
        yield {name: InMemory(np.zeros((n_rows, width), np.float32)) for name, width in widths.items()}
        return
    with ExitStack() as stack:
        # Files without a name where the system has such: no crash leaves one behind.
        yield {name: _spilled(stack, n_rows, width) for name, width in widths.items()}


def _spilled(stack: ExitStack, n_rows: int, width: int) -> Spilled:
    try:
        file = stack.enter_context(tempfile.TemporaryFile(buffering=0))
    except OSError as error:
        raise EnvironmentFault(
            f"gates: no scratch file could be made ({error.strerror}): raise `memory_limit`, or let TMPDIR "
            "name a folder to write to"
        ) from None
    return Spilled(file.fileno(), np.empty((min(n_rows, BLOCK_ROWS), width), np.float32))


def in_memory(rows: Float32[np.ndarray, "row feature"]) -> Columns:
    """One matrix of rows that are standardised already."""
    return Columns(len(rows), [InMemory(rows)])


def standardise(n_rows: int, matrix: Matrix) -> Scaling:
    """Centre and scale every feature in place."""
    mean, square = _moments(n_rows, matrix)
    spread = np.sqrt(square / max(1, n_rows))
    constant = spread <= CONSTANT * np.abs(mean)
    scaling = Scaling(mean.astype(np.float32), np.where(constant, 1.0, spread).astype(np.float32))
    for start, _, (rows,) in Columns(n_rows, [matrix]).blocks():
        rows -= scaling.mean
        rows /= scaling.scale
        rows[:, constant] = 0.0
        matrix.write(start, rows)
    return scaling


def _moments(
    n_rows: int, matrix: Matrix
) -> tuple[Float64[np.ndarray, "feature"], Float64[np.ndarray, "feature"]]:
    """Mean and sum of squares about it, blocks joined as by Chan."""
    mean, square, n = np.zeros(matrix.width), np.zeros(matrix.width), 0
    for start, stop, (rows,) in Columns(n_rows, [matrix]).blocks():
        count = stop - start
        own = rows.mean(axis=0, dtype=np.float64)
        centred = rows - own.astype(np.float32)
        # The second mean takes up what rounding the first one to float32 left.
        rest = centred.mean(axis=0, dtype=np.float64)
        inside = np.einsum("tf,tf->f", centred, centred, dtype=np.float64) - count * rest**2
        shift = own - mean
        square += inside + shift**2 * (n * count / (n + count))
        mean += shift * (count / (n + count))
        n += count
    return mean, square
