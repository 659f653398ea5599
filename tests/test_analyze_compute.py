"""The same work on threads and on Dask clusters: the same bytes, with workers killed too; what goes wrong is
said in one sentence.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dask.config
import numpy as np
import psutil
import pytest
from distributed import Client
from helpers_compute import (
    Counted,
    alive,
    die,
    die_once,
    join_pids,
    pid_of,
    pid_when_let,
    product,
    refuse,
    threads_of_blas,
)
from helpers_store import make_store
from nearline.analyze import AnalyzeSettings, FitSettings, compute_cluster, compute_place, fit
from nearline.analyze.compute import session
from nearline.analyze.compute_cluster import Cluster, open_cluster
from nearline.analyze.compute_place import Watch
from nearline.analyze.compute_settings import MACHINE_FIELDS, ComputeSettings, flatten_compute
from nearline.analyze.compute_slurm import job_options
from nearline.analyze.compute_tasks import Here, Place, Task, run_tasks
from nearline.analyze.gathering import gather
from nearline.analyze.named_fits import ensure
from nearline.analyze.settings import parse
from nearline.store import EnvironmentFault, Study, UsageError

ITEMS = list(range(7))
THREADS = ComputeSettings(workers=2)


def results(items: Sequence[int], function: Any, shared: Any, settings: ComputeSettings) -> list[Any]:
    with session(settings) as workers:
        return workers.map(function, shared, items, lambda _, found: found, "test")


def values(folder: Path) -> Counted:
    return Counted(folder, np.random.default_rng(0).standard_normal((40, 40)).astype(np.float32))


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A scheduler with two worker processes, which gives an item two workers to kill."""
    with (
        dask.config.set({"distributed.scheduler.allowed-failures": 1}),
        local_cluster(2) as cluster,
    ):
        yield cluster.scheduler_address


def local_cluster(n_workers: int) -> Any:
    from distributed import LocalCluster

    return LocalCluster(
        n_workers=n_workers,
        threads_per_worker=1,
        host="127.0.0.1",
        dashboard_address="127.0.0.1:0",
        silence_logs=60,
    )


@pytest.fixture
def remote(address: str) -> ComputeSettings:
    return ComputeSettings(scheduler=address)


# The loop


class Listed(Place):
    """Runs tasks one by one, the last started first, and counts what exists."""

    def __init__(self, window: int) -> None:
        self.window = window
        self.started: list[tuple[Task, Any, list[Any]]] = []
        self.most_started = self.most_kept = 0
        self.kept: set[int] = set()

    def start(self, task: Task, argument: Any, results: Sequence[Any]) -> None:
        self.started.append((task, argument, [result.value for result in results]))
        self.most_started = max(self.most_started, len(self.started))

    def finished(self) -> tuple[Task, Any]:
        task, argument, results = self.started.pop()
        made = Result(task.function(10, argument, *results), self.kept)
        self.most_kept = max(self.most_kept, len(self.kept))
        return task, made

    def fetch(self, handle: "Result") -> Any:
        return handle.value


class Result:
    def __init__(self, value: Any, kept: set[int]) -> None:
        self.value, self._kept = value, kept
        kept.add(id(self))

    def __del__(self) -> None:
        self._kept.discard(id(self))


def leaf(shared: int, argument: int) -> str:
    return str(shared + argument)


def join(shared: int, argument: str, *results: str) -> str:
    return argument.join(results)


def test_tasks_get_what_they_follow_and_results_are_let_go() -> None:
    last: list[Task] = []
    for flow in range(30):
        first, *rest = [Task(leaf, Here(lambda n=10 * flow + part: n)) for part in range(6)]
        for part in rest:
            first = Task(join, "+", (first, part))
        last.append(Task(join, "|", (first, first)))
    place, seen = Listed(window=3), []
    found = run_tasks(place, last, lambda index, made: (index, made), seen.append)
    joined = ["+".join(str(10 + 10 * flow + part) for part in range(6)) for flow in range(30)]
    assert found == [(index, f"{text}|{text}") for index, text in enumerate(joined)]
    assert len(seen) == 30 * (6 + 5 + 1)
    assert place.most_started == 3
    # However many flows there are: those at work, and a few that wait to be joined.
    assert place.most_kept <= 8
    assert not place.kept


