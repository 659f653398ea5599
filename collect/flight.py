"""Forward passes that are launched and not judged yet: a GPU computes one while the host looks at the last.

In: blocks with their batches. Out: activations, losses and masked rows of each block; `finished` is called
with a block once its last batch is judged, never before. On a GPU one pass is in flight beside the one that
is judged, so that the device has work while the host waits for the writer or prepares a batch; on a CPU,
where a pass is done when its call returns, none. Cost: one forward pass a batch, its losses, and one look at
the sizes of all values. Whatever an unjudged pass brought is in no block that anybody else has seen.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .anatomy import Anatomy
from .capture import Capture
from .forward import final_hidden, inputs_of
from .lanes import moment, moved, seconds_between
from .needs import working_device
from .nll import NO_TARGET, token_nll, token_nll_and_slope
from .recorder import Filling, Launched, Recorder
from .refused_values import ValueRefused
from .rows import Batch

CPU = torch.device("cpu")


@dataclass(slots=True, eq=False)
class OpenBlock:
    """A block that is being filled: token columns with `nll` and `valid`, and its buffer."""

    number: int
    began_s: float
    columns: dict[str, np.ndarray]
    filling: Filling

    def __post_init__(self) -> None:
        self.columns["nll"] = np.full(self.n_rows, np.nan, np.float32)

    @property
    def n_rows(self) -> int:
        return len(self.columns["token_id"])


@dataclass(frozen=True, slots=True, eq=False)
class _Pass:
    block: OpenBlock
    launched: Launched
    began: Any  # marks on the device
    ended: Any


class Flight:
    """Named steps: `launch` batch after batch in row order, then `land`.

    `waited_s`: how long the host waited for the device; `busy_s`: how long the device was at work, or None
    on a CPU.
    """

    def __init__(
        self, anatomy: Anatomy, recorder: Recorder, capture: Capture, finished: Callable[[OpenBlock], None]
    ) -> None:
        self._anatomy, self._recorder, self._capture = anatomy, recorder, capture
        self._finished = finished
        self._waiting: deque[_Pass] = deque()
        self.waited_s = 0.0
        self._device = working_device(anatomy)
        self.busy_s = None if self._device.type == "cpu" else 0.0

    def launch(self, block: OpenBlock, batch: Batch) -> None:
        """One forward pass; then judge those that more than `ahead` others have overtaken."""
        began = moment(self._device)
        launched = forward(self._anatomy, self._recorder, self._capture, block, batch)
        self._waiting.append(_Pass(block, launched, began, moment(self._device)))
        self.land(self._recorder.ahead)

    def land(self, left: int = 0) -> None:
        """Judge the oldest passes until so many are left."""
        while len(self._waiting) > left:
            self._judge(self._waiting.popleft())

    def _judge(self, one: _Pass) -> None:
        launched, columns, started = one.launched, one.block.columns, time.perf_counter()
        try:
            nll, masked = self._recorder.judge(launched)
        except ValueRefused as refused:
            refused.block = one.block.number
            raise
        if self.busy_s is not None:
            self.waited_s += time.perf_counter() - started
            self.busy_s += seconds_between(one.began, one.ended)
        rows = slice(launched.row0, launched.row1)
        bad = ~np.isfinite(nll) & (columns["target_id"][rows] != NO_TARGET)
        if bad.any() and not self._recorder.mask_nonfinite:
            refused = ValueRefused(
                "nll", None, launched.row0 + int(np.flatnonzero(bad)[0]), float("nan"), float("inf")
            )
            refused.block = one.block.number
            raise refused
        columns["nll"][rows] = nll
        columns["valid"][rows] = ~(bad | masked)
        if launched.row1 == one.block.n_rows:
            self._finished(one.block)


def forward(
    anatomy: Anatomy, recorder: Recorder, capture: Capture, block: OpenBlock, batch: Batch
) -> Launched:
    """Launch one forward pass with every hook, its losses, and, where gradients are wanted, the way back from
    their sum. Nothing here waits for a GPU; but transformers
    looks at the mask (or, where there is none, at the positions) as a pass begins, and there waits for the
    pass before."""
    recorder.start_batch(block.filling, batch.row0, batch.row1, batch.mask)
    inputs = inputs_of(batch.ids, batch.mask, CPU)
    there = {name: None if value is None else moved(value, anatomy.device) for name, value in inputs.items()}
    target = torch.from_numpy(block.columns["target_id"][batch.row0 : batch.row1])
    if not capture.differentiates:
        hidden = final_hidden(anatomy, there)
        capture.check_counts()
        return recorder.end_batch(token_nll(anatomy, recorder.rows_of(hidden), target))
    with capture.graph():
        rows = recorder.rows_of(final_hidden(anatomy, there), attached=True)
    nll, slope = token_nll_and_slope(anatomy, rows, target)
    capture.pull_back(rows, slope)
    capture.check_counts()
    return recorder.end_batch(nll)
