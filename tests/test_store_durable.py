"""Nothing is called written before it is on disk, and nothing is written past the durable path."""

import errno
import logging
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers_disk import Log, power_cut, unsynced, watched
from helpers_store import begin, commit, make_store, synthetic, tree, write_all
from nearline.store import EnvironmentFault, Reader, disk, durable, points, seal
from nearline.store.durable import create_file, create_files, sweep, write_file

pytestmark = pytest.mark.sampled
SETTINGS: dict[str, Any] = {"n_tokens": 30, "block": 10, "n_layers": 1, "d": 4, "sequence_length": 10}
DATA = synthetic(**SETTINGS)
PACKAGE = Path(points.__file__).parents[1]
PARTS = ("store", "collect", "analyze", "reports", "workflows")


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return tree(make_store(tmp_path_factory.mktemp("calm") / "s", **SETTINGS))


def log_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, work: Callable[[Path, Log], None], **options: bool
) -> Log:
    root = tmp_path / "disk"
    root.mkdir()
    with watched(root, monkeypatch, **options) as log:
        work(root / "s", log)
    return log


def harvest(path: Path, log: Log) -> None:
    writer = begin(path, DATA)
    log.mark("begun")
    for block in sorted(set(range(DATA.plan.n_blocks)) - writer.committed):
        commit(writer, DATA, block)
        log.mark(f"committed {block}")
    writer.seal()
    log.mark("sealed")


# Every file of a store


def test_every_file_of_a_store_is_synced_before_it_has_its_name_and_its_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = log_of(tmp_path, monkeypatch, harvest, real_sync=True)
    assert unsynced(log) == []
    names = {inode: Path(path).relative_to(log.root) for path, inode in log.paths.items()}
    for path, inode in log.paths.items():  # what there is came by a link or a rename, and by no other way
        if Path(path).is_file():
            calls = [call for call in log.calls if call.inode == inode]
            kinds = [call.kind for call in calls if call.kind != "drop"]
            puts = [call.name for call in calls if call.kind == "put"]
            assert [name.endswith(durable.PARTIAL) for name in puts] == [True, False], names[inode]
            assert kinds[:2] == ["file", "put"], names[inode]
            assert set(kinds[2:-2]) == {"write"}, names[inode]
            assert kinds[-2:] == ["sync", "put"], names[inode]
    wanted = {name: content for name, content in tree(tmp_path / "disk" / "s").items()}
    assert {str(names[inode]) for path, inode in log.paths.items() if Path(path).is_file()} == {
        f"s/{name}" for name in wanted
    }
    n_files = len(wanted) + 1  # the root's metadata is written twice
    assert sum(call.kind == "put" and not call.name.endswith(".partial") for call in log.calls) >= n_files


def test_a_record_has_its_name_after_all_its_chunks_are_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = log_of(tmp_path, monkeypatch, harvest)
    for block in range(3):
        put = next(i for i, call in enumerate(log.calls) if call.name == f"{block:06d}.json")
        at_that_moment = Log(log.root, log.calls[:put], log.paths)
        assert [problem for problem in unsynced(at_that_moment) if ".lock" not in problem] == []
        power_cut(log, put, tmp_path / f"cut{block}")
        chunk = f"cut{block}/s/activations.zarr/residual/c/0/{block}/0"
        assert (tmp_path / chunk).stat().st_size == 10 * 4 * 4 + 4


@pytest.mark.parametrize("lost", ["sync_file", "synced_folder"])
def test_a_missing_sync_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(durable, lost, lambda *args: None)
        log = log_of(tmp_path, monkeypatch, harvest)
    found = unsynced(log)
    assert len(found) > 30
    assert any("residual" in problem or problem.startswith("0 got") for problem in found)


def test_a_folder_that_a_killed_process_made_is_made_durable_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calm: dict[str, bytes]
) -> None:
    """Its entry was never synced, and whoever finds the folder cannot know."""

    class Crash(BaseException):
        pass

    def killed_and_gone_on(path: Path, log: Log) -> None:
        def crash(name: str) -> None:
            if name == "durable.written":
                raise Crash

        writer = begin(path, DATA)
        with monkeypatch.context() as patch:
            patch.setattr(points, "hook", crash)
            with pytest.raises(Crash):
                commit(writer, DATA, 0)
        harvest(path, log)

    log = log_of(tmp_path, monkeypatch, killed_and_gone_on)
    assert unsynced(log) == []
    power_cut(log, len(log.calls), tmp_path / "cut")
    assert tree(tmp_path / "cut" / "s") == calm


@pytest.mark.parametrize("again", [seal, lambda path: write_all(path, DATA)], ids=["seal", "collect"])
def test_a_record_that_a_killed_process_created_is_made_durable_before_the_seal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: Callable[[Path], object]
) -> None:
    """It has its name, and the process died before it could sync the folder."""

    class Crash(BaseException):
        pass

    def killed_and_sealed(path: Path, log: Log) -> None:
        def crash(name: str) -> None:
            if name == "durable.created":
                raise Crash

        writer = begin(path, DATA)
        for block in range(2):
            commit(writer, DATA, block)
        with monkeypatch.context() as patch:
            patch.setattr(points, "hook", crash)
            with pytest.raises(Crash):
                commit(writer, DATA, 2)
        again(path)

    log = log_of(tmp_path, monkeypatch, killed_and_sealed)
    assert unsynced(log) == []
    power_cut(log, len(log.calls), tmp_path / "cut")
    assert Reader.open(tmp_path / "cut" / "s").n_blocks == 3


