"""A store onto the Hub and back, the real client against a small Hub: commits, resuming, limits, secrets."""

import logging
import pickle
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers_hub import TOKEN, FakeHub
from helpers_servers import Fault, FaultProxy
from helpers_store import make_store
from nearline.store import hub_upload
from nearline.store.errors import EnvironmentFault, UsageError
from nearline.store.hub import HubPlace, hub_place
from nearline.store.patience import Patience

pytest_plugins = ("helpers_hub",)

URL = "hf://datasets/org/store"
QUICK = Patience(
    retries=1, again=2, first_wait_s=0.001, longest_wait_s=0.002, silence_s=5, sleep=lambda s: None
)
SECRETS = (TOKEN, "planted-signature")


@pytest.fixture
def place(hub: FakeHub) -> HubPlace:
    return hub_place(URL, QUICK)


@pytest.fixture
def proxy(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    with FaultProxy(hub.url) as proxy:
        hub.use(monkeypatch, proxy.url)
        yield proxy


@pytest.fixture
def store(tmp_path: Path) -> dict[str, Path]:
    """Like a store: 25 files, some for LFS, one empty; what makes it whole comes last."""
    files = {f"c/{i // 10}/{i}": bytes([i]) * (i * 100) for i in range(22)}
    files |= {
        "README.md": b"---\nlicense: other\n---\n# A store",
        "manifest.json": b"{}",
        "SEALED": b"seal\n",
    }
    for name, content in files.items():
        (tmp_path / "store" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "store" / name).write_bytes(content)
    return {name: tmp_path / "store" / name for name in files}


def send(place: HubPlace, store: dict[str, Path], **more: Any) -> None:
    last = ("manifest.json", "SEALED")
    files = [(name, path) for name, path in store.items() if name not in last]
    place.upload(files, last=[(name, store[name]) for name in last], **more)


def contents(store: dict[str, Path]) -> dict[str, bytes]:
    return {name: path.read_bytes() for name, path in store.items()}


def test_few_commits_the_seal_last_in_a_private_repository(
    hub: FakeHub, place: HubPlace, store: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_upload, "FILES_PER_COMMIT", 10)
    told: list[tuple[int, int]] = []
    send(place, store, progress=lambda stage, done, total, unit: told.append((done, total)))
    assert hub.files("org/store") == contents(store)
    commits = hub.commits("org/store")
    assert len(commits) == 1 + 3 + 1
    assert not any({"SEALED", "manifest.json"} & set(files) for files in commits[:-1])
    assert hub.visibility["org/store"] == "private"
    assert told[-1][0] == told[-1][1] > 0
    again = hub_place(URL, QUICK)
    assert {name: again.read(name) for name in again.list() or () if name in store} == contents(store)


def test_a_second_upload_sends_nothing(hub: FakeHub, place: HubPlace, store: dict[str, Path]) -> None:
    send(place, store)
    before, hub.requests = len(hub.commits("org/store")), []
    send(hub_place(URL, QUICK), store)
    assert len(hub.commits("org/store")) == before
    assert not [path for _, path in hub.requests if "/lfs/" in path or "/commit/" in path]


@pytest.mark.parametrize("after", [0, 2, 4])
@pytest.mark.parametrize("path", ["/commit/", "/lfs/", "/preupload/"])
def test_cut_off_anywhere_it_goes_on(
    hub: FakeHub,
    proxy: FaultProxy,
    store: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    after: int,
) -> None:
    monkeypatch.setattr(hub_upload, "FILES_PER_COMMIT", 6)
    proxy.add(Fault("status", path=path, status=400, after=after, times=None))
    with pytest.raises(EnvironmentFault, match="HTTP 400"):
        send(hub_place(URL, QUICK), store)
    assert "SEALED" not in hub.files("org/store")
    proxy.clear()
    send(hub_place(URL, QUICK), store)
    assert hub.files("org/store") == contents(store)


def test_a_lost_reply_to_a_commit_is_looked_up(
    hub: FakeHub, proxy: FaultProxy, store: dict[str, Path]
) -> None:
    proxy.add(Fault("drop_reply", method="POST", path="/commit/", times=2))
    send(hub_place(URL, QUICK), store)
    assert proxy.struck == 2
    assert hub.files("org/store") == contents(store)
    assert len(hub.commits("org/store")) == 1 + 1 + 1


def test_passing_faults_of_the_api(hub: FakeHub, proxy: FaultProxy, store: dict[str, Path]) -> None:
    for path in ("/tree/", "/commit/", "/paths-info/", "/revision/"):
        proxy.add(Fault("status", path=path, status=503, times=1))
    place = hub_place(URL, QUICK)
    send(place, store)
    proxy.add(Fault("status", path="/resolve/", status=503, times=1), Fault("cut", path="/cdn/", n_bytes=700))
    assert place.read("c/2/21") == store["c/2/21"].read_bytes()
    assert hub.files("org/store") == contents(store)


def test_a_commit_of_somebody_else_is_no_harm(
    hub: FakeHub, place: HubPlace, store: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at the whole and the seal: its parent is refused, and all is looked at again."""
    original, crossed = hub_upload._missing, []

    def cross(there: dict[str, Any], wanted: Any) -> list[str]:
        found = original(there, wanted)
        if len(crossed) < 2:
            crossed.append(1)
            hub.repos["org/store"].append(
                (f"{len(crossed):040x}", {**hub.files("org/store"), "NOTE": b"hello"})
            )
        return found

    monkeypatch.setattr(hub_upload, "_missing", cross)
    send(place, store)
    assert hub.files("org/store") == {**contents(store), "NOTE": b"hello"}


def test_a_file_that_vanishes_is_not_sealed(
    hub: FakeHub, place: HubPlace, store: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = HubPlace.write

    def lose(self: HubPlace, *args: Any, **more: Any) -> None:
        original(self, *args, **more)
        hub.repos["org/store"][-1][1].pop("c/0/3", None)

    monkeypatch.setattr(HubPlace, "write", lose)
    with pytest.raises(EnvironmentFault, match=r"c/0/3: sent, and the Hub does not show it"):
        send(place, store)
    assert "SEALED" not in hub.files("org/store")


def test_another_store_there_is_not_touched(hub: FakeHub, place: HubPlace, store: dict[str, Path]) -> None:
    hub.fill("org/store", {"SEALED": b"other\n", "manifest.json": b"{}"})
    with pytest.raises(UsageError, match="another store"):
        send(place, store)
    assert len(hub.commits("org/store")) == 2


def test_a_store_goes_there_and_back(hub: FakeHub, tmp_path: Path) -> None:
    from nearline.store.transfer import pull, push

    store = make_store(tmp_path / "here")
    push(store, URL)
    push(store, URL)
    files = {name: path.read_bytes() for name, path in _files(store).items()}
    assert hub.files("org/store") == files
    assert all("SEALED" not in commit for commit in hub.commits("org/store")[:-2])
    pull(URL, tmp_path / "back")
    assert {name: path.read_bytes() for name, path in _files(tmp_path / "back").items()} == files


def _files(folder: Path) -> dict[str, Path]:
    found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return {name: path for name, path in found.items() if not name.startswith("runs/")}


class TestLimits:
    """What the Hub does not take is refused before anything is sent."""

    @pytest.fixture(autouse=True)
    def _nothing_is_sent(self, hub: FakeHub) -> Iterator[None]:
        yield
        assert not hub.requests

    def test_files(self, place: HubPlace, store: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(hub_upload, "MAX_FILES", 24)
        with pytest.raises(UsageError, match=r"25 files, the Hub takes 24: .*s3"):
            send(place, store)

    def test_entries(self, place: HubPlace, store: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(hub_upload, "MAX_ENTRIES", 9)
        with pytest.raises(UsageError, match=r"folder 'c/0' would hold 10 entries, the Hub takes 9"):
            send(place, store)

    def test_size(self, place: HubPlace, store: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(hub_upload, "MAX_FILE_BYTES", 2000)
        with pytest.raises(UsageError, match=r"c/2/21 has 2100 bytes, the Hub takes 2000"):
            send(place, store)

    def test_a_name_twice(self, place: HubPlace, store: dict[str, Path]) -> None:
        with pytest.raises(UsageError, match="'SEALED' is given twice"):
            place.upload([("SEALED", store["SEALED"])], last=[("SEALED", store["SEALED"])])

    def test_the_numbers_of_august_2026(self) -> None:
        assert (hub_upload.MAX_FILES, hub_upload.MAX_ENTRIES) == (100_000, 10_000)
        assert hub_upload.MAX_FILE_BYTES == 200 * 10**9
        assert hub_upload.FILES_PER_COMMIT <= 100


class TestSecrets:
    def test_neither_errors_nor_logs_show_the_token_or_a_signed_url(
        self, hub: FakeHub, proxy: FaultProxy, store: dict[str, Path], caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.DEBUG)
        logger = logging.getLogger("huggingface_hub.utils._http")
        logger.addHandler(caplog.handler)
        level, said = (
            logger.level,
            f"thrown while requesting PUT {hub.url}/lfs/1?X-Amz-Signature=planted-signature",
        )
        logger.setLevel(logging.DEBUG)
        try:
            for path in ("/commit/", "/lfs/", "/tree/", "/preupload/"):
                proxy.clear()
                proxy.add(Fault("status", path=path, status=400, times=None, body=TOKEN.encode()))
                with pytest.raises(EnvironmentFault) as caught:
                    send(hub_place(URL, QUICK), store)
                shown = "".join(traceback.format_exception(caught.value)) + str(caught.value)
                assert not [secret for secret in SECRETS if secret in shown]
            logger.warning(said)
        finally:
            logger.setLevel(level)
            logger.removeHandler(caplog.handler)
        assert "thrown while requesting" in caplog.text
        assert not [secret for secret in SECRETS if secret in caplog.text]

    def test_a_pickle_holds_no_token(self, place: HubPlace, store: dict[str, Path]) -> None:
        send(place, store)
        assert place.read("SEALED") == b"seal\n"  # the client inside holds the token now
        assert TOKEN.encode() not in pickle.dumps(place)
        assert TOKEN not in repr(place)

    def test_without_a_token(self, place: HubPlace, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
        hub.fill("org/store", {"SEALED": b"x"})
        monkeypatch.delenv("HF_TOKEN")
        with pytest.raises(FileNotFoundError):  # the Hub tells nobody of a private repository
            hub_place(URL, QUICK).read("SEALED")
        with pytest.raises(EnvironmentFault, match=r"other credentials|may not make it"):
            hub_place(URL, QUICK).put("x", b"1")

    def test_offline_is_said(self, place: HubPlace, monkeypatch: pytest.MonkeyPatch) -> None:
        from huggingface_hub import constants

        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(
            EnvironmentFault, match=r"offline mode is enabled\. Unset the variable HF_HUB_OFFLINE"
        ):
            place.read("SEALED")
