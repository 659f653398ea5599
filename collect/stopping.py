"""When a harvest ends before its last block: a time limit has come, or a signal.

In: `max_time` of the settings, and on the command line SIGINT, SIGTERM and SIGHUP. Out: the run stops
between two batches, the block in hand is dropped, those handed to the writer are committed; one sentence
says how many blocks are committed and that the same command continues. Cost: one look at a flag and a clock
per batch. The second signal ends the process at once, which harms nothing: a store survives that at any
moment.
"""

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

from ..store.errors import IncompleteError, NearlineError, UsageError

EXIT_INTERRUPTED = 130
SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")  # the last one: a dropped connection to a rented machine
CONTINUES = "the same command continues"
_DURATION = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m(?:in)?)?(?:(\d+)s)?")
_SECONDS = (86_400, 3_600, 60, 1)

now = time.monotonic  # tests put a clock of their own here


class TimeIsUp(IncompleteError):
    """The run stopped after its `max_time`."""


class Interrupted(NearlineError):
    """The run was stopped by a signal."""

    exit_code = EXIT_INTERRUPTED


class StopNow(Exception):
    """Raised inside the loop; the harvest turns it into one of the two above once the writer is done."""

    def __init__(self, by_signal: bool) -> None:
        super().__init__(by_signal)
        self.by_signal = by_signal

    def explained(self, n_committed: int, n_blocks: int) -> TimeIsUp | Interrupted:
        if self.by_signal:
            return Interrupted(interrupted(n_committed, n_blocks))
        # Without the hint, a job that is queued again and again would never get further.
        next_step = CONTINUES if n_committed else "give it more time, or a smaller block"
        words = f"stopped after --max-time: {n_committed} of {n_blocks} blocks are committed"
        return TimeIsUp(f"{words}; {next_step}")


def interrupted(n_committed: int, n_blocks: int) -> str:
    """What a signal's user reads once the store is begun."""
    return f"interrupted: {n_committed} of {n_blocks} blocks are committed; {CONTINUES}"


def parse_duration(text: str) -> float:
    """`"7h30m"`, `"45m"` or `"90s"` as seconds."""
    match = _DURATION.fullmatch(text.replace(" ", "").lower())
    seconds = (
        sum(int(part or 0) * unit for part, unit in zip(match.groups(), _SECONDS, strict=True))
        if match
        else 0
    )
    if seconds < 1:
        raise UsageError(f"{text!r} is no duration above zero; write 7h30m, 45m or 90s")
    return float(seconds)


@dataclass(slots=True)
class StopRequest:
    """What a signal has asked for. `deferred` is true while there is a block in hand: a signal then only
    sets `requested`, which the loop sees before its next batch; otherwise it is a KeyboardInterrupt."""

    requested: bool = False
    deferred: bool = False
    sentence: str = "interrupted: nothing was collected yet; the same command starts again"

    @contextmanager
    def deferring(self) -> Generator[None]:
        self.deferred = True
        try:
            yield
        finally:
            self.deferred = False


@dataclass(slots=True)
class Watch:
    """What the loop asks, `before_block`, `before_batch` and `after_blocks`, and is told, `block_took`."""

    request: StopRequest = field(default_factory=StopRequest)
    limit_s: float | None = None
    began_s: float = field(default_factory=lambda: now())
    _took_s: list[float] = field(default_factory=list)

    def before_block(self) -> None:
        """Stop unless there is time for a block that takes as long as the slowest so far."""
        self._look(max(self._took_s, default=0.0))

    def before_batch(self) -> None:
        self._look(0.0)

    def block_took(self, seconds: float) -> None:
        """Called when a block is full, and again when it is committed, while the next one runs."""
        self._took_s.append(seconds)

    def after_blocks(self) -> None:
        """A signal that came while the last block was written still ends the run, before it seals."""
        if self.request.requested:
            raise StopNow(by_signal=True)

    def _look(self, needed_s: float) -> None:
        if self.request.requested:
            raise StopNow(by_signal=True)
        if self.limit_s is not None and now() - self.began_s + needed_s > self.limit_s:
            raise StopNow(by_signal=False)


@contextmanager
def stop_on_signals() -> Generator[StopRequest]:
    """SIGINT, SIGTERM and SIGHUP end the run inside in good order (`Interrupted`); the handlers before come
    back.

    For programs that own their process: a library call leaves the handlers alone, and a KeyboardInterrupt
    goes through it as through anything else. Signals that are ignored (nohup, `&`) stay ignored.
    """
    request = StopRequest()

    def handle(number: int, frame: FrameType | None) -> None:
        if request.requested:
            _say("stopped at once; committed blocks stay, " + CONTINUES)
            os._exit(EXIT_INTERRUPTED)
        request.requested = True
        if not request.deferred:
            raise KeyboardInterrupt
        _say("stopping before the next batch (a second signal: at once)")

    previous = {}
    if threading.current_thread() is threading.main_thread():
        wanted = [getattr(signal, name) for name in SIGNALS if hasattr(signal, name)]
        previous = {one: signal.getsignal(one) for one in wanted if signal.getsignal(one) != signal.SIG_IGN}
    try:
        for one in previous:
            signal.signal(one, handle)
        yield request
    except KeyboardInterrupt:
        raise Interrupted(request.sentence) from None
    finally:
        for one, handler in previous.items():
            signal.signal(one, handler)


def _say(words: str) -> None:
    # A handler may run in the middle of any print, so nothing buffered or locked is used.
    os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"\nnearline: {words}\n".encode())