def test_a_sink_has_one_call_at_a_time_and_the_order_is_that_of_the_items() -> None:
    inside, most, order = [0], [0], []

    def sink(item: int, found: int) -> tuple[int, int]:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        order.append(item)
        inside[0] -= 1
        return item, found

    steps: list[tuple[Any, ...]] = []
    with session(
        ComputeSettings(workers=4), lambda stage, done, total, unit: steps.append((stage, done, total, unit))
    ) as workers:
        found = workers.map(pid_of, None, list(range(50)), sink, "stage")
        assert workers.map(pid_of, None, [], sink, "stage") == []
    assert found == [(item, os.getpid()) for item in range(50)]
    assert most == [1]
    assert sorted(order) == list(range(50))
    assert steps == [("stage", done, 50, "items") for done in range(1, 51)]


def test_memory_lowers_the_workers_or_says_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    with session(ComputeSettings(workers=8, memory_limit="10 MiB")) as workers:
        assert workers.at_once(3 * 2**20, "a layer") == 3
        assert "a layer: 3 of 8 workers fit into 10 MiB" in caplog.text
        assert workers.at_once(2**20, "what takes less") == 8
        with pytest.raises(EnvironmentFault, match=r"a layer takes 0.01 GiB.*raise `memory_limit` or less"):
            workers.at_once(11 * 2**20, "a layer", "or less")


# Clusters


def test_workers_that_are_too_small_make_place_for_fewer() -> None:
    """As on threads, where the next step of an analysis takes more memory than the one before."""
    settings = ComputeSettings(scheduler="local", workers=2, memory_limit="64 MiB")
    with session(settings) as workers:
        first = workers.map(pid_of, None, ITEMS, lambda _, pid: pid, "test")
        assert workers.at_once(40 * 2**20, "a layer") == 1
        then = workers.map(pid_of, None, ITEMS, lambda _, pid: pid, "test", 1)
        assert len(set(then)) == 1
        assert not alive(first)
        with pytest.raises(EnvironmentFault, match=r"a layer takes 0.06 GiB, the memory limit is"):
            workers.at_once(65 * 2**20, "a layer")


def test_a_map_gives_the_same_bytes_and_sends_the_shared_value_once(
    remote: ComputeSettings, tmp_path: Path
) -> None:
    here = results(ITEMS, product, values(tmp_path), THREADS)
    assert not (tmp_path / "arrived").exists()
    there = results(ITEMS + ITEMS, product, values(tmp_path), remote)
    assert [one.tobytes() for one in there] == [one.tobytes() for one in here + here]
    arrived = (tmp_path / "arrived").read_text().split()
    assert len(arrived) == len(set(arrived)) <= 2


def test_errors_of_workers_arrive_as_they_were(remote: ComputeSettings) -> None:
    with session(remote) as workers:
        for _ in range(2):  # and the cluster is of use afterwards
            with pytest.raises(UsageError, match=r"^item 3 cannot be computed; leave it out$") as caught:
                workers.map(refuse, None, ITEMS, lambda _, found: found, "test")
            assert caught.value.exit_code == 2
        assert workers.map(refuse, None, [1, 2], lambda _, found: found, "test") == [None, None]


def test_blas_has_one_thread_everywhere(remote: ComputeSettings) -> None:
    for settings in (THREADS, remote):
        found = results([0, 1], threads_of_blas, None, settings)
        assert all(found)
        assert {count for counts in found for count in counts} == {1}


