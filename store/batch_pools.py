"""Pools of blocks in memory, read ahead: while the rows of one are given out, the next one is read.

In: a reader, the arrays wanted, the order. Out: pools, each with its rows as stored and the places of the
chosen ones in the order in which they are to come. Cost: one read straight into the pool and one crc32c per
chunk, in a thread of its own, which needs no GIL meanwhile; two pools of memory (one where there is only
one), taken once.
"""

import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Bool, Int

from .batch_order import Order
from .dtypes import numpy_dtype

if TYPE_CHECKING:
    from .reader import Reader

Slot = tuple[str, int | None]  # a stored site, and a layer where it has layers


@dataclass(frozen=True, slots=True, eq=False)
class Pool:
    """Rows of a few blocks; `values` are reused for a later pool once this one is through."""

    values: Mapping[Slot, np.ndarray]  # (row, feature) as stored, every row of the blocks
    places: Int[np.ndarray, " row"]  # of the chosen rows in `values`, in the order in which they come
    rows: Int[np.ndarray, " row"]  # the same rows by their number in the store


@dataclass(frozen=True, slots=True, eq=False)
class Pools:
    """Where pools come from."""

    reader: "Reader"
    slots: tuple[Slot, ...]
    order: Order
    chosen: Mapping[int, Bool[np.ndarray, " row"]]  # by block; a block that is not named gives all its rows

    def most_rows(self) -> int:
        """Rows of the largest pool, those that are not chosen included."""
        sizes = self.reader.plan.block_rows
        return max(int(sizes[list(pool)].sum()) for pool in self.order.pools)

    def n_bytes(self) -> int:
        """What all pools that are ever held together take, and one chunk while it is unpacked."""
        row_bytes = self.reader.d_model * numpy_dtype(self.reader.storage_dtype).itemsize
        packed = self.reader.attributes.storage.compressor is not None
        unpacking = 3 * self.reader.plan.block * row_bytes if packed else 0
        # For each row also two numbers, and two more while they are shuffled, with the permutation.
        buffers = self._n_buffers() * self.most_rows() * (len(self.slots) * row_bytes + 2 * 8)
        return buffers + self.most_rows() * 3 * 8 + unpacking

    def read(self, first: int) -> Iterator[Pool]:
        """Pool after pool, from the one numbered `first`. A pool is void when the next one is asked for."""
        dtype, shape = numpy_dtype(self.reader.storage_dtype), (self.most_rows(), self.reader.d_model)
        buffers = [
            {slot: np.empty(shape, dtype) for slot in self.slots} for _ in range(self._n_buffers(first))
        ]
        stop, n_pools = threading.Event(), len(self.order.pools)
        with ThreadPoolExecutor(1, thread_name_prefix="nearline-batches") as thread:
            try:
                ahead = thread.submit(self._fill, first, buffers[0], stop)
                for number in range(first, n_pools):
                    pool = ahead.result()
                    if number + 1 < n_pools:
                        buffer = buffers[(number + 1 - first) % len(buffers)]
                        ahead = thread.submit(self._fill, number + 1, buffer, stop)
                    yield pool
            finally:
                stop.set()  # whoever wants no more need not wait for the rest of a pool

    def _n_buffers(self, first: int = 0) -> int:
        return min(2, len(self.order.pools) - first)

    def _fill(self, number: int, buffer: Mapping[Slot, np.ndarray], stop: threading.Event) -> Pool:
        row, places, rows = 0, [], []
        for block in self.order.pools[number]:
            row0, row1 = self.reader.block_range(block)
            n_rows = row1 - row0
            for (site, layer), values in buffer.items():
                if not stop.is_set():
                    self.reader.read_into(site, layer, block, values[row : row + n_rows])
            mask = self.chosen.get(block)
            kept = np.arange(n_rows) if mask is None else np.flatnonzero(mask)
            places.append(kept + row)
            rows.append(kept + row0)
            row += n_rows
        place, number_in_store = np.concatenate(places), np.concatenate(rows)
        shuffled = self.order.permutation(number)
        if shuffled is not None:
            place, number_in_store = place[shuffled], number_in_store[shuffled]
        return Pool(buffer, place, number_in_store)
