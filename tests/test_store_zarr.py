"""The store is plain Zarr v3: what we write by hand is what zarr writes, and zarr and xarray read it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
import zarr
from helpers_store import Synthetic, begin, commit, make_store, synthetic
from nearline.store import STORAGE_DTYPES, array_name
from nearline.store.folder import load_spec
from nearline.store.metadata import ZSTD_LEVEL
from zarr.codecs import Crc32cCodec, ZstdCodec
from zarr.errors import ZarrUserWarning

SETTINGS: dict[str, Any] = {"n_tokens": 500, "block": 160}


def write_with_zarr(path: Path, store: Path, data: Synthetic) -> None:
    """The arrays of a store, by zarr's own hand."""
    group = zarr.create_group(path, attributes=data.attributes.to_dict())
    values: dict[str, Any] = {
        array_name(site, data.storage_dtype): stored for site, stored in data.stored.items()
    }
    values |= data.columns | data.affine
    values |= {"layer": np.array(data.layers, dtype=np.int32), "position_embedding": data.position_embedding}
    zstd = [ZstdCodec(level=ZSTD_LEVEL)] if data.compressor else []
    for name, found in values.items():
        spec = load_spec(store, name)
        array = group.create_array(
            name,
            shape=found.shape,
            chunks=spec.chunks,
            dtype=spec.dtype,
            fill_value=spec.fill,
            filters=None,
            compressors=[*zstd, Crc32cCodec()],
            dimension_names=spec.dims,
            config={"write_empty_chunks": True},
        )
        array[...] = found
    with pytest.warns(ZarrUserWarning, match="Consolidated metadata"):
        zarr.consolidate_metadata(group.store)


def tree(path: Path) -> dict[str, bytes | dict]:
    """Chunk objects as bytes, metadata as values: zarr indents its JSON, and we sort its keys."""
    return {
        file.relative_to(path).as_posix(): json.loads(file.read_text())
        if file.name == "zarr.json"
        else file.read_bytes()
        for file in path.rglob("*")
        if file.is_file()
    }


@pytest.mark.parametrize(
    ("dtype", "compressor"),
    [("float32", None), ("float16", "zstd"), ("bfloat16", None), ("bfloat16", "zstd")],
)
def test_every_object_is_what_zarr_itself_writes(dtype: str, compressor: str | None, tmp_path: Path) -> None:
    data = synthetic(**SETTINGS, storage_dtype=dtype, compressor=compressor)
    writer = begin(tmp_path / "s", data)
    for block in range(data.plan.n_blocks):
        commit(writer, data, block)
    writer.seal()
    write_with_zarr(tmp_path / "z", tmp_path / "s", data)
    ours, theirs = tree(tmp_path / "s" / "activations.zarr"), tree(tmp_path / "z")
    assert sorted(ours) == sorted(theirs)
    for name, content in theirs.items():
        assert ours[name] == content, name


@pytest.mark.parametrize("compressor", [None, "zstd"])
@pytest.mark.parametrize("dtype", STORAGE_DTYPES)
def test_plain_zarr_and_plain_xarray_read_the_values(
    dtype: str, compressor: str | None, tmp_path: Path
) -> None:
    data = synthetic(**SETTINGS, layers=[1, 3], storage_dtype=dtype, compressor=compressor)
    writer = begin(tmp_path / "s", data)
    for block in range(data.plan.n_blocks):
        commit(writer, data, block)
    writer.seal()
    root = tmp_path / "s" / "activations.zarr"
    group: Any = zarr.open_group(root, mode="r")
    opened = xr.open_zarr(root)
    assert opened.attrs["storage"]["dtype"] == dtype
    for site, stored in data.stored.items():
        name = array_name(site, dtype)
        assert np.array_equal(group[name][:], stored)
        assert np.array_equal(opened[name].values, stored)
        assert opened[name].dtype == stored.dtype
    assert opened["residual_bits" if dtype == "bfloat16" else "residual"].dims == (
        "layer",
        "token",
        "feature",
    )
    assert opened["layer"].values.tolist() == [1, 3]
    assert np.array_equal(opened["token_id"].sel().values, data.columns["token_id"])
    assert np.array_equal(opened["nll"].values, data.columns["nll"], equal_nan=True)
    assert np.array_equal(opened["norm_weight"].sel(layer=3).values, data.affine["norm_weight"][1])


def test_an_unsealed_store_is_not_consolidated_and_gaps_read_as_nan(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", **SETTINGS, seal=False, blocks=[0, 2])
    root = json.loads((store / "activations.zarr" / "zarr.json").read_text())
    assert "consolidated_metadata" not in root
    opened = xr.open_zarr(store / "activations.zarr", consolidated=False)
    assert np.isnan(opened["residual"][:, 160:320].values).all()
    assert not np.isnan(opened["residual"][:, :160].values).any()