def test_a_killed_worker_costs_its_item_only(
    remote: ComputeSettings, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert results(ITEMS, die_once, tmp_path, remote) == [item * item for item in ITEMS]
    assert (tmp_path / "died").exists()
    assert "is lost: its items run again on others" in caplog.text


def test_an_item_that_kills_every_worker_is_named(remote: ComputeSettings, tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match=r"^test: die of 1: 2 workers died at it.*memory") as caught:
        results([1], die, tmp_path, remote)
    assert caught.value.exit_code == 4
    assert len(set((tmp_path / "deaths").read_text().split())) == 2


def test_a_result_that_is_lost_before_it_is_taken_is_made_again(
    remote: ComputeSettings, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    go.touch()
    with opened(remote, tmp_path) as place, ThreadPoolExecutor(1) as pool:
        place.start(Task(pid_when_let, 1), 1, [])
        ((_, future),) = place._running.values()
        pid = future.result()
        go.unlink()
        os.kill(pid, signal.SIGKILL)
        until(lambda: future.status != "finished")
        finished = pool.submit(place.finished)
        go.touch()
        task, handle = finished.result()
        place.start(Task(join_pids, "after", (task,)), "after", [handle])
        assert place.fetch(place.finished()[1]).startswith("after ")
        assert place.fetch(handle) != pid


def test_who_gives_up_leaves_the_same_work_of_another_process(
    remote: ComputeSettings, tmp_path: Path
) -> None:
    with opened(remote, tmp_path) as ours:
        ours.start(Task(pid_when_let, 1), 1, [])
        with opened(remote, tmp_path) as theirs:
            theirs.start(Task(pid_when_let, 1), 1, [])
        (tmp_path / "go").touch()
        assert ours.fetch(ours.finished()[1]) != os.getpid()


def test_what_was_given_up_can_be_asked_for_again_at_once(remote: ComputeSettings, tmp_path: Path) -> None:
    """A scheduler tells of what it cancelled a little later: that must not hit who asks anew."""
    go, cluster = tmp_path / "go", open_cluster(remote)
    try:
        for _ in range(20):
            go.unlink(missing_ok=True)
            with cluster.place(tmp_path, "test", None) as given_up:
                given_up.start(Task(pid_when_let, 1), 1, [])
                given_up.forget()
                with cluster.place(tmp_path, "test", None) as again:
                    again.start(Task(pid_when_let, 1), 1, [])
                    go.touch()
                    assert again.fetch(again.finished()[1]) != os.getpid()
    finally:
        cluster.close()


def test_slurm_jobs_that_have_all_ended_are_missed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And those that wait in their queue are not."""
    monkeypatch.setattr(compute_place, "WORKERS_S", 0.1)
    monkeypatch.setattr(compute_place, "HEALTH_S", 0.1)
    settings = ComputeSettings(scheduler="slurm", workers=1)
    with local_cluster(0) as jobs, Client(jobs, set_as_default=False) as client:
        watch = Watch(client, settings)
        for _ in range(2):
            watch.look()
            until(lambda: time.monotonic() - (watch.empty_since or 0.0) > 0.1)
        watch.look()
        jobs.scale(1)
        client.wait_for_workers(1)
        cluster = Cluster(client, settings)
        cluster.watch.look()
        jobs.scale(0)
        until(lambda: not client.nthreads())
        with cluster.place(tmp_path, "test", None) as place:
            place.start(Task(pid_of, 1), 1, [])
            with pytest.raises(EnvironmentFault, match="all its jobs have ended and work is left"):
                place.finished()


@contextmanager
def opened(settings: ComputeSettings, shared: Any) -> Generator[Any]:
    """A place of a cluster, to take its steps one by one."""
    cluster = open_cluster(settings)
    try:
        with cluster.place(shared, "test", None) as place:
            yield place
    finally:
        cluster.close()


def until(holds: Callable[[], bool]) -> None:
    while not holds():
        time.sleep(0.01)


def test_a_scheduler_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute_cluster, "CONNECT_S", 1)
    with socket.socket() as taken:  # bound, and nobody listens
        taken.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(EnvironmentFault, match=rf"scheduler={address}: no Dask scheduler answers.*start"):
            results(ITEMS, pid_of, None, ComputeSettings(scheduler=address))


def test_a_scheduler_without_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute_cluster, "WORKERS_S", 0.1)
    with local_cluster(0) as cluster:
        settings = ComputeSettings(scheduler=cluster.scheduler_address)
        with pytest.raises(EnvironmentFault, match=r"no worker for .* start one with `dask worker tcp"):
            results(ITEMS, pid_of, None, settings)


def test_an_interrupt_leaves_no_worker_behind() -> None:
    """And a terminal's interrupt, which all processes get, is for this one alone to answer."""
    pids: list[int] = []
    listening: set[str] = set()

    def sink(_: int, pid: int) -> None:
        pids.append(pid)
        for process in (psutil.Process(), psutil.Process(pid)):
            found = process.net_connections("inet")
            listening.update(one.laddr.ip for one in found if one.status == psutil.CONN_LISTEN)
        os.kill(pid, signal.SIGINT)
        if len(pids) == 3:
            raise KeyboardInterrupt

    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(KeyboardInterrupt), session(ComputeSettings(scheduler="local", workers=1)) as workers:
        workers.map(pid_of, None, ITEMS, sink, "test")
    assert len(set(pids)) == 1
    assert pids[0] != os.getpid()
    assert not alive(pids)
    left = [one for one in set(psutil.Process().children(recursive=True)) - before if one.is_running()]
    assert not [one for one in left if "resource_tracker" not in " ".join(one.cmdline())]
    assert listening == {"127.0.0.1"}


# A fit, and fits beside it


def study_of(path: Path, stores: Sequence[Path], settings: dict[str, Any]) -> dict[str, bytes]:
    """Every file of a study with its named fits."""
    return named(
        fit(path, stores, FitSettings(folds=3, examples=2, alphas=(1e-3, 1e-1), **settings)), settings
    )


def named(study: Study, settings: dict[str, Any]) -> dict[str, bytes]:
    evidence = gather(study, AnalyzeSettings())
    with session(ComputeSettings(**settings)) as workers:
        ensure(evidence, [*evidence.stores, "pooled"], workers)
    return {
        file.relative_to(study.path).as_posix(): file.read_bytes()
        for file in sorted(study.path.rglob("*"))
        if file.is_file() and "runs" not in file.parts
    }


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """With enough rows for several ranges a layer, so that there is an order to get wrong."""
    folder = tmp_path_factory.mktemp("stores")
    return [make_store(folder / f"s{seed}", n_tokens=2500, d=6, n_layers=2, seed=seed) for seed in (1, 2)]


@pytest.mark.sampled
def test_a_study_has_the_same_bytes_on_every_scheduler(
    stores: list[Path], address: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Threads, and a cluster of two processes; in full a cluster of three of its own too."""
    first = study_of(tmp_path / "one", stores, {"workers": 1})
    assert len(first) > 60
    others: dict[str, dict[str, Any]] = {"remote": {"scheduler": address}}
    if request.config.getoption("--run-long"):
        others |= {"threads": {"workers": 3}, "local": {"scheduler": "local", "workers": 3}}
    for name, settings in others.items():
        assert study_of(tmp_path / name, stores, settings) == first, name
    print(f"{len(first)} files, {len(others)} other schedulers: all bytes the same")


@pytest.mark.long
@pytest.mark.parametrize("workers", [2, 3])
def test_a_study_has_the_same_bytes_whoever_is_killed(
    stores: list[Path], tmp_path: Path, workers: int
) -> None:
    """A worker is killed at points spread over the fit: while it sums, solves and measures."""
    first = study_of(tmp_path / "one", stores, {"workers": 1})
    settings: dict[str, Any] = {"scheduler": "local", "workers": workers}
    killed: list[int] = []
    for after in (1, 8, 15):
        folder, killer = tmp_path / f"after {after}", Killer(after, killed)
        fit_settings = FitSettings(folds=3, examples=2, alphas=(1e-3, 1e-1), **settings)
        assert named(fit(folder, stores, fit_settings, progress=killer), {"workers": 1}) == first
    assert len(killed) == 3
    print(f"3 fits of {len(first)} files, one of {workers} workers killed in each: all bytes the same")


class Killer:
    """Kills a worker process when so many steps are done."""

    def __init__(self, after: int, killed: list[int]) -> None:
        self._left, self._killed = after, killed

    def __call__(self, stage: str, done: int, total: int, unit: str) -> None:
        self._left -= 1
        if self._left:
            return
        for process in psutil.Process().children(recursive=True):
            if process.pid not in self._killed and "spawn_main" in " ".join(process.cmdline()):
                process.send_signal(signal.SIGKILL)
                self._killed.append(process.pid)
                return


@pytest.mark.long
def test_a_scheduler_and_workers_started_by_hand(tmp_path: Path, stores: list[Path]) -> None:
    """As the documentation says; then the scheduler dies in the middle."""
    first = study_of(tmp_path / "one", stores, {"workers": 1})
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    with started("scheduler", "--host", address, "--no-dashboard") as scheduler:
        with started("worker", address, "--nthreads", "2", "--no-dashboard"):
            settings: dict[str, Any] = {"scheduler": address}
            assert study_of(tmp_path / "two", stores, settings) == first
            stop = StopScheduler(scheduler)
            with pytest.raises(EnvironmentFault, match="connection to the scheduler is lost"):
                fit(tmp_path / "three", stores, FitSettings(folds=3, **settings), progress=stop)
    assert fit(tmp_path / "three", stores, FitSettings(folds=3)).has_table("surrogates")


class StopScheduler:
    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process

    def __call__(self, stage: str, done: int, total: int, unit: str) -> None:
        self._process.kill()
        self._process.wait()


class started:
    """`dask scheduler …` or `dask worker …` in a process of its own."""

    def __init__(self, *arguments: str) -> None:
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "dask", *arguments],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def __enter__(self) -> "subprocess.Popen[bytes]":
        return self.process

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait()


# Slurm

SLURM = {
    "scheduler": "slurm",
    "workers": 2,
    "slurm_queue": "short",
    "slurm_account": "science",
    "slurm_walltime": "00:30:00",
    "slurm_cores": 2,
    "slurm_memory": "3 GiB",
    "slurm_interface": "lo",
    "slurm_directives": ("--constraint=cpu", "--nice=10"),
}


def test_the_job_script_says_what_the_settings_say() -> None:
    from dask_jobqueue import SLURMCluster

    made: Any = SLURMCluster(**job_options(ComputeSettings(**SLURM)))
    with made as cluster:
        script = cluster.job_script()
        assert cluster.scheduler_address.startswith("tcp://127.0.0.1:")
    for line in (
        "-J nearline",
        "-p short",
        "-A science",
        "-t 00:30:00",
        "--cpus-per-task=2",
        "--mem=3G",
        "--constraint=cpu",
        "--nice=10",
    ):
        assert f"#SBATCH {line}\n" in script
    assert "--nthreads 1" in script
    assert "--nworkers 2" in script
    assert sys.executable in script


FAKES = {
    # Runs the job at once, in the background, as Slurm would somewhere else.
    "sbatch": '#!/bin/sh\nd="$(dirname "$0")"; cp "$1" "$d/job.sh"\n'
    'setsid sh "$d/job.sh" > "$d/job.log" 2>&1 &\necho $! > "$d/pid"; echo "Submitted batch job $!"\n',
    "scancel": '#!/bin/sh\necho "$1" >> "$(dirname "$0")/cancelled"; kill -TERM -"$1" 2>/dev/null; exit 0\n',
    "squeue": "#!/bin/sh\nexit 0\n",
}


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "slurm"
    folder.mkdir()
    for name, script in FAKES.items():
        (folder / name).write_text(script)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder


def test_a_refused_job_is_one_sentence(slurm: Path) -> None:
    (slurm / "sbatch").write_text("#!/bin/sh\necho 'sbatch: error: invalid partition: short' >&2; exit 1\n")
    with pytest.raises(
        EnvironmentFault, match=r"sbatch says: sbatch: error: invalid partition: short"
    ) as caught:
        results(ITEMS, pid_of, None, ComputeSettings(**SLURM))
    assert "\n" not in str(caught.value)


def test_slurm_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(EnvironmentFault, match="there is no `sbatch` here"):
        results(ITEMS, pid_of, None, ComputeSettings(scheduler="slurm"))


@pytest.mark.long
def test_a_map_over_slurm_jobs(slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    here = results(ITEMS, product, values(tmp_path), THREADS)
    with session(ComputeSettings(**SLURM)) as workers:
        there = workers.map(product, values(tmp_path), ITEMS, lambda _, found: found, "test")
        pids = set(workers.map(pid_of, None, list(range(20)), lambda _, found: found, "test"))
    assert [one.tobytes() for one in there] == [one.tobytes() for one in here]
    assert os.getpid() not in pids
    job = (slurm / "pid").read_text().split()[0]
    assert job in (slurm / "cancelled").read_text().split()


# Settings


def test_a_table_of_a_settings_file_is_the_same_as_flags() -> None:
    table = {
        "scheduler": "slurm",
        "queue": "short",
        "cores": 4,
        "memory": "8 GiB",
        "directives": ["--nice=1"],
    }
    flat = flatten_compute({"folds": 3, "compute": table | {"memory_limit": "2 GiB", "slurm_account": "a"}})
    settings = parse(flat)
    assert settings.folds == 3
    assert (settings.scheduler, settings.slurm_queue, settings.slurm_cores) == ("slurm", "short", 4)
    assert settings.worker_bytes == 2 * 2**30
    assert (settings.n_workers, settings.slurm_directives, settings.slurm_account) == (4, ("--nice=1",), "a")
    assert flatten_compute({"workers": 2}) == {"workers": 2}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"scheduler": "cloud"}, "must be threads, local, slurm or an address such as tcp://host:8786"),
        ({"scheduler": "tcp://host"}, "must be threads"),
        ({"slurm_walltime": "long"}, "a time of Slurm's"),
        ({"slurm_directives": "--a=1\n#SBATCH --b"}, "one line of text"),
        ({"slurm_memory": "much"}, "is no size"),
        (
            {"compute": {"partition": "short"}},
            r"\[compute\] has no setting 'partition'; it has account, cores",
        ),
        ({"compute": {"workers": 2}, "workers": 3}, "give it once"),
        ({"compute": "slurm"}, "it is a table"),
    ],
)
def test_wrong_settings_are_one_sentence(data: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse(flatten_compute(data))


def test_where_it_runs_is_no_part_of_the_results() -> None:
    settings = FitSettings(scheduler="local", slurm_queue="short", keep_moments=True, workers=3)
    assert settings.results() == FitSettings().results()
    assert {"scheduler", "workers", "memory_limit", "slurm_directives"} <= MACHINE_FIELDS


def test_directives_of_a_flag_are_split_before_dashes() -> None:
    settings = parse({"slurm_directives": "--gres=gpu:1,--nodelist=a,b, --nice=10"})
    assert settings.slurm_directives == ("--gres=gpu:1", "--nodelist=a,b", "--nice=10")


def test_distributed_is_missed_with_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    """That it is loaded only where it is used is in test_imports."""
    monkeypatch.delitem(sys.modules, "nearline.analyze.compute_cluster")
    monkeypatch.setitem(sys.modules, "distributed", None)
    with (
        pytest.raises(EnvironmentFault, match=r"pip install 'nearline\[cluster\]'"),
        session(ComputeSettings(scheduler="local")) as workers,
    ):
        workers.map(pid_of, None, ITEMS, lambda _, pid: pid, "test")
