"""One contract for all places (helpers_contracts.py): folder, S3 (moto), plain HTTP, Hub (a fake one)."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers_contracts import FILES, ReadingContract, RemoteNames, WritingContract
from helpers_hub import FakeHub
from helpers_servers import SECRET_KEY, Bucket, FileServer
from helpers_store import make_store
from nearline.store import Reader, info, pull, push, verify
from nearline.store.errors import EnvironmentFault, StoreNotFound, UsageError
from nearline.store.patience import Patience
from nearline.store.places import LocalPlace, place_of, writable_place_of
from nearline.store.probe import require_exclusive_create
from nearline.store.remote import remote_place

pytest_plugins = ("helpers_servers", "helpers_hub")


def fill(folder: Path) -> Path:
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


class TestFolder(WritingContract):
    @pytest.fixture
    def place(self, tmp_path: Path) -> LocalPlace:
        return LocalPlace(fill(tmp_path / "store"))

    @pytest.fixture
    def empty(self, tmp_path: Path) -> LocalPlace:
        return LocalPlace(tmp_path / "empty")

    def test_a_file_url_is_a_folder(self, place: LocalPlace) -> None:
        for url in (f"file://{place.path}", f"file:{place.path}", f"file://localhost{place.path}"):
            assert place_of(url).read("SEALED") == FILES["SEALED"]

    def test_a_file_url_may_be_relative_and_stays_where_it_was(
        self, place: LocalPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        place.path.rename(tmp_path / "a store#1")
        monkeypatch.chdir(tmp_path)
        found = [writable_place_of(url) for url in ("file:a%20store#1", "file:./a store#1")]
        monkeypatch.chdir("/")
        assert [each.read("SEALED") for each in found] == [FILES["SEALED"]] * 2

    @pytest.mark.parametrize("url", ["file://pu/a", "file:", "file://localhost"])
    def test_a_file_url_without_a_path_of_this_machine(self, url: str) -> None:
        with pytest.raises(UsageError, match=f"^{url}: .*write file:"):
            place_of(url)


class TestS3(WritingContract, RemoteNames):
    @pytest.fixture
    def place(self, s3_bucket: Bucket) -> Any:
        client: Any = s3_bucket.client()
        for name, content in FILES.items():
            client.put_object(Bucket=s3_bucket.name, Key=f"some where/{name}", Body=content)
        client.put_object(Bucket=s3_bucket.name, Key="some where else/SEALED", Body=b"another store")
        return place_of(f"{s3_bucket.url}/some where/")

    @pytest.fixture
    def empty(self, s3_bucket: Bucket) -> Any:
        return writable_place_of(f"{s3_bucket.url}/new/one")

    def test_a_whole_bucket_is_a_place(self, s3_bucket: Bucket) -> None:
        place = writable_place_of(s3_bucket.url)
        place.put("x", b"1")
        assert place.list() == {"x": 1}
        assert place.where("x") == f"{s3_bucket.url}/x"

    def test_a_bucket_that_is_not_there(self, s3_bucket: Bucket, tmp_path: Path) -> None:
        """One answer, whatever is asked."""
        url = "s3://no-such-bucket/store"
        for look in (Reader.open, info, verify, lambda url: pull(url, tmp_path / "copy")):
            with pytest.raises(StoreNotFound, match=f"^{url}: there is no bucket 'no-such-bucket'$"):
                look(url)
        store = make_store(tmp_path / "s", n_tokens=60, block=30, d=4)
        with pytest.raises(EnvironmentFault, match=f"^{url}: there is no bucket 'no-such-bucket'$"):
            push(store, url)

    def test_more_than_a_thousand_files_are_listed(self, s3_bucket: Bucket) -> None:
        from moto.s3.models import s3_backends

        behind = s3_backends["123456789012"]["aws"]  # the server runs in this process: 15 s of requests saved
        for index in range(1010):
            behind.put_object(s3_bucket.name, f"p/{index:05d}", b"")
        assert len(place_of(f"{s3_bucket.url}/p").list() or ()) == 1010

    def test_a_large_file_goes_up_in_parts(self, s3_bucket: Bucket, tmp_path: Path) -> None:
        content = bytes(range(256)) * (9 * 2**12)  # 9 MiB
        (tmp_path / "large").write_bytes(content)
        place = writable_place_of(f"{s3_bucket.url}/p")
        place.put("from a file", tmp_path / "large")
        place.put("from memory", content)
        client: Any = s3_bucket.client()
        for name in ("from a file", "from memory"):
            found = client.get_object(Bucket=s3_bucket.name, Key=f"p/{name}")
            assert found["ETag"].endswith('-2"')
            assert found["Body"].read() == content == place.read(name)


class TestGoogle(ReadingContract, RemoteNames):
    """moto takes gs:// requests too, but knows nothing of Google's header for conditional writes."""

    @pytest.fixture
    def empty(self, s3_bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> Any:
        monkeypatch.setenv("GOOGLE_BASE_URL", s3_bucket.endpoint)
        monkeypatch.setenv("GOOGLE_BEARER_TOKEN", SECRET_KEY)
        return writable_place_of(f"gs://{s3_bucket.name}/some where")

    @pytest.fixture
    def place(self, empty: Any) -> Any:
        for name, content in FILES.items():
            empty.put(name, content)
        return empty

    def test_large_files_and_deletion(self, empty: Any) -> None:
        content = bytes(range(256)) * (9 * 2**12)
        empty.put("large", content)
        assert empty.read("large") == content
        empty.delete("large")
        assert empty.list() == {}

    def test_its_create_is_found_to_be_unsafe_here(self, empty: Any) -> None:
        with pytest.raises(EnvironmentFault, match=r"gs://.*exactly one must win"):
            require_exclusive_create(empty)


class TestAzure:
    """No server for it runs here: only what is said before the first request."""

    def test_an_account_is_needed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
        with pytest.raises(UsageError, match=r"az://container/store: .*Account must be specified"):
            place_of("az://container/store")

    def test_no_server(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with FileServer(Path("/nonexistent")) as gone:
            monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", gone.url)
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "cGxhbnRlZC1zZWNyZXQ=")
        place = remote_place("az://container/store", Patience(retries=0, again=0))
        with pytest.raises(EnvironmentFault, match="no connection to the server") as caught:
            place.read("SEALED")
        assert "cGxhbnRlZC" not in str(caught.value)


class TestHttp(ReadingContract, RemoteNames):
    @pytest.fixture
    def place(self, tmp_path: Path) -> Iterator[Any]:
        with FileServer(fill(tmp_path / "some where")) as server:
            server.root = tmp_path
            yield place_of(f"{server.url}/some%20where/")

    def test_it_cannot_be_written(self, place: Any) -> None:
        with pytest.raises(UsageError, match="can only be read"):
            writable_place_of(place.url)


class TestHub(WritingContract, RemoteNames):
    @pytest.fixture
    def place(self, hub: FakeHub) -> Any:
        files = {f"some where/{name}": content for name, content in FILES.items()}
        hub.fill("org/name", {**files, "some where else/SEALED": b"another store", "README.md": b"# Hello"})
        return place_of("hf://datasets/org/name/some where")

    @pytest.fixture
    def empty(self, hub: FakeHub) -> Any:
        hub.fill("org/new", {})
        return writable_place_of("hf://datasets/org/new")

    def test_a_revision_is_kept(self, place: Any, hub: FakeHub) -> None:
        old = hub.repos["org/name"][-1][0]
        assert place.read("SEALED") == FILES["SEALED"]
        hub.repos["org/name"].append(("a" * 40, {"some where/SEALED": b"newer"}))
        assert place.read("SEALED") == FILES["SEALED"]
        assert set(place.list()) == set(FILES)
        assert place_of(place.url).read("SEALED") == b"newer"
        pinned = place_of(f"hf://datasets/org/name@{old}/some where")
        assert pinned.read("SEALED") == FILES["SEALED"]

    def test_what_is_not_there(self, place: Any) -> None:
        for url in ("hf://datasets/org/none", "hf://datasets/org/name@none", "hf://datasets/org/name/none"):
            absent = place_of(url)
            assert absent.size("SEALED") is None
            assert absent.list() == {}
            with pytest.raises(FileNotFoundError, match=url):
                absent.read("SEALED")

    @pytest.mark.parametrize("url", ["hf://org/name", "hf://datasets/name", "hf://models/org/name"])
    def test_only_datasets(self, url: str) -> None:
        with pytest.raises(UsageError, match="hf://datasets/ORG/NAME"):
            place_of(url)


def test_other_schemes_are_refused() -> None:
    with pytest.raises(UsageError, match=r"ftp.*allowed.*s3"):
        place_of("ftp://host/x")
