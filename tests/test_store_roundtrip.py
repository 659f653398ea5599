"""What is committed is what is read, bit for bit, whatever the layout of the arrays that were given."""

import dataclasses
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers_store import Synthetic, begin, commit, make_store, statistics, synthetic
from nearline.store import STORAGE_DTYPES, Reader, UsageError, decode
from nearline.store.layout import TOKEN_COLUMNS

SETTINGS: dict[str, Any] = {"n_tokens": 500, "block": 160}  # the last block has 20 rows


def special_values(dtype: str) -> np.ndarray:
    """Bit patterns that a careless path changes: NaN with payload, −0.0, infinity, subnormals, largest."""
    patterns = {
        "float32": ["7FC00001", "FFFFFFFF", "7F800001", "80000000", "7F800000", "00000001", "7F7FFFFF"],
        "float16": ["7E01", "FFFF", "7C01", "8000", "7C00", "0001", "7BFF"],
        "bfloat16": ["7FC1", "FFFF", "7F81", "8000", "7F80", "0001", "7F7F"],
    }
    raw = [int(pattern, 16) for pattern in patterns[dtype]]
    if dtype == "bfloat16":
        return np.array(raw, dtype=np.uint16)
    return np.array(raw, dtype=np.uint32 if dtype == "float32" else np.uint16).view(dtype)


def with_specials(data: Synthetic) -> Synthetic:
    """The same store, with special values strewn over every site and a whole chunk of NaN with payload."""
    specials, rng = special_values(data.storage_dtype), np.random.default_rng(5)
    stored = {site: values.copy() for site, values in data.stored.items()}
    for values in stored.values():
        values.reshape(-1)[rng.choice(values.size, 200, replace=False)] = np.resize(specials, 200)
    stored["residual"][0, :160] = specials[0]
    return dataclasses.replace(data, stored=stored)


def as_bits(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values).view(f"u{values.itemsize}")


def write(path: Path, data: Synthetic) -> Reader:
    writer = begin(path, data)
    for block in range(data.plan.n_blocks):
        writer.commit(block, *data.block(block), {})
    writer.seal()
    return Reader.open(path)


@pytest.mark.parametrize("compressor", [None, "zstd"])
@pytest.mark.parametrize("dtype", STORAGE_DTYPES)
def test_every_bit_comes_back(dtype: str, compressor: str | None, tmp_path: Path) -> None:
    data = with_specials(synthetic(**SETTINGS, storage_dtype=dtype, compressor=compressor))
    reader = write(tmp_path / "s", data)
    for site, values in data.stored.items():
        for index, layer in enumerate(data.layers if values.ndim == 3 else [None]):
            expected = values[index] if values.ndim == 3 else values
            found = reader.stored(site, layer, 0, reader.n_blocks)
            assert found.dtype == expected.dtype
            assert np.array_equal(as_bits(found), as_bits(expected))
            assert np.array_equal(as_bits(reader.stored(site, layer, 1, 4)), as_bits(expected[160:]))
            rows = reader.rows(site, layer, 0, reader.n_blocks)
            assert np.array_equal(as_bits(rows), as_bits(decode(expected, dtype)))
    for name in TOKEN_COLUMNS:
        assert np.array_equal(as_bits(reader.column(name)), as_bits(data.columns[name]))
        assert np.array_equal(as_bits(reader.column_block(name, 3)), as_bits(data.columns[name][480:]))


@pytest.mark.parametrize("dtype", STORAGE_DTYPES)
def test_strides_and_later_changes_of_the_given_arrays_do_not_matter(dtype: str, tmp_path: Path) -> None:
    data = with_specials(synthetic(**SETTINGS, storage_dtype=dtype))
    plain = write(tmp_path / "plain", data)
    writer = begin(tmp_path / "strided", data)
    for block in range(data.plan.n_blocks):
        columns, sites = data.block(block)
        sites = {site: np.asfortranarray(values) for site, values in sites.items()}
        sites["mlp_output"] = np.repeat(sites["mlp_output"], 2, axis=1)[
            :, ::2
        ]  # every second row of a larger one
        sites["embedding"] = sites["embedding"][::-1].copy()[::-1]  # walked backwards
        columns = {name: np.repeat(values, 3)[::3] for name, values in columns.items()}
        writer.commit(block, columns, sites, {})
        for values in [*sites.values(), *columns.values()]:
            values[...] = 0  # the buffer is filled with the next block
    writer.seal()
    strided = Reader.open(tmp_path / "strided")
    for block in range(data.plan.n_blocks):
        assert strided.record(block) == plain.record(block)
    assert strided.digest == plain.digest


