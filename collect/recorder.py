"""The hooks' callback: what a forward pass shows goes into a block buffer, and every value is measured.

In: one tensor per site, layer and forward pass, at hook time, before the next operation can overwrite it.
Out: a block's rows, and per site and layer the largest |value|, the mean square and counts, taken before the
cast. A forward pass is judged apart from being launched, so that a GPU need not wait for the verdict. Cost:
one copy, which is also the cast, and two reductions per tensor. Nothing here assumes one device: each tensor
is measured and copied where it lies.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float32
from torch import Tensor

from ..store.dtypes import GRADIENT
from .buffers import BlockBuffer, Shape
from .lanes import NONFINITE, OVERFLOW, PEAK, SQUARE, UNDERFLOW, Lane, Turn
from .refused_values import ValueRefused
from .site_names import SITES

Statistics = dict[str, dict[str, list[float] | list[int]]]


@dataclass(slots=True, eq=False)
class Filling:
    """A block buffer, and the sizes of what was judged and found good in it so far."""

    buffer: BlockBuffer
    shape: Shape
    totals: np.ndarray = field(init=False)
    n_rows: int = 0

    def __post_init__(self) -> None:
        self.totals = np.zeros((5, len(self.shape.slots)))

    def add(self, sizes: np.ndarray, n_rows: int) -> None:
        """Take in the sizes of one forward pass."""
        self.totals[PEAK] = np.maximum(self.totals[PEAK], sizes[PEAK])
        self.totals[1:] += sizes[1:]
        self.n_rows += n_rows

    def statistics(self) -> Statistics:
        """Per site, one entry per layer. Sizes are of what is stored: a gradient's with its power of two."""
        n_values, facts = self.n_rows * self.shape.d_model, {}
        for site in (site for site in SITES if site in self.shape.sites):
            slots = [index for index, (name, _) in enumerate(self.shape.slots) if name == site]
            counts = [int(self.totals[NONFINITE, slot]) for slot in slots]
            facts[site] = {
                "max_abs": [float(self.totals[PEAK, slot]) for slot in slots],
                "mean_square": [
                    float(self.totals[SQUARE, slot] / max(n_values - count, 1))
                    for slot, count in zip(slots, counts, strict=True)
                ],
                "n_nonfinite": counts,
                "n_out_of_range": [int(self.totals[OVERFLOW, slot]) for slot in slots],
            }
            if site == GRADIENT:
                facts[site]["n_underflow"] = [int(self.totals[UNDERFLOW, slot]) for slot in slots]
        return facts


class Launched(NamedTuple):
    """A forward pass that may still be running, and the rows `row0:row1` of the block that it fills."""

    batch: int
    filling: Filling
    row0: int
    row1: int
    lanes: tuple[Lane, ...]
    nll: Lane


class Judged(NamedTuple):
    """A forward pass whose values may be stored; `masked`: rows that hold one that is not finite."""

    nll: Float32[np.ndarray, "row"]
    masked: Bool[np.ndarray, "row"]


