"""One run on a store: which blocks it is to do, and what it leaves behind.

In: a prepared harvest and an open writer. Out: the blocks of this rank; runs/<id>.json for each run that
committed something; the seal when nothing is missing any more, and `Harvested`. The last of several ranks
seals; any number may try at once. Cost: that of the seal.
"""

import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..store.folder import committed_blocks
from ..store.writer import StoreWriter
from .loop import Waits
from .preparing import Prepared
from .ranks import Ranks
from .stopping import StopRequest, interrupted


@dataclass(frozen=True, slots=True)
class Harvested:
    """A store and how the run went. `sample` is the text of the first rows, from the stored ids; `n_tokens`
    are the rows of the whole store, `n_collected` those of this run."""

    path: Path
    n_tokens: int
    sample: str
    seconds: float
    tokens_per_s: float
    waited_s: float  # for the disk
    waited_device_s: float
    device_idle_share: float | None  # of the run, as a GPU's own events say; None on a CPU
    notes: tuple[str, ...]
    sealed: bool
    n_blocks: int
    n_committed: int
    n_collected: int


@dataclass(slots=True)
class Run:
    """Named steps: made when the store is begun; `blocks` are collected; `keep_facts`; `finish`."""

    prepared: Prepared
    writer: StoreWriter
    settings: dict[str, Any]  # as they were used, for the record
    ranks: Ranks
    request: StopRequest
    began: datetime
    waits: Waits = field(default_factory=Waits)
    seconds: float = 0.0
    blocks: list[int] = field(init=False)
    _before: frozenset[int] = field(init=False)
    _ready: datetime = field(init=False)
    _ready_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._before = frozenset(self.writer.committed)
        self._ready, self._ready_s = datetime.now(UTC), time.perf_counter()
        n_blocks = self.writer.plan.n_blocks
        self.blocks = self.ranks.own(set(range(n_blocks)) - self._before)
        self._say_how_far(len(self._before))

    def keep_facts(self) -> None:
        """Write what differs from run to run, unless this one committed nothing."""
        end, plan, self.seconds = datetime.now(UTC), self.writer.plan, time.perf_counter() - self._ready_s
        done = sorted(self.writer.committed - self._before)
        if not done:
            return
        n_rows = int(plan.block_rows[done].sum())
        n_bytes = self.prepared.store_bytes * len(done) // plan.n_blocks
        facts: dict[str, Any] = {
            "command": sys.argv,
            "settings": self.settings,
            "start": self.began.isoformat(timespec="seconds"),
            "end": end.isoformat(timespec="seconds"),
            "host": platform.node(),
            "path": str(self.writer.path.resolve()),
            "rank": self.ranks.rank,
            "world_size": self.ranks.world_size,
            "n_blocks": len(done),
            "n_tokens": n_rows,
            "setup_s": round((self._ready - self.began).total_seconds(), 3),
            "seconds": round(self.seconds, 3),
            "tokens_per_s": round(n_rows / self.seconds, 1),
            "waited_s": round(self.waits.disk_s, 3),
            "waited_share": round(self.waits.disk_s / self.seconds, 4),
            "waited_device_s": round(self.waits.device_s, 3),
            **({} if self.idle_share is None else {"device_idle_share": round(self.idle_share, 4)}),
            "uncompressed_bytes": n_bytes,
            "mib_per_s": round(n_bytes / 2**20 / self.seconds, 1),
        }
        self.writer.write_run(facts)

    @property
    def idle_share(self) -> float | None:
        """The part of the run in which a GPU had no work."""
        if self.waits.busy_s is None or not self.seconds:
            return None
        return max(0.0, 1 - self.waits.busy_s / self.seconds)

    def finish(self, sample: str, notes: Sequence[str]) -> Harvested:
        """Seal if every block is committed; the last note says how the run ended, if that is worth saying."""
        plan, writer = self.writer.plan, self.writer
        n_committed = plan.n_blocks if writer.sealed else len(committed_blocks(writer.path))
        self._say_how_far(n_committed)
        # One process alone lets `seal` say what is missing, should anything be.
        sealed = writer.sealed or n_committed == plan.n_blocks or self.ranks.world_size == 1
        if sealed and not writer.sealed:
            writer.seal()
        outcome = self._outcome(n_committed)
        n_collected = int(plan.block_rows[sorted(writer.committed - self._before)].sum())
        return Harvested(
            path=writer.path,
            n_tokens=plan.n_tokens,
            sample=sample,
            seconds=self.seconds,
            tokens_per_s=n_collected / self.seconds if n_collected else 0.0,
            waited_s=self.waits.disk_s,
            waited_device_s=self.waits.device_s,
            device_idle_share=self.idle_share,
            notes=(*notes, *([outcome] if outcome else [])),
            sealed=sealed,
            n_blocks=plan.n_blocks,
            n_committed=n_committed,
            n_collected=n_collected,
        )

    def _outcome(self, n_committed: int) -> str | None:
        n_blocks, n_before = self.writer.plan.n_blocks, len(self._before)
        if self.writer.sealed:
            return "nothing to do: the store is sealed, and was made with these settings"
        if n_committed < n_blocks:
            return f"{self.ranks} is done: {n_committed} of {n_blocks} blocks committed; the last rank seals"
        if self.ranks.world_size > 1:
            return f"{self.ranks} is done: all {n_blocks} blocks are committed, the store is sealed"
        return f"continued after {n_before} of {n_blocks} blocks" if n_before else None

    def _say_how_far(self, n_committed: int) -> None:
        self.request.sentence = interrupted(n_committed, self.writer.plan.n_blocks)
