"""A store as one lazy xarray Dataset, values as float32.

In: a store's folder, its URL, its activations.zarr, or a Reader. Out: a Dataset with dims layer, token,
feature, the coordinate `layer` and the attributes; nothing is read before it is used, and what is read is
checked as `Reader` checks it. Cost: opening reads the metadata. With chunks, each Dask task reads whole
blocks.
"""

import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import UsageError
from .places import Place
from .reader import Reader

if TYPE_CHECKING:  # xarray takes 0.6 s to import, which `import nearline.store` need not pay
    import xarray as xr

AUTO_BLOCKS = "auto blocks"
TASK_BYTES = 128 * 2**20  # of float32 per Dask task and layer


def open(
    where: str | Path | Place | Reader,
    *,
    chunks: str | dict[str, int] | None = AUTO_BLOCKS,
    require_seal: bool = True,
) -> "xr.Dataset":
    """Open a store by its folder or URL. `chunks`: "auto blocks" (one layer, as many whole blocks as give
    tasks of about 128 MiB), sizes per dimension, or None for no Dask: then values are read when they are
    asked for.
    """
    from .backend import dataset

    reader = where if isinstance(where, Reader) else Reader.open(where, require_seal=require_seal)
    data = dataset(reader)
    if chunks is None:
        return data
    if isinstance(chunks, str) and chunks != AUTO_BLOCKS:
        raise UsageError(f"chunks={chunks!r}: give {AUTO_BLOCKS!r}, sizes per dimension, or None")
    # Named by us, its tasks need no pickle of each array, which would open the store anew for every one.
    token = f"{reader.path} {reader.digest or secrets.token_hex(8)}"
    return data.chunk(auto_blocks(reader) if isinstance(chunks, str) else chunks, token=token)


def auto_blocks(reader: Reader) -> dict[str, Any]:
    """Chunk sizes in whole blocks."""
    block = reader.plan.block
    n_blocks = max(1, TASK_BYTES // (block * reader.d_model * 4))
    return {"layer": 1, "token": min(n_blocks * block, reader.n_tokens), "feature": reader.d_model}
