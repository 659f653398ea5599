"""Damage is found and named: which site, which layer, which tokens; an absent chunk is never data."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
from helpers_store import make_store
from nearline import store as nearline_store
from nearline.store import (
    DamageError,
    IncompleteError,
    MissingChunk,
    Reader,
    StoreNotFound,
    StoreNotSealed,
    info,
)

SETTINGS: dict[str, Any] = {"n_tokens": 500, "block": 160, "layers": [2, 5], "storage_dtype": "float16"}
CHUNK = "activations.zarr/residual/c/1/2/0"  # layer 5, tokens 320-479


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("whole") / "s", **SETTINGS)


@pytest.fixture
def store(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "s"))


READS: dict[str, Callable[[Path], object]] = {
    "reader": lambda path: Reader.open(path).rows("residual", 5, 0, 4),
    "stored": lambda path: Reader.open(path).stored("residual", 5, 2, 3),
    "open": lambda path: nearline_store.open(path)["residual"].sel(layer=5).mean().compute(),
    "open without dask": lambda path: nearline_store.open(path, chunks=None)["residual"][1, 330].values,
    "backend": lambda path: xr.open_dataset(path, engine="nearline")["residual"][:, 400:].values,
    "backend on zarr": lambda path: xr.open_dataset(path / "activations.zarr", engine="nearline").load(),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_missing_chunk_raises_and_is_named(store: Path, read: Callable[[Path], object]) -> None:
    read(store)
    (store / CHUNK).unlink()
    with pytest.raises(MissingChunk, match="`residual` layer 5, tokens 320-479"):
        read(store)


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_flipped_bit_raises_and_is_named(store: Path, read: Callable[[Path], object]) -> None:
    flip(store / CHUNK, 777)
    with pytest.raises(DamageError, match=r"`residual` layer 5, tokens 320-479.*checksum"):
        read(store)


@pytest.mark.parametrize("cut", [0, 1, 2000, -4, -1])
def test_a_cut_chunk_raises_and_is_named(store: Path, cut: int) -> None:
    content = (store / CHUNK).read_bytes()
    (store / CHUNK).write_bytes(content[:cut])
    for read in READS.values():
        with pytest.raises(DamageError, match=r"`residual` layer 5, tokens 320-479.*bytes"):
            read(store)


def test_bytes_too_many_raise(store: Path) -> None:
    (store / CHUNK).write_bytes((store / CHUNK).read_bytes() + b"1234")
    with pytest.raises(DamageError, match="5128 bytes, 5124 expected"):
        Reader.open(store).rows("residual", 5, 2, 3)


def test_another_chunk_under_this_name_raises(store: Path) -> None:
    """Its checksum is right, its place is not: only the block record knows."""
    shutil.copy(store / CHUNK.replace("/1/2/0", "/0/2/0"), store / CHUNK)
    with pytest.raises(
        DamageError, match=r"`residual` layer 5, tokens 320-479.*not the one that was committed"
    ):
        Reader.open(store).rows("residual", 5, 2, 3)


def test_every_flip_in_a_chunk_is_found(store: Path) -> None:
    reader, original = Reader.open(store), (store / CHUNK).read_bytes()
    for place in np.random.default_rng(0).choice(len(original) * 8, 200, replace=False).tolist():
        flip(store / CHUNK, place)
        with pytest.raises(DamageError, match="tokens 320-479"):
            reader.rows("residual", 5, 2, 3)
        (store / CHUNK).write_bytes(original)
    assert reader.rows("residual", 5, 2, 3).shape == (160, 16)


def test_other_rows_are_still_read(store: Path) -> None:
    (store / CHUNK).unlink()
    reader = Reader.open(store)
    assert reader.rows("residual", 5, 0, 2).shape == (320, 16)
    assert reader.rows("residual", 2, 0, 4).shape == (500, 16)
    assert reader.rows("mlp_output", 5, 0, 4).shape == (500, 16)


def test_a_damaged_column_or_embedding_is_named(store: Path) -> None:
    (store / "activations.zarr/nll/c/1").unlink()
    flip(store / "activations.zarr/embedding/c/3/0", 9)
    with pytest.raises(MissingChunk, match="`nll`, tokens 160-319"):
        Reader.open(store).column("nll")
    with pytest.raises(DamageError, match="`embedding`, tokens 480-499"):
        nearline_store.open(store)["embedding"][490:].compute()


@pytest.mark.parametrize(
    "name",
    [
        "SEALED",
        "manifest.json",
        "plan.json",
        "activations.zarr/zarr.json",
        "activations.zarr/residual/zarr.json",
        "activations.zarr/nll/zarr.json",
    ],
)
def test_a_flip_in_a_metadata_file_is_refused_on_opening(store: Path, name: str) -> None:
    for place in np.linspace(0, (store / name).stat().st_size * 8 - 1, 12).astype(int).tolist():
        flip(store / name, place)
        with pytest.raises(DamageError, match=name.rpartition("/")[2]):
            Reader.open(store)
        flip(store / name, place)
    Reader.open(store)


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("documents.parquet", lambda reader: reader.documents),
        ("vocabulary.parquet", lambda reader: reader.vocabulary),
        ("activations.zarr/norm_weight/c/0/0", lambda reader: reader.affine("norm_weight")),
        ("activations.zarr/position_embedding/zarr.json", lambda reader: reader.position_embedding),
        ("blocks/000002.json", lambda reader: reader.rows("residual", 2, 2, 3)),
    ],
)
def test_a_flip_in_a_small_file_is_refused_when_it_is_read(
    store: Path, name: str, read: Callable[[Reader], object]
) -> None:
    flip(store / name, 100)
    with pytest.raises(DamageError, match=name.rpartition("/")[2]):
        read(Reader.open(store))


@pytest.mark.parametrize("name", ["manifest.json", "plan.json", "activations.zarr/residual/zarr.json"])
def test_a_missing_metadata_file_is_refused(store: Path, name: str) -> None:
    (store / name).unlink()
    with pytest.raises((DamageError, IncompleteError), match=name.rpartition("/")[2]):
        Reader.open(store)


def test_a_missing_block_record_of_a_sealed_store_is_damage(store: Path) -> None:
    (store / "blocks/000001.json").unlink()
    with pytest.raises(DamageError, match="tokens 160-319 have no block record"):
        Reader.open(store).rows("residual", 2, 0, 4)
    with pytest.raises(DamageError, match=r"blocks/000001.json: the file is missing"):
        info(store)


def test_an_unsealed_store_is_refused_with_the_missing_blocks(tmp_path: Path) -> None:
    path = make_store(tmp_path / "s", n_tokens=1600, block=160, seal=False, blocks=[0, 1, 4, 6])
    for read in (Reader.open, nearline_store.open, lambda path: xr.open_dataset(path, engine="nearline")):
        with pytest.raises(StoreNotSealed, match=r"6 of 10 blocks are missing \(2-3, 5, 7-9\)"):
            read(path)
    with pytest.raises(StoreNotSealed, match="6 of 10"):
        nearline_store.seal(path)
    assert not (path / "SEALED").exists()
    reader = Reader.open(path, require_seal=False)
    assert reader.digest is None
    assert reader.rows("residual", 0, 0, 2).shape == (320, 16)
    with pytest.raises(IncompleteError, match="tokens 320-479 have no block record"):
        reader.rows("residual", 0, 0, 3)


def test_all_blocks_but_no_seal_says_what_to_do(tmp_path: Path) -> None:
    path = make_store(tmp_path / "s", n_tokens=500, block=160, seal=False)
    with pytest.raises(StoreNotSealed, match="nearline seal"):
        Reader.open(path)
    nearline_store.seal(path)
    assert Reader.open(path).n_blocks == 4


def test_sealing_looks_at_the_size_of_every_chunk(tmp_path: Path) -> None:
    path = make_store(tmp_path / "s", **SETTINGS, seal=False)
    content = (path / CHUNK).read_bytes()
    (path / CHUNK).write_bytes(content[:-1])
    with pytest.raises(DamageError, match="`residual` layer 5, tokens 320-479"):
        nearline_store.seal(path)
    (path / CHUNK).unlink()
    with pytest.raises(MissingChunk, match="`residual` layer 5, tokens 320-479"):
        nearline_store.seal(path)
    assert not (path / "SEALED").exists()


COMMANDS: list[Callable[[Path], object]] = [
    Reader.open,
    nearline_store.info,
    nearline_store.seal,
    lambda path: nearline_store.push(path, path.parent / "further"),
    lambda path: nearline_store.pull(path, path.parent / "further"),
]


@pytest.mark.parametrize("mark", ["PUSHING", "PULLING"])
@pytest.mark.parametrize("command", COMMANDS)
def test_an_unfinished_copy_is_called_so_by_every_command(
    store: Path, command: Callable[[Path], object], mark: str
) -> None:
    """Its chunk objects and block records are there, its metadata is not."""
    (store / "manifest.json").rename(store / mark)
    for name in ("SEALED", "plan.json", "documents.parquet", "activations.zarr/zarr.json"):
        (store / name).unlink()
    verb = {"PUSHING": "push", "PULLING": "pull"}[mark]
    words = (
        rf"^{store} is an unfinished {verb}: 3 of its files are missing.*repeat the same `nearline {verb}`"
    )
    with pytest.raises(StoreNotSealed, match=words):
        command(store)


@pytest.mark.parametrize("move", [nearline_store.push, nearline_store.pull])
def test_a_harvest_that_is_not_finished_is_not_moved(tmp_path: Path, move: Callable[..., object]) -> None:
    path = make_store(tmp_path / "s", **SETTINGS, seal=False, blocks=[0, 2])
    words = r"2 of 4 blocks are missing \(1, 3\); the same `nearline collect` command collects them"
    with pytest.raises(StoreNotSealed, match=words):
        move(path, tmp_path / "copy")
    whole = make_store(tmp_path / "whole", **SETTINGS, seal=False)
    with pytest.raises(StoreNotSealed, match="run `nearline seal`"):
        move(whole, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_a_folder_that_is_no_store_says_so(tmp_path: Path) -> None:
    with pytest.raises(StoreNotFound, match="does not exist"):
        Reader.open(tmp_path / "nothing")
    with pytest.raises(StoreNotFound, match="not a nearline store"):
        Reader.open(tmp_path)


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def test_a_store_in_the_middle_of_a_replacement_is_not_read(store: Path) -> None:
    (store / "replacing").mkdir()
    (store / "replacing/READY").write_bytes(b"{}")
    with pytest.raises(StoreNotSealed, match="interrupted; run `nearline repair` again"):
        Reader.open(store)


def test_a_harvest_that_was_stopped_while_it_was_sealed_is_told_to_seal(store: Path) -> None:
    (store / "SEALED").unlink()
    with pytest.raises(StoreNotSealed, match="run `nearline seal`"):
        Reader.open(store)
    (store / CHUNK).unlink()
    with pytest.raises(StoreNotSealed, match="incomplete copy: 1 of its files"):
        Reader.open(store)
