"""Several processes at one store: one of them wins, the others say so, and nothing is ever a mixture.

The processes are real ones, started once; a barrier lets them loose at the same moment of every round.
"""

import functools
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from multiprocessing.synchronize import Barrier, Event
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers_store import Synthetic, begin, commit, make_store, synthetic, tree, write_all
from nearline.store import DamageError, NearlineError, Reader, StoreWriter, UsageError, disk, points, seal
from nearline.store.folder import committed_blocks
from nearline.store.verify import verify

SETTINGS: dict[str, Any] = {"n_tokens": 30, "block": 10, "n_layers": 2, "d": 8, "sequence_length": 10}
PATIENCE_S = 120  # a worker that died breaks the barrier; this is for one that hangs


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@functools.cache
def data_of(worker: int, alike: bool) -> Synthetic:
    """Each worker's values: under the same attributes the same or, `alike` false, others of the same size."""
    data = synthetic(**SETTINGS)
    if not alike:
        for site in data.stored:
            data.stored[site][...] += worker
    return data


def work(
    folder: str, worker: int, rounds: int, task: str, alike: bool, barrier: Barrier, results: Any
) -> None:
    """One process: its part of every round, and what came of it."""
    os.fsync = lambda descriptor: None  # a race needs no disk, and hundreds of rounds need time
    data = data_of(worker, alike)
    for number in range(rounds):
        path = Path(folder) / f"{number}" / "s"
        steps = steps_of(task, path, data)
        outcome = [attempt(next(steps))] if task == "commit" else []  # the store is begun before the start
        barrier.wait(PATIENCE_S)
        results.put((number, worker, [*outcome, *map(attempt, steps)][-3:]))
        barrier.wait(PATIENCE_S)


def steps_of(task: str, path: Path, data: Synthetic) -> Iterator[Callable[[], object]]:
    if task == "commit":
        writers: list[StoreWriter] = []
        yield lambda: writers.append(begin(path, data))
        for block in range(data.plan.n_blocks):
            yield lambda block=block: commit(writers[0], data, block)
    elif task == "seal":
        yield lambda: seal(path)
    else:
        yield lambda: begin(path, data).begun_here


def attempt(step: Callable[[], object]) -> str:
    """What a step returned, or its error; a worker that stopped here would hang the others."""
    try:
        return str(step())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def race(
    folder: Path, *, n_workers: int, rounds: int, task: str, alike: bool = True
) -> dict[int, dict[int, list[str]]]:
    """Let the workers loose; what came of it, by round and worker."""
    context = multiprocessing.get_context("forkserver")  # imports what it is told once, for all workers
    context.set_forkserver_preload(["numpy", "pytest", "nearline.store", "nearline.analyze"])
    barrier, results = context.Barrier(n_workers), context.Queue()
    processes = [
        context.Process(target=work, args=(str(folder), worker, rounds, task, alike, barrier, results))
        for worker in range(n_workers)
    ]
    for process in processes:
        process.start()
    found: dict[int, dict[int, list[str]]] = {number: {} for number in range(rounds)}
    try:
        for _ in range(rounds * n_workers):
            number, worker, outcome = results.get(timeout=PATIENCE_S)
            found[number][worker] = outcome
    finally:
        for process in processes:
            process.join(PATIENCE_S)
    assert [process.exitcode for process in processes] == [0] * n_workers
    return found


def whose(path: Path, block: int) -> Iterator[int]:
    """Whose values a committed block has: every site and every chunk must be of one worker."""
    reader = Reader.open(path, require_seal=False)
    for worker in range(2):
        data = data_of(worker, alike=False)
        row0, row1 = data.plan.block_range(block)
        layered = {site: data.stored[site][..., row0:row1, :] for site in data.stored}
        if all(
            np.array_equal(reader.stored(site, layer, block, block + 1), layered[site][layer])
            if layered[site].ndim == 3
            else np.array_equal(reader.stored(site, None, block, block + 1), layered[site])
            for site in layered
            for layer in (0, 1)
        ):
            yield worker


