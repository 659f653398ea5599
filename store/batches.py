"""Batches of rows for training: sites of chosen layers and splits, shuffled or as stored, in numpy.

In: a reader and what is wanted. Out: `Batches`, which says how many there are and what memory they take,
and gives them one by one; all that is wrong with the request is said before anything is read. `mlp_input`
is given by every store that has it or `residual`: it is then norm(residual), recomputed. Cost: each chunk
of the chosen layers and blocks is read once; two pools and two batches of memory.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Int, Shaped

from .batch_order import Order, order_rows
from .batch_pools import Pool, Pools, Slot
from .batch_values import Values, values_of
from .dtypes import numpy_dtype
from .errors import UsageError
from .plan import SPLITS
from .settings import nearest_known, parse_bytes, parse_layers

if TYPE_CHECKING:
    from .reader import Reader

ROWS = ("all", "body")


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Some rows of every site asked for, row for row; `for x, y in …` takes the sites apart."""

    number: int  # to resume behind this one: start=number + 1
    rows: Int[np.ndarray, " row"]  # their numbers in the store, as `Reader.column` counts them
    sites: Mapping[str, Shaped[np.ndarray, "..."]]  # (row, feature), or (layer, row, feature)

    def __iter__(self) -> Iterator[np.ndarray]:
        return iter(self.sites.values())

    def __getitem__(self, site: str) -> np.ndarray:
        return self.sites[site]

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Batches:
    """What `Reader.batches` gives: iterate it, as often as you like, always to the same bytes."""

    batch_size: int
    start: int  # number of the first batch
    drop_last: bool
    pool_blocks: int  # blocks whose rows are mixed with one another, at most
    order: Order
    _pools: Pools
    _values: tuple[Values, ...]

    def __repr__(self) -> str:
        sites = ", ".join(values.site for values in self._values)
        rows = f"{self.n_rows:,} rows in batches of {self.batch_size:,}"
        return f"Batches({sites}: {rows}; {self.memory_bytes / 2**20:,.1f} MiB held at most)"

    @property
    def n_rows(self) -> int:
        """Rows of an epoch."""
        return self.order.n_rows

    @property
    def n_batches(self) -> int:
        """Batches of an epoch, those before `start` included."""
        return _n_batches(self.n_rows, self.batch_size, self.drop_last)

    @property
    def memory_bytes(self) -> int:
        """What is held at most: the pools, the batch in the caller's hands and the one being made."""
        row_bytes = 8 + sum(values.row_bytes for values in self._values)
        scratch = max(values.scratch_bytes(self.batch_size) for values in self._values)
        return self._pools.n_bytes() + 2 * self.batch_size * row_bytes + scratch

    def __len__(self) -> int:
        return self.n_batches - self.start

    def __iter__(self) -> Iterator[Batch]:
        if not len(self):
            return
        first, done = self.order.pool_of(self.start * self.batch_size)
        number, parts = self.start, self._begin(self.start)
        for pool in self._pools.read(first):
            while done < len(pool.rows):
                taken = parts.fill(pool, done, self._values)
                done += taken
                if parts.is_full:
                    yield Batch(number, parts.rows, parts.sites)
                    number += 1
                    if number == self.n_batches:
                        return
                    parts = self._begin(number)
            done = 0

    def _begin(self, number: int) -> "_Parts":
        n_rows = min(self.batch_size, self.n_rows - number * self.batch_size)
        sites = {values.site: values.empty(n_rows) for values in self._values}
        return _Parts(np.empty(n_rows, np.int64), sites)


@dataclass(slots=True, eq=False)
class _Parts:
    """A batch in the making: it may take its rows from several pools."""

    rows: np.ndarray
    sites: dict[str, np.ndarray]
    n_filled: int = 0

    @property
    def is_full(self) -> bool:
        return self.n_filled == len(self.rows)

    def fill(self, pool: Pool, done: int, all_values: Sequence[Values]) -> int:
        """Take rows of a pool from place `done` on; how many were taken."""
        n_rows = min(len(self.rows) - self.n_filled, len(pool.rows) - done)
        source, target = slice(done, done + n_rows), slice(self.n_filled, self.n_filled + n_rows)
        self.rows[target] = pool.rows[source]
        for values in all_values:
            values.take(pool, pool.places[source], self.sites[values.site][..., target, :])
        self.n_filled += n_rows
        return n_rows


