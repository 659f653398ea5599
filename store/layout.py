"""Pure arithmetic of a store: how large a block is, what a store weighs, which arrays it has.

In: counts and widths. Out: rows per block, bytes, objects, array specifications; or a UsageError that says
which limit is broken and what to change. Touches no disk.
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np

from .dtypes import LAYER_SITES, array_name, fill_value, numpy_dtype
from .errors import UsageError
from .metadata import ArraySpec
from .plan import MAX_BLOCKS

CHUNK_LIMIT_BYTES = 64 * 2**20
MIN_BLOCKS = 10
ALIGNMENTS = (64, 32, 16, 8, 4, 2, 1)
BLOCK_BUFFERS = 2  # one is filled while the other one is written
CRC_BYTES = 4

TOKEN_COLUMNS: dict[str, tuple[np.dtype[np.generic], int | float | bool]] = {
    "token_id": (np.dtype("<i4"), -1),
    "target_id": (np.dtype("<i4"), -1),
    "position": (np.dtype("<i4"), -1),
    "sequence": (np.dtype("<i4"), -1),
    "document": (np.dtype("<i4"), -1),
    "split": (np.dtype("u1"), 255),
    "special": (np.dtype("?"), False),
    "valid": (np.dtype("?"), False),
    "nll": (np.dtype("<f4"), float("nan")),
}
AFFINE = ("norm_weight", "norm_bias", "post_norm_weight", "post_norm_bias")
_COLUMN_ROW_BYTES = sum(dtype.itemsize for dtype, _ in TOKEN_COLUMNS.values())


def choose_block(
    n_tokens: int, d_model: int, n_layers: int, n_sites: int, itemsize: int, memory_limit_bytes: int
) -> int:
    """Rows per block: as many as fit a 64 MiB chunk and the memory limit, in 10 blocks or more if N allows.

    `n_sites` counts the sites that have layers; the embedding comes on top. A multiple of 64, or of the
    largest smaller power of two with which padding the last block costs at most 1 % of the rows.
    """
    row_bytes = block_bytes(1, d_model, n_layers, n_sites, itemsize)
    in_chunk = CHUNK_LIMIT_BYTES // (d_model * itemsize)
    in_memory = memory_limit_bytes // (BLOCK_BUFFERS * row_bytes)
    most = min(in_chunk, in_memory)
    least = -(-n_tokens // MAX_BLOCKS)
    if most < max(1, least):
        need = BLOCK_BUFFERS * row_bytes * max(1, least)
        if need <= memory_limit_bytes:
            raise UsageError(
                f"{n_tokens} tokens need blocks of at least {least} rows ({MAX_BLOCKS} blocks at most), "
                f"whose chunks are larger than 64 MiB at d = {d_model}; lower tokens or use two stores"
            )
        raise UsageError(
            f"{n_tokens} tokens need blocks of at least {max(1, least)} rows ({MAX_BLOCKS} blocks at most): "
            f"{need / 2**20:.1f} MiB of buffers, the memory limit is {memory_limit_bytes / 2**20:.1f} MiB; "
            "raise memory_limit, or lower tokens or layers"
        )
    even = -(-n_tokens // max(MIN_BLOCKS, -(-n_tokens // most)))
    for alignment in ALIGNMENTS:
        for block in (-(-even // alignment) * alignment, even // alignment * alignment):
            n_blocks = -(-n_tokens // max(block, 1))
            padding = n_blocks * block - n_tokens
            if least <= block <= most and n_blocks >= MIN_BLOCKS and 0 <= padding <= n_tokens // 100:
                return block
    return max(least, min(most, n_tokens // MIN_BLOCKS), 1)  # so few rows that one more each would be much


def block_bytes(block: int, d_model: int, n_layers: int, n_sites: int, itemsize: int) -> int:
    """Bytes of one block in memory: every site of every layer, the embedding, the token columns."""
    return block * ((n_layers * n_sites + 1) * d_model * itemsize + _COLUMN_ROW_BYTES)


def store_bytes(n_tokens: int, block: int, d_model: int, n_layers: int, n_sites: int, itemsize: int) -> int:
    """Bytes of all chunk objects of a store without compressor; the last block is padded to full size."""
    n_blocks = -(-n_tokens // block)
    per_block = block_bytes(block, d_model, n_layers, n_sites, itemsize)
    return n_blocks * (per_block + CRC_BYTES * objects_per_block(n_layers, n_sites))


def objects_per_block(n_layers: int, n_sites: int) -> int:
    return n_layers * n_sites + 1 + len(TOKEN_COLUMNS)


def n_objects(n_tokens: int, block: int, n_layers: int, n_sites: int) -> int:
    """Chunk objects and block records of a store."""
    return -(-n_tokens // block) * (objects_per_block(n_layers, n_sites) + 1)


def block_arrays(
    n_tokens: int, block: int, layers: Sequence[int], d_model: int, storage_dtype: str, sites: Iterable[str]
) -> dict[str, ArraySpec]:
    """The arrays that grow by blocks, by the name of the site or column."""
    dtype, fill = numpy_dtype(storage_dtype), fill_value(storage_dtype)
    found: dict[str, ArraySpec] = {}
    for site in sites:
        name = array_name(site, storage_dtype)
        if site in LAYER_SITES:
            dims, shape = ("layer", "token", "feature"), (len(layers), n_tokens, d_model)
            found[site] = ArraySpec(name, dims, shape, (1, block, d_model), dtype, fill)
        else:
            found[site] = ArraySpec(
                name, ("token", "feature"), (n_tokens, d_model), (block, d_model), dtype, fill
            )
    for name, (column_dtype, column_fill) in TOKEN_COLUMNS.items():
        found[name] = ArraySpec(name, ("token",), (n_tokens,), (block,), column_dtype, column_fill)
    return found


def whole_array(name: str, dims: tuple[str, ...], values: np.ndarray) -> ArraySpec:
    """Specification of a small array that is written at once, in chunks of at most 64 MiB."""
    return _whole(name, dims, values.shape, values.dtype.newbyteorder("<"))


def whole_form(name: str, layers: Sequence[int], d_model: int, n_positions: int) -> ArraySpec:
    """What a small array of a store has to be: `layer`, a norm parameter, or `position_embedding`."""
    if name == "layer":
        return _whole(name, ("layer",), (len(layers),), np.dtype("<i4"))
    if name == "position_embedding":
        return _whole(name, ("position", "feature"), (n_positions, d_model), np.dtype("<f4"))
    return _whole(name, ("layer", "feature"), (len(layers), d_model), np.dtype("<f4"))


def _whole(
    name: str, dims: tuple[str, ...], shape: tuple[int, ...], dtype: np.dtype[np.generic]
) -> ArraySpec:
    row_bytes = max(1, math.prod(shape[1:]) * dtype.itemsize)
    rows = max(1, min(shape[0], CHUNK_LIMIT_BYTES // row_bytes))
    fill = float("nan") if dtype.kind == "f" else 0
    return ArraySpec(name, dims, shape, (rows, *shape[1:]), dtype, fill)