@pytest.mark.parametrize(
    "rounds", [pytest.param(5, id="5"), pytest.param(200, id="200", marks=pytest.mark.long)]
)
def test_two_collectors_of_other_bytes_never_leave_a_mixture_that_a_record_vouches_for(
    tmp_path: Path, rounds: int
) -> None:
    found = race(tmp_path, n_workers=2, rounds=rounds, task="commit", alike=False)
    for number, outcomes in found.items():
        path = tmp_path / f"{number}" / "s"
        there = committed_blocks(path)
        for block in range(3):
            said = [outcomes[worker][block] for worker in range(2)]
            assert said.count("None") <= 1, said
            loser = next(text for text in said if text != "None")
            assert "two collectors are at work on the same blocks" in loser
            if block in there:
                (owner,) = whose(path, block)
                assert said[owner] == "None"
        writer = begin(path, data_of(0, alike=False))
        assert writer.committed == there  # what has a record is what the record says
        write_all(path, data_of(0, alike=False))
        assert all(len(list(whose(path, block))) == 1 for block in range(3))


@pytest.mark.parametrize(
    "rounds", [pytest.param(5, id="5"), pytest.param(200, id="200", marks=pytest.mark.long)]
)
def test_two_collectors_of_the_same_bytes_leave_the_store_of_one(tmp_path: Path, rounds: int) -> None:
    calm = tree(make_store(tmp_path / "calm" / "s", **SETTINGS))
    found = race(tmp_path, n_workers=2, rounds=rounds, task="commit")
    for number, outcomes in found.items():
        path = tmp_path / f"{number}" / "s"
        for block in range(3):
            said = sorted(outcomes[worker][block].partition(":")[0] for worker in range(2))
            assert said == ["None", "UsageError"]
        assert committed_blocks(path) == {0, 1, 2}
        write_all(path, data_of(0, alike=True))
        assert tree(path) == calm


@pytest.mark.parametrize(
    "rounds", [pytest.param(3, id="3"), pytest.param(60, id="60", marks=pytest.mark.long)]
)
def test_of_eight_sealers_all_get_one_digest(tmp_path: Path, rounds: int) -> None:
    calm = tree(make_store(tmp_path / "calm" / "s", **SETTINGS))
    for number in range(rounds):
        make_store(tmp_path / f"{number}" / "s", seal=False, **SETTINGS)
    found = race(tmp_path, n_workers=8, rounds=rounds, task="seal")
    digest = Reader.open(tmp_path / "calm" / "s").digest
    for number, outcomes in found.items():
        assert [outcomes[worker] for worker in range(8)] == [[digest]] * 8
        assert tree(tmp_path / f"{number}" / "s") == calm


@pytest.mark.parametrize(
    "rounds", [pytest.param(3, id="3"), pytest.param(60, id="60", marks=pytest.mark.long)]
)
def test_of_many_that_begin_at_once_one_begins_and_all_go_on(tmp_path: Path, rounds: int) -> None:
    calm = tree(make_store(tmp_path / "calm" / "s", **SETTINGS))
    found = race(tmp_path, n_workers=4, rounds=rounds, task="begin")
    for number, outcomes in found.items():
        path = tmp_path / f"{number}" / "s"
        said = [outcomes[worker] for worker in range(4)]
        assert sorted(said) == [["False"], ["False"], ["False"], ["True"]]
        write_all(path, data_of(0, alike=True))
        assert tree(path) == calm