class Recorder:
    """Named steps: per forward pass `start_batch`, the calls, `end_batch`, and in the same order `judge`.

    At most `ahead` forward passes may be launched beside the one that is judged next; none has a batch of
    more than `most_rows` rows. With none ahead, a CPU copies at hook time, without a side stream.
    `exponents`: of the powers of two that gradients are stored with, one for each layer.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        most_rows: int,
        mask_nonfinite: bool = False,
        ahead: int = 0,
        exponents: Sequence[int] = (),
    ) -> None:
        self.shape, self.mask_nonfinite = shape, mask_nonfinite
        self._exponents = dict(zip(shape.layers, exponents or [0] * len(shape.layers), strict=True))
        self.ahead, self._most_rows = ahead, most_rows
        self._slots = {slot: index for index, slot in enumerate(shape.slots)}
        self._index = {layer: index for index, layer in enumerate(shape.layers)}
        self._lanes: dict[torch.device, Lane] = {}
        self._batch = -1

    def start_batch(
        self, filling: Filling, row0: int, row1: int, mask: Bool[np.ndarray, "sequence position"]
    ) -> None:
        """The next calls bring rows `row0:row1` of the block: where the `mask` of the batch is true."""
        self._filling, self._row0, self._row1 = filling, row0, row1
        self._batch += 1
        self._places = None if mask.all() else torch.from_numpy(np.flatnonzero(mask))
        self._used: dict[Lane, None] = {}

    def __call__(self, site: str, layer: int | None, tensor: Tensor) -> None:
        slot = self._slots.get((site, None if site == "embedding" else layer))
        if slot is None:
            return
        lane = self._lane(tensor)
        rows = lane.rows_of(tensor)
        if site == GRADIENT and layer is not None:
            rows = lane.scaled(slot, rows, self._exponents[layer], self.shape.dtype)
        lane.measure(slot, rows, masks=self.mask_nonfinite)
        self._keep(site, layer, lane, rows)

    def _keep(self, site: str, layer: int | None, lane: Lane, rows: Tensor) -> None:
        index = 0 if layer is None or site == "embedding" else self._index[layer]
        lane.keep(self._filling.buffer.sites[site][index, self._row0 : self._row1], rows)

    def rows_of(self, tensor: Tensor, *, attached: bool = False) -> Tensor:
        """The real rows of another tensor of this forward pass; `attached`: to its graph."""
        return self._lane(tensor).rows_of(tensor, attached=attached)

    def end_batch(self, nll: Float32[Tensor, "row"]) -> Launched:
        """The forward pass and its losses are launched."""
        home = self._lane(nll)
        for lane in self._used:
            lane.close(masks=self.mask_nonfinite, nll=nll if lane is home else None)
        return Launched(self._batch, self._filling, self._row0, self._row1, tuple(self._used), home)

    def wait(self, launched: Launched) -> list[Turn]:
        """Until all that a forward pass brought is on the host: its sizes, from each device."""
        return [lane.wait(launched.batch) for lane in launched.lanes]

    def judge(self, launched: Launched) -> Judged:
        """Wait for a forward pass; ValueRefused where a value is not finite or does not fit."""
        turns = self.wait(launched)
        # Each slot was measured on one device and is zero on the others, which a maximum leaves as it is.
        sizes = np.maximum.reduce([turn.host_sizes.double().numpy() for turn in turns])
        masked = self._masked(turns, launched)
        limit = torch.finfo(self.shape.dtype).max
        if not (sizes[PEAK] <= limit).all():  # also where the largest value is NaN
            slot = int(np.flatnonzero(~(sizes[PEAK] <= limit))[0])
            raise self._refused(launched, slot, float(sizes[PEAK, slot]), masked)
        launched.filling.add(sizes, launched.row1 - launched.row0)
        nll = launched.nll.wait(launched.batch).host_nll[: launched.row1 - launched.row0]
        return Judged(nll.numpy().copy(), masked)

    def _masked(self, turns: list[Turn], launched: Launched) -> Bool[np.ndarray, "row"]:
        n_rows = launched.row1 - launched.row0
        if not self.mask_nonfinite:
            return np.zeros(n_rows, bool)
        return np.logical_or.reduce([turn.host_bad[:n_rows].numpy() for turn in turns])

    def _refused(self, launched: Launched, slot: int, value: float, masked: np.ndarray) -> ValueRefused:
        site, layer = self.shape.slots[slot]
        index = 0 if layer is None else self._index[layer]
        rows = launched.filling.buffer.sites[site][index, launched.row0 : launched.row1].float()
        limit = torch.finfo(self.shape.dtype).max
        bad = ~(rows.abs() < limit).all(dim=1).numpy()
        # A masked row is not what is refused here, unless it overflows beside what is not finite in it.
        bad = bad & ~masked if (bad & ~masked).any() else bad
        return ValueRefused(site, layer, launched.row0 + int(np.flatnonzero(bad)[0]), value, limit)

    def _lane(self, tensor: Tensor) -> Lane:
        """The lane of the device that a tensor lies on, started for this forward pass."""
        lane = self._lanes.get(tensor.device) or self._new_lane(tensor.device)
        if lane.batch != self._batch:
            lane.start(self._batch, self._places, masks=self.mask_nonfinite)
            self._used[lane] = None
        return lane

    def _new_lane(self, device: torch.device) -> Lane:
        self._lanes[device] = Lane(
            device,
            n_slots=len(self._slots),
            most_rows=self._most_rows,
            d_model=self.shape.d_model,
            dtype=self.shape.dtype,
            turns=self.ahead + 1,
            staged=self.ahead > 0 or device.type != "cpu",
        )
        return self._lanes[device]
