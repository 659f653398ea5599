"""Remote places when things go wrong: every fault on the way, planted secrets, and servers that lie."""

import logging
import pickle
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers_contracts import read_all
from helpers_servers import ACCESS_KEY, SECRET_KEY, Bucket, Fault, FaultProxy, FileServer
from nearline.store import patience
from nearline.store.errors import EnvironmentFault, UsageError
from nearline.store.patience import Patience
from nearline.store.remote import remote_place
from nearline.store.scrub import scrub

pytest_plugins = ("helpers_servers",)

CONTENT = bytes(range(256)) * 4096  # 1 MiB
SECRETS = (SECRET_KEY, ACCESS_KEY, "hunter2", "X-Amz-Signature=", "planted-session-token")
QUICK = Patience(
    retries=2, again=1, first_wait_s=0.001, longest_wait_s=0.002, silence_s=0.5, sleep=lambda s: None
)


@pytest.fixture
def place(s3_proxy: FaultProxy, s3_bucket: Bucket) -> Any:
    place: Any = remote_place(f"{s3_bucket.url}/store", QUICK)
    place.put("file", CONTENT)
    s3_proxy.requests.clear()
    return place


@pytest.fixture
def pages(tmp_path: Path) -> Iterator[tuple[Any, FaultProxy]]:
    (tmp_path / "file").write_bytes(CONTENT)
    with FileServer(tmp_path) as server, FaultProxy(server.url) as proxy:
        yield remote_place(proxy.url, QUICK), proxy


PASSING = [
    Fault("status", status=429),
    Fault("status", status=500),
    Fault("status", status=503, times=2),
    Fault("cut", n_bytes=0),
    Fault("cut", n_bytes=300_001),
    Fault("stall"),
]


