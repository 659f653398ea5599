"""Where hooks put what they see: fixed block buffers in the storage dtype, and the size of every value.

In: one tensor per site, layer and forward pass, at hook time, before the next operation can overwrite it.
Out: a block's arrays as numpy views, and per site and layer the largest |value|, the mean square and
counts, taken before the cast. Cost: one copy, which is also the cast, and two reductions per tensor; on
CUDA the copy to pinned host memory runs on a side stream. Memory: each buffer is allocated once and lives
as long as the run.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from ..store.errors import NotFinite, OutOfRange

LAYER_SITES = ("residual", "mlp_output")
SITES = (*LAYER_SITES, "embedding")
_TORCH_DTYPE = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Shape:
    """What one block buffer holds."""

    layers: tuple[int, ...]
    d_model: int
    block: int
    storage_dtype: str

    @property
    def slots(self) -> list[tuple[str, int | None]]:
        """Every (site, layer) that a forward pass brings, in the order in which it does."""
        slots: list[tuple[str, int | None]] = [(site, layer) for layer in self.layers for site in LAYER_SITES]
        return [("embedding", None), *slots]

    @property
    def itemsize(self) -> int:
        return _TORCH_DTYPE[self.storage_dtype].itemsize


class BlockBuffer:
    """The activations of one block on the host, in the storage dtype."""

    def __init__(self, shape: Shape, pinned: bool) -> None:
        dtype, n_layers = _TORCH_DTYPE[shape.storage_dtype], len(shape.layers)
        sizes = {site: (n_layers, shape.block, shape.d_model) for site in LAYER_SITES}
        sizes["embedding"] = (1, shape.block, shape.d_model)
        self.sites = {site: torch.zeros(size, dtype=dtype, pin_memory=pinned) for site, size in sizes.items()}

    def stored(self, rows: int) -> dict[str, np.ndarray]:
        """The first `rows` rows as the store keeps them: bfloat16 as its bits; views, no copies."""
        views = {site: tensor[:, :rows] for site, tensor in self.sites.items()}
        if views["embedding"].dtype == torch.bfloat16:
            views = {site: view.view(torch.uint16) for site, view in views.items()}
        arrays = {site: view.numpy() for site, view in views.items()}
        return arrays | {"embedding": arrays["embedding"][0]}


@dataclass(slots=True)
class Recorder:
    """The hooks' callback. Named steps: `start_block`, then for each forward pass `start_batch`, the calls
    and `finish_batch`; then `statistics`."""

    shape: Shape
    device: torch.device
    mask_nonfinite: bool = False
    _slot: dict[tuple[str, int | None], int] = field(init=False)
    _peak: Tensor = field(init=False)
    _square: Tensor = field(init=False)
    _nonfinite: Tensor = field(init=False)
    _bad_row: Tensor = field(init=False)
    _buffer: BlockBuffer = field(init=False)
    _row0: int = field(init=False)
    _row1: int = field(init=False)
    _places: Tensor | None = field(init=False)
    _stream: "torch.cuda.Stream | None" = field(init=False)
    _totals: np.ndarray = field(init=False)
    _rows_seen: int = field(init=False)

    def __post_init__(self) -> None:
        self._slot = {slot: index for index, slot in enumerate(self.shape.slots)}
        self._peak = torch.zeros(len(self._slot), dtype=torch.float32, device=self.device)
        self._square = torch.zeros_like(self._peak)
        self._nonfinite = torch.zeros_like(self._peak)
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def start_block(self, buffer: BlockBuffer) -> None:
        self._buffer = buffer
        self._totals = np.zeros((3, len(self._slot)))
        self._rows_seen = 0

    def start_batch(self, row0: int, row1: int, places: Int[Tensor, "row"] | None) -> None:
        """The next calls bring rows `row0:row1` of the block; `places` are theirs in the flattened, padded
        batch, None where nothing is padded."""
        self._row0, self._row1, self._places = row0, row1, places
        if self.mask_nonfinite:
            self._bad_row = torch.zeros(row1 - row0, dtype=torch.bool, device=self.device)

    def __call__(self, site: str, layer: int | None, tensor: Tensor) -> None:
        slot = self._slot.get((site, None if site == "embedding" else layer))
        if slot is None:
            return
        rows = tensor.detach().reshape(-1, self.shape.d_model)
        if self._places is not None:
            rows = rows.index_select(0, self._places.to(rows.device))
        self._measure(slot, rows)
        index = 0 if layer is None or site == "embedding" else self.shape.layers.index(layer)
        self._copy(
            self._buffer.sites[site][index, self._row0 : self._row1], rows, owned=self._places is not None
        )

    def finish_batch(self) -> np.ndarray | None:
        """Judge the batch: raises where a value is not finite or does not fit; returns the rows to mask, if
        any."""
        if self._stream is not None:
            self._stream.synchronize()
        batch = torch.stack([self._peak, self._square, self._nonfinite]).cpu().double().numpy()
        limit = torch.finfo(_TORCH_DTYPE[self.shape.storage_dtype]).max
        if not (batch[0] <= limit).all():  # also where the largest value is NaN
            self._refuse(int(np.flatnonzero(~(batch[0] <= limit))[0]), batch[0], limit)
        self._totals[0] = np.maximum(self._totals[0], batch[0])
        self._totals[1:] += batch[1:]
        self._rows_seen += self._row1 - self._row0
        if not self.mask_nonfinite or not self._bad_row.any():
            return None
        return self._bad_row.cpu().numpy()

    def statistics(self) -> dict[str, dict[str, list[float] | list[int]]]:
        """Of the block so far, per site, one entry per layer."""
        n_values = self._rows_seen * self.shape.d_model
        facts: dict[str, dict[str, list[float] | list[int]]] = {}
        for site in SITES:
            slots = [index for (name, _), index in self._slot.items() if name == site]
            counts = [int(self._totals[2, slot]) for slot in slots]
            squares = [
                float(self._totals[1, slot] / max(n_values - count, 1))
                for slot, count in zip(slots, counts, strict=True)
            ]
            facts[site] = {
                "max_abs": [float(self._totals[0, slot]) for slot in slots],
                "mean_square": squares,
                "n_nonfinite": counts,
                "n_out_of_range": [0 for _ in slots],
            }
        return facts

    def _measure(self, slot: int, rows: Tensor) -> None:
        if self.mask_nonfinite:
            finite = torch.isfinite(rows)
            self._nonfinite[slot] = (~finite).sum()
            self._bad_row |= (~finite).any(dim=1).to(self._bad_row.device)
            rows = torch.where(finite, rows, torch.zeros_like(rows))
        low, high = torch.aminmax(rows)
        self._peak[slot] = torch.maximum(-low, high)
        self._square[slot] = torch.linalg.vector_norm(rows, dtype=torch.float32).square()

    def _copy(self, out: Tensor, rows: Tensor, *, owned: bool) -> None:
        if self._stream is None:
            out.copy_(rows)
            return
        # The cast is a copy on the model's own stream, ordered before whatever overwrites `rows` next; where
        # nothing is cast and nothing selected, it has to be made one.
        ready = rows.to(out.dtype, copy=not owned)
        self._stream.wait_stream(torch.cuda.current_stream(ready.device))
        with torch.cuda.stream(self._stream):
            out.copy_(ready, non_blocking=True)
        ready.record_stream(self._stream)

    def _refuse(self, slot: int, peaks: np.ndarray, limit: float) -> None:
        site, layer = self.shape.slots[slot]
        index = 0 if layer is None else self.shape.layers.index(layer)
        rows = self._buffer.sites[site][index, self._row0 : self._row1].float()
        bad = ~(rows.abs() < limit).all(dim=1)
        if self.mask_nonfinite:  # rows that are masked anyway are not what is refused here
            bad &= ~self._bad_row.to(bad.device)
        row = self._row0 + int(torch.nonzero(bad)[0])
        raise ValueRefused(site, layer, row, float(peaks[slot]), limit)


class ValueRefused(Exception):
    """A value that must not be stored, by its row in the block; the harvest adds which token that is."""

    def __init__(self, site: str, layer: int | None, row: int, value: float, limit: float) -> None:
        super().__init__(f"{site} layer {layer} row {row}: {value}")
        self.site, self.layer, self.row, self.value, self.limit = site, layer, row, value, limit

    def explained(self, storage_dtype: str, where: str, committed: str) -> NotFinite | OutOfRange:
        """The user's error: site, layer, token, the dtype to use instead, and what is safe."""
        site = f"`{self.site}`" + ("" if self.layer is None else f" layer {self.layer}")
        if not np.isfinite(self.value):
            return NotFinite(
                f"{site}, {where}: the model gave a value that is not finite. Try another compute dtype "
                f"(dtype=float32), or on_nonfinite=mask to store such rows as not valid. {committed}"
            )
        other = "bfloat16 (same range as float32) or float32" if storage_dtype == "float16" else "float32"
        return OutOfRange(
            f"{site}, {where}: |value| {self.value:,.6g} does not fit {storage_dtype}, whose largest is "
            f"{self.limit:,.6g}. Use storage_dtype={other}. {committed}"
        )


def places_of(mask: np.ndarray, device: torch.device) -> Tensor | None:
    """Where the real rows stand in a flattened padded batch; None where all do."""
    if mask.all():
        return None
    return torch.from_numpy(np.flatnonzero(mask)).to(device)


def make_buffers(shape: Shape, device: torch.device, count: int = 2) -> Sequence[BlockBuffer]:
    """Block buffers, pinned where a GPU copies into them; two, so that one is filled while one is written."""
    return [BlockBuffer(shape, pinned=device.type == "cuda") for _ in range(count)]
