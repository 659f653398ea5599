"""Which gates a measurement was made with: digests of single gates of a study.

In: a study with gates, and the gates that are used. Out: one digest each, of everything that routes by it; so
that gates which were fitted again to the same numbers, beside others or not, count as the same. Cost: the
arrays of gates.zarr, read once.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from blake3 import blake3

from ..store import Study, UsageError
from ..store.names import typed

GATES, CONTEXT = "gates", "context"
_CONTEXT_PIECES = ("token_full", "context_only")
_TYPES = ("token_type", "target_type")


@dataclass(frozen=True, slots=True, eq=False)
class Gates:
    """The gates of a study. `layers`, `needs` and `names` (FEATURES@SIZE) are what it has gates for."""

    study: Study
    layers: tuple[int, ...]
    needs: tuple[str, ...]
    names: tuple[str, ...]
    _arrays: Any
    _context: Any

    def features(self, need: str) -> list[str]:
        """The feature sets with a gate of full size for a need."""
        names = self.names if need in self.needs else ()
        return [name.removesuffix("@linear") for name in names if name.endswith("@linear")]

    def digest(self, name: str, need: str, layer: int) -> str:
        """Of everything that `name` routes by at a layer."""
        at = self.layers.index(layer)
        column, gate = self.needs.index(need), self.names.index(name)
        width, pieces = (
            self._arrays.attrs["described"][name]["n_features"],
            self._arrays.attrs["described"][name]["pieces"],
        )
        found = blake3()
        for array in ("weight", "mean", "scale"):
            found.update(_bytes(self._arrays[array].values[at, column, gate, :width]))
        for array in ("bias", "threshold"):
            found.update(_bytes(self._arrays[array].values[at, column, gate]))
        for piece in _TYPES:
            if piece in pieces:
                found.update(self.types_digest(need, layer, piece).encode())
        if any(piece in pieces for piece in _CONTEXT_PIECES):
            context = self._context.sel(layer=layer)
            for array in ("weight", "bias"):
                found.update(_bytes(context[array].values))
        return found.hexdigest()

    def types_digest(self, need: str, layer: int, piece: str = "token_type") -> str:
        """Of the mean needs of token types at a layer."""
        at = self.layers.index(layer)
        column = self.needs.index(need)
        found = blake3(_bytes(self._arrays["type"].values))
        for array in (piece, f"{piece}_grand"):
            found.update(_bytes(self._arrays[array].values[at, column]))
        return found.hexdigest()


def open_gates(study: Study) -> Gates | None:
    """The gates of a study; None where it has none."""
    if "gates" not in study.provenance() or not study.group_path(GATES).exists():
        return None
    arrays = study.group(GATES).load()
    layers = tuple(int(layer) for layer in arrays["layer"].values)
    needs, names = tuple(arrays.attrs["needs"]), tuple(arrays.attrs["gates"])
    return Gates(study, layers, needs, names, arrays, study.group(CONTEXT))


def require_gates(
    study: Study, wanted: Iterable[tuple[str, str | None, str]], layers: Sequence[int]
) -> Gates | None:
    """The gates of a study, which has all of `wanted` (intervention, gate, need) at these layers; else a
    UsageError. None where nothing is wanted and none are there. A gate of None asks for the mean needs of
    token types alone, which come with the gates.
    """
    gates, folder = open_gates(study), typed(study.path)
    for intervention, name, need in wanted:
        features, _, size = (name or "@linear").partition("@")
        what = features if size == "linear" else f"{features} of size {size}"
        if gates is None:
            raise UsageError(
                f"{intervention}: {study.path} has no gates yet: run `nearline analyze {folder} --need "
                f"{need}` first, or name interventions without gates (--interventions linear,mean,zero)"
            )
        if need not in gates.needs:
            raise UsageError(
                f"{intervention}: {study.path} has gates for the needs {', '.join(gates.needs)}, none for "
                f"{need}: run `nearline analyze {folder} --need {','.join([*gates.needs, need])}` first"
            )
        if name is not None and name not in gates.names:
            there = ", ".join(gates.features(need))
            raise UsageError(
                f"{intervention}: {study.path} has no gate of {what} (there are {there}): run `nearline "
                f"analyze {folder}` with it among its features first"
            )
        if missing := sorted(set(layers) - set(gates.layers)):
            raise UsageError(
                f"{intervention}: {study.path} has no gate of layer {missing[0]}: run `nearline analyze "
                f"{folder}` for this layer first, or name --layers with gates"
            )
    return gates


def _bytes(values: np.ndarray) -> bytes:
    return np.ascontiguousarray(values).tobytes()
