"""How far a run has come, on standard error.

In: the calls `progress(stage, done, total, unit)` that library code makes. Out: on a terminal one bar with
rate and time left; anywhere else (a log file, a pipe) a plain line at most every ten seconds. Work that is
over within two seconds prints nothing. Cost: a clock read per call.
"""

import sys
import time
from collections import deque
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

QUIET_S = 2.0  # shorter work needs no announcement
LINE_EVERY_S = 10.0  # a log of an eight-hour run stays readable
RECENT_S = 60.0  # what the rate and the time left are of: work is not as fast at its end as at its beginning
AT_ONCE_S = 1.0  # what is done by then was there already: a run that goes on counts it, and it says no rate
_PER = ((1, "s"), (60, "min"), (3600, "h"))


def rate_text(per_s: float, unit: str) -> str:
    """`1,234 tokens/s`, `0.25 steps/s`, `2.4 steps/min`: two digits of slow work."""
    scale, per = next((one for one in _PER if per_s * one[0] >= 0.1), _PER[-1] if per_s else _PER[0])
    rate = per_s * scale
    return f"{rate:,.0f} {unit}/{per}" if rate >= 9.95 else f"{rate:.2g} {unit}/{per}"


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


class _Recent:
    """Done a second in the last minute, or since the last report but one where that is longer ago."""

    def __init__(self, now: float, done: int) -> None:
        self.began, self.done = now, done
        self._points = deque([(now, done)])

    def goes_on(self, done: int) -> bool:
        """Not so where less is done than before: that is the same stage of another model."""
        return done >= self.done

    def rate(self, now: float, done: int) -> float:
        """As of a report now."""
        self.done, points = done, self._points
        if now - self.began < AT_ONCE_S:
            points[0] = (now, done)
            return 0.0
        while len(points) > 1 and now - points[1][0] >= RECENT_S:
            points.popleft()
        since, before = points[0]
        if now - points[-1][0] >= AT_ONCE_S:
            points.append((now, done))
        return (done - before) / max(now - since, 1e-9)


class PlainProgress:
    """A line now and then; remembers only the stage in hand."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._stage = ""
        self._last_s = 0.0
        self._recent = _Recent(0.0, 0)

    def __call__(self, stage: str, done: int, total: int, unit: str) -> None:
        now = time.monotonic()
        if stage != self._stage or not self._recent.goes_on(done):
            self._stage, self._recent, self._last_s = stage, _Recent(now, done), now
        elapsed, rate = now - self._recent.began, self._recent.rate(now, done)
        if elapsed < QUIET_S or (now - self._last_s < LINE_EVERY_S and done < total):
            return
        self._last_s = now
        end = f"{duration_text((total - done) / rate)} left" if rate else "time left unknown"
        end = f"done in {duration_text(elapsed)}" if done >= total else end
        print(
            f"{stage}: {done:,} of {total:,} {unit} ({rate_text(rate, unit)}, {end})",
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
            speed_estimate_period=RECENT_S,
        )
        self._tasks: dict[str, tuple[TaskID, _Recent]] = {}

    def __call__(self, stage: str, done: int, total: int, unit: str) -> None:
        if stage not in self._tasks or not self._tasks[stage][1].goes_on(done):
            task = self._progress.add_task(stage, total=total, counts="")
            self._tasks[stage] = (task, _Recent(time.monotonic(), done))
        task, recent = self._tasks[stage]
        rate = rate_text(recent.rate(time.monotonic(), done), unit)
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