MANY_LAYERS = """
import os, resource, sys
from pathlib import Path
from helpers_store import make_store
os.fsync = lambda descriptor: None
resource.setrlimit(resource.RLIMIT_NOFILE, (192, 192))
make_store(Path(sys.argv[1]), n_tokens=30, block=10, n_layers=100, d=2, sequence_length=10)
"""


def test_a_block_of_more_chunk_objects_than_a_process_may_open_is_written(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-c", MANY_LAYERS, str(tmp_path / "s")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    reader = Reader.open(tmp_path / "s")
    assert len(reader.record(0).chunks) > 192


def test_files_get_their_names_batch_by_batch_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable, "OPEN_FILES", 2)
    names, seen = list("edcba"), list[set[str]]()

    def look(name: str) -> None:
        if name == "durable.folders_synced":
            seen.append({path.name for path in tmp_path.iterdir()})

    monkeypatch.setattr(points, "hook", look)
    durable.write_files((tmp_path / name, (name.encode(),)) for name in names)
    assert seen == [set("ed"), set("edcb"), set(names)]
    assert all((tmp_path / name).read_text() == name for name in names)


# Power cuts


def test_after_a_power_cut_what_was_reported_is_there_and_the_rest_can_be_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calm: dict[str, bytes], request: pytest.FixtureRequest
) -> None:
    log = log_of(tmp_path, monkeypatch, harvest)
    rng = random.Random(0)
    n_cuts = 300 if request.config.getoption("--run-long") else 24
    moments = sorted({*rng.sample(range(1, len(log.calls)), n_cuts), len(log.calls)})
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    for moment in moments:
        reported = {call.name for call in log.calls[:moment] if call.kind == "mark"}
        for kind, lucky in (("strict", None), ("mixed", rng)):
            path = tmp_path / f"{moment}-{kind}" / "s"
            power_cut(log, moment, path.parent, lucky)
            if "sealed" in reported:
                assert tree(path) == calm
            if "begun" in reported:
                writer = begin(path, DATA)
                assert {f"committed {block}" for block in writer.committed} >= reported - {"begun", "sealed"}
            write_all(path, DATA)
            assert tree(path) == calm, f"power cut after {moment} calls, {kind}"


def test_after_a_power_cut_a_shortening_is_done_or_can_be_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    data = synthetic(**{**SETTINGS, "n_tokens": 50})

    def shorten(path: Path, log: Log) -> None:
        writer = begin(path, data)
        for block in (0, 1, 2, 4):
            commit(writer, data, block)
        log.mark("committed")
        seal(path, partial=True, drop_blocks=True)
        log.mark("sealed")

    log = log_of(tmp_path, monkeypatch, shorten)
    assert unsynced(log) == []
    start = next(i for i, call in enumerate(log.calls) if call.name == "committed")
    rng, every = random.Random(1), request.config.getoption("--run-long")
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    wanted = tree(tmp_path / "disk" / "s")
    for moment in [*range(start + 1, len(log.calls), 1 if every else 23), len(log.calls)]:
        for kind, lucky in (("strict", None), ("mixed", rng)):
            path = tmp_path / f"{moment}-{kind}" / "s"
            power_cut(log, moment, path.parent, lucky)
            seal(path, partial=True, drop_blocks=True)
            assert tree(path) == wanted, f"power cut after {moment} calls, {kind}"


def test_a_power_cut_without_syncs_loses_what_was_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other side: the wrapper does drop what was not synced, and it does not pass in silence."""
    with monkeypatch.context() as patch:
        patch.setattr(durable, "sync_file", lambda descriptor, path: None)
        log = log_of(tmp_path, monkeypatch, harvest)
    power_cut(log, len(log.calls), tmp_path / "cut")
    assert (tmp_path / "cut/s/SEALED").read_bytes() == b""
    with pytest.raises(Exception, match="SEALED"):
        Reader.open(tmp_path / "cut/s")


# A file that must not exist


def test_of_files_that_must_not_exist_the_first_stays(tmp_path: Path) -> None:
    assert create_file(tmp_path / "a", b"first")
    assert not create_file(tmp_path / "a", b"second")
    assert create_files([(tmp_path / "a", (b"third",)), (tmp_path / "b", (b"one", b"two"))]) == [False, True]
    assert (tmp_path / "a").read_bytes() == b"first"
    assert (tmp_path / "b").read_bytes() == b"onetwo"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_a_link_whose_reply_was_lost_is_a_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network file system asks again, and is told that the name exists."""
    real = os.link

    def lost(source: Path, target: Path) -> None:
        real(source, target)
        raise FileExistsError(errno.EEXIST, "File exists")

    monkeypatch.setattr(os, "link", lost)
    assert create_file(tmp_path / "a", b"mine")
    assert not create_file(tmp_path / "a", b"second")


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def test_without_hard_links_a_store_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calm: dict[str, bytes], code: int
) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", refuse)
    assert create_file(tmp_path / "a", b"first")
    assert not create_file(tmp_path / "a", b"second")
    assert (tmp_path / "a").read_bytes() == b"first"
    write_all(tmp_path / "s", DATA)
    assert tree(tmp_path / "s") == calm


