"""Blocks travel from the model's thread to one writer thread, and the empty buffers travel back.

In: a function that writes one job, and the buffers (two: one filled while the other is written). Out: the
time the model waited for a buffer. The buffers bound the queues, and so the memory. When the writer fails,
the next call here raises the writer's own error, and so does leaving, whatever else was on its way; when only
the model's side fails, blocks handed over before are still written. Nothing polls.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Generic, TypeVar

Job = TypeVar("Job")
Buffer = TypeVar("Buffer")


class Pipeline(Generic[Buffer, Job]):
    """Named steps: enter; `borrow` a buffer, fill it, `submit` it with its job, again and again; leave."""

    def __init__(self, write: Callable[[Buffer, Job], None], buffers: Iterable[Buffer]) -> None:
        self._write = write
        self._free: queue.SimpleQueue[Buffer | None] = queue.SimpleQueue()
        self._jobs: queue.SimpleQueue[tuple[Buffer, Job] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="nearline-writer", daemon=True)
        self.waited_s = 0.0
        for buffer in buffers:
            self._free.put(buffer)

    def __enter__(self) -> "Pipeline[Buffer, Job]":
        self._thread.start()
        return self

    def borrow(self) -> Buffer:
        """An empty buffer; waits while the writer holds them all."""
        self.check()
        started = time.perf_counter()
        buffer = self._free.get()
        self.waited_s += time.perf_counter() - started
        if buffer is None:
            self.check()
            raise RuntimeError("the writer stopped without an error")
        return buffer

    @property
    def has_free(self) -> bool:
        """Whether `borrow` would not wait."""
        return not self._free.empty()

    def submit(self, buffer: Buffer, job: Job) -> None:
        """Hand a full buffer over; it must not be touched until it is borrowed again."""
        self.check()
        self._jobs.put((buffer, job))

    def check(self) -> None:
        """Raise the writer's error, if it has one."""
        if self._error is not None:
            raise self._error

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._jobs.put(None)
        started = time.perf_counter()
        self._thread.join()
        self.waited_s += time.perf_counter() - started
        if self._error is not None and self._error is not error:
            raise self._error from error  # also when a stop or a signal was on its way: this one is the news

    def _work(self) -> None:
        try:
            while (item := self._jobs.get()) is not None:
                buffer, job = item
                self._write(buffer, job)
                self._free.put(buffer)
        except BaseException as error:
            self._error = error
            self._free.put(None)  # wakes a model that waits for a buffer