def test_small_arrays_and_tables_come_back(tmp_path: Path) -> None:
    data = synthetic(**SETTINGS, post_norm=True)
    reader = write(tmp_path / "s", data)
    for name in ("norm_weight", "norm_bias", "post_norm_weight"):
        np.testing.assert_array_equal(np.asarray(reader.affine(name)), data.affine[name])
    assert reader.affine("post_norm_bias") is None
    assert data.position_embedding is not None
    np.testing.assert_array_equal(np.asarray(reader.position_embedding), data.position_embedding)
    assert reader.documents.equals(data.documents)
    assert reader.vocabulary.equals(data.vocabulary)
    assert reader.attributes == data.attributes
    assert reader.plan == data.plan
    with pytest.raises(UsageError, match="norm_weight"):
        reader.affine("weight")


def test_a_subset_of_layers_keeps_its_numbers(tmp_path: Path) -> None:
    data = synthetic(**SETTINGS, layers=[2, 5, 11])
    reader = write(tmp_path / "s", data)
    assert reader.layers == (2, 5, 11)
    assert np.array_equal(reader.rows("residual", 5, 0, 1), data.sites["residual"][1, :160])
    with pytest.raises(UsageError, match="layer 1: this store has layers 2, 5, 11"):
        reader.rows("residual", 1, 0, 1)


def test_what_is_not_there_is_a_usage_error_that_lists_what_is(tmp_path: Path) -> None:
    reader = Reader.open(make_store(tmp_path / "s", **SETTINGS))
    with pytest.raises(UsageError, match="residual, mlp_output, embedding"):
        reader.rows("mlp_input", 0, 0, 1)
    with pytest.raises(UsageError, match="token_id"):
        reader.column("tokens")
    for start, stop in [(0, 5), (-1, 1), (2, 2)]:
        with pytest.raises(UsageError, match="blocks 0-3"):
            reader.rows("residual", 0, start, stop)


def test_two_writers_give_the_same_bytes(tmp_path: Path) -> None:
    """Whatever the order of the blocks; only runs/ may differ."""
    data = synthetic(**SETTINGS, storage_dtype="bfloat16")
    for name, order in (("a", [0, 1, 2, 3]), ("b", [3, 1, 0, 2])):
        writer = begin(tmp_path / name / "store", data)
        for block in order:
            commit(writer, data, block)
        writer.write_run({"order": order})
        writer.seal()
    trees = []
    for name in ("a", "b"):
        root = tmp_path / name / "store"
        files = sorted(path for path in root.rglob("*") if path.is_file() and path.parent.name != "runs")
        trees.append({path.relative_to(root).as_posix(): path.read_bytes() for path in files})
    assert trees[0] == trees[1]
    assert {"README.md", "SEALED", "manifest.json", "plan.json", "blocks/000003.json"} <= set(trees[0])


def test_records_keep_the_statistics_that_were_given(tmp_path: Path) -> None:
    data = synthetic(**SETTINGS)
    writer = begin(tmp_path / "s", data)
    columns, sites = data.block(0)
    given = {site: statistics(values) for site, values in sites.items()}
    given["residual"]["mean_square"][0] = float("inf")
    record = writer.commit(0, columns, sites, given)
    assert record.statistics["residual"]["mean_square"][0] is None
    assert record.statistics["mlp_output"] == given["mlp_output"]
    assert Reader.open(tmp_path / "s", require_seal=False).record(0) == record


def test_a_reader_is_shared_by_threads_and_sent_to_processes(tmp_path: Path) -> None:
    data = synthetic(**SETTINGS, storage_dtype="float16")
    reader = write(tmp_path / "s", data)
    copy = pickle.loads(pickle.dumps(reader))
    jobs = [(layer, block) for layer in data.layers for block in range(reader.n_blocks)] * 8

    def same(job: tuple[int, int]) -> bool:
        layer, block = job
        row0, row1 = reader.block_range(block)
        return np.array_equal(
            copy.stored("residual", layer, block, block + 1), data.stored["residual"][layer, row0:row1]
        )

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(same, jobs))
