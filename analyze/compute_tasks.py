"""Tasks and the one loop that runs them: tasks that wait for one another in, the last ones' results out.

A task is a pure function of a value that all share, an argument of its own and the results of the tasks
before it. Tasks are started depth first in the order of the last tasks, at most a window of them at once,
and a result is let go as soon as nothing waits for it: however many tasks there are, about as many results
exist as there are workers. The results do not depend on where or in which order tasks run, because every
task names the tasks it follows. Cost: a few microseconds a task here; a place adds its own.
"""

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

Kept = TypeVar("Kept")


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """`function(shared, argument, *results of after)`, where `function` is one of a module, so that its name
    can be sent."""

    function: Callable[..., Any]
    argument: Any
    after: tuple["Task", ...] = ()
    weight: int = 0  # in the unit of the progress
    label: str = ""  # what an error calls it

    def __str__(self) -> str:
        return self.label or f"{self.function.__name__} of {str(self.argument)[:80]}"


@dataclass(frozen=True, slots=True)
class Here:
    """An argument that only this process can make, made when its task is started."""

    make: Callable[[], Any]


class Place(ABC):
    """Where the tasks of one run go."""

    window: int  # tasks to have started at once

    @abstractmethod
    def start(self, task: Task, argument: Any, results: Sequence[Any]) -> None:
        """Begin a task; `results`: what `finished` gave for those before it."""

    @abstractmethod
    def finished(self) -> tuple[Task, Any]:
        """Wait for the next task that is done: a handle on its result, or what it raised is raised."""

    @abstractmethod
    def fetch(self, handle: Any) -> Any:
        """The result behind a handle."""


class Workers(ABC):
    """What runs tasks, for as long as a session lasts."""

    n_workers: int

    @property
    @abstractmethod
    def worker_bytes(self) -> int | None:
        """Working memory of one worker, where it is known."""

    @abstractmethod
    def place(self, shared: Any, stage: str, workers: int | None) -> AbstractContextManager[Place]:
        """Where the tasks of one run go; at most `workers` of them at once."""

    @abstractmethod
    def close(self) -> None:
        """Stop what was started."""


def run_tasks(
    place: Place,
    last: Sequence[Task],
    sink: Callable[[int, Any], Kept],
    on_done: Callable[[Task], None],
) -> list[Kept]:
    """`sink(index, result)` for each of the last tasks, as they come; what it returned, in their order."""
    order = _depth_first(last)
    number = {task: index for index, task in enumerate(order)}
    index_of = {task: index for index, task in enumerate(last)}
    waits_for = {task: len(task.after) for task in order}
    followers: dict[Task, list[Task]] = {task: [] for task in order}
    for task in order:
        for before in task.after:
            followers[before].append(task)
    wanted_by = {task: len(found) for task, found in followers.items()}
    handles: dict[Task, Any] = {}
    kept: dict[int, Kept] = {}
    ready = [number[task] for task in order if not task.after]  # a heap already: they ascend
    running = 0
    while ready or running:
        while ready and running < place.window:
            task = order[heapq.heappop(ready)]
            argument = task.argument.make() if isinstance(task.argument, Here) else task.argument
            place.start(task, argument, [handles[before] for before in task.after])
            running += 1
        task, handle = place.finished()
        running -= 1
        handles[task] = handle
        on_done(task)
        for before in task.after:
            wanted_by[before] -= 1
            if not wanted_by[before]:
                del handles[before]
        for follower in followers[task]:
            waits_for[follower] -= 1
            if not waits_for[follower]:
                heapq.heappush(ready, number[follower])
        if task in index_of:
            kept[index_of[task]] = sink(index_of[task], place.fetch(handles.pop(task)))
        del handle
    return [kept[index] for index in range(len(last))]


def _depth_first(last: Sequence[Task]) -> list[Task]:
    """Every task once, after those that it follows."""
    order: list[Task] = []
    seen: set[Task] = set()
    for final in last:
        stack = [(final, iter(final.after))]
        while stack:
            task, rest = stack[-1]
            before = next((one for one in rest if one not in seen), None)
            if before is not None:
                stack.append((before, iter(before.after)))
                continue
            stack.pop()
            if task not in seen:
                seen.add(task)
                order.append(task)
    return order
