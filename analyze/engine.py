"""The tasks of a fit: layers in, each layer's result out, the same bytes wherever and however they run.

Each range of a layer's blocks gives partial moments, joined from first to last; one task a family of
surrogates solves; each range then gives the needs of its rows, by every family in one read; one task
finishes the layer. Stores that several families are fitted on are read once. Workers hold one block and
fixed buffers each, and need the stores alone: what goes into the study goes through the sink, in the
calling process.
"""

import functools
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Int32

from .compute import Session
from .compute_tasks import Here, Task
from .moments import MomentBuffers
from .ridge import AlphaRule
from .surrogates import LayerFit, LayerMoments, merge_layers, solve_layer
from .tasks import SINK_BUFFER_ROWS, Evaluated, range_moments, range_needs

Needs = dict[str, np.ndarray]
# From a layer, its surrogates by family, and their needs by family and store; runs on a worker.
Finish = Callable[[int, dict[str, LayerFit], dict[str, dict[str, Needs]]], Any]
Kept = TypeVar("Kept")

MAIN = ""  # the family of the study's own surrogates


@dataclass(frozen=True, slots=True, eq=False)
class Family:
    """Surrogates fitted on some stores together, and which of their folds scores which row of every store."""

    name: str
    fitted: tuple[str, ...]
    folds: Mapping[str, Int32[np.ndarray, "token"]]  # by store


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """What is fitted on which rows, and which stores it is evaluated on."""

    layers: Sequence[int]
    stores: Mapping[str, Evaluated]
    families: tuple[Family, ...]
    rules: Sequence[AlphaRule]
    n_folds: int
    # The fold whose moments each row of a fitted store enters; a row below 0 enters none.
    folds: Mapping[str, Int32[np.ndarray, "token"]]
    extras: bool = False  # learning curve, ranks and variants too


def one_family(
    stores: Mapping[str, Evaluated],
    fit_on: str,
    layers: Sequence[int],
    rules: Sequence[AlphaRule],
    n_folds: int,
    *,
    extras: bool = False,
) -> Job:
    """The job of one fit: surrogates of `fit_on`, with the folds of the populations. `fit_on` may have no
    rows here, where its moments are given.
    """
    folds = {name: store.population.fold for name, store in stores.items()}
    family = Family(MAIN, (fit_on,), folds)
    summed = {name: found for name, found in folds.items() if name == fit_on}
    return Job(layers, stores, (family,), rules, n_folds, summed, extras)


@dataclass(frozen=True, slots=True, eq=False)
class Saved:
    """Moments of stores that are kept from an earlier fit, and stores whose moments are wanted back."""

    load: Mapping[str, Callable[[int], LayerMoments]] = field(default_factory=dict)  # by store, of a layer
    keep: tuple[str, ...] = ()


def run(
    job: Job,
    session: Session,
    finish: Finish,
    sink: Callable[[int, Any, dict[str, LayerMoments]], Kept],
    workers: int | None = None,
    saved: Saved | None = None,
    stage: str = "fit",
) -> list[Kept]:
    """`sink(layer, finish(layer, surrogates, needs), moments to keep)` for every layer, in the order of
    `job.layers`.
    """
    saved = saved or Saved()
    last = [_layer_task(job, layer, saved) for layer in job.layers]
    return session.run(
        _Shared(job, finish, _Pool(job.n_folds)),
        last,
        lambda index, found: sink(job.layers[index], *found),
        stage,
        workers,
        "row passes",  # a row counts once for each layer and pass
    )


def fit_surrogates(job: Job, session: Session) -> list[LayerFit]:
    """The surrogates of every layer, without needs: one pass over fit and test rows, then the solves."""
    (family,) = job.families
    last = [_solved(job, layer, family, _merged(job, layer, Saved())) for layer in job.layers]
    return session.run(_Shared(job, _no_finish, _Pool(job.n_folds)), last, lambda _, fit: fit, "fit")


# The tasks of a layer


def _layer_task(job: Job, layer: int, saved: Saved) -> Task:
    merged = _merged(job, layer, saved)
    solved = [_solved(job, layer, family, merged) for family in job.families]
    parts = [
        Task(_needs, (layer, name, blocks), tuple(solved), store.n_rows(blocks), f"needs of layer {layer}")
        for name, store in job.stores.items()
        for blocks in store.ranges()
    ]
    kept = tuple(merged[name] for name in saved.keep)
    return Task(_finished, (layer, saved.keep), (*solved, *parts, *kept), label=f"layer {layer}")


