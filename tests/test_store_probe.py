"""The probe on good servers, and on servers that break one promise each: every one is found."""

import threading
from pathlib import Path
from typing import Any, cast

import pytest
from helpers_hub import FakeHub
from helpers_servers import Bucket, Fault, FaultProxy
from nearline.store.errors import EnvironmentFault
from nearline.store.patience import Patience
from nearline.store.places import LocalPlace, WritablePlace, place_of
from nearline.store.probe import RACERS, probe, require_exclusive_create
from nearline.store.remote import remote_place

pytest_plugins = ("helpers_servers", "helpers_hub")

QUICK = Patience(
    retries=2, again=1, first_wait_s=0.001, longest_wait_s=0.002, silence_s=5, sleep=lambda s: None
)
CHECKS = {"put", "absent", "range", "listing", "create_refused", "create_race"}


def test_a_folder_keeps_all_promises(tmp_path: Path) -> None:
    place = LocalPlace(tmp_path / "new")
    assert probe(place) == dict.fromkeys(CHECKS, True)
    assert not list((tmp_path / "new").iterdir())
    require_exclusive_create(place)


def test_a_good_store_keeps_all_promises(s3_bucket: Bucket) -> None:
    place: Any = place_of(f"{s3_bucket.url}/store")
    assert probe(place) == dict.fromkeys(CHECKS, True)
    require_exclusive_create(place)
    assert place_of(s3_bucket.url).list() == {}


def test_a_store_that_ignores_conditions_is_refused_by_name(
    s3_bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FaultProxy(s3_bucket.endpoint, strip=("If-None-Match",)) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        place: Any = remote_place(f"{s3_bucket.url}/store", QUICK)
        failed = {name for name, kept in probe(place).items() if not kept}
        assert failed == {"create_refused", "create_race"}
        with pytest.raises(
            EnvironmentFault, match=rf"^{s3_bucket.url}/store: .*exactly one.*here {RACERS}, {RACERS}"
        ):
            require_exclusive_create(place)
        require_exclusive_create(place, allowed=True)
        assert place.list() == {}


def test_a_store_that_checks_in_sequence_only_is_refused(tmp_path: Path) -> None:
    """Like OpenStack Swift: it looks, and then it writes. The twin of a store without a lock."""

    class Swift(LocalPlace):
        def create(self, name: str, content: bytes) -> bool:
            if self.size(name) is not None:
                return False
            arrived.wait(timeout=20)  # all racers have looked before one writes
            self.put(name, content)
            return True

    arrived = threading.Barrier(RACERS)
    place: Any = Swift(tmp_path)
    other = type("Remote", (), {"__getattr__": lambda self, name: getattr(place, name)})()  # not a LocalPlace
    with pytest.raises(EnvironmentFault, match=rf"here {RACERS}, {RACERS}, {RACERS} did"):
        require_exclusive_create(cast("WritablePlace", other))


def test_other_broken_promises_are_named(s3_bucket: Bucket, s3_proxy: FaultProxy) -> None:
    place: Any = remote_place(f"{s3_bucket.url}/store", QUICK)
    s3_proxy.add(Fault("status", path="list-type=2", status=200, times=None, body=b"<ListBucketResult/>"))
    assert {name for name, kept in probe(place).items() if not kept} == {"listing"}


def test_a_store_without_permission_is_an_error(s3_bucket: Bucket, s3_proxy: FaultProxy) -> None:
    place: Any = remote_place(f"{s3_bucket.url}/store", QUICK)
    s3_proxy.add(Fault("status", method="PUT", status=403, times=None))
    for ask in (probe, require_exclusive_create):
        with pytest.raises(EnvironmentFault, match="refuses access"):
            ask(place)
    with pytest.raises(EnvironmentFault, match=rf"^{place.url}: "):  # and no file that the user never named
        require_exclusive_create(place)


def test_the_hub_is_not_raced(hub: FakeHub) -> None:
    require_exclusive_create(place_of("hf://datasets/org/new"))  # type: ignore[arg-type]
    assert not hub.requests