class TestReading:
    @pytest.mark.parametrize("fault", PASSING, ids=lambda f: f"{f.kind}-{f.status}-{f.n_bytes}")
    def test_a_passing_fault_passes(self, place: Any, s3_proxy: FaultProxy, fault: Fault) -> None:
        s3_proxy.add(fault)
        assert place.read("file") == CONTENT
        assert s3_proxy.struck == fault.times
        s3_proxy.add(Fault("status", status=503, method="HEAD"))
        assert place.size("file") == len(CONTENT)

    @pytest.mark.parametrize("fault", PASSING[:-1], ids=lambda f: f"{f.kind}-{f.status}-{f.n_bytes}")
    def test_over_plain_http_too(self, pages: tuple[Any, FaultProxy], fault: Fault) -> None:
        place, proxy = pages
        proxy.add(fault)
        assert read_all(place, "file", 100_000) == CONTENT
        assert proxy.struck == fault.times

    def test_a_server_without_ranges_starts_anew(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(CONTENT)
        with FileServer(tmp_path, ranges=False) as server, FaultProxy(server.url) as proxy:
            proxy.add(Fault("cut", n_bytes=700_000))
            assert remote_place(proxy.url, QUICK).read("file") == CONTENT

    @pytest.mark.parametrize("status", [429, 500, 503])
    def test_a_lasting_fault_ends_after_bounded_tries(
        self, place: Any, s3_proxy: FaultProxy, status: int
    ) -> None:
        s3_proxy.add(Fault("status", status=status, times=None))
        with pytest.raises(EnvironmentFault, match=rf"store/file: no success.*HTTP {status} PlannedFault"):
            place.read("file")
        assert len(s3_proxy.requests) == QUICK.retries + 1

    def test_a_body_cut_for_ever_ends_too(self, place: Any, s3_proxy: FaultProxy) -> None:
        s3_proxy.add(Fault("cut", n_bytes=100, times=None))
        with pytest.raises(EnvironmentFault, match=r"store/file: no success.*broke off"):
            place.read("file")
        assert len(s3_proxy.requests) <= (QUICK.retries + 1) * (QUICK.again + 1)

    def test_a_silent_server_is_given_up(self, place: Any, s3_proxy: FaultProxy) -> None:
        s3_proxy.add(Fault("stall", times=None))
        impatient: Any = remote_place(place.url, Patience(retries=0, again=0, silence_s=0.2))
        with pytest.raises(EnvironmentFault, match=r"store/file: no success"):
            impatient.read("file")

    def test_no_server_at_all(self, place: Any, s3_bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
        with FaultProxy(s3_bucket.endpoint) as gone:
            monkeypatch.setenv("AWS_ENDPOINT_URL", gone.url)
        with pytest.raises(EnvironmentFault, match=r"store/file: no success.*no connection"):
            remote_place(place.url, QUICK).read("file")

    @pytest.mark.parametrize(
        ("status", "words"), [(403, r"refuses access \(HTTP 403.*403 for 404"), (401, "other credentials")]
    )
    def test_refusals_are_not_repeated(
        self, place: Any, s3_proxy: FaultProxy, status: int, words: str
    ) -> None:
        s3_proxy.add(Fault("status", status=status, times=None))
        for ask in (place.read, place.size, place.open, place.list):
            with pytest.raises(EnvironmentFault, match=words):
                ask("file")
        assert len(s3_proxy.requests) == 4

    def test_404_is_an_absent_file(self, place: Any, s3_proxy: FaultProxy) -> None:
        s3_proxy.add(Fault("status", status=404, times=2))
        with pytest.raises(FileNotFoundError, match=r"s3://.*/store/file"):
            place.read("file")
        assert place.size("file") is None

    def test_a_body_shorter_than_announced_is_no_data(self, pages: tuple[Any, FaultProxy]) -> None:
        place, proxy = pages
        proxy.add(Fault("cut", n_bytes=100, times=None))
        with pytest.raises(EnvironmentFault):
            place.read("file")

    def test_a_well_formed_short_body_shows_in_the_size(self, place: Any, s3_proxy: FaultProxy) -> None:
        """Such a file can only be told from the right one by its record: `size` says what arrived."""
        s3_proxy.add(Fault("short", n_bytes=10))
        file = place.open("file")
        assert file.size == len(CONTENT) - 10
        file.close()

    def test_a_file_that_changes_while_it_is_read(
        self, pages: tuple[Any, FaultProxy], tmp_path: Path
    ) -> None:
        place, proxy = pages
        proxy.add(Fault("cut", n_bytes=500_000))
        file = place.open("file")
        (tmp_path / "file").write_bytes(CONTENT + b"more")
        with pytest.raises(EnvironmentFault, match="changed while it was read"):
            file.readinto(memoryview(bytearray(len(CONTENT))))


class TestWriting:
    @pytest.mark.parametrize("size", [1000, 9 * 2**20])
    @pytest.mark.parametrize(
        "fault",
        [
            Fault("status", method="PUT", status=503),
            Fault("cut_upload", method="PUT", n_bytes=500),
            Fault("drop_reply", method="PUT"),
            Fault("drop_reply", method="POST", path="uploadId"),
        ],
        ids=lambda f: f"{f.kind}-{f.method}",
    )
    def test_a_put_survives(self, place: Any, s3_proxy: FaultProxy, fault: Fault, size: int) -> None:
        content = (CONTENT * 9)[:size]
        s3_proxy.add(fault)
        place.put("new", content)
        s3_proxy.clear()
        assert place.read("new") == content

    def test_an_abandoned_upload_leaves_nothing(
        self, place: Any, s3_proxy: FaultProxy, s3_bucket: Bucket
    ) -> None:
        s3_proxy.add(Fault("status", method="PUT", path="partNumber=2", status=500, times=None))
        with pytest.raises(EnvironmentFault, match="store/new: no success"):
            place.put("new", CONTENT * 9)
        client: Any = s3_bucket.client()
        assert not client.list_multipart_uploads(Bucket=s3_bucket.name).get("Uploads")
        assert place.size("new") is None

    def test_a_store_that_keeps_less_is_found(self, place: Any, s3_proxy: FaultProxy) -> None:
        s3_proxy.add(Fault("status", method="PUT", status=200, headers=(("ETag", '"x"'),)))  # took nothing
        with pytest.raises(EnvironmentFault, match=r"sent 3 bytes, the store shows None"):
            place.put("new", b"abc")

    @pytest.mark.parametrize("kind", ["drop_reply", "cut_upload", "status"])
    def test_a_lost_reply_to_create_is_settled_by_reading(
        self, place: Any, s3_proxy: FaultProxy, kind: Any
    ) -> None:
        s3_proxy.add(Fault(kind, method="PUT", times=2, n_bytes=1))
        assert place.create("SEALED", b"mine")
        assert place.read("SEALED") == b"mine"
        s3_proxy.add(Fault(kind, method="PUT", times=2, n_bytes=1))
        assert not place.create("SEALED", b"other")
        assert place.read("SEALED") == b"mine"
        assert place.create("SEALED", b"mine")  # equal content counts as written: documented

    def test_a_timeout_after_the_server_took_it(self, place: Any, s3_proxy: FaultProxy) -> None:
        impatient: Any = remote_place(
            place.url, Patience(retries=0, again=2, silence_s=0.3, sleep=lambda s: None)
        )
        s3_proxy.add(Fault("stall", method="PUT"))  # here: before it took it
        assert impatient.create("SEALED", b"mine")
        assert place.read("SEALED") == b"mine"

    def test_waits_grow_with_jitter_and_are_bounded(self, place: Any, s3_proxy: FaultProxy) -> None:
        waited: list[float] = []
        slow = Patience(
            retries=0, again=6, first_wait_s=1, longest_wait_s=8, silence_s=5, sleep=waited.append
        )
        s3_proxy.add(Fault("status", method="PUT", times=None))
        with pytest.raises(EnvironmentFault, match="no success"):
            remote_place(place.url, slow).put("new", b"x")  # type: ignore[attr-defined]
        assert len(waited) == 6
        assert all(0 <= wait <= min(8, 2**attempt) for attempt, wait in enumerate(waited))
        assert len(set(waited)) == 6

    def test_a_bucket_that_is_not_there(self, place: Any) -> None:
        other: Any = remote_place("s3://no-such-bucket/store", QUICK)
        with pytest.raises(EnvironmentFault, match="no bucket 'no-such-bucket'"):
            other.put("x", b"1")
        with pytest.raises(EnvironmentFault, match="no bucket 'no-such-bucket'"):
            other.create("x", b"1")


class TestSecrets:
    @pytest.mark.parametrize(
        "fault",
        [
            Fault(
                "status",
                status=403,
                times=None,
                body=f"<AWSAccessKeyId>{ACCESS_KEY}</AWSAccessKeyId>".encode(),
            ),
            Fault("status", status=503, times=None, body=f"password=hunter2 {SECRET_KEY}".encode()),
            Fault("cut", times=None),
            Fault("drop_reply", times=None),
            Fault("page", times=None),
        ],
        ids=lambda f: f"{f.kind}-{f.status}",
    )
    def test_no_error_or_log_shows_one(
        self, place: Any, s3_proxy: FaultProxy, fault: Fault, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.DEBUG)
        s3_proxy.add(fault)
        acts: list[Callable[[], object]] = [
            lambda: place.read("file"),
            lambda: place.list(),
            lambda: place.put("x", b"1"),
            lambda: place.create("x", b"1"),
            lambda: place.delete("x"),
        ]
        for act in acts:
            try:
                act()
            except Exception as error:
                shown = (
                    "".join(traceback.format_exception(error)) + repr(error) + repr(pickle.dumps(str(error)))
                )
                assert not [secret for secret in SECRETS if secret in shown]
        assert not [secret for secret in SECRETS if secret in caplog.text]

    def test_a_place_shows_and_pickles_none(self, place: Any) -> None:
        for shown in (repr(place), str(place), place.url, place.where("x"), repr(pickle.dumps(place))):
            assert not [secret for secret in SECRETS if secret in shown]

    def test_a_child_opens_the_pickle_with_its_own_credentials(self, place: Any) -> None:
        code = "import pickle, sys; sys.stdout.buffer.write(pickle.load(sys.stdin.buffer).read('file'))"
        done = subprocess.run(
            [sys.executable, "-c", code], input=pickle.dumps(place), capture_output=True, check=True
        )
        assert done.stdout == CONTENT

    @pytest.mark.parametrize(
        "url",
        [
            "s3://user:hunter2@bucket/x",
            "http://user:hunter2@host/x",
            "https://hunter2@host/x",
            "https://host/x?X-Amz-Signature=hunter2",
            "https://host/x#hunter2",
            "s3://bucket/x?token=hunter2",
        ],
    )
    def test_urls_with_credentials_are_refused(self, url: str) -> None:
        with pytest.raises(UsageError) as caught:
            remote_place(url)
        assert "hunter2" not in "".join(traceback.format_exception(caught.value))

    @pytest.mark.parametrize("url", ["s3://", "s3:///x", "s3://b/../x", "http://h/a/%2e%2e/b", "s3://b/a//c"])
    def test_other_urls_that_cannot_be(self, url: str) -> None:
        with pytest.raises(UsageError):
            remote_place(url)

    def test_an_endpoint_with_a_password_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://user:hunter2@127.0.0.1:1")
        with pytest.raises(UsageError, match="AWS_ENDPOINT_URL holds") as caught:
            remote_place("s3://bucket/x")
        assert "hunter2" not in str(caught.value)

    @pytest.mark.parametrize(
        "text",
        [
            "GET https://host/x?X-Amz-Credential=hunter2&b=1 failed",
            "http://user:hunter2@host/",
            "http://user:hun@hunter2@host/",
            "Authorization: Bearer hunter2",
            "{'token': 'hunter2'}",
            'password="hunter2"',
            "aws_secret_access_key = hunter2",
            "Signature=hunter2, x",
            "a text with hf_abcDEF123456hunter2 in it",
        ],
    )
    def test_scrub(self, text: str) -> None:
        assert "hunter2" not in scrub(text)

    def test_scrub_knows_the_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SOME_API_KEY", "correct horse")
        assert scrub("said correct horse battery") == "said *** battery"
        assert scrub("s3://bucket/blocks/000001.json: 404") == "s3://bucket/blocks/000001.json: 404"


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(UsageError, match=r'pip install "nearline\[share\]"'):
        remote_place("s3://bucket/x")


def test_the_defaults_are_bounded() -> None:
    assert patience.PATIENCE.retries <= 10
    assert patience.PATIENCE.in_all_s <= 300


def test_a_cause_is_scrubbed_before_it_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of a secret is still half of a secret, and no longer known as one."""
    secret = "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY"
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    for length in range(110, 170):
        found = patience.cause_of(ValueError("x " * (length // 2) + "x" * (length % 2) + secret))
        assert secret[:8] not in found
        assert len(found) < 200
