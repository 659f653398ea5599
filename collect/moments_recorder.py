"""The hooks' callback where no rows are stored: what a forward pass shows is summed on the spot.

In: residual and MLP output of each layer at hook time, and which sum each row of the block belongs to. Out:
`LayerMoments` of every layer. Sizes are measured and judged as in a harvest of rows, so a value that could
not be stored ends this run too. Memory on the device: one batch of normed rows, of the layer at work, beside
the sums.
"""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ..analyze.surrogates import LayerMoments
from .buffers import Shape
from .device_moments import DeviceNorm, DeviceSums
from .lanes import Lane, moved
from .norm_parameters import NO_NORM, NormParameters
from .recorder import Filling, Launched, Recorder
from .refused_values import ValueRefused


class MomentsRecorder(Recorder):
    """A recorder that sums. `keys` of the block in hand are set before its first batch: of each row the
    number of its sum, below 0 for none.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        most_rows: int,
        ahead: int,
        n_folds: int,
        norms: Sequence[NormParameters],
        post_norms: Sequence[NormParameters],
        multipliers: Sequence[float],
    ) -> None:
        super().__init__(shape, most_rows=most_rows, ahead=ahead)
        self.n_folds = n_folds
        self.keys: Int[np.ndarray, "row"] = np.zeros(0, np.int64)
        self._norms = [DeviceNorm(norm) for norm in norms]
        # An offline contribution without a kind of norm is a constant factor, whatever affine it has.
        self._post_norms = [DeviceNorm(NO_NORM if norm.kind == "none" else norm) for norm in post_norms]
        self._multipliers = list(multipliers)
        self._sums: dict[int, DeviceSums] = {}
        self._x: Tensor | None = None

    def start_batch(
        self, filling: Filling, row0: int, row1: int, mask: Bool[np.ndarray, "sequence position"]
    ) -> None:
        super().start_batch(filling, row0, row1, mask)
        keys = self.keys[row0:row1]
        self._places_of = {int(key): np.flatnonzero(keys == key) for key in np.unique(keys[keys >= 0])}
        fitted = np.flatnonzero((keys >= 0) & (keys < self.n_folds))
        self._fitted = fitted if fitted.size else None
        self._chosen: dict[torch.device, dict[int, Tensor]] = {}

    def moments(self, layer: int) -> LayerMoments:
        """The sums of a layer, on the host."""
        index = self._index[layer]
        with_contribution = not self._post_norms[index].is_identity
        return self._sums[layer].moments(self.n_folds, with_contribution=with_contribution)

    def _keep(self, site: str, layer: int | None, lane: Lane, rows: Tensor) -> None:
        assert layer is not None
        index = self._index[layer]
        stored = rows.to(self.shape.dtype).float()
        if site == "residual":
            self._x = self._norms[index](stored)
            return
        x, self._x = self._x, None
        assert x is not None, f"layer {layer} gave its output before its input"
        if layer not in self._sums:
            self._sums[layer] = DeviceSums(self.n_folds + 3, self.shape.d_model, stored.device)
        sums = self._sums[layer]
        for key, chosen in self._indices(stored.device).items():
            if key >= 0:
                sums.add(key, x, stored, chosen)
            elif not self._post_norms[index].is_identity:
                added = self._post_norms[index](stored.index_select(0, chosen))
                sums.add_contribution(added * self._multipliers[index])

    def _indices(self, device: torch.device) -> dict[int, Tensor]:
        """Rows of each sum that occurs in the batch; under −1 those of all folds."""
        if device not in self._chosen:
            places = dict(self._places_of)
            if self._fitted is not None:
                places[-1] = self._fitted
            self._chosen[device] = {key: moved(torch.from_numpy(at), device) for key, at in places.items()}
        return self._chosen[device]

    def _refused(self, launched: Launched, slot: int, value: float, masked: np.ndarray) -> ValueRefused:
        """The row is not known here: no row was kept."""
        site, layer = self.shape.slots[slot]
        refused = ValueRefused(site, layer, launched.row0, value, torch.finfo(self.shape.dtype).max)
        refused.maskable = False
        return refused
