"""Stores behind URLs open lazily: nothing is pulled, what is read is checked, workers open them anew."""

import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask.config
import numpy as np
import pytest
import xarray as xr
import zarr.storage
from helpers_servers import ACCESS_KEY, SECRET_KEY, Bucket, FileServer, s3_client
from helpers_store import make_store
from nearline import store as nearline_store
from nearline.analyze.fit import fit
from nearline.analyze.settings import FitSettings
from nearline.store import DamageError, MissingChunk, Reader, StoreNotFound, StoreNotSealed, info

pytest_plugins = ("helpers_servers",)
SETTINGS: dict[str, Any] = {"n_tokens": 500, "block": 160, "layers": [2, 5], "storage_dtype": "bfloat16"}
CHUNK = "activations.zarr/residual_bits/c/1/2/0"  # layer 5, tokens 320-479


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("local") / "mine", **SETTINGS)


@pytest.fixture
def served(local: Path, tmp_path: Path) -> Iterator[FileServer]:
    shutil.copytree(local, tmp_path / "mine")
    with FileServer(tmp_path) as server:
        yield server


@pytest.fixture
def bucket_url(local: Path, s3_bucket: Bucket) -> str:
    client = s3_client(s3_bucket.endpoint)
    for path in local.rglob("*"):
        if path.is_file():
            client.put_object(
                Bucket=s3_bucket.name,
                Key=f"deep/mine/{path.relative_to(local).as_posix()}",
                Body=path.read_bytes(),
            )
    return f"{s3_bucket.url}/deep/mine"


def test_http_opens_lazily_and_equals_the_folder(local: Path, served: FileServer) -> None:
    url = f"{served.url}/mine"
    opened = nearline_store.open(url, chunks=None)
    chunks = [path for _, path, _ in served.requests if "/c/" in path]
    assert not [path for path in chunks if "residual" in path or "mlp_output" in path]
    xr.testing.assert_identical(
        opened["residual"].sel(layer=5)[330:340].load(),
        nearline_store.open(local, chunks=None)["residual"].sel(layer=5)[330:340].load(),
    )
    fetched = [path for _, path, _ in served.requests if "residual_bits/c/" in path]
    assert {path.removeprefix("/mine/") for path in fetched} == {CHUNK}
    xr.testing.assert_identical(
        xr.open_dataset(f"{url}/activations.zarr", engine="nearline").load(),
        nearline_store.open(local).load(),
    )


def test_s3_opens_lazily_with_dask_and_without_secrets(local: Path, bucket_url: str) -> None:
    expected = nearline_store.open(local)["mlp_output"].mean("token").compute()
    opened = nearline_store.open(bucket_url)
    with dask.config.set(scheduler="threads", num_workers=2):
        xr.testing.assert_identical(opened["mlp_output"].mean("token").compute(), expected)
    reader = Reader.open(bucket_url)
    copied = pickle.loads(pickle.dumps(reader))
    assert np.array_equal(copied.rows("residual", 2, 0, 4), Reader.open(local).rows("residual", 2, 0, 4))
    graph = pickle.dumps(dict(opened["mlp_output"].data.__dask_graph__()))
    for secret in (SECRET_KEY, ACCESS_KEY):
        assert secret.encode() not in pickle.dumps(reader) + graph
        assert secret not in repr(opened.encoding) + reader.path
    assert info(bucket_url)["sealed"]
    assert info(bucket_url)["digest"] == info(local)["digest"]


def test_plain_zarr_opens_a_url(local: Path, served: FileServer) -> None:
    from obstore.store import HTTPStore

    url = f"{served.url}/mine/activations.zarr"
    store = zarr.storage.ObjectStore(HTTPStore(url, client_options={"allow_http": True}), read_only=True)
    plain = xr.open_zarr(store)
    xr.testing.assert_identical(plain.load(), xr.open_zarr(local / "activations.zarr").load())


def test_damage_behind_a_url_is_named(served: FileServer, tmp_path: Path) -> None:
    url, victim = f"{served.url}/mine", tmp_path / "mine" / CHUNK
    reader = Reader.open(url)
    content = victim.read_bytes()
    spot = "`residual` layer 5, tokens 320-479"
    victim.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    with pytest.raises(DamageError, match=f"{spot}.*checksum"):
        reader.rows("residual", 5, 0, 4)
    victim.write_bytes(b"<html>please log in</html>")
    with pytest.raises(DamageError, match=f"{spot}.*bytes"):
        reader.rows("residual", 5, 0, 4)
    victim.write_bytes(b"")
    with pytest.raises(DamageError, match=f"{spot}.*bytes"):
        reader.rows("residual", 5, 0, 4)
    victim.unlink()
    with pytest.raises(MissingChunk, match=spot):
        reader.rows("residual", 5, 0, 4)


def test_an_unsealed_copy_and_an_absent_store_are_told_apart(served: FileServer, tmp_path: Path) -> None:
    (tmp_path / "mine/SEALED").unlink()
    with pytest.raises(StoreNotSealed, match="incomplete copy"):
        nearline_store.open(f"{served.url}/mine")
    with pytest.raises(StoreNotFound, match=r"no-such.*: check the URL"):
        nearline_store.open(f"{served.url}/no-such")


def test_a_study_of_a_url_equals_the_study_of_the_folder(
    local: Path, served: FileServer, tmp_path: Path
) -> None:
    url, settings = f"{served.url}/mine", FitSettings(folds=2)
    here, there = fit(tmp_path / "here", [local], settings), fit(tmp_path / "there", [url], settings)
    assert there.table("surrogates").equals(here.table("surrogates"))
    assert there.stores() == {"mine": url}
