"""The gates of a study, ready to route live rows: `gates.zarr` and `tokens/routing` in, routers out.

Thresholds for a share are chosen on the gate rows of the store that gates were fitted on, by probabilities of
gates that have not seen them: test rows choose nothing. What is missing is one sentence that says which step
makes it. Cost: a few arrays of one layer; for a share also its routing table and the table of rows.
"""

from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Bool

from ..analyze.calibration import threshold_for_share
from ..analyze.context_map import load_context_map
from ..analyze.gate_features import WIDE, TypeMeans
from ..analyze.stores import spell_layers
from ..store import IncompleteError, Study, UsageError
from ..store.names import typed
from .anatomy import Anatomy
from .gate_routing import OF_STREAM, OF_TOKEN, GateRouter, gate_router
from .interventions import Intervention
from .norm_parameters import NO_NORM, norm_parameters
from .row_routers import TypeRouter, type_router


class StudyGates:
    """Gates of one study for one need: `need`, or the first that the study has gates for."""

    def __init__(self, study: Study, need: str | None = None) -> None:
        self._study, self._asked = study, need

    def router(self, one: Intervention, layer: int, anatomy: Anatomy | None) -> GateRouter:
        """The gate of an intervention at a layer. `anatomy`: needed where it looks at parts of the input."""
        name = f"{one.features}@{one.size}"
        if name not in self._arrays.attrs["gates"]:
            raise UsageError(
                f"{one.name}: {self._study.path} has no gate {name}; it has "
                f"{', '.join(self._arrays.attrs['gates'])}. {self._again} --features {one.features}` makes it"
            )
        facts = self._arrays.attrs["described"][name]
        fitted = self._at(layer, gate=self._arrays.attrs["gates"].index(name))
        pieces = _widths(facts["pieces"], facts["n_features"])
        parts = [piece for piece in pieces if piece in (*OF_TOKEN, *OF_STREAM)]
        norm, positions = NO_NORM, None
        if parts:
            if anatomy is None:
                raise ValueError(f"{one.name} looks at parts of the MLP's input: give the model's anatomy")
            norm, positions = norm_parameters(anatomy.layers[layer].norm), anatomy.positions
        mapped = {"token_full", "context_only"} & set(parts)
        chosen = float(fitted["threshold"])
        return gate_router(
            fitted["weight"].to_numpy()[: facts["n_features"]],
            float(fitted["bias"]),
            chosen if one.share is None else self._threshold(layer, name, one.share),
            pieces,
            self._types(layer),
            norm=norm,
            positions=positions,
            context=load_context_map(self._study, layer) if mapped else None,
        )

    def token_list(self, layer: int, share: float, salt: int) -> TypeRouter:
        """Types of the smallest mean need, so many that this share of gate rows goes linear."""
        rows = self._gate_rows(layer)["token"].to_numpy()
        ids = self._study.rows(self._fit_on)["token_id"].to_numpy()[rows]
        return type_router(self._types(layer), ids, share, salt)

    def _threshold(self, layer: int, gate: str, share: float) -> float:
        """Above it lies this share of the gate rows. Of all or none of them, also where p is 0 or 1."""
        p = self._gate_rows(layer)[gate].to_numpy()
        p = p[np.isfinite(p)]
        if share in (0.0, 1.0) or not p.size:
            return -float("inf") if share == 1.0 else float("inf")
        return threshold_for_share(p, share)

    def _gate_rows(self, layer: int) -> pa.Table:
        """What gates that have not seen them say of the gate rows, sinks left out."""
        routing = self._study.routing(layer, self.need, self._fit_on)
        return routing.filter(pa.array(self._is_gate[routing["token"].to_numpy()]))

    @cached_property
    def _is_gate(self) -> Bool[np.ndarray, "token"]:
        return np.asarray(self._study.rows(self._fit_on)["split"].to_pylist()) == "gate"

    def _types(self, layer: int) -> TypeMeans:
        fitted = self._at(layer)
        return TypeMeans(
            self._arrays["type"].to_numpy().astype(np.int64),
            fitted["token_type"].to_numpy(),
            np.float32(fitted["token_type_grand"]),
        )

    def _at(self, layer: int, **place: int) -> Any:
        layers: list[int] = self._arrays["layer"].to_numpy().tolist()
        if layer not in layers:
            raise UsageError(
                f"layer {layer} has no gates in {self._study.path}; it has {spell_layers(layers)}. "
                f"{self._again} --layers {layer}` makes them"
            )
        return self._arrays.sel(layer=layer).isel(need=self._needs.index(self.need), **place)

    @property
    def need(self) -> str:
        """The need that routes."""
        need = self._asked or self._needs[0]
        if need not in self._needs:
            raise UsageError(
                f"need={need}: {self._study.path} has gates for {', '.join(self._needs)}. {self._again} "
                f"--need {','.join((*self._needs, need))}` makes them"
            )
        return need

    @property
    def _needs(self) -> list[str]:
        return self._arrays.attrs["needs"]

    @property
    def _fit_on(self) -> str:
        return self._arrays.attrs["fit_on"]

    @property
    def _again(self) -> str:
        return f"`nearline analyze {typed(self._study.path)} --only gates"

    @cached_property
    def _arrays(self) -> Any:
        if not self._study.group_path("gates").exists():
            raise IncompleteError(f"{self._study.path} has no gates yet: run {self._again}` first")
        return self._study.group("gates")


def _widths(pieces: list[str], n_features: int) -> dict[str, int]:
    """How many features each piece has: wide ones share alike in what narrow ones leave."""
    n_wide = sum(piece in WIDE for piece in pieces)
    width = (n_features - (len(pieces) - n_wide)) // max(1, n_wide)
    return {piece: width if piece in WIDE else 1 for piece in pieces}
