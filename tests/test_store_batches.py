"""Batches hold each row once, in the order that their rule says, aligned between sites, in bounded memory.

The slow twin reads every row at once and puts them in order by the rule as docs/transcoder.md states it.
"""

import dataclasses
import pickle
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers_store import make_store, synthetic, write_all
from hypothesis import given
from hypothesis import strategies as st
from nearline.analyze.moments_file import save_moments
from nearline.analyze.moments_reading import read_moments
from nearline.store import (
    STORAGE_DTYPES,
    DamageError,
    MissingChunk,
    OutOfRange,
    Reader,
    StoreNotFound,
    UsageError,
    encode,
)
from nearline.store.batch_order import order_rows
from nearline.store.norms import apply_norm, norm_of
from scipy import stats

SETTINGS: dict[str, Any] = {"n_tokens": 1500, "block": 160, "layers": [2, 5, 7], "d": 16}  # last block: 60
BLOCK_BYTES = 160 * 16 * 4  # of one array of float32
SMALL_P = 1e-4  # seeds are fixed: what passes, passes for ever


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    return Reader.open(make_store(tmp_path_factory.mktemp("stores") / "s", **SETTINGS))


def all_rows(reader: Reader, site: str, layer: int) -> np.ndarray:
    """A site of one layer, read at once."""
    if site == "embedding":
        return reader.rows(site, None, 0, reader.n_blocks)
    if site == "mlp_input" and site not in reader.sites:
        residual = reader.rows("residual", layer, 0, reader.n_blocks)
        return apply_norm(residual, norm_of(reader, layer))
    return reader.rows(site, layer, 0, reader.n_blocks)


def rows_by_block(reader: Reader, splits: tuple[str, ...], rows: str) -> dict[int, np.ndarray]:
    """The rows asked for, from the columns of the whole store."""
    split = np.array(["fit", "gate", "test"])[reader.column("split")]
    block = np.arange(reader.n_tokens) // reader.plan.block
    of_split = np.isin(split, splits) | (splits == ("all",))
    body = reader.column("valid") & ~reader.column("special") & (reader.column("position") > 0)
    kept = of_split & (body | (rows == "all"))
    return {int(one): np.flatnonzero(kept & (block == one)) for one in np.unique(block[of_split])}


def draw(seed: int, epoch: int, stream: int) -> np.random.Generator:
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(epoch, stream)))


