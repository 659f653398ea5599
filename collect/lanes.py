"""The way of tensors from one device to the host: sizes measured there, copies made at hook time.

In: tensors of a forward pass while it runs. Out: rows in a block buffer, and, per forward pass, the sizes of
all values and the rows that are not finite, on the host once `wait` returns. On a CPU a copy is done when
the hook returns. On a GPU nothing here waits for it: the cast goes to one of a few fixed places on the
model's own stream, before anything can overwrite the tensor; a side stream takes it to pinned memory; the
model's stream waits for a place only when all are still on their way. Memory: these places, and a set of
sizes for each forward pass in flight. A model over several devices has one lane for each; nothing crosses
between them.

Everything but the CUDA calls themselves also runs on a CPU (`staged=True`), whose streams and events do
nothing.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Float32, Int
from torch import Tensor

PLACES = 4  # copies on their way at once: a layer's sites, and those of the layer before

PEAK, SQUARE, NONFINITE, OVERFLOW, UNDERFLOW = range(5)  # rows of the sizes


@dataclass(slots=True)
class Turn:
    """What is kept of one forward pass: on the device, and the same on the host."""

    sizes: Float32[Tensor, "5 slot"]
    bad: Bool[Tensor, "row"]
    host_sizes: Float32[Tensor, "5 slot"]
    host_bad: Bool[Tensor, "row"]
    host_nll: Float32[Tensor, "row"]
    done: Any


@dataclass(slots=True)
class Place:
    """Memory on the device for one copy that is on its way; `free` is when it has arrived."""

    values: Float[Tensor, "row feature"]
    free: Any


class Lane:
    """Named steps: `start` a forward pass; for each tensor `rows_of`, `measure`, `keep`; `close`; later
    `wait`."""

    def __init__(
        self,
        device: torch.device,
        *,
        n_slots: int,
        most_rows: int,
        d_model: int,
        dtype: torch.dtype,
        turns: int,
        staged: bool,
    ) -> None:
        self.device, self.staged = device, staged
        self.batch = -1  # the number of the forward pass that was started last
        self._tools: Any = torch.get_device_module(device)
        self._stream = stream_of(device)
        self._turns = [self._new_turn(n_slots, most_rows) for _ in range(turns)]
        self._next = 0
        self._places = [
            Place(torch.empty(most_rows, d_model, dtype=dtype, device=device), self._tools.Event())
            for _ in range(PLACES if staged else 0)
        ]
        if device.type != "cpu":
            for tensor in self._on_device():  # freed memory is not reused before the side stream is done
                tensor.record_stream(self._stream)

    def start(self, batch: int, places: Int[Tensor, "row"] | None, *, masks: bool) -> None:
        """The next tensors are those of forward pass number `batch`; `places`: where its rows stand in the
        flattened, padded batch."""
        self.batch, self._turn = batch, self._turns[batch % len(self._turns)]
        self._peak, self._square, self._nonfinite, self._overflow, self._underflow = self._turn.sizes.unbind()
        self._where = None if places is None else moved(places, self.device)
        if masks:
            self._turn.bad.zero_()

    def rows_of(self, tensor: Tensor, *, attached: bool = False) -> Float[Tensor, "row feature"]:
        """The real rows of a tensor of the padded batch; `attached`: to its graph."""
        rows = (tensor if attached else tensor.detach()).reshape(-1, tensor.shape[-1])
        return rows if self._where is None else rows.index_select(0, self._where)

    def scaled(
        self, slot: int, rows: Float[Tensor, "row feature"], exponent: int, dtype: torch.dtype
    ) -> Float[Tensor, "row feature"]:
        """The rows times 2^exponent, on their way to `dtype`: what is too large for it becomes its largest
        value, and that is counted, as is what becomes zero."""
        if rows.dtype == dtype and not exponent:
            return rows
        rows = rows.float() * 2.0**exponent
        limit, size = torch.finfo(dtype).max, rows.abs()
        over = (size > limit) & (size < float("inf"))
        self._overflow[slot] = over.sum()
        rows = torch.where(over, rows.sign() * limit, rows)
        self._underflow[slot] = ((rows.to(dtype) == 0) & (rows != 0)).sum()
        return rows

    def measure(self, slot: int, rows: Float[Tensor, "row feature"], *, masks: bool) -> None:
        """Largest |value|, sum of squares; where `masks`, also what is not finite, which then counts in
        neither."""
        if masks:
            finite = torch.isfinite(rows)
            self._nonfinite[slot] = (~finite).sum()
            self._turn.bad[: len(rows)] |= (~finite).any(dim=1)
            rows = torch.where(finite, rows, torch.zeros_like(rows))
        low, high = torch.aminmax(rows)
        self._peak[slot] = torch.maximum(-low, high)
        self._square[slot] = torch.linalg.vector_norm(rows, dtype=torch.float32).square()

    def keep(self, out: Float[Tensor, "row feature"], rows: Float[Tensor, "row feature"]) -> None:
        """Copy rows to the host, cast to the dtype there."""
        if not self.staged:
            out.copy_(rows)
            return
        place, here = self._places[self._next], self._tools.current_stream(self.device)
        self._next = (self._next + 1) % len(self._places)
        place.free.wait(here)
        cast = place.values[: len(rows)]
        cast.copy_(rows)
        self._stream.wait_stream(here)
        with self._tools.stream(self._stream):
            out.copy_(cast, non_blocking=True)
        place.free.record(self._stream)

    def close(self, *, masks: bool, nll: Float32[Tensor, "row"] | None = None) -> None:
        """The forward pass is launched: its sizes follow the copies to the host; and the losses, on their
        device's lane."""
        turn, here = self._turn, self._tools.current_stream(self.device)
        self._stream.wait_stream(here)
        with self._tools.stream(self._stream):
            if self.staged:
                turn.host_sizes.copy_(turn.sizes, non_blocking=True)
                if masks:
                    turn.host_bad.copy_(turn.bad, non_blocking=True)
            if nll is not None:
                turn.host_nll[: len(nll)].copy_(nll, non_blocking=True)
        if nll is not None and self.device.type != "cpu":
            nll.record_stream(self._stream)
        turn.done.record(self._stream)

    def wait(self, batch: int) -> Turn:
        """What forward pass number `batch` left on the host, once it is all there."""
        turn = self._turns[batch % len(self._turns)]
        turn.done.synchronize()
        return turn

    def _new_turn(self, n_slots: int, most_rows: int) -> Turn:
        sizes = torch.zeros(5, n_slots, dtype=torch.float32, device=self.device)
        bad = torch.zeros(most_rows, dtype=torch.bool, device=self.device)
        pinned = self.device.type != "cpu"

        def on_host(tensor: Tensor) -> Tensor:
            if not self.staged:
                return tensor
            return torch.zeros(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)

        nll = torch.zeros(most_rows, dtype=torch.float32, pin_memory=pinned)
        return Turn(sizes, bad, on_host(sizes), on_host(bad), nll, self._tools.Event())

    def _on_device(self) -> list[Tensor]:
        turns = [tensor for turn in self._turns for tensor in (turn.sizes, turn.bad)]
        return [*turns, *(place.values for place in self._places)]


def stream_of(device: torch.device) -> Any:
    """A stream beside the model's own."""
    return torch.cpu.Stream() if device.type == "cpu" else torch.get_device_module(device).Stream(device)


def moved(values: Tensor, device: torch.device) -> Tensor:
    """The values on a device; from the host to a GPU by way of pinned memory, so that nothing waits."""
    if values.device.type != "cpu" or device.type == "cpu":
        return values.to(device)
    # Pinning keeps the strides, and so cannot write what was expanded (positions are).
    return values.contiguous().pin_memory().to(device, non_blocking=True)


def moment(device: torch.device) -> Any:
    """A mark in the work of a GPU, from which `seconds_between` measures; None on a CPU."""
    if device.type == "cpu":
        return None
    tools = torch.get_device_module(device)
    mark = tools.Event(enable_timing=True)
    mark.record(tools.current_stream(device))
    return mark


def seconds_between(first: Any, last: Any) -> float:
    """Device time between two marks; 0.0 on a CPU."""
    if first is None or last is None:
        return 0.0
    last.synchronize()
    return first.elapsed_time(last) / 1000
