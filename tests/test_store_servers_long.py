"""The places against a real S3 server, Ceph radosgw: contract, create races, multipart, a push and a pull."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from helpers_contracts import FILES, RemoteNames, WritingContract
from helpers_radosgw import Gateway
from helpers_servers import Bucket, Fault, FaultProxy, s3_client, use_s3
from helpers_store import make_store
from nearline.store.errors import EnvironmentFault
from nearline.store.patience import Patience
from nearline.store.places import LocalPlace, place_of, writable_place_of
from nearline.store.probe import probe, require_exclusive_create
from nearline.store.remote import remote_place

pytest_plugins = ("helpers_radosgw",)
pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
QUICK = Patience(retries=2, again=2, first_wait_s=0.01, longest_wait_s=0.02, silence_s=20)


@pytest.fixture
def bucket(gateway_bucket: Bucket) -> str:
    return gateway_bucket.name


class TestContract(WritingContract, RemoteNames):
    @pytest.fixture
    def place(self, bucket: str, gateway: Gateway) -> Any:
        client = s3_client(gateway.endpoint, gateway.access, gateway.secret)
        for name, content in FILES.items():
            client.put_object(Bucket=bucket, Key=f"some where/{name}", Body=content)
        client.put_object(Bucket=bucket, Key="some where else/SEALED", Body=b"another store")
        return place_of(f"s3://{bucket}/some where")

    @pytest.fixture
    def empty(self, bucket: str) -> Any:
        return writable_place_of(f"s3://{bucket}/new/one")


def test_it_keeps_all_promises(bucket: str) -> None:
    place: Any = place_of(f"s3://{bucket}/store")
    assert all(probe(place).values())
    for _ in range(10):
        require_exclusive_create(place)
    assert place.list() == {}


def test_more_than_a_thousand_files_are_listed(bucket: str, gateway: Gateway) -> None:
    client = s3_client(gateway.endpoint, gateway.access, gateway.secret)
    with ThreadPoolExecutor(16) as threads:
        for index in range(1010):
            threads.submit(client.put_object, Bucket=bucket, Key=f"p/{index:05d}", Body=b"")
    assert len(place_of(f"s3://{bucket}/p").list() or ()) == 1010


def test_a_large_file_in_parts_survives_faults(
    bucket: str, gateway: Gateway, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    content = bytes(range(256)) * (2**12 * 20)  # 20 MiB
    (tmp_path / "large").write_bytes(content)
    client = s3_client(gateway.endpoint, gateway.access, gateway.secret)
    faults = [
        Fault("cut_upload", method="PUT", n_bytes=3_000_000),
        Fault("drop_reply", method="PUT", path="partNumber=2"),
        Fault("drop_reply", method="POST", path="uploadId"),
        Fault("status", method="POST", path="uploads", status=503),
    ]
    with FaultProxy(gateway.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        place: Any = remote_place(f"s3://{bucket}/store", QUICK)
        for index, fault in enumerate(faults):
            proxy.add(fault)
            place.put(f"large-{index}", tmp_path / "large")
            assert proxy.struck == index + 1
            proxy.add(Fault("cut", n_bytes=5_000_000, method="GET"))
            assert place.read(f"large-{index}") == content
            proxy.struck = index + 1
        proxy.add(Fault("status", method="PUT", path="partNumber=3", status=500, times=None))
        with pytest.raises(EnvironmentFault, match="no success"):
            place.put("lost", tmp_path / "large")
        assert place.size("lost") is None
    assert not client.list_multipart_uploads(Bucket=bucket).get("Uploads")


def test_a_lost_reply_to_create_is_settled(
    bucket: str, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FaultProxy(gateway.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        place: Any = remote_place(f"s3://{bucket}/store", QUICK)
        proxy.add(Fault("drop_reply", method="PUT"))
        assert place.create("SEALED", b"mine")
        assert not place.create("SEALED", b"other")


def test_wrong_keys_are_refused_without_showing_them(
    bucket: str, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_s3(monkeypatch, gateway.endpoint, gateway.access, "planted-wrong-secret")
    with pytest.raises(EnvironmentFault, match="refuses access") as caught:
        place_of(f"s3://{bucket}/store").read("SEALED")
    assert gateway.access not in str(caught.value)
    assert "planted" not in str(caught.value)


def test_a_store_goes_there_and_back(bucket: str, tmp_path: Path) -> None:
    from nearline.store.transfer import pull, push

    store = make_store(tmp_path / "store")
    url = f"s3://{bucket}/there"
    push(store, url)
    pull(url, tmp_path / "back")
    for name in LocalPlace(store).list() or ():
        if not name.startswith("runs/"):
            assert (tmp_path / "back" / name).read_bytes() == (store / name).read_bytes()
