"""Which rows of a pass go where, layer by layer: rows and activations in, a `Division` of each call out.

In: a substitute, the rows of the pass, and for gates that look at parts of the input what hooks have kept.
Rows that are known beforehand are divided on the host; those that a gate divides wait for the device once.
Cost: the router; a float32 copy of the residual and of the stream where a gate looks at them.
"""

from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32
from torch import Tensor

from ..store.errors import ProofFailed, UsageError
from .batch_rows import BatchRows
from .gate_routing import GateRouter, LiveRows
from .lanes import moved
from .substituted_span import Division
from .substitutes import Substitute


class Seen:
    """What the layers have in common: the rows of the pass, and the stream that entered the first block."""

    def __init__(self) -> None:
        self.rows: BatchRows | None = None
        self.stream: Float32[Tensor, "row feature"] | None = None

    def keep_stream(self, tensor: Tensor) -> None:
        self.stream = _copied(tensor)


class LayerRoute:
    """One layer's decisions in a forward pass."""

    def __init__(self, substitute: Substitute, seen: Seen) -> None:
        self._substitute, self._seen = substitute, seen
        self._device: torch.device | None = None
        self._residual: Float32[Tensor, "row feature"] | None = None
        self.weight: Float32[Tensor, "row"] | None = None

    @property
    def wants_parts(self) -> bool:
        router = self._substitute.router
        return isinstance(router, GateRouter) and router.wants_parts

    def begin(self) -> None:
        """A forward pass comes."""
        self.weight = self._residual = None

    def keep_residual(self, tensor: Tensor) -> None:
        self._residual = _copied(tensor)

    def divide(self, x: Float[Tensor, "*row feature"]) -> Division:
        """Which rows of this call go where."""
        if self.weight is not None and self._seen.rows is not None:
            raise ProofFailed(
                f"layer {self._substitute.layer}: its MLP ran twice in one forward pass. Name the rows of "
                "every pass, or do not measure a model that repeats a layer."
            )
        if x.device != self._device:
            self._substitute = self._substitute.on(x.device)
            self._device = x.device
        division = self._division(x)
        self.weight, self._residual = division.weight, None
        return division

    def replacement(self, x: Float[Tensor, "*row feature"]) -> Float[Tensor, "*row feature"]:
        assert self._substitute.replacement is not None
        return self._substitute.replacement(x)

    def _division(self, x: Tensor) -> Division:
        one, n_rows = self._substitute, x.numel() // x.shape[-1]
        if one.replacement is None:
            return _one_way(x, n_rows, "mlp")
        if one.intervention.everywhere:
            return _one_way(x, n_rows, "replaced")
        rows = self._known_rows(n_rows)
        if isinstance(one.router, GateRouter):
            return self._by_gate(x, one.router, rows)
        mask = rows.covered if one.router is None else rows.covered & one.router.linear(rows)
        mask = mask.reshape(-1)
        if mask.all() or not mask.any():
            return _one_way(x, n_rows, "replaced" if mask.any() else "mlp")
        return Division(
            moved(torch.from_numpy(mask.astype(np.float32)), x.device),
            "divided",
            moved(torch.from_numpy(np.flatnonzero(mask)), x.device),
            moved(torch.from_numpy(np.flatnonzero(~mask)), x.device),
        )

    def _by_gate(self, x: Tensor, gate: GateRouter, rows: BatchRows) -> Division:
        def column(values: np.ndarray) -> Tensor:
            return moved(torch.from_numpy(np.ascontiguousarray(values).reshape(-1)), x.device)

        flat = x.reshape(-1, x.shape[-1]).float()
        residual = flat if self._residual is None else self._residual
        stream = None if self._seen.stream is None else self._seen.stream.to(x.device)
        live = LiveRows(flat, residual, stream, column(rows.token_id).long(), column(rows.position).long())
        p, covered = gate.probability(live), column(rows.covered)
        if self._substitute.mixes:
            return Division(torch.where(covered, p.nan_to_num(0.0), 0.0), "mixed")
        return _divided(covered & (p > gate.threshold))

    def _known_rows(self, n_rows: int) -> BatchRows:
        rows = self._seen.rows
        if rows is None:
            raise UsageError(
                f"{self._substitute.intervention.name} has to know the rows of a pass: set `rows` first"
            )
        if rows.row.size != n_rows:
            raise ProofFailed(
                f"layer {self._substitute.layer}: its MLP was given {n_rows} rows where the pass has "
                f"{rows.row.size}. The model cuts or packs rows here; its rows cannot be told apart this way."
            )
        return rows


def _one_way(x: Tensor, n_rows: int, way: Literal["mlp", "replaced"]) -> Division:
    value = 1.0 if way == "replaced" else 0.0
    return Division(torch.full((n_rows,), value, dtype=torch.float32, device=x.device), way=way)


def _divided(mask: Bool[Tensor, "row"]) -> Division:
    """On a GPU this waits for the number of rows."""
    replaced, weight = mask.nonzero().flatten(), mask.float()
    if replaced.numel() in (0, mask.numel()):
        return Division(weight, way="replaced" if replaced.numel() else "mlp")
    return Division(weight, "divided", replaced, (~mask).nonzero().flatten())


def _copied(tensor: Tensor) -> Float32[Tensor, "row feature"]:
    """Rows in float32 that stay as they are, whatever the model does with its tensor."""
    return tensor.detach().reshape(-1, tensor.shape[-1]).to(torch.float32, copy=True)
