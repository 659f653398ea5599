"""Where the work of an analysis runs: work items in, their results out, in the order of the items.

In: a pure function, one value that all items share, and the items; or tasks that wait for one another. Out:
what the function returned for each, handed to a `sink` in this process as soon as it is there. Workers are
threads of this process, or those of a Dask cluster: of this machine, behind an address, or made of Slurm
jobs. An item is the unit of loss: a worker that dies costs the items it was at. Results do not depend on
the scheduler: BLAS has one thread everywhere, an item is computed whole by one task, and whatever is summed
is summed in the order of the items. Cost on threads: none to speak of; on a cluster a few milliseconds and
two pickles an item, and the shared value once a worker.
"""

import ctypes
import functools
import logging
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, TypeVar

from threadpoolctl import threadpool_limits

from ..store import EnvironmentFault, Progress, silent
from .compute_settings import ComputeSettings
from .compute_tasks import Place, Task, Workers, run_tasks

Item = TypeVar("Item")
Kept = TypeVar("Kept")
_LOG = logging.getLogger("nearline")


class Session:
    """Workers to run items on; made by `session`. A cluster is started, or looked for, at the first item."""

    def __init__(self, settings: ComputeSettings, progress: Progress = silent) -> None:
        self._settings, self._progress = settings, progress
        self._opened: Workers | None = None

    @property
    def n_workers(self) -> int:
        """How many items run at once."""
        return self._settings.n_workers if self._on_threads else self._cluster().n_workers

    def at_once(self, need_bytes: int, what: str, advice: str = "") -> int:
        """How many items that need so much working memory may run at once; EnvironmentFault where not even
        one may. Fewer workers than the settings ask for are worth a warning. A cluster of this machine whose
        workers are too small is started again with fewer.
        """
        settings = self._settings
        if settings.scheduler in ("threads", "local"):
            limit, most = settings.memory_limit_bytes, settings.n_workers
            if need_bytes > limit:
                raise _too_large(
                    what, need_bytes, "the memory limit is", limit, f"raise `memory_limit` {advice}"
                )
            fitting = min(most, limit // need_bytes)
            if fitting < most:
                _LOG.warning("%s: %d of %d workers fit into %s", what, fitting, most, settings.memory_limit)
                if not self._on_threads:
                    self._close()
                    self._settings = settings.model_copy(update={"workers": fitting})
            return fitting
        each = self._cluster().worker_bytes
        if each is not None and need_bytes > each:
            more = f"give the workers more memory {advice}"
            raise _too_large(what, need_bytes, "a worker has", each, more)
        return self.n_workers

    def map(
        self,
        function: Callable[[Any, Item], Any],
        shared: Any,
        items: Sequence[Item],
        sink: Callable[[Item, Any], Kept],
        stage: str,
        workers: int | None = None,
    ) -> list[Kept]:
        """`sink(item, function(shared, item))` for every item, in the order of the items.

        `function`, `shared`, the items and the results can be pickled. `sink` runs in this process, one
        call at a time, as results come. `workers`: at most so many items at once, where memory asks for it.
        """
        tasks = [Task(function, item, weight=1) for item in items]
        return self.run(shared, tasks, lambda index, found: sink(items[index], found), stage, workers)

    def run(
        self,
        shared: Any,
        last: Sequence[Task],
        sink: Callable[[int, Any], Kept],
        stage: str,
        workers: int | None = None,
        unit: str = "items",
    ) -> list[Kept]:
        """`sink(index, result)` for each of the last tasks, with all that they follow; see `map`.

        Progress counts the weights of the tasks that are done.
        """
        if not last:
            return []
        total, done = sum(task.weight for task in _all_tasks(last)), 0

        def count(task: Task) -> None:
            nonlocal done
            if task.weight:
                done += task.weight
                self._progress(stage, done, total, unit)

        with self._place(shared, stage, workers) as place:
            try:
                return run_tasks(place, last, sink, count)
            finally:
                _give_back()

    @contextmanager
    def _place(self, shared: Any, stage: str, workers: int | None) -> Generator[Place, None, None]:
        if self._on_threads:
            # The limit holds for the whole process, not for a thread: it is set once, outside the tasks.
            with (
                threadpool_limits(1),
                _threads(shared, min(workers or self.n_workers, self.n_workers)) as place,
            ):
                yield place
        else:
            with self._cluster().place(shared, stage, workers) as place:
                yield place

    @property
    def _on_threads(self) -> bool:
        return self._settings.scheduler == "threads"

    def _cluster(self) -> Workers:
        if self._opened is None:
            from .compute_cluster import open_cluster  # distributed is loaded where it is used

            self._opened = open_cluster(self._settings)
        return self._opened

    def _close(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()


@contextmanager
def session(settings: ComputeSettings, progress: Progress = silent) -> Generator[Session, None, None]:
    """The workers that the settings name, until the block ends."""
    made = Session(settings, progress)
    try:
        yield made
    finally:
        made._close()


def _give_back() -> None:
    """Let the system have what was freed: threads free matrices of one size and ask for those of another, and
    glibc keeps them all for a process that lasts. Milliseconds; nothing elsewhere.
    """
    if (trim := _trim()) is not None:
        trim(0)


@functools.cache
def _trim() -> Callable[[int], int] | None:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # not glibc
        return None


def _too_large(what: str, need: int, limit_is: str, limit: int, advice: str) -> EnvironmentFault:
    sizes = f"takes {need / 2**30:.2f} GiB, {limit_is} {limit / 2**30:.2f} GiB"
    return EnvironmentFault(f"{what} {sizes}: {advice.strip()}")


def _all_tasks(last: Sequence[Task]) -> set[Task]:
    found: set[Task] = set()
    stack = list(last)
    while stack:
        task = stack.pop()
        if task not in found:
            found.add(task)
            stack.extend(task.after)
    return found


class _Threads(Place):
    """Threads of this process; they share all memory, and a handle is the result itself.

    A pool and not Dask's own threads: those keep the sink off the caller's thread, and start whatever is
    ready.
    """

    def __init__(self, pool: ThreadPoolExecutor, shared: Any, workers: int) -> None:
        self._pool, self._shared = pool, shared
        self._done: SimpleQueue[tuple[Task, Any, BaseException | None]] = SimpleQueue()
        self.window = workers + 1  # one waits, so that no thread does while the sink runs

    def start(self, task: Task, argument: Any, results: Sequence[Any]) -> None:
        self._pool.submit(self._one, task, argument, results)

    def finished(self) -> tuple[Task, Any]:
        task, result, error = self._done.get()
        if error is not None:
            raise error
        return task, result

    def fetch(self, handle: Any) -> Any:
        return handle

    def _one(self, task: Task, argument: Any, results: Sequence[Any]) -> None:
        try:
            self._done.put((task, task.function(self._shared, argument, *results), None))
        except BaseException as error:
            self._done.put((task, None, error))


@contextmanager
def _threads(shared: Any, workers: int) -> Generator[_Threads, None, None]:
    pool = ThreadPoolExecutor(workers, "nearline")
    try:
        yield _Threads(pool, shared, workers)
    finally:
        pool.shutdown(cancel_futures=True)
