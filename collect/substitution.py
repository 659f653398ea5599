"""Replace MLPs of a live model while a `with` lasts, and leave the model as it was, whatever happens.

In: an `Anatomy`, a `Substitute` for each layer, and before every forward pass the rows that are in it. Out:
the model's own forward pass with other MLPs, and how much of each row came from the replacement. No module is
exchanged and no weight touched: the two ends of a span get a `forward` of their own, which is taken away in
the end, and hooks look at what a gate has to see.

A hard router has the MLP compute the rows that need it and the replacement those sent to it, and both are put
together. Where no row is replaced the MLP runs as ever, on the very tensor it was given: bit for bit the
model itself. Cost: gathering and scattering of rows, d values each; the router; on a GPU one wait for each
gated layer, for the number of rows on either way, and none where the rows are known beforehand.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from jaxtyping import Float32
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..store.errors import ProofFailed, UsageError
from .adapters import adapter_of
from .anatomy import Anatomy
from .batch_rows import BatchRows as BatchRows
from .capture import first_tensor
from .layer_routes import LayerRoute, Seen
from .live_models import config_of
from .substituted_span import Span, is_replaced
from .substitutes import Substitute


@dataclass(frozen=True, slots=True)
class Counts:
    """Rows of one forward pass, without padding. `linear` is a sum of p where a gate is soft."""

    linear: float
    covered: int
    rows: int


class Substitution:
    """`with Substitution(anatomy, {layer: substitute}) as live:`, then `live.rows = BatchRows(…)` before each
    forward pass. Rows may be left out for `none` and for what acts everywhere."""

    def __init__(self, anatomy: Anatomy, substitutes: Mapping[int, Substitute]) -> None:
        outside = [layer for layer in substitutes if not 0 <= layer < anatomy.n_layers]
        if outside:
            raise UsageError(f"layer {outside[0]}: this model has layers 0-{anatomy.n_layers - 1}.")
        self._anatomy, self._seen = anatomy, Seen()
        self._routes = {layer: LayerRoute(one, self._seen) for layer, one in sorted(substitutes.items())}
        self._handles: list[RemovableHandle] = []
        self._spans: list[Span] = []

    def __enter__(self) -> "Substitution":
        if any(is_replaced(one.mlp_first) or is_replaced(one.mlp_last) for one in self._anatomy.layers):
            raise UsageError(
                "MLPs of this model are replaced already: leave that `with` first, or give all layers to one "
                "Substitution"
            )
        try:
            divides = divides_of(self._anatomy)
            if any(route.wants_parts for route in self._routes.values()):
                self._watch(self._anatomy.layers[0].block, self._seen.keep_stream)
            for layer, route in self._routes.items():
                parts = self._anatomy.layers[layer]
                if route.wants_parts and parts.norm is not None:
                    self._watch(parts.norm, route.keep_residual)
                span = Span(parts.mlp_first, parts.mlp_last, route, divides=divides(parts))
                self._spans.append(span)
                span.enter()
        except BaseException:
            self._restore()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    @property
    def rows(self) -> BatchRows | None:
        """The rows of the forward pass that comes next."""
        return self._seen.rows

    @rows.setter
    def rows(self, rows: BatchRows | None) -> None:
        self._seen.rows, self._seen.stream = rows, None
        for route in self._routes.values():
            route.begin()

    def linear(self, layer: int) -> Float32[Tensor, "sequence position"]:
        """How much of each row of the last pass came from the replacement: 0, 1, or p of a soft gate; padding
        as it fell. On the layer's device."""
        weight = self._routes[layer].weight
        if weight is None:
            raise ProofFailed(
                f"layer {layer}: its MLP did not run in this forward pass, so nothing was replaced there. "
                "The model skips or hides this module; it cannot be measured this way."
            )
        return weight if self.rows is None else weight.reshape(self.rows.shape)

    @property
    def counts(self) -> dict[int, Counts]:
        """Of each layer, in the last forward pass. Waits for the device."""
        found: dict[int, Counts] = {}
        for layer in self._routes:
            weight, rows = self.linear(layer).cpu(), self.rows
            if rows is None:
                found[layer] = Counts(float(weight.sum()), weight.numel(), weight.numel())
            else:
                linear = weight[torch.from_numpy(rows.real)].sum(dtype=torch.float64)
                found[layer] = Counts(float(linear), int(rows.covered.sum()), int(rows.real.sum()))
        return found

    def _watch(self, module: nn.Module, keep: Callable[[Tensor], None]) -> None:
        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            keep(first_tensor(args or tuple(kwargs.values())))

        self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))

    def _restore(self) -> None:
        for span in self._spans:
            span.leave()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._spans.clear()
        self._seen.stream = None


def divides_of(anatomy: Anatomy) -> Callable[[Any], bool]:
    """Whether a layer's span may be given some of the rows. One module may; so may fc1 … fc2 of a family with
    a row in adapters.py, where nothing but an activation lies in between. Of a traced span nobody knows what
    else flows into it."""
    adapter = adapter_of(config_of(anatomy.model))
    known = adapter is not None and all(
        anatomy.paths[part].endswith(f"{adapter.blocks}.{{i}}.{getattr(adapter, part)}")
        for part in ("mlp_first", "mlp_last")
    )
    return lambda parts: known or parts.mlp_first is parts.mlp_last