def twin(by_block: dict[int, np.ndarray], pool_blocks: int, seed: int | None, epoch: int = 0) -> np.ndarray:
    """All rows in order: blocks are shuffled and dealt in turn into as few pools as hold them, pools that
    differ by one block at most, larger ones first; then the rows of each pool are shuffled."""
    blocks, order = sorted(by_block), []
    if seed is None:
        return np.concatenate([by_block[block] for block in blocks])
    blocks = [blocks[place] for place in draw(seed, epoch, 0).permutation(len(blocks))]
    n_pools = -(-len(blocks) // pool_blocks)
    for pool in range(n_pools):
        n_here = len(blocks) // n_pools + (pool < len(blocks) % n_pools)
        start = sum(len(blocks) // n_pools + (one < len(blocks) % n_pools) for one in range(pool))
        rows = np.concatenate([by_block[block] for block in blocks[start : start + n_here]])
        order.append(rows[draw(seed, epoch, pool + 1).permutation(len(rows))])
    return np.concatenate(order)


def memory_for(n_blocks: int, n_arrays: int, itemsize: int = 4) -> int:
    return n_blocks * n_arrays * BLOCK_BYTES // 4 * itemsize


@pytest.mark.parametrize(
    ("storage", "compressor"), [("float32", None), ("float16", None), ("bfloat16", "zstd")]
)
@pytest.mark.parametrize(
    "asked",
    [
        {"layers": 5, "splits": "fit"},
        {"layers": 2, "splits": ("gate", "test"), "rows": "body", "seed": 3, "epoch": 2, "batch_size": 170},
        {"layers": "2,7", "sites": ("residual", "mlp_input", "mlp_output", "embedding"), "batch_size": 999},
        {"layers": [7], "sites": "mlp_output", "seed": None, "batch_size": 64, "rows": "body"},
        {"layers": 7, "seed": None, "batch_size": 5000},
    ],
    ids=["fit", "two splits", "two layers", "in order", "one batch"],
)
def test_batches_are_all_rows_read_at_once_in_the_order_of_the_rule(
    asked: dict[str, Any], storage: str, compressor: str | None, tmp_path: Path
) -> None:
    store = make_store(tmp_path / "s", **SETTINGS, storage_dtype=storage, compressor=compressor)
    reader = Reader.open(store)
    asked = {"sites": ("mlp_input", "mlp_output"), "batch_size": 100, "seed": 0, "splits": "all"} | asked
    sites = (asked["sites"],) if isinstance(asked["sites"], str) else asked["sites"]
    layers = [2, 7] if asked["layers"] == "2,7" else np.atleast_1d(asked["layers"]).tolist()
    read = {"residual" if site == "mlp_input" else site for site in sites if site != "embedding"}
    n_arrays = len(read) * len(layers)
    n_arrays += "embedding" in sites
    # Room for three blocks and a bit: the order is that of pools of three.
    memory = memory_for(3, n_arrays, {"float32": 4}.get(storage, 2)) + 1
    batches = reader.batches(**asked, pool_memory=memory)
    splits = (asked["splits"],) if isinstance(asked["splits"], str) else asked["splits"]
    by_block = rows_by_block(reader, splits, asked.get("rows", "all"))
    expected = twin(by_block, 3, asked["seed"], asked.get("epoch", 0))
    found = list(batches)
    assert [len(batch) for batch in found[:-1]] == [asked["batch_size"]] * (len(batches) - 1)
    assert [batch.number for batch in found] == list(range(len(batches)))
    assert np.array_equal(np.concatenate([batch.rows for batch in found]), expected)
    for site in sites:
        assert [batch[site].dtype for batch in found] == [np.float32] * len(found)
        together = np.concatenate([batch[site] for batch in found], axis=-2)
        if isinstance(asked["layers"], int) or site == "embedding":
            assert np.array_equal(together, all_rows(reader, site, layers[0])[expected])
        else:
            stacked = np.stack([all_rows(reader, site, layer)[expected] for layer in layers])
            assert np.array_equal(together, stacked)


@given(
    rows=st.lists(st.integers(0, 9), min_size=1, max_size=30),
    pool_blocks=st.integers(1, 9),
    seed=st.one_of(st.none(), st.integers(0, 3)),
)
def test_each_block_stands_in_one_pool_and_pools_are_even(
    rows: list[int], pool_blocks: int, seed: int | None
) -> None:
    order = order_rows(dict(enumerate(rows)), pool_blocks, seed, 0)
    assert sorted(block for pool in order.pools for block in pool) == list(range(len(rows)))
    sizes = [len(pool) for pool in order.pools]
    assert max(sizes) <= (pool_blocks if seed is not None else 1)
    assert max(sizes) - min(sizes) <= 1
    where = [order.pool_of(row) for row in range(order.n_rows)]
    counts = [sum(rows[block] for block in pool) for pool in order.pools]
    assert where == [(pool, place) for pool, n in enumerate(counts) for place in range(n)]
    if seed is not None:
        for pool, count in enumerate(counts):
            shuffled = order.permutation(pool)
            assert shuffled is not None
            assert sorted(shuffled.tolist()) == list(range(count))


def ranks(reader: Reader, seed: int, memory: int) -> np.ndarray:
    """Of each row, its rank in the order."""
    batches = reader.batches("embedding", seed=seed, pool_memory=memory)
    order = np.concatenate([batch.rows for batch in batches])
    found = np.empty(len(order), np.int64)
    found[order] = np.arange(len(order))
    return found


def test_a_row_stands_anywhere_in_its_pool_and_its_block_in_any_pool(tmp_path: Path) -> None:
    """Uniform over ranks, seed by seed; and this test sees an order that is not."""
    reader = Reader.open(make_store(tmp_path / "s", n_tokens=60, block=5, n_layers=1, d=2, sequence_length=5))
    seeds, n_bins, memory = 600, 12, 4 * 5 * 2 * 4  # twelve blocks in three pools of four: twenty rows each
    found = np.array([ranks(reader, seed, memory) for seed in range(seeds)])
    for row in (0, 7, 59):
        assert stats.chisquare(np.bincount(found[:, row] // 20, minlength=3)).pvalue > SMALL_P
        assert stats.chisquare(np.bincount(found[:, row] % 20, minlength=20)).pvalue > SMALL_P
    # Rows of one block share a pool, always; rows of two blocks do so by chance: 3 of the 11 other blocks.
    assert (found[:, 0] // 20 == found[:, 4] // 20).all()
    together = (found[:, 0] // 20 == found[:, 59] // 20).sum()
    assert stats.binomtest(int(together), seeds, 3 / 11).pvalue > SMALL_P
    # Within the pool they share, neither comes first more often.
    first = (found[:, 0] < found[:, 4]).sum()
    assert stats.binomtest(int(first), seeds, 0.5).pvalue > SMALL_P
    unshuffled = np.array([np.arange(60) for _ in range(seeds)])
    assert stats.chisquare(np.bincount(unshuffled[:, 7] // 5, minlength=n_bins)).pvalue < SMALL_P


def content(batches: Any) -> list[bytes]:
    return [b"".join([batch.rows.tobytes(), *(site.tobytes() for site in batch)]) for batch in batches]


def test_the_same_seed_gives_the_same_bytes_and_another_seed_or_epoch_another_order(reader: Reader) -> None:
    asked: dict[str, Any] = {"layers": 5, "batch_size": 130, "pool_memory": memory_for(4, 2)}
    batches = reader.batches(**asked, seed=1)
    first = content(batches)
    assert first == content(batches) == content(reader.batches(**asked, seed=1))
    assert first == content(pickle.loads(pickle.dumps(batches)))
    others: list[dict[str, Any]] = [{"seed": 2}, {"seed": 1, "epoch": 1}]
    for other in others:
        changed = list(reader.batches(**asked, **other))
        assert [batch.rows.tolist() for batch in changed] != [batch.rows.tolist() for batch in batches]
        assert np.array_equal(np.sort(np.concatenate([batch.rows for batch in changed])), np.arange(1500))


def test_the_order_of_rows_does_not_depend_on_the_size_of_a_batch_nor_on_the_dtype(reader: Reader) -> None:
    orders = [
        np.concatenate([batch.rows for batch in reader.batches(layers=2, batch_size=size, dtype=dtype)])
        for size, dtype in ((7, "float32"), (64, "float64"), (4096, "bfloat16"))
    ]
    assert np.array_equal(orders[0], orders[1])
    assert np.array_equal(orders[0], orders[2])


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("seed", [None, 4])
def test_from_every_batch_on_the_rest_is_the_same(seed: int | None, drop_last: bool, reader: Reader) -> None:
    asked: dict[str, Any] = {"layers": 5, "batch_size": 130, "seed": seed, "drop_last": drop_last}
    whole = reader.batches(**asked, rows="body", pool_memory=memory_for(2, 2))
    expected = content(whole)
    assert len(expected) == len(whole) == whole.n_batches
    for start in range(len(expected) + 1):
        rest = reader.batches(**asked, rows="body", pool_memory=memory_for(2, 2), start=start)
        assert content(rest) == expected[start:]
        assert len(rest) == len(expected) - start


def test_only_full_batches_are_left_with_drop_last(reader: Reader) -> None:
    kept = [len(batch) for batch in reader.batches(layers=2, batch_size=400, drop_last=True)]
    whole = [len(batch) for batch in reader.batches(layers=2, batch_size=400)]
    assert (kept, whole) == ([400, 400, 400], [400, 400, 400, 300])
    assert len(list(reader.batches(layers=2, batch_size=500, drop_last=True))) == 3


@pytest.mark.parametrize("storage", STORAGE_DTYPES)
def test_every_dtype_is_the_rounding_of_float32(storage: str, tmp_path: Path) -> None:
    reader = Reader.open(make_store(tmp_path / "s", **SETTINGS, storage_dtype=storage))
    for site in ("mlp_input", "mlp_output"):
        values = {
            dtype: next(iter(reader.batches(site, layers=2, batch_size=1500, dtype=dtype)))[site]
            for dtype in ("float32", "float16", "bfloat16", "float64", np.float64)
        }
        exact = values["float32"]
        assert values["float64"].dtype == np.float64
        assert np.array_equal(values["float64"], exact)
        assert np.array_equal(values[np.float64], exact)
        for dtype in ("float16", "bfloat16"):
            assert np.array_equal(values[dtype], encode(exact, dtype))


def test_a_gradient_comes_without_the_power_of_two_it_is_stored_with(tmp_path: Path) -> None:
    data = synthetic(**SETTINGS, with_gradient=True, storage_dtype="float16")
    storage = dataclasses.replace(data.attributes.storage, gradient_exponents=(3, 0, 9))
    data = dataclasses.replace(data, attributes=dataclasses.replace(data.attributes, storage=storage))
    write_all(tmp_path / "s", data)
    reader = Reader.open(tmp_path / "s")
    for dtype in ("float32", "float16"):
        batch = next(iter(reader.batches("mlp_output_grad", batch_size=1500, dtype=dtype)))
        for index, layer in enumerate(reader.layers):
            expected = reader.rows("mlp_output_grad", layer, 0, reader.n_blocks)[batch.rows]
            assert np.array_equal(batch["mlp_output_grad"][index], expected.astype(dtype))


def test_a_value_too_large_for_the_dtype_is_refused_by_name(tmp_path: Path) -> None:
    data = synthetic(**SETTINGS)
    data.stored["mlp_output"][1, 700, 3] = 1e6
    write_all(tmp_path / "s", data)
    batches = Reader.open(tmp_path / "s").batches("mlp_output", layers=[2, 5], dtype="float16")
    with pytest.raises(OutOfRange, match=r"`mlp_output` layer 5: .*float16.*ask for dtype='float32'"):
        list(batches)


def peak(batches: Any) -> int:
    tracemalloc.start()
    try:
        for _ in batches:
            pass
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


OVERHEAD = 2**19
"""Of Python itself, records and threads, which the projection leaves out; a third pool would be 2 MiB."""
POOL_BYTES = 2 * 2 * 1024 * 128 * 4  # two blocks of two arrays


@pytest.mark.parametrize(
    "asked", [{}, {"compressor": "zstd"}, {"seed": None}], ids=["plain", "zstd", "order"]
)
def test_memory_stays_within_what_was_projected_however_long_the_store(
    asked: dict[str, Any], tmp_path: Path
) -> None:
    storage: dict[str, Any] = {"d": 128, "n_layers": 1, "block": 1024, "linear": 0.5, "with_positions": False}
    peaks: dict[int, int] = {}
    for n_blocks in (8, 24):
        path = tmp_path / f"{n_blocks}"
        made = make_store(path, n_tokens=1024 * n_blocks, compressor=asked.get("compressor"), **storage)
        reader = Reader.open(made)
        batches = reader.batches(
            layers=0,
            batch_size=512,
            seed=asked.get("seed", 0),
            pool_memory=POOL_BYTES,
        )
        list(reader.batches("embedding", batch_size=512, pool_memory=2**30))  # records are read and kept
        peaks[n_blocks] = peak(batches)
        assert peaks[n_blocks] < batches.memory_bytes + OVERHEAD
        assert batches.memory_bytes < 4 * POOL_BYTES  # two pools and what is small beside them
    assert peaks[24] < peaks[8] + OVERHEAD
    whole = reader.batches(layers=0, batch_size=512, pool_memory="1 GiB")  # what has no bound is seen to grow
    assert peak(whole) > peaks[24] + 16 * 2**20


def test_a_damaged_chunk_ends_the_batches_with_its_name(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", **SETTINGS)
    path = store / "activations.zarr" / "mlp_output" / "c" / "1" / "3" / "0"
    whole = path.read_bytes()
    path.write_bytes(whole[:99] + bytes([whole[99] ^ 1]) + whole[100:])
    reader = Reader.open(store)
    with pytest.raises(DamageError, match=r"`mlp_output` layer 5, tokens 480-639"):
        list(reader.batches(layers=5))
    assert len(list(reader.batches(layers=2))) == 1
    path.unlink()
    with pytest.raises(MissingChunk, match=r"`mlp_output` layer 5, tokens 480-639"):
        list(reader.batches(layers=5))


def test_whoever_stops_early_leaves_no_thread_behind_and_others_are_not_disturbed(reader: Reader) -> None:
    batches = reader.batches(layers=5, batch_size=100, pool_memory=memory_for(2, 2))
    expected = content(batches)
    before, seen = threading.active_count(), []
    given = iter(batches)
    for batch in given:
        seen.append(content([batch])[0])
        assert content([next(iter(batches))]) == expected[:1]  # another pass in the midst of this one
        if batch.number == 3:
            break
    assert seen == expected[:4]
    del given
    assert threading.active_count() <= before


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"sites": ("mlp_input", "attention")}, "site 'attention' is not in .* which has residual"),
        (
            {"sites": "mlp_output_grad"},
            "site 'mlp_output_grad' is not in .*, embedding and `mlp_input`, which",
        ),
        ({"sites": ()}, r"sites=\(\): name one or several"),
        ({"sites": ("residual", "residual")}, "each once"),
        ({"layers": 3}, "layer 3 is not in .*, which has layers 2, 5, 7"),
        ({"layers": "2-5"}, "layer 3 is not in"),
        ({"layers": "deep"}, "'deep' is no layer or range; write 0-5,8 or all"),
        ({"layers": []}, "name one or several"),
        ({"layers": [2, 2]}, "each once"),
        ({"splits": "train"}, "split 'train' is unknown; allowed: all, or some of fit, gate, test"),
        ({"splits": ("fit", "tests")}, "split 'tests' is unknown.*the nearest is 'test'"),
        ({"splits": ()}, "name one or several"),
        ({"rows": "sinks"}, "rows='sinks': give 'all', or 'body'"),
        ({"batch_size": 0}, "batch_size=0: give a whole number of at least 1"),
        ({"batch_size": 2.5}, "batch_size=2.5: give a whole number"),
        ({"batch_size": 1501, "drop_last": True}, "1500 rows are chosen, which fill no batch"),
        ({"seed": -1}, "seed=-1: .* of at least 0, or None for the order of the store"),
        ({"epoch": -1}, "epoch=-1"),
        ({"start": 99}, "start=99: an epoch has 1 batches here"),
        ({"dtype": "int8"}, "dtype='int8': allowed are float32, float16, bfloat16, float64"),
        ({"dtype": "quick"}, "dtype='quick': allowed"),
        (
            {"pool_memory": "1 KiB"},
            "two blocks, the least that can be mixed, of 2 arrays take 40960 bytes; raise",
        ),
        ({"pool_memory": "much"}, "'much' is no size"),
        ({"pool_memory": 20479, "seed": None}, "one block of 2 arrays take 20480 bytes"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_read(
    asked: dict[str, Any], message: str, reader: Reader
) -> None:
    asked = {"layers": 5} | asked
    with pytest.raises(UsageError, match=message):
        reader.batches(**asked)


def test_a_split_without_rows_is_refused(tmp_path: Path) -> None:
    reader = Reader.open(make_store(tmp_path / "s", n_tokens=300, block=160))
    with pytest.raises(UsageError, match=r"has no rows of the split gate; it has fit, test"):
        reader.batches(layers=0, splits="gate")


def test_a_folder_of_moments_has_no_rows_to_give(reader: Reader, tmp_path: Path) -> None:
    save_moments(tmp_path / "m", read_moments(reader, "store", folds=2))
    with pytest.raises(StoreNotFound, match="holds moments only, no rows that could be read"):
        Reader.open(tmp_path / "m")