def _merged(job: Job, layer: int, saved: Saved) -> dict[str, Task]:
    """The moments of each fitted store."""
    names = dict.fromkeys(name for family in job.families for name in family.fitted)
    return {
        name: _given_moments(saved.load[name], layer) if name in saved.load else _store(job, layer, name)
        for name in names
    }


def _given_moments(load: Callable[[int], LayerMoments], layer: int) -> Task:
    return Task(_given, Here(functools.partial(load, layer)), label=f"saved moments of layer {layer}")


def _store(job: Job, layer: int, name: str) -> Task:
    store = job.stores[name]
    label = f"moments of layer {layer} of store {name}"
    first, *rest = [
        Task(_moments, (layer, name, blocks), (), store.n_rows(blocks), label) for blocks in store.ranges()
    ]
    for part in rest:
        first = Task(_merge, None, (first, part), label=label)
    return first


def _solved(job: Job, layer: int, family: Family, merged: Mapping[str, Task]) -> Task:
    after = tuple(merged[name] for name in family.fitted)
    return Task(_solve, None, after, label=f"surrogates of layer {layer}")


# What runs on a worker


@dataclass(frozen=True, slots=True, eq=False)
class _Shared:
    """What every task of a job gets."""

    job: Job
    finish: Finish
    pool: "_Pool"


class _Pool:
    """Buffers of moments, handed from task to task: as many as there are tasks at work in a process, touched
    only once. It travels empty.
    """

    def __init__(self, n_folds: int) -> None:
        self._n_folds = n_folds
        self._free: deque[tuple[MomentBuffers, MomentBuffers]] = deque()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Pool, (self._n_folds,)

    @contextmanager
    def buffers(self, width: int) -> Generator[tuple[MomentBuffers, MomentBuffers], None, None]:
        """Those of body rows, by fold and of test; those of sink rows, of fit and of test."""
        try:
            taken = self._free.pop()
        except IndexError:
            body = MomentBuffers(width, width, self._n_folds + 1)
            taken = body, MomentBuffers(width, width, 2, SINK_BUFFER_ROWS)
        yield taken
        self._free.append(taken)


def _given(shared: _Shared, moments: LayerMoments) -> LayerMoments:
    return moments


def _moments(shared: _Shared, at: tuple[int, str, range]) -> LayerMoments:
    layer, name, blocks = at
    store, folds = shared.job.stores[name], shared.job.folds[name]
    with shared.pool.buffers(store.reader.d_model) as buffers:
        return range_moments(store.sources[layer], blocks, store.population, folds, *buffers)


def _merge(shared: _Shared, _: None, first: LayerMoments, second: LayerMoments) -> LayerMoments:
    return merge_layers(first, second)


def _solve(shared: _Shared, _: None, *moments: LayerMoments) -> LayerFit:
    joined = functools.reduce(merge_layers, moments)
    return solve_layer(joined, shared.job.rules, extras=shared.job.extras)


def _needs(shared: _Shared, at: tuple[int, str, range], *fits: LayerFit) -> list[Needs]:
    layer, name, blocks = at
    store = shared.job.stores[name]
    by = [(fit, family.folds[name]) for fit, family in zip(fits, shared.job.families, strict=True)]
    return range_needs(store.sources[layer], blocks, store.population, by)


def _finished(shared: _Shared, at: tuple[int, tuple[str, ...]], *results: Any) -> tuple[Any, Any]:
    layer, keep = at
    job = shared.job
    names = [family.name for family in job.families]
    fits = dict(zip(names, results, strict=False))
    remaining = iter(results[len(names) :])
    needs: dict[str, dict[str, Needs]] = {name: {} for name in names}
    for store_name, store in job.stores.items():
        found: list[list[Needs]] = [next(remaining) for _ in store.ranges()]
        for index, name in enumerate(names):
            parts = [part[index] for part in found]
            needs[name][store_name] = {c: np.concatenate([part[c] for part in parts]) for c in parts[0]}
    kept = dict(zip(keep, remaining, strict=True))
    return shared.finish(layer, fits, needs), kept


def _no_finish(*_: object) -> None:
    """A job without needs finishes nothing."""
