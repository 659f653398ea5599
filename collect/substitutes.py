"""What stands in for the MLP of a layer: a study and the name of an intervention in, a `Substitute` out.

A substitute is a replacement (a linear map, one of low rank, a constant) and, where not every covered row
gets it, a router. Routers work in float32. The product of the surrogate runs in the dtype given here: its
float32 weights are rounded to it once, as the weights of a model are that is kept in that dtype. Cost: one
layer's weights at a time from the study, d² values of the dtype a layer; `low_rank` reads the fitted rows of
the layer once more, unless the study keeps its moments.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ..analyze.evidence import need_columns
from ..analyze.low_rank import cut_bias, cut_to_rank, input_scatter
from ..analyze.stores import spell_layers
from ..store import IncompleteError, Study, UsageError
from ..store.names import typed
from .anatomy import Anatomy
from .gate_routing import GateRouter
from .interventions import Intervention, parse_intervention
from .replacements import Constant as Constant
from .replacements import LinearMap as LinearMap
from .replacements import LowRankMap as LowRankMap
from .replacements import Replacement as Replacement
from .residence import runs_on
from .row_routers import ColumnRouter, RandomRouter, RowRouter, lowest, salt
from .study_gates import StudyGates


@dataclass(frozen=True, slots=True, eq=False)
class Substitute:
    """An intervention at one layer. Without a replacement it is the MLP itself; without a router every
    covered row is replaced, and every row where the intervention is `everywhere`."""

    intervention: Intervention
    layer: int
    replacement: Replacement | None
    router: RowRouter | GateRouter | None = None

    @property
    def mixes(self) -> bool:
        """Whether MLP and replacement are added up in each row, weighted by p."""
        return self.intervention.kind == "soft"

    def on(self, device: torch.device) -> "Substitute":
        """The same with its weights on another device."""
        moved = None if self.replacement is None else self.replacement.on(device)
        router = self.router.on(device) if isinstance(self.router, GateRouter) else self.router
        return replace(self, replacement=moved, router=router)


def substitutes_of(
    study: Study,
    intervention: Intervention | str,
    layers: Sequence[int],
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    *,
    anatomy: Anatomy | None = None,
    need: str | None = None,
    store: str | None = None,
    seed: int = 0,
) -> dict[int, Substitute]:
    """The substitute of each layer.

    `dtype`: of the surrogate's product. `device`: None is where the layer's MLP runs if `anatomy` is given,
    else the CPU. `anatomy`: needed by gates that look at more than the MLP's input, the token and its
    position. `need`: the one that routes where the intervention names none; by default the first that the
    study has gates for. `store`: whose rows an oracle knows. `seed`: of random rows and ties.
    """
    one = parse_intervention(intervention) if isinstance(intervention, str) else intervention
    maker = _Maker(study, one, dtype, anatomy, one.need or need, store, seed)
    return {layer: maker.substitute(layer, device) for layer in layers}


@dataclass(frozen=True, eq=False)
class _Maker:
    """What the layers share."""

    study: Study
    one: Intervention
    dtype: torch.dtype
    anatomy: Anatomy | None
    need: str | None
    store: str | None
    seed: int

    def substitute(self, layer: int, device: torch.device | None) -> Substitute:
        found = Substitute(self.one, layer, self._replacement(layer), self._router(layer))
        if device is None and self.anatomy is not None:
            device = runs_on(self.anatomy.layers[layer].mlp_first)
        return found if device is None else found.on(device)

    def _replacement(self, layer: int) -> Replacement | None:
        if self.one.kind == "none":
            return None
        fitted = self._fitted(layer)
        if self.one.kind == "mean":
            return Constant(self._rounded(fitted["mean_y"]))
        bias = self._rounded(fitted["bias"])
        if self.one.kind == "zero":
            return Constant(torch.zeros_like(bias))
        if self.one.rank is None:
            return LinearMap(self._rounded(fitted["weight"]), bias)
        return self._low_rank(layer, self.one.rank, fitted)

    def _low_rank(self, layer: int, rank: int, fitted: Any) -> LowRankMap:
        weight, bias, mean_y = (fitted[name].to_numpy() for name in ("weight", "bias", "mean_y"))
        scatter = input_scatter(self.study, layer)
        up, down = cut_to_rank(weight, float(fitted["penalty"]), scatter, rank)
        return LowRankMap(self._rounded(down), self._rounded(up), self._rounded(cut_bias(up, bias, mean_y)))

    def _router(self, layer: int) -> RowRouter | GateRouter | None:
        share, drawn = self.one.share or 0.0, salt(self.seed, layer, self.one.draw or 0)
        match self.one.kind:
            case "random":
                return RandomRouter(share, drawn)
            case "oracle":
                return ColumnRouter(self._easiest(layer, share, drawn))
            case "token_list":
                return self._gates.token_list(layer, share, drawn)
            case "gated" | "soft":
                return self._gates.router(self.one, layer, self.anatomy)
            case _:
                return None

    def _easiest(self, layer: int, share: float, drawn: int) -> Bool[np.ndarray, "token"]:
        """Within each split, so that gate and test rows have the share each."""
        if self.store is None:
            raise ValueError("an oracle knows the rows of one store: name it")
        need = self.need or self._gates.need
        rows = self.study.rows(self.store)
        values = need_columns(self.study, layer, self.store, [need])[need]
        body = ~np.asarray(rows["special"].to_pylist(), bool) & (rows["position"].to_numpy() != 0)
        split = np.asarray(rows["split"].to_pylist())
        return lowest(values, share, drawn, [np.flatnonzero(body & (split == one)) for one in set(split)])

    @cached_property
    def _gates(self) -> StudyGates:
        return StudyGates(self.study, self.need)

    @cached_property
    def _surrogates(self) -> Any:
        if not self.study.group_path("surrogates").exists():
            raise IncompleteError(
                f"{self.study.path} is not fitted yet: run `nearline fit {typed(self.study.path)} STORE…` "
                "first"
            )
        return self.study.surrogates()

    def _fitted(self, layer: int) -> Any:
        layers: list[int] = self._surrogates["layer"].to_numpy().tolist()
        if layer not in layers:
            raise UsageError(
                f"layer {layer} was not fitted in {self.study.path}; it has {spell_layers(layers)}"
            )
        return self._surrogates.sel(layer=layer)

    def _rounded(self, values: Any) -> Float[Tensor, "..."]:
        return torch.from_numpy(np.array(values, np.float32)).to(self.dtype)
