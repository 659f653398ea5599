"""What a study has learned, as plain arrays: the linear map of a layer, a gate of a layer.

In: a study that was fitted (and, for gates, analysed). Out: frozen values of float32 arrays that apply
themselves to rows. One layer is read at a time; a missing or damaged chunk raises. Cost: d² numbers a layer.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Bool, Float, Float32

from .errors import FormatError, IncompleteError, UsageError
from .names import printable, typed
from .settings import nearest_known
from .study import Study

if TYPE_CHECKING:
    import xarray as xr

SURROGATE = {
    "weight": ("layer", "feature_out", "feature_in"),
    "bias": ("layer", "feature_out"),
    "alpha": ("layer",),
}
GATE = {"weight": ("layer", "need", "gate", "feature"), "bias": ("layer", "need", "gate")}
GATE |= {"threshold": ("layer", "need", "gate")}


class NoSuchLayer(UsageError, KeyError):
    """A layer that was not fitted; also the KeyError that a mapping raises."""

    __str__ = Exception.__str__  # a KeyError shows its message in quotes


@dataclass(frozen=True, slots=True, eq=False)
class Surrogate:
    """ŷ = W x + b of one layer: x the MLP's input, ŷ its output. `surrogate(x)` applies it to rows."""

    layer: int
    weight: Float32[np.ndarray, "feature_out feature_in"]
    bias: Float32[np.ndarray, "feature_out"]
    alpha: float  # of the ridge, chosen by cross-validation

    def __call__(self, x: Float[np.ndarray, "... feature_in"]) -> Float[np.ndarray, "... feature_out"]:
        return x @ self.weight.T + self.bias

    def __repr__(self) -> str:
        return f"Surrogate(layer {self.layer}: {self.weight.shape}, alpha {self.alpha:g})"


class Surrogates(Mapping[int, Surrogate]):
    """Layer → surrogate, read when it is asked for. `name`: another fit of the study, such as `pooled`."""

    def __init__(self, study: Study, name: str | None = None) -> None:
        self._study = study
        self._arrays = study.surrogates(name)
        file = "surrogates.zarr" if name is None else f"surrogates@{name}.zarr"
        self._where = str(study.path / file)
        _check(self._arrays, SURROGATE, self._where)

    @property
    def fit_on(self) -> str:
        """The store whose rows were fitted."""
        return printable(str(self._arrays.attrs.get("fit_on", "")))

    def __getitem__(self, layer: int) -> Surrogate:
        one = _at_layer(self._arrays, layer, str(self._study.path))
        weight, bias = (np.asarray(one[name].values, np.float32) for name in ("weight", "bias"))
        return Surrogate(int(layer), weight, bias, float(one["alpha"]))

    def __iter__(self) -> Iterator[int]:
        return iter(map(int, self._arrays["layer"].values))

    def __len__(self) -> int:
        return self._arrays.sizes["layer"]

    def __contains__(self, layer: object) -> bool:
        return layer in list(self)

    def __repr__(self) -> str:
        return f"Surrogates(layers {', '.join(map(str, self))}, fitted on {self.fit_on})"


@dataclass(frozen=True, slots=True, eq=False)
class Gate:
    """p(linear) of tokens at one layer from some of their features. `gate(f)` gives it for rows of features
    (those that `pieces` names, side by side; for `features="input"` the MLP's input)."""

    layer: int
    need: str
    features: str
    size: str
    weight: Float32[np.ndarray, "feature"]
    bias: float
    threshold: float  # linear goes what has p above it
    pieces: Mapping[str, str]  # name → what it is
    available_at_routing: bool

    def __call__(self, f: Float[np.ndarray, "... feature"]) -> Float[np.ndarray, "..."]:
        with np.errstate(over="ignore"):  # e to the power of much is infinite, and p is 0 then
            return 1.0 / (1.0 + np.exp(-(f @ self.weight + self.bias)))

    def is_linear(self, f: Float[np.ndarray, "... feature"]) -> Bool[np.ndarray, "..."]:
        """Which rows the gate lets go linear."""
        return self(f) > self.threshold

    def __repr__(self) -> str:
        name = f"{self.features}@{self.size}"
        return f"Gate(layer {self.layer}, {name} on {self.need}: {len(self.weight)} weights)"


def gate_of(study: Study, layer: int, *, features: str, size: str, need: str | None) -> Gate:
    """One gate; UsageError names the gates, needs and layers that there are."""
    try:
        arrays = study.group("gates")
    except IncompleteError:
        raise IncompleteError(
            f"{study.path} has no gates yet: run `nearline analyze {typed(study.path)} --only gates`"
        ) from None
    where = str(study.path / "gates.zarr")
    _check(arrays, GATE, where)
    attrs = _listed(arrays, where)
    need_at = _index("need", attrs["needs"][0] if need is None else need, attrs["needs"], study)
    gate_at = _index("gate", f"{features}@{size}", attrs["gates"], study)
    name = attrs["gates"][gate_at]
    one = _at_layer(arrays, layer, str(study.path)).isel(need=need_at, gate=gate_at)
    facts = attrs["described"][name]
    return Gate(
        layer=int(layer),
        need=attrs["needs"][need_at],
        features=facts["features"],
        size=facts["size"],
        weight=np.asarray(one["weight"].values, np.float32)[: facts["n_features"]],
        bias=float(one["bias"]),
        threshold=float(one["threshold"]),
        pieces={piece: str(attrs["pieces"].get(piece, "")) for piece in facts["pieces"]},
        available_at_routing=bool(facts["available_at_routing"]),
    )


def _listed(arrays: "xr.Dataset", where: str) -> dict[str, Any]:
    """The attributes that say which gate is which, of the form that `analyze` writes."""
    attrs = dict(arrays.attrs)
    try:
        fits = (len(attrs["needs"]), len(attrs["gates"])) == (arrays.sizes["need"], arrays.sizes["gate"])
        for name in attrs["gates"]:
            facts = attrs["described"][name]
            fits &= {"features", "size", "pieces", "n_features", "available_at_routing"} <= set(facts)
            fits &= isinstance(facts["n_features"], int) and isinstance(facts["pieces"], list)
        fits &= isinstance(attrs["pieces"], Mapping)
    except (KeyError, TypeError):
        fits = False
    if not fits:
        raise FormatError(f"{where}: its attributes do not describe its gates; run `nearline analyze` again")
    return attrs


def _check(arrays: "xr.Dataset", wanted: Mapping[str, tuple[str, ...]], where: str) -> None:
    for name, dims in wanted.items():
        if name not in arrays or arrays[name].dims != dims or "layer" not in arrays.coords:
            raise FormatError(f"{where}: `{name}` with axes {', '.join(dims)} is not in it; make it again")


def _at_layer(arrays: "xr.Dataset", layer: object, where: str) -> "xr.Dataset":
    layers = [int(one) for one in arrays["layer"].values]
    if isinstance(layer, bool) or not isinstance(layer, (int, np.integer)) or layer not in layers:
        raise NoSuchLayer(f"layer {layer!r} is not in {where}, which has {', '.join(map(str, layers))}")
    return arrays.isel(layer=layers.index(int(layer)))


def _index(what: str, name: str, there: list[str], study: Study) -> int:
    if name not in there:
        shown = ", ".join(printable(str(one)) for one in there)
        raise UsageError(f"{study.path} has no {what} {name!r}; it has {shown}{nearest_known(name, there)}")
    return there.index(name)