def batches(
    reader: "Reader",
    sites: str | Sequence[str],
    *,
    layers: int | str | Sequence[int],
    splits: str | Sequence[str],
    rows: str,
    batch_size: int,
    seed: int | None,
    epoch: int,
    dtype: Any,
    drop_last: bool,
    start: int,
    pool_memory: int | str,
) -> Batches:
    """See `Reader.batches`."""
    _check_counts(batch_size, seed, epoch, start)
    batch_size, epoch, start = int(batch_size), int(epoch), int(start)  # numpy's would overflow
    if rows not in ROWS:
        raise UsageError(f"rows={rows!r}: give 'all', or 'body' to leave out what fits leave out")
    names = _names("sites", sites)
    numbers, layered = _layers(reader, layers)
    values = tuple(values_of(reader, site, numbers, layered, dtype) for site in names)
    slots = tuple(dict.fromkeys(slot for one in values for slot in one.slots))
    blocks = _blocks(reader, _names("splits", splits))
    pool_blocks = _pool_blocks(reader, slots, blocks, pool_memory, seed)
    chosen = {} if rows == "all" else {block: _body(reader, block) for block in blocks}
    counts = {
        block: int(chosen[block].sum() if chosen else reader.plan.block_rows[block]) for block in blocks
    }
    order = order_rows(counts, pool_blocks, None if seed is None else int(seed), epoch)
    n_batches = _n_batches(order.n_rows, batch_size, drop_last)
    if not n_batches:
        raise UsageError(
            f"batch_size={batch_size}: {order.n_rows} rows are chosen, which fill no batch; lower it, choose "
            "more splits, or keep the short batch with drop_last=False"
        )
    if start > n_batches:
        raise UsageError(f"start={start}: an epoch has {n_batches} batches here; their numbers begin at 0")
    return Batches(
        batch_size, start, drop_last, pool_blocks, order, Pools(reader, slots, order, chosen), values
    )


def _n_batches(n_rows: int, batch_size: int, drop_last: bool) -> int:
    return n_rows // batch_size if drop_last else -(-n_rows // batch_size)


def _check_counts(batch_size: int, seed: int | None, epoch: int, start: int) -> None:
    least = {"batch_size": (batch_size, 1), "seed": (0 if seed is None else seed, 0)}
    least |= {"epoch": (epoch, 0), "start": (start, 0)}
    for name, (value, low) in least.items():
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < low:
            also = ", or None for the order of the store" if name == "seed" else ""
            raise UsageError(f"{name}={value!r}: give a whole number of at least {low}{also}")


def _names(what: str, given: str | Sequence[str]) -> tuple[str, ...]:
    names = (given,) if isinstance(given, str) else tuple(given)
    if not names or len(set(names)) < len(names):
        raise UsageError(f"{what}={given!r}: name one or several, each once")
    return names


def _layers(reader: "Reader", layers: int | str | Sequence[int]) -> tuple[tuple[int, ...], bool]:
    """The layers asked for, and whether arrays get an axis of layers: a number alone gives none."""
    if isinstance(layers, str):
        numbers = reader.layers if layers == "all" else tuple(parse_layers(layers))
    else:
        numbers = (layers,) if isinstance(layers, (int, np.integer)) else tuple(layers)
    have = ", ".join(map(str, reader.layers))
    if not numbers or len(set(numbers)) < len(numbers):
        raise UsageError(f"layers={layers!r}: name one or several, each once; this store has layers {have}")
    for layer in numbers:
        if layer not in reader.layers:
            raise UsageError(f"layer {layer} is not in {reader.path}, which has layers {have}")
    return tuple(int(layer) for layer in numbers), not isinstance(layers, (int, np.integer))


def _blocks(reader: "Reader", splits: tuple[str, ...]) -> list[int]:
    """The blocks of the splits asked for: a block is of one split."""
    if splits == ("all",):
        return list(range(reader.n_blocks))
    for split in splits:
        if split not in SPLITS:
            near = nearest_known(str(split), SPLITS)
            raise UsageError(
                f"split {split!r} is unknown; allowed: all, or some of {', '.join(SPLITS)}{near}"
            )
    found = [block for block in range(reader.n_blocks) if reader.plan.split_of(block) in splits]
    if not found:
        there = sorted({reader.plan.split_of(block) for block in range(reader.n_blocks)})
        raise UsageError(
            f"{reader.path} has no rows of the split {' or '.join(splits)}; it has {', '.join(there)}"
        )
    return found


def _body(reader: "Reader", block: int) -> np.ndarray:
    """Rows that fits take: no attention sinks (position 0, special tokens), nothing that was not finite."""
    apart = reader.column_block("special", block) | (reader.column_block("position", block) == 0)
    return reader.column_block("valid", block) & ~apart


def _pool_blocks(
    reader: "Reader", slots: tuple[Slot, ...], blocks: list[int], memory: int | str, seed: int | None
) -> int:
    """How many blocks are mixed; refused where they would be too few to mix."""
    limit = parse_bytes(memory) if isinstance(memory, str) else int(memory)
    row_bytes = len(slots) * reader.d_model * numpy_dtype(reader.storage_dtype).itemsize
    block_bytes = int(reader.plan.block_rows[blocks].max()) * row_bytes
    least = 1 if seed is None else min(2, len(blocks))
    if limit < least * block_bytes:
        what = "one block" if least == 1 else "two blocks, the least that can be mixed,"
        raise UsageError(
            f"pool_memory={memory!r}: {what} of {len(slots)} arrays take {least * block_bytes} bytes; "
            "raise it, or choose fewer layers or sites"
        )
    return 1 if seed is None else min(len(blocks), limit // block_bytes)
