"""The graph of a fit on Dask threads: layers in, each layer's result out, the same bytes however it is
scheduled.

Each range of a layer's blocks gives partial moments, joined from first to last; one task solves; each range
then gives the needs of its rows; one task finishes the layer. BLAS runs on one thread throughout, so that
parallel speed comes from tasks and every product has the same order of sums. At most `workers` tasks are in
flight, each with one block and fixed buffers.
"""

import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import dask.config
import numpy as np
from dask.base import compute
from dask.delayed import delayed
from threadpoolctl import threadpool_limits

from ..store import Progress, silent
from .moments import MomentBuffers
from .ridge import AlphaRule
from .surrogates import LayerFit, LayerMoments, merge_layers, solve_layer
from .tasks import Evaluated, range_moments, range_needs

Needs = dict[str, np.ndarray]
Finish = Callable[[int, LayerFit, dict[str, Needs]], Any]


@dataclass(frozen=True, slots=True)
class Job:
    """What is fitted on which rows, and which stores it is evaluated on."""

    layers: Sequence[int]
    fitted: Evaluated
    stores: Sequence[Evaluated]
    rules: Sequence[AlphaRule]
    n_folds: int


def run(job: Job, workers: int, finish: Finish, progress: Progress = silent) -> list[Any]:
    """`finish(layer, fit, needs by store)` for every layer, in the order of `job.layers`."""
    n_rows = sum(store.population.split.size for store in (job.fitted, *job.stores))
    graph = _Graph(job, _Counter(progress, "fit", n_rows * len(job.layers)), _Pool(job))
    return _compute([graph.layer(layer, finish) for layer in job.layers], workers)


def fit_surrogates(job: Job, workers: int) -> list[LayerFit]:
    """The surrogates of every layer, without needs: one pass over fit and test rows, then the solves."""
    graph = _Graph(job, _Counter(silent, "fit", 1), _Pool(job))
    return _compute([graph.solved(layer) for layer in job.layers], workers)


def _compute(graphs: list[Any], workers: int) -> list[Any]:
    # threadpool_limits holds for the whole process, not for a thread: it is set once, outside the tasks.
    with threadpool_limits(1), dask.config.set(scheduler="threads", num_workers=workers):
        return list(compute(*graphs, traverse=False))


class _Pool:
    """Buffers of moments, handed from task to task: as many as there are tasks at work, touched only once."""

    def __init__(self, job: Job) -> None:
        self._width, self._n_sums = job.fitted.reader.d_model, job.n_folds + 1
        self._free: deque[MomentBuffers] = deque()

    @contextmanager
    def buffers(self) -> Generator[MomentBuffers, None, None]:
        try:
            taken = self._free.pop()
        except IndexError:
            taken = MomentBuffers(self._width, self._width, self._n_sums)
        yield taken
        self._free.append(taken)


class _Counter:
    """Counts rows over all threads and hands them to the progress callback."""

    def __init__(self, progress: Progress, stage: str, total: int) -> None:
        self._progress, self._stage, self._total = progress, stage, total
        self._done = 0
        self._lock = threading.Lock()

    def add(self, rows: int) -> None:
        with self._lock:
            self._done += rows
            self._progress(self._stage, self._done, self._total, "rows")


@dataclass(frozen=True, slots=True)
class _Graph:
    """Delayed values of one job.

    What is no result of another task is bound to its function beforehand (`partial`), where Dask neither
    hashes nor walks it.
    """

    job: Job
    counter: _Counter
    pool: _Pool

    def solved(self, layer: int) -> Any:
        """The layer's surrogates."""
        first, *rest = [_task(partial(self._moments, layer, blocks)) for blocks in self.job.fitted.ranges()]
        for part in rest:
            first = _task(merge_layers, first, part)
        return _task(partial(_solve, self.job.rules), first)

    def layer(self, layer: int, finish: Finish) -> Any:
        """The layer's result."""
        solved = self.solved(layer)
        parts = [
            _task(partial(self._needs, store, layer, blocks), solved)
            for store in self.job.stores
            for blocks in store.ranges()
        ]
        return _task(partial(self._finish, layer, finish), solved, parts)

    def _moments(self, layer: int, blocks: range) -> LayerMoments:
        fitted = self.job.fitted
        with self.pool.buffers() as buffers:
            moments = range_moments(fitted.sources[layer], blocks, fitted.population, buffers)
        self.counter.add(fitted.n_rows(blocks))
        return moments

    def _needs(self, store: Evaluated, layer: int, blocks: range, fit: LayerFit) -> Needs:
        needs = range_needs(store.sources[layer], blocks, store.population, fit)
        self.counter.add(store.n_rows(blocks))
        return needs

    def _finish(self, layer: int, finish: Finish, fit: LayerFit, parts: list[Needs]) -> Any:
        remaining = iter(parts)
        by_store: dict[str, Needs] = {}
        for store in self.job.stores:
            found = [next(remaining) for _ in store.ranges()]
            by_store[store.name] = {name: np.concatenate([part[name] for part in found]) for name in found[0]}
        return finish(layer, fit, by_store)


def _solve(rules: Sequence[AlphaRule], moments: LayerMoments) -> LayerFit:
    return solve_layer(moments, rules)


def _task(function: Callable[..., Any], *arguments: Any) -> Any:
    return delayed(function, pure=False, traverse=False)(*arguments)
