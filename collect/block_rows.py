"""How many rows a block of a harvest has: as the settings say, else as many as its limits take.

In: token rows, the sizes of a store and the settings of a harvest. Out: rows, or one sentence on the limit
that is broken. Pure arithmetic: the same for a harvest that begins and for one that is only planned, whose
model need not be there. Cost: none; no torch is loaded.
"""

from ..store.errors import UsageError
from ..store.layout import BLOCK_BUFFERS, CHUNK_LIMIT_BYTES, block_bytes, choose_block
from .settings import HarvestSettings

# A fixed limit: a block that followed the memory free at the moment would give other bytes each time.
DEFAULT_MEMORY_LIMIT_BYTES = 4 * 2**30


def block_rows(n_tokens: int, sizes: tuple[int, int, int, int], settings: HarvestSettings) -> int:
    """Rows of a block. `sizes`: d_model, layers, sites of a layer and bytes of a value, as a store's
    arithmetic counts them."""
    limit = settings.memory_limit_bytes or DEFAULT_MEMORY_LIMIT_BYTES
    d_model, _, _, itemsize = sizes
    if settings.block is None:
        # A block below the shortest window would be one cut after another.
        return max(choose_block(max(n_tokens, 1), *sizes, limit), settings.min_length)
    chunk_rows = CHUNK_LIMIT_BYTES // (d_model * itemsize)
    if settings.block > chunk_rows:
        raise UsageError(
            f"block={settings.block:,}: a chunk is at most {CHUNK_LIMIT_BYTES // 2**20} MiB, which is "
            f"{chunk_rows:,} rows of this model. Use {chunk_rows:,} or less."
        )
    need, row_bytes = (BLOCK_BUFFERS * block_bytes(rows, *sizes) for rows in (settings.block, 1))
    if need > limit:
        raise UsageError(
            f"block={settings.block:,} needs {need / 2**20:,.1f} MiB of buffers, the memory limit is "
            f"{limit / 2**20:,.1f} MiB. Use block={max(limit // row_bytes, 1):,} or less, fewer layers, or "
            "raise memory_limit."
        )
    return settings.block
