"""Arithmetic of blocks and sizes: the limits hold for all inputs, and sizes are those of a store on disk."""

from pathlib import Path

import pytest
from helpers_store import make_store
from hypothesis import given
from hypothesis import strategies as st
from nearline.store import UsageError, choose_block, info, n_objects, store_bytes
from nearline.store.layout import BLOCK_BUFFERS, CHUNK_LIMIT_BYTES, MAX_BLOCKS, block_bytes

GIB = 2**30


@given(
    n_tokens=st.integers(1, 10**9),
    d_model=st.sampled_from([16, 576, 4096, 8192]),
    n_layers=st.integers(1, 80),
    itemsize=st.sampled_from([2, 4]),
    limit=st.integers(2**20, 64 * GIB),
)
def test_a_block_keeps_every_limit_or_says_which_one(
    n_tokens: int, d_model: int, n_layers: int, itemsize: int, limit: int
) -> None:
    least = -(-n_tokens // MAX_BLOCKS)
    fits = BLOCK_BUFFERS * block_bytes(least, d_model, n_layers, 2, itemsize) <= limit
    if not fits or least * d_model * itemsize > CHUNK_LIMIT_BYTES:
        with pytest.raises(UsageError, match="memory_limit" if not fits else "64 MiB"):
            choose_block(n_tokens, d_model, n_layers, 2, itemsize, limit)
        return
    block = choose_block(n_tokens, d_model, n_layers, 2, itemsize, limit)
    assert block >= 1
    assert block * d_model * itemsize <= CHUNK_LIMIT_BYTES
    assert BLOCK_BUFFERS * block_bytes(block, d_model, n_layers, 2, itemsize) <= limit
    n_blocks = -(-n_tokens // block)
    assert n_blocks <= MAX_BLOCKS
    if n_tokens >= 10:
        assert n_blocks >= 10
    if n_tokens >= 1000:
        assert n_blocks * block <= n_tokens * 1.01, "what pads the last block is stored for nothing"


def test_blocks_are_aligned_where_that_pads_little() -> None:
    assert choose_block(100_000, 576, 30, 2, 2, 4 * GIB) == 10_048, "ten blocks, the last of 9,568 rows"
    assert choose_block(102_400, 576, 30, 2, 2, 4 * GIB) == 10_240
    assert choose_block(20_000, 576, 30, 2, 2, 4 * GIB) == 2016
    assert choose_block(10**8, 576, 12, 2, 2, 4 * GIB) % 64 == 0
    assert choose_block(300, 64, 2, 2, 4, GIB) == 30
    assert choose_block(15, 64, 2, 2, 4, GIB) == 1


def test_a_memory_limit_that_is_too_small_names_it() -> None:
    with pytest.raises(UsageError, match="memory_limit"):
        choose_block(10**6, 8192, 80, 2, 4, 2**20)


def test_sizes_are_those_on_disk(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", n_tokens=500, block=160, d=16, n_layers=3, storage_dtype="float16")
    facts = info(store)
    assert facts["chunk_bytes"] == store_bytes(500, 160, 16, 3, 2, 2)
    assert facts["n_objects"] + facts["n_blocks"] == n_objects(500, 160, 3, 2)
    growing = ("residual", "mlp_output", "embedding", "nll")
    on_disk = [
        path.stat().st_size
        for path in (store / "activations.zarr").rglob("c/**/*")
        if path.is_file() and path.relative_to(store).parts[1] in growing
    ]
    assert sum(on_disk) == 4 * (7 * (160 * 16 * 2 + 4) + 160 * 4 + 4)
