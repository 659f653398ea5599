"""In which order rows come in batches: pure arithmetic, no disk.

In: how many chosen rows each chosen block has, how many blocks a pool holds, a seed and an epoch. Out: the
blocks of each pool, the order of the rows within it, and where a batch begins. Each pool draws its order
from a generator of its own, so any batch is found without those before it. Cost: O(blocks), and O(rows of a
pool) when a pool is reached.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int


@dataclass(frozen=True, slots=True, eq=False)
class Order:
    """Pools of blocks, one after the other; each row of a block comes once, within its pool.

    With a seed the blocks are shuffled, then cut into pools of nearly equal numbers of blocks, then the rows
    of each pool are shuffled. Without one, all comes as it is stored, a block at a time.
    """

    pools: tuple[tuple[int, ...], ...]  # block numbers, in the order in which they are read
    ends: Int[np.ndarray, " pool_or_start"]  # rows before each pool, and all rows at the end
    seed: int | None
    epoch: int

    @property
    def n_rows(self) -> int:
        return int(self.ends[-1])

    def pool_of(self, row: int) -> tuple[int, int]:
        """The pool that gives the row of this rank in the order, and the row's rank within it."""
        pool = int(np.searchsorted(self.ends, row, side="right")) - 1
        return pool, row - int(self.ends[pool])

    def permutation(self, pool: int) -> Int[np.ndarray, " row"] | None:
        """How the rows of a pool are shuffled; None where they are not."""
        if self.seed is None:
            return None
        n_rows = int(self.ends[pool + 1] - self.ends[pool])
        return _generator(self.seed, self.epoch, pool + 1).permutation(n_rows)


def order_rows(rows_of: dict[int, int], pool_blocks: int, seed: int | None, epoch: int) -> Order:
    """The order of the rows of some blocks, given as block number → chosen rows."""
    blocks = np.array(sorted(rows_of), dtype=np.int64)
    if seed is None:
        pools = [(int(block),) for block in blocks]
    else:
        shuffled = _generator(seed, epoch, 0).permutation(blocks)
        # Of nearly equal size: a last pool of one block alone would hardly be mixed.
        parts = np.array_split(shuffled, -(-len(blocks) // pool_blocks))
        pools = [tuple(int(block) for block in part) for part in parts]
    counts = [sum(rows_of[block] for block in pool) for pool in pools]
    return Order(tuple(pools), np.concatenate(([0], np.cumsum(counts, dtype=np.int64))), seed, epoch)


def _generator(seed: int, epoch: int, stream: int) -> np.random.Generator:
    """Stream 0 orders the blocks, stream p + 1 the rows of pool p."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(epoch, stream)))
