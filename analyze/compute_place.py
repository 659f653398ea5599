"""A Dask cluster as a place to run tasks, and a watch over it: tasks in, futures of their results out.

Data stay where they are made: a task gets the results before it from the workers that hold them, and Dask
makes again what a lost worker held. The keys of a run are its own: a scheduler tells of a cancelled key some
time later, and whoever has asked for the same key anew by then loses that one too. While no task ends, the
cluster is looked at every few seconds: one that can finish nothing any more is an error, one that may yet is
a warning. Cost: a few milliseconds a task, and the transfer of what tasks hand on.
"""

import logging
import pickle
import queue
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

from distributed import Client, Future, KilledWorker

from ..store import EnvironmentFault, NearlineError
from .compute_settings import ComputeSettings
from .compute_tasks import Place, Task
from .compute_worker import call

HEALTH_S: Final = 2  # between looks at a cluster that is silent
WORKERS_S: Final = 30  # how long there may be no worker
_LOG = logging.getLogger("nearline")


class Watch:
    """Whether a cluster can still finish what it was given; it remembers the workers that there were."""

    def __init__(self, client: Client, settings: ComputeSettings) -> None:
        self._client, self._settings = client, settings
        self._seen: set[str] = set()
        self.empty_since: float | None = None
        self._said = False
        client.subscribe_topic("all", self._hear)

    def begin(self) -> None:
        """Something is started: what was before does not count."""
        self.empty_since = None

    def look(self) -> None:
        """EnvironmentFault where nobody is left to finish anything."""
        there: Any = self._client.nthreads()
        if there:
            self._seen |= set(there)
            self.empty_since, self._said = None, False
            return
        now = time.monotonic()
        self.empty_since = self.empty_since or now
        if now - self.empty_since <= WORKERS_S:
            return
        scheduler = self._settings.scheduler
        if scheduler == "slurm" and len(self._seen) >= self._settings.n_workers:
            raise EnvironmentFault(
                "scheduler=slurm: all its jobs have ended and work is left: raise `slurm_walltime` or "
                "`slurm_memory` (sacct says which it was), or ask for more `workers`, and run this again"
            )
        if scheduler not in ("local", "slurm"):
            raise EnvironmentFault(no_workers(scheduler))
        if not self._said:
            self._said = True
            where = (
                "see squeue, and slurm-*.out of jobs that failed" if scheduler == "slurm" else "still waiting"
            )
            _LOG.warning("compute: no worker for %g s: %s", WORKERS_S, where)

    def _hear(self, event: tuple[float, Any]) -> None:
        message = event[1]
        if not isinstance(message, dict):
            return
        worker = str(message.get("worker"))
        if message.get("action") == "add-worker":
            self._seen.add(worker)
        elif message.get("action") == "remove-worker" and not message.get("expected"):
            _LOG.warning("compute: worker %s is lost: its items run again on others", worker)


class ClusterPlace(Place):
    """Tasks of one run on a cluster. Handles are futures; the data stay on the workers."""

    def __init__(
        self, client: Client, watch: Watch, scheduler: str, digest: str, stage: str, window: int
    ) -> None:
        self._client, self._watch, self._scheduler = client, watch, scheduler
        self._digest, self._stage = digest, stage
        self.window = window
        self._running: dict[str, tuple[Task, Future]] = {}
        self._prefix = f"nearline {stage}-{secrets.token_hex(8)}"
        self._n_started = 0
        self._labels: dict[str, str] = {}
        self._done: queue.SimpleQueue[str] = queue.SimpleQueue()

    def start(self, task: Task, argument: Any, results: Sequence[Any]) -> None:
        content = pickle.dumps((task.function, argument), protocol=5)
        self._n_started += 1
        key = f"{self._prefix}-{self._n_started}"
        self._labels[key] = str(task)
        try:
            future = self._client.submit(call, self._digest, content, *results, key=key, pure=False)
        except Exception as error:
            raise self._lost() from error
        self._running[key] = task, future
        future.add_done_callback(lambda done, key=key: self._done.put(key))

    def finished(self) -> tuple[Task, Any]:
        task, future = self._running.pop(self._next())
        if future.status != "finished":
            self.fetch(future)  # raises, or waits until it is made again: the worker that held it is gone
        return task, future

    def fetch(self, handle: Any) -> Any:
        try:
            return handle.result()
        except NearlineError:
            raise
        except KilledWorker as error:
            label = self._labels.get(str(error.task), str(error.task))
            raise EnvironmentFault(
                f"{self._stage}: {label}: {error.allowed_failures + 1} workers died at it, one after "
                "another. The usual cause is memory: give each worker more (fewer `workers`, a higher "
                "`memory_limit`, or more memory where the workers run)"
            ) from None
        except Exception as error:
            if handle.status in ("cancelled", "lost"):
                raise self._lost() from None
            if "deserialization" in str(error):
                raise EnvironmentFault(
                    f"{self._stage}: scheduler={self._scheduler}: it cannot read this process's "
                    f"tasks ({short(error.__cause__ or error)}): install the same packages there"
                ) from None
            raise

    def forget(self) -> None:
        """Nothing more is wanted: what runs or waits is cancelled."""
        futures = [future for _, future in self._running.values()]
        self._running.clear()
        if futures:
            with suppress(Exception):
                self._client.cancel(futures)

    def _next(self) -> str:
        """The key of the next future that is done; EnvironmentFault where nobody is left to finish any."""
        self._watch.begin()
        while True:
            with suppress(queue.Empty):
                return self._done.get(timeout=HEALTH_S)
            try:
                self._watch.look()
            except EnvironmentFault:
                raise
            except Exception:
                raise self._lost() from None

    def _lost(self) -> EnvironmentFault:
        return EnvironmentFault(
            f"{self._stage}: scheduler={self._scheduler}: the connection to the scheduler is lost: "
            "see what it logged, start it again and run this again"
        )


def no_workers(address: str) -> str:
    """What to say where a scheduler has none."""
    return (
        f"scheduler={address}: no worker for {WORKERS_S} s: start one with `dask worker {address}`, or leave "
        "`scheduler` out to compute on threads"
    )


def short(error: BaseException) -> str:
    """The first line of what an error says."""
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