def test_without_hard_links_a_crash_leaves_an_empty_file_that_nobody_takes_for_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calm: dict[str, bytes], request: pytest.FixtureRequest
) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    names = [name for name in calm if name.endswith(".json") or name in ("SEALED", "documents.parquet")]
    every = request.config.getoption("--run-long")
    chosen = set(names) if every else {*names[::6], "SEALED", "blocks/000001.json"}
    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    for name in sorted(chosen - {"manifest.json"}):  # that one may replace an older one
        path = tmp_path / name.replace("/", "-") / "s"
        real = Path.replace

        def crash(self: Path, target: Path, name: str = name, real: Any = real) -> Path:
            if target.as_posix().endswith(f"/s/{name}"):
                raise KeyboardInterrupt
            return real(self, target)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", crash)
            with pytest.raises(KeyboardInterrupt):
                write_all(path, DATA)
        with pytest.raises(Exception, match=r"."):
            Reader.open(path)
        write_all(path, DATA)
        assert tree(path) == calm, name


# Leftovers


def test_only_what_nobody_writes_is_swept(tmp_path: Path) -> None:
    """A temporary of a living writer stays at every step of its writing; a dead one's goes."""
    (tmp_path / "dead.0123456789ab.partial").write_bytes(b"left")
    (tmp_path / "keep.json").write_bytes(b"data")
    swept: list[int] = []
    points.hook = lambda name: swept.append(sweep(tmp_path))
    try:
        write_file(tmp_path / "a", b"one")
        create_file(tmp_path / "b", b"two")
    finally:
        points.hook = lambda name: None
    assert sum(swept) == swept[0] == 1
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        "a": b"one",
        "b": b"two",
        "keep.json": b"data",
    }


def test_where_nothing_can_be_locked_nothing_is_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    (tmp_path / "dead.0123456789ab.partial").write_bytes(b"left")
    monkeypatch.setattr(disk.fcntl, "flock", refuse)
    assert sweep(tmp_path) == 0
    write_file(tmp_path / "a", b"one")
    assert len(list(tmp_path.iterdir())) == 2


def test_leftovers_of_a_killed_run_are_swept_and_those_of_a_living_one_are_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, calm: dict[str, bytes]
) -> None:
    path = make_store(tmp_path / "s", seal=False, blocks=[0], **SETTINGS)
    group = path / "activations.zarr"
    dead = [
        path / "plan.json.000000000000.partial",
        path / "blocks/000001.json.000000000000.partial",
        group / "residual/c/0/1/0.000000000000.partial",
        group / "token_id/c/1.000000000000.partial",
        group / "norm_weight/c/0/0.000000000000.partial",
        path / "runs/x.json.000000000000.partial",
    ]
    for file in dead:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"half")
    living = group / "residual/c/0/1/0.111111111111.partial"
    with living.open("wb") as file:
        assert disk.lock(file.fileno())
        with caplog.at_level(logging.INFO, "nearline"):
            write_all(path, DATA)
        assert [name for name in path.rglob("*.partial")] == [living]
    assert "leftovers of runs that ended early were removed" in caplog.text
    living.unlink()
    assert tree(path) == calm


def test_a_commit_swept_at_every_step_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calm: dict[str, bytes]
) -> None:
    """Cleaning up during a live write: another process begins and sweeps wherever this one is."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    path, busy = tmp_path / "s", []

    def interleave(name: str) -> None:
        if not busy and name.startswith(("durable.", "writer.")) and (path / "blocks").exists():
            busy.append(name)
            other = begin(path, DATA)
            assert not other.begun_here or name == "writer.root_begun"
            for folder in (path / "activations.zarr").rglob("*"):
                if folder.is_dir():
                    sweep(folder)
            busy.clear()

    monkeypatch.setattr(points, "hook", interleave)
    write_all(path, DATA)
    assert tree(path) == calm


# Odd disks


def test_a_short_write_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, view: real(descriptor, memoryview(view)[:7]))
    values = np.arange(100, dtype=np.float32)
    write_file(tmp_path / "a", values, b"end")
    assert (tmp_path / "a").read_bytes() == values.tobytes() + b"end"


def test_a_store_below_spaces_and_letters_of_all_kinds(tmp_path: Path, calm: dict[str, bytes]) -> None:
    path = tmp_path / "zwölf Boxkämpfer, 100 % ✓" / "s"
    write_all(path, DATA)
    assert tree(path) == calm
    assert Reader.open(path).digest == seal(path)


def test_a_folder_that_is_a_file_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(EnvironmentFault, match="cannot create"):
        begin(tmp_path / "file" / "s", DATA)
