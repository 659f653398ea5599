"""Signals to a collecting process: the first ends it in good order, the second at once; no harm is done."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers_harvest import harvested
from helpers_kills import N_BLOCKS, Forge, store_files, the_forge
from nearline.collect.stopping import Interrupted, StopRequest, stop_on_signals
from nearline.store import Reader
from nearline.store.errors import NearlineError

INT, TERM = int(signal.SIGINT), int(signal.SIGTERM)


@pytest.fixture(scope="module")
def forge() -> Forge:
    return the_forge()


@pytest.fixture(scope="module")
def whole(forge: Forge, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    path = tmp_path_factory.mktemp("whole") / "store"
    assert forge.run(path=str(path)).code == 0
    return store_files(path)


def n_records(path: Path) -> int:
    return len(list((path / "blocks").glob("*.json")))


@pytest.mark.parametrize(
    ("point", "nth", "number"),
    [
        ("batch", 4, INT),
        ("batch", 5, TERM),
        ("writer.chunks_durable", 3, TERM),
        ("writer.record_created", N_BLOCKS, INT),
    ],
)
def test_the_first_signal_keeps_what_is_committed(
    point: str, nth: int, number: int, forge: Forge, whole: dict[str, bytes], tmp_path: Path
) -> None:
    path = tmp_path / "store"
    stopped = forge.run(path=str(path), handlers=True, signals={point: [nth, number]})
    assert stopped.code == 130
    n_committed = n_records(path)
    said = f"interrupted: {n_committed} of {N_BLOCKS} blocks are committed; the same command continues"
    assert stopped.message == said
    # A block that was with the writer is finished, the one being filled is dropped.
    assert n_committed >= (1 if point == "batch" else nth)
    assert stopped.points["batch"] == nth or point != "batch"
    with pytest.raises(NearlineError):
        Reader.open(path)
    assert forge.run(path=str(path), handlers=True).code == 0
    assert store_files(path) == whole


@pytest.mark.parametrize(
    ("point", "says"),
    [
        ("durable.written", "nothing was collected yet; the same command starts again"),
        ("writer.root_begun", "nothing was collected yet; the same command starts again"),
        ("sealing.manifest_written", "6 of 6 blocks are committed; the same command continues"),
        ("sealing.sealed", "6 of 6 blocks are committed; the same command continues"),
    ],
)
def test_a_signal_before_and_after_the_blocks_ends_the_run_there(
    point: str, says: str, forge: Forge, whole: dict[str, bytes], tmp_path: Path
) -> None:
    path = tmp_path / "store"
    stopped = forge.run(path=str(path), handlers=True, signals={point: [1, TERM]})
    assert (stopped.code, stopped.message) == (130, f"interrupted: {says}")
    assert "batch" not in stopped.points or "6 of 6" in says
    assert forge.run(path=str(path), handlers=True).code == 0
    assert store_files(path) == whole


@pytest.mark.parametrize("numbers", [[INT, INT], [TERM, INT]])
def test_the_second_signal_ends_the_process_at_once(
    numbers: list[int], forge: Forge, whole: dict[str, bytes], tmp_path: Path
) -> None:
    path = tmp_path / "store"
    stopped = forge.run(path=str(path), handlers=True, signals={"batch": [4, *numbers]})
    assert stopped.code == 130
    assert stopped.points == {}, "it said nothing more"
    assert forge.run(path=str(path), handlers=True).code == 0
    assert store_files(path) == whole


@pytest.mark.parametrize("point", ["batch", "writer.chunks_durable"])
def test_a_library_call_is_interrupted_as_any_other(
    point: str, forge: Forge, whole: dict[str, bytes], tmp_path: Path
) -> None:
    path = tmp_path / "store"
    stopped = forge.run(path=str(path), signals={point: [3, INT]})
    assert stopped.message.startswith("KeyboardInterrupt")
    assert n_records(path) >= 1
    assert forge.run(path=str(path)).code == 0
    assert store_files(path) == whole


def test_a_signal_from_outside_while_a_batch_runs(
    forge: Forge, whole: dict[str, bytes], tmp_path: Path
) -> None:
    path = tmp_path / "store"
    stopped = forge.run(path=str(path), handlers=True, kill_after_s=0.0, kill_with=TERM)
    assert stopped.code in (0, 130)  # 0: it was done before the signal came
    assert forge.run(path=str(path)).code == 0
    assert store_files(path) == whole


# ---- the handlers themselves


def test_the_handlers_before_come_back() -> None:
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)  # a runner in the background ignores it
    try:
        handlers_come_back()
    finally:
        signal.signal(signal.SIGINT, usual)


def handlers_come_back() -> None:
    before = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
    with stop_on_signals() as request:
        assert isinstance(request, StopRequest)
        assert signal.getsignal(signal.SIGINT) == signal.getsignal(signal.SIGTERM) != before[0]
    assert [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)] == before
    with pytest.raises(Interrupted) as caught, stop_on_signals():
        signal.raise_signal(signal.SIGTERM)
    assert caught.value.exit_code == 130
    assert [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with stop_on_signals() as request:
            signal.raise_signal(signal.SIGTERM)
        assert not request.requested
    finally:
        signal.signal(signal.SIGTERM, before)


def test_library_calls_leave_the_handlers_alone(tmp_path: Path) -> None:
    before = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
    seen: list[object] = []
    harvested(
        tmp_path / "store",
        tokens=300,
        block=100,
        progress=lambda *_: seen.append([signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]),
    )
    assert seen
    assert all(one == before for one in seen)


# ---- the command line itself


@pytest.mark.long
@pytest.mark.parametrize("number", [INT, TERM])
def test_the_command_line_stops_in_good_order(number: int, tmp_path: Path) -> None:
    store = tmp_path / "store"
    collect = ["collect", "tiny-gpt2", "docs:stdlib", str(store), "--tokens", "60000", "--threads", "1"]
    command = [sys.executable, "-m", "nearline", *collect]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    while not n_records(store) and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(number)
    _, said = process.communicate()
    n_committed = n_records(store)
    assert process.returncode == 130, said
    blocks = rf"nearline: interrupted: {n_committed} of \d+ blocks are committed; the same command continues"
    assert re.search(blocks, said), said
    again = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (store / "SEALED").exists(), again.stderr
