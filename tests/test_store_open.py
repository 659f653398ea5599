"""`store.open` and the xarray backend: lazy, decoded, labelled; any index gives what numpy gives."""

import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import dask.config
import numpy as np
import pytest
import xarray as xr
from helpers_store import Synthetic, make_store, synthetic
from hypothesis import example, given
from hypothesis import strategies as st
from nearline import store as nearline_store
from nearline.store import STORAGE_DTYPES, Reader, UsageError, decode

SETTINGS: dict[str, Any] = {"n_tokens": 500, "block": 160, "layers": [1, 4, 7]}


@pytest.fixture(scope="module", params=STORAGE_DTYPES)
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Synthetic]:
    settings = {**SETTINGS, "storage_dtype": request.param}
    path = tmp_path_factory.mktemp("store") / "s"
    return make_store(path, **settings), synthetic(**settings)


def test_open_gives_float32_with_coordinates_and_attributes(store: tuple[Path, Synthetic]) -> None:
    path, data = store
    opened = nearline_store.open(path)
    for site, stored in data.stored.items():
        assert opened[site].dtype == np.float32
        assert np.array_equal(opened[site].values, decode(stored, data.storage_dtype))
    assert opened["residual"].dims == ("layer", "token", "feature")
    assert opened["embedding"].dims == ("token", "feature")
    assert np.array_equal(
        opened["residual"].sel(layer=4).values, decode(data.stored["residual"][1], data.storage_dtype)
    )
    assert np.array_equal(opened["document"].values, data.columns["document"])
    assert np.array_equal(opened["norm_weight"].values, data.affine["norm_weight"])
    assert opened.attrs["model"]["name"] == "synthetic"
    with pytest.raises(KeyError):
        opened["residual"].sel(layer=2)


def test_every_way_in_opens_the_same_dataset(store: tuple[Path, Synthetic]) -> None:
    path, _ = store
    expected = nearline_store.open(path).load()
    for opened in (
        xr.open_dataset(path, engine="nearline"),
        xr.open_dataset(path / "activations.zarr", engine="nearline"),
        xr.open_dataset(path, engine="nearline", chunks={}),
        xr.open_dataset(path),  # the folder says what it is
        nearline_store.open(Reader.open(path), chunks=None),
        nearline_store.open(path, chunks={"token": 320}),
    ):
        xr.testing.assert_identical(opened.load(), expected)
    assert "nll" not in xr.open_dataset(path, engine="nearline", drop_variables=["nll"])


def test_nothing_is_read_before_it_is_used(
    store: tuple[Path, Synthetic], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = store
    reads: list[tuple[int, int]] = []
    real = Reader._read_block

    def noted(self: Reader, name: str, spec: Any, index: int, block: int, out: np.ndarray) -> None:
        reads.append((index, block))
        real(self, name, spec, index, block, out)

    monkeypatch.setattr(Reader, "_read_block", noted)
    opened = nearline_store.open(path, chunks=None).reset_coords(drop=True)
    assert reads == []
    opened["residual"][1, 170:190].load()
    assert reads == [(1, 1)]
    opened["mlp_output"][[0, 2]][:, [3, 499]].load()
    assert reads == [(1, 1), (0, 0), (0, 3), (2, 0), (2, 3)]
    assert opened["residual"][[], 3:8].values.shape == (0, 5, 16)
    assert opened["residual"][:, 8:8].values.shape == (3, 0, 16)
    assert len(reads) == 5


def test_chunks_are_whole_blocks_of_one_layer(
    store: tuple[Path, Synthetic], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = store
    assert nearline_store.open(path)["residual"].data.chunks == ((1, 1, 1), (500,), (16,))
    by_block = xr.open_dataset(path, engine="nearline", chunks={})
    assert by_block["residual"].data.chunks == ((1, 1, 1), (160, 160, 160, 20), (16,))
    with pytest.raises(UsageError, match="auto blocks"):
        nearline_store.open(path, chunks="auto")


def test_dask_reduces_over_threads(store: tuple[Path, Synthetic]) -> None:
    path, data = store
    lazy = xr.open_dataset(path, engine="nearline", chunks={})["residual"].mean("token")
    expected = decode(data.stored["residual"], data.storage_dtype).mean(1, dtype=np.float64)
    with dask.config.set(scheduler="threads", num_workers=2):
        # float32 sums of 500 values of size up to about 100, against float64
        np.testing.assert_allclose(lazy.compute().values, expected, atol=1e-4)


INTEGERS = st.integers(-500, 499)
INDEX = st.one_of(
    INTEGERS,
    st.slices(500),
    st.lists(INTEGERS, min_size=1, max_size=8).map(np.array),
)


@pytest.fixture(scope="module")
def lazy(tmp_path_factory: pytest.TempPathFactory) -> xr.Dataset:
    path = make_store(tmp_path_factory.mktemp("lazy") / "s", **SETTINGS, storage_dtype="float16")
    return nearline_store.open(path, chunks=None)


@example(index=slice(0, 0, -1), layer=slice(2, 2, -1), feature=slice(3, 3, -1))
@example(index=slice(4, 400, -3), layer=0, feature=0)
@given(
    index=INDEX,
    layer=st.one_of(st.integers(-3, 2), st.slices(3)),
    feature=st.one_of(st.integers(0, 15), st.slices(16)),
)
def test_any_index_gives_what_numpy_gives(
    lazy: xr.Dataset, index: object, layer: object, feature: object
) -> None:
    values, column = loaded("residual"), loaded("token_id")
    key = {"layer": layer, "token": index, "feature": feature}
    found = lazy["residual"].isel(key)
    assert found.shape == values.isel(key).shape
    assert np.array_equal(found.values, values.isel(key).values)
    assert np.array_equal(lazy["token_id"].isel(token=index).values, column.isel(token=index).values)


@functools.cache
def loaded(name: str) -> xr.Variable:
    data = synthetic(**SETTINGS, storage_dtype="float16")
    if name == "residual":
        return xr.Variable(("layer", "token", "feature"), decode(data.stored[name], "float16"))
    return xr.Variable(("token",), data.columns[name])


def test_importing_the_store_is_light(tmp_path: Path) -> None:
    heavy = (
        "torch",
        "transformers",
        "zarr",
        "xarray",
        "dask",
        "polars",
        "pandas",
        "pyarrow.parquet",
        "scipy",
    )
    program = f"import sys, nearline.store; print([name for name in {heavy!r} if name in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert result.stdout.strip() == "[]"
