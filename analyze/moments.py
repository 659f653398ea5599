"""First and second moments of paired rows: rows of x and y in, float64 means and centred scatters out.

`Moments` is a frozen value; `merge` joins two of them (Chan), `without` takes one out again; `MomentSums` is
the one class with state: rows are copied into a fixed buffer, and each full buffer becomes one float32
product of centred rows that is added to float64 sums. Cost: 3·d² flops a row (a symmetric and a general
product), memory two buffers and two d × d sums.

Chan's between-part term, n_a·n_b/(n_a + n_b)·ΔΔᵀ, enters as one more row of the product, so that joining a
buffer costs no further pass over a d × d matrix.
"""

from dataclasses import dataclass
from functools import reduce
from typing import Final

import numpy as np
from jaxtyping import Float32, Float64

# Rows of one float32 product. Adding the product to the float64 sums costs about 2 % of it at this size; more
# rows would only grow buffers.
BUFFER_ROWS: Final = 2048
# Squares of this many rows are summed in float32 before they go to float64: the rounding stays below 1e-6.
SQUARE_ROWS: Final = 64


@dataclass(frozen=True, slots=True)
class Moments:
    """Moments of n row pairs; scatters are sums over rows, centred on the means of these same rows."""

    n: int
    mean_x: Float64[np.ndarray, "feature"]
    mean_y: Float64[np.ndarray, "target"]
    cxx: Float64[np.ndarray, "feature feature"]
    cxy: Float64[np.ndarray, "feature target"]
    cyy: Float64[np.ndarray, "target"]

    @property
    def syy(self) -> float:
        """Σ‖y − ȳ‖² over the rows."""
        return float(self.cyy.sum())


def empty(n_features: int, n_targets: int) -> Moments:
    """Moments of no rows: the neutral element of `merge`."""
    return Moments(
        0,
        np.zeros(n_features),
        np.zeros(n_targets),
        np.zeros((n_features, n_features)),
        np.zeros((n_features, n_targets)),
        np.zeros(n_targets),
    )


def from_rows(x: Float32[np.ndarray, "token feature"], y: Float32[np.ndarray, "token target"]) -> Moments:
    """Moments of all rows at once."""
    sums = MomentSums(MomentBuffers(x.shape[1], y.shape[1]))
    sums.add(x, y)
    return sums.finish()


def merge(a: Moments, b: Moments) -> Moments:
    """Moments of the rows of both."""
    n = a.n + b.n
    if n == 0:
        return a
    dx, dy = b.mean_x - a.mean_x, b.mean_y - a.mean_y
    between = a.n * b.n / n
    return Moments(
        n,
        a.mean_x + dx * (b.n / n),
        a.mean_y + dy * (b.n / n),
        _plus_outer(a.cxx + b.cxx, between, dx, dx),
        _plus_outer(a.cxy + b.cxy, between, dx, dy),
        a.cyy + b.cyy + between * dy * dy,
    )


def merge_all(parts: list[Moments]) -> Moments:
    """Moments of the rows of all parts, joined from left to right: the same order gives the same bytes."""
    return reduce(merge, parts)


def without(total: Moments, part: Moments) -> Moments:
    """Moments of the rows of `total` that are not in `part`: `merge` turned round."""
    n = total.n - part.n
    if n < 0:
        raise ValueError(f"cannot take {part.n} rows out of {total.n}")
    if n == 0:
        return empty(total.mean_x.size, total.mean_y.size)
    mean_x = total.mean_x + (total.mean_x - part.mean_x) * (part.n / n)
    mean_y = total.mean_y + (total.mean_y - part.mean_y) * (part.n / n)
    dx, dy = part.mean_x - mean_x, part.mean_y - mean_y
    between = n * part.n / total.n
    return Moments(
        n,
        mean_x,
        mean_y,
        _plus_outer(total.cxx - part.cxx, -between, dx, dx),
        _plus_outer(total.cxy - part.cxy, -between, dx, dy),
        np.maximum(total.cyy - part.cyy - between * dy * dy, 0.0),
    )