def test_a_loser_that_wrote_over_the_winner_gives_the_block_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order that a race may never hit: the loser renames its chunks after the winner's record."""
    monkeypatch.setattr(disk, "fcntl", None)  # as on Windows: a lock would keep the loser out
    path, mine, other = tmp_path / "s", data_of(0, alike=False), data_of(1, alike=False)
    writer, rival = begin(path, mine), begin(path, other)

    def overtake(name: str) -> None:
        if name == "durable.written" and 0 not in writer.committed:
            monkeypatch.setattr("nearline.store.points.hook", lambda name: None)
            commit(writer, mine, 0)  # the winner is done while the loser has written but not renamed

    monkeypatch.setattr("nearline.store.points.hook", overtake)
    with pytest.raises(NearlineError, match=r"not the one that was committed: block 0 is missing now"):
        commit(rival, other, 0)
    assert committed_blocks(path) == set()
    write_all(path, mine)
    assert list(whose(path, 0)) == [0]


def test_a_loser_that_wrote_over_a_sealed_block_says_that_it_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "fcntl", None)
    path, mine, other = tmp_path / "s", data_of(0, alike=False), data_of(1, alike=False)
    writer, rival = begin(path, mine), begin(path, other)
    for block in range(2):
        commit(writer, mine, block)

    def overtake(name: str) -> None:
        if name == "durable.written":
            monkeypatch.setattr(points, "hook", lambda name: None)
            commit(writer, mine, 2)
            writer.seal()

    monkeypatch.setattr(points, "hook", overtake)
    with pytest.raises(DamageError, match=r"wrote over block 2: .* run `nearline repair"):
        commit(rival, other, 2)
    assert committed_blocks(path) == {0, 1, 2}  # of a sealed store nothing is taken back
    assert not verify(path, level="full").whole


def commit_until_killed(folder: str, block: int, written: Event, go: Event) -> None:
    """A process that is killed once the first of its chunk objects has its name."""

    def die(name: str) -> None:
        if name == "durable.written":
            written.set()
            go.wait(PATIENCE_S)
        if name == "durable.half_renamed":
            os.kill(os.getpid(), signal.SIGKILL)

    data = data_of(1, alike=False)
    writer = begin(Path(folder), data)
    points.hook = die
    commit(writer, data, block)


def test_nobody_commits_a_block_that_another_process_writes_until_that_one_dies(tmp_path: Path) -> None:
    """Else the one that is killed could have renamed one chunk object over a block with a record, and nobody
    would look at a block in the middle again."""
    path, mine = tmp_path / "s", data_of(0, alike=False)
    writer = begin(path, mine)
    commit(writer, mine, 0)
    context = multiprocessing.get_context("spawn")
    written, go = context.Event(), context.Event()
    process = context.Process(target=commit_until_killed, args=(str(path), 1, written, go))
    process.start()
    try:
        assert written.wait(PATIENCE_S)
        with pytest.raises(UsageError, match=r"block 1 is being written by the other .*nothing is damaged"):
            commit(writer, mine, 1)
        with pytest.raises(UsageError, match=r"a collector is at work .*000001.lock"):
            seal(path, partial=True)
        commit(writer, mine, 2)
    finally:
        go.set()
        process.join(PATIENCE_S)
    assert process.exitcode == -signal.SIGKILL
    assert (path / "blocks/000001.lock").exists()
    assert {problem.kind for problem in verify(path).problems} == {"incomplete"}
    commit(begin(path, mine), mine, 1)
    assert not (path / "blocks/000001.lock").exists()
    seal(path)
    assert [list(whose(path, block)) for block in range(3)] == [[0]] * 3
    assert verify(path, level="full").whole


def test_the_lock_of_a_dead_process_is_harmless_and_goes_with_the_seal(tmp_path: Path) -> None:
    path = make_store(tmp_path / "s", seal=False, **SETTINGS)
    (path / "blocks/000001.lock").touch()  # it was killed once its record was there
    assert committed_blocks(path) == {0, 1, 2}
    seal(path)
    assert not list((path / "blocks").glob("*.lock"))
    (path / "blocks/000001.lock").touch()
    assert verify(path, level="full").whole
