"""The replaced MLPs of a measurement: made once a store, their weights shared.

In: a request and the model. Out: for a unit, the substitute of each of its layers. All replacements of a
layer by the surrogate hold one and the same matrix, on the device where the layer runs. Everything is made
before the first forward pass, so that what cannot be made is refused before it. Cost: one matrix of d² a
layer in the compute dtype, and gates.
"""

from collections.abc import Mapping
from dataclasses import replace

from .anatomy import Anatomy
from .interventions import Intervention
from .made_with import Unit
from .measure_request import LINEAR, Request
from .substitutes import LinearMap, Substitute, substitutes_of


class ReplacedLayers:
    """Called with a unit: the substitute of each of its layers, for the rows of the store named last."""

    def __init__(self, request: Request, net: Anatomy) -> None:
        self._request, self._net = request, net
        self._store = ""
        self._made: dict[tuple[Intervention, int], Substitute] = {}
        self._linear = {layer: one.replacement for layer, one in self._make(LINEAR).items()}

    def of_store(self, store: str) -> None:
        """Make everything that rows of this store need and is not there yet."""
        if store != self._store:
            self._store = store
            self._made = {key: one for key, one in self._made.items() if key[0].kind != "oracle"}
        request = self._request
        wanted = (*request.on_gate, *request.on_test, *request.joint)
        for intervention in dict.fromkeys(wanted):
            if (intervention, request.layers[0]) in self._made:
                continue
            for layer, one in self._make(intervention).items():
                shared = isinstance(one.replacement, LinearMap)
                self._made[intervention, layer] = (
                    replace(one, replacement=self._linear[layer]) if shared else one
                )

    def __call__(self, unit: Unit) -> Mapping[int, Substitute]:
        return {layer: self._made[unit.intervention, layer] for layer in unit.layers}

    def _make(self, intervention: Intervention) -> Mapping[int, Substitute]:
        request = self._request
        return substitutes_of(
            request.study,
            intervention,
            request.layers,
            self._net.dtype,
            anatomy=self._net,
            need=request.settings.need,
            store=self._store or None,
            seed=request.settings.seed,
        )