def _plus_outer(matrix: np.ndarray, factor: float, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    matrix += np.outer(left * factor, right)
    return matrix


class MomentBuffers:
    """Fixed memory of several `MomentSums`: two row buffers each, two products that they take turns in."""

    def __init__(
        self, n_features: int, n_targets: int, n_sums: int = 1, buffer_rows: int = BUFFER_ROWS
    ) -> None:
        # One row more than the capacity: the last row carries Chan's between-part term.
        self.x = np.empty((n_sums, buffer_rows + 1, n_features), np.float32)
        self.y = np.empty((n_sums, buffer_rows + 1, n_targets), np.float32)
        self.product_xx = np.empty((n_features, n_features), np.float32)
        self.product_xy = np.empty((n_features, n_targets), np.float32)

    def sums(self) -> "list[MomentSums]":
        """Empty sums over these buffers; those handed out before must be finished."""
        return [MomentSums(self, index) for index in range(len(self.x))]


class MomentSums:
    """Streaming moments of row pairs: `add` any number of times, then `finish` once."""

    def __init__(self, buffers: MomentBuffers, index: int = 0) -> None:
        self._x, self._y = buffers.x[index], buffers.y[index]
        self._product_xx, self._product_xy = buffers.product_xx, buffers.product_xy
        self._total = empty(self._x.shape[1], self._y.shape[1])
        self._capacity = self._x.shape[0] - 1
        self._filled = 0

    def add(
        self,
        x: Float32[np.ndarray, "token feature"],
        y: Float32[np.ndarray, "token target"],
        index: np.ndarray | None = None,
    ) -> None:
        """Take in the rows (or the rows named by `index`, in that order)."""
        n = x.shape[0] if index is None else index.size
        start = 0
        while start < n:
            stop = min(n, start + self._capacity - self._filled)
            _gather(x, index, start, stop, self._x[self._filled :])
            _gather(y, index, start, stop, self._y[self._filled :])
            self._filled += stop - start
            start = stop
            if self._filled == self._capacity:
                self._flush()

    def finish(self) -> Moments:
        """The moments of every row taken in; the buffers are free for other sums."""
        if self._filled:
            self._flush()
        return self._total

    def _flush(self) -> None:
        n, total = self._filled, self._total
        mean_x, mean_y = _centre(self._x[:n]), _centre(self._y[:n])
        cyy = total.cyy + _sum_of_squares(self._y[:n])
        dx, dy = mean_x - total.mean_x, mean_y - total.mean_y
        between = total.n * n / (total.n + n)
        self._x[n] = np.sqrt(between) * dx
        self._y[n] = np.sqrt(between) * dy
        x, y = self._x[: n + 1], self._y[: n + 1]
        np.add(total.cxx, np.matmul(x.T, x, out=self._product_xx), out=total.cxx)
        np.add(total.cxy, np.matmul(x.T, y, out=self._product_xy), out=total.cxy)
        share = n / (total.n + n)
        self._total = Moments(
            total.n + n,
            total.mean_x + share * dx,
            total.mean_y + share * dy,
            total.cxx,
            total.cxy,
            cyy + between * dy * dy,
        )
        self._filled = 0


def _gather(rows: np.ndarray, index: np.ndarray | None, start: int, stop: int, out: np.ndarray) -> None:
    if index is None:
        out[: stop - start] = rows[start:stop]
    else:
        # mode="clip" writes straight into `out`; the default mode buffers a whole copy first.
        np.take(rows, index[start:stop], axis=0, out=out[: stop - start], mode="clip")


def _centre(rows: np.ndarray) -> np.ndarray:
    """Centre float32 rows in place; their float64 mean. The second step takes up the first one's rounding."""
    ones = np.full(rows.shape[0], np.float32(1.0 / rows.shape[0]))
    mean = np.zeros(rows.shape[1])
    for _ in range(2):
        shift = ones @ rows
        rows -= shift
        mean += shift
    return mean


def _sum_of_squares(rows: np.ndarray) -> np.ndarray:
    whole = rows.shape[0] // SQUARE_ROWS * SQUARE_ROWS
    tiles = rows[:whole].reshape(-1, SQUARE_ROWS, rows.shape[1])
    tail = np.einsum("tf,tf->f", rows[whole:], rows[whole:])
    return np.einsum("btf,btf->bf", tiles, tiles).sum(axis=0, dtype=np.float64) + tail
