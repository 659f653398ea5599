"""How far a run has come, on standard error.

In: the calls `progress(stage, done, total, unit)` that library code makes. Out: on a terminal one bar with
rate and time left; anywhere else (a log file, a pipe) a plain line at most every ten seconds. Work that is
over within two seconds prints nothing. Cost: a clock read per call.
"""

import sys
import time
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

QUIET_S = 2.0  # shorter work needs no announcement
LINE_EVERY_S = 10.0  # a log of an eight-hour run stays readable


def rate_text(done: float, seconds: float, unit: str) -> str:
    """`1,234 tokens/s`."""
    return f"{done / max(seconds, 1e-9):,.0f} {unit}/s"


def duration_text(seconds: float) -> str:
    """`1 h 02 min`, `3 min 20 s` or `12 s`."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 60} min {whole % 60:02d} s" if whole >= 60 else f"{whole} s"


def short_duration_text(seconds: float) -> str:
    """Two digits of an estimate: `0.8 s`, `12 min`, `3.2 h`."""
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= 0.995 * size:
            return _two_digits(seconds / size, unit)
    return _two_digits(seconds, "s") if seconds >= 0.05 else "under 0.1 s"


def _two_digits(value: float, unit: str) -> str:
    return f"{value:.1f} {unit}" if value < 9.95 else f"{value:,.0f} {unit}"


class PlainProgress:
    """A line now and then; remembers only the stage in hand."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._stage = ""
        self._start_s = self._last_s = 0.0

    def __call__(self, stage: str, done: int, total: int, unit: str) -> None:
        now = time.monotonic()
        if stage != self._stage:
            self._stage, self._start_s, self._last_s = stage, now, now
        elapsed = now - self._start_s
        if elapsed < QUIET_S or (now - self._last_s < LINE_EVERY_S and done < total):
            return
        self._last_s = now
        left = duration_text(elapsed * (total - done) / max(done, 1))
        end = f"done in {duration_text(elapsed)}" if done >= total else f"{left} left"
        print(
            f"{stage}: {done:,} of {total:,} {unit} ({rate_text(done, elapsed, unit)}, {end})",
            file=self._stream,
            flush=True,
        )

    def __enter__(self) -> "PlainProgress":
        return self

    def __exit__(self, *_: object) -> None:
        return None


class BarProgress:
    """One bar per stage on a terminal; a finished stage leaves its line."""

    def __init__(self, console: Console | None = None) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            TextColumn("{task.fields[counts]}"),
            TimeRemainingColumn(compact=True),
            console=console or Console(stderr=True),
        )
        self._tasks: dict[str, tuple[TaskID, float]] = {}

    def __call__(self, stage: str, done: int, total: int, unit: str) -> None:
        if stage not in self._tasks:
            task = self._progress.add_task(stage, total=total, counts="")
            self._tasks[stage] = (task, time.monotonic())
        task, start_s = self._tasks[stage]
        rate = rate_text(done, time.monotonic() - start_s, unit)
        self._progress.update(task, completed=done, total=total, counts=f"{done:,}/{total:,} {unit}  {rate}")

    def __enter__(self) -> "BarProgress":
        self._progress.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.__exit__(kind, error, trace)


def progress_for(stream: TextIO | None = None) -> BarProgress | PlainProgress:
    """A bar on a terminal, plain lines elsewhere."""
    if stream is None and sys.stderr.isatty():
        return BarProgress()
    return PlainProgress(stream)
