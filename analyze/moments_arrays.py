"""The moments of one layer as a small Zarr group: `LayerMoments` in, arrays with their dims out, and back.

Arrays, float64, sums along the first axis (the folds, then test, sink rows of fit, sink rows of test): n,
mean_x, mean_y, cxx, cxy, cyy; contribution, where there is one. A group from elsewhere is refused by the
names, types and shapes that its metadata states before memory is taken for any of it, and by its values
before one is used. Cost: a read, and one look at each number; memory: the moments.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from ..store import FormatError, UsageError
from ..store.whole import open_arrays
from .moments import Moments
from .surrogates import LayerMoments

_DIMS: Final[Mapping[str, tuple[str, ...]]] = {
    "mean_x": ("part", "feature"),
    "mean_y": ("part", "target"),
    "cxx": ("part", "feature", "other_feature"),
    "cxy": ("part", "feature", "target"),
    "cyy": ("part", "target"),
}
# Sums beside those of the folds: test, sink rows of fit, sink rows of test.
_FURTHER: Final = 3


def layer_arrays(moments: LayerMoments) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arrays and attributes of a layer's group."""
    if moments.sinks is None or moments.test_sinks is None:
        raise UsageError("moments without those of sink rows are not saved: sum the rows of a store again")
    parts = [*moments.folds, moments.test, moments.sinks, moments.test_sinks]
    arrays: dict[str, Any] = {"n": (("part",), np.array([part.n for part in parts], np.float64))}
    for name, axes in _DIMS.items():
        arrays[name] = (axes, np.stack([getattr(part, name) for part in parts]))
    if moments.contribution is not None:
        arrays["contribution"] = (("target",), moments.contribution)
    folds = [f"fold {fold}" for fold in range(len(moments.folds))]
    return arrays, {"parts": [*folds, "test", "sinks of fit", "sinks of test"]}


def read_layer(group: Path, n_folds: int, width: int, *, with_contribution: bool) -> LayerMoments:
    """The moments in a layer's group; FormatError where they are not sums over rows of this width."""
    sizes = {"part": n_folds + _FURTHER, "feature": width, "other_feature": width, "target": width}
    wanted = {"n": ("part",), **_DIMS} | ({"contribution": ("target",)} if with_contribution else {})
    with open_arrays(group) as arrays:
        stated = {str(name): (array.dims, array.shape) for name, array in arrays.variables.items()}
        shapes = {name: (dims, tuple(sizes[dim] for dim in dims)) for name, dims in wanted.items()}
        if stated != shapes or any(array.dtype != np.float64 for array in arrays.variables.values()):
            raise FormatError(
                f"{group}: its arrays are not those of {sizes['part']} sums of width {width} in float64"
            )
        values = {name: np.asarray(arrays[name]) for name in wanted}
    if problem := _problem(values):
        raise FormatError(f"{group}: {problem}: no sums of rows are like that; sum the moments again")
    return _layer_moments(values, n_folds)


def _problem(values: Mapping[str, np.ndarray]) -> str | None:
    """What cannot be in sums over rows, in words."""
    for name, array in values.items():
        if not np.isfinite(array).all():
            return f"`{name}` holds a value that is not finite"
    n, cxx, cyy = values["n"], values["cxx"], values["cyy"]
    if (n < 0).any() or (n != np.floor(n)).any() or (n > 2**53).any():
        return "`n` is not a number of rows"
    if (np.diagonal(cxx, axis1=1, axis2=2) < 0).any() or (cyy < 0).any():
        return "a sum of squares is negative"
    nothing = n == 0
    if any(values[name][nothing].any() for name in _DIMS):
        return "a sum over no rows is not 0"
    return None


def _layer_moments(values: Mapping[str, np.ndarray], n_folds: int) -> LayerMoments:
    parts = [Moments(int(n), *(values[name][index] for name in _DIMS)) for index, n in enumerate(values["n"])]
    return LayerMoments(
        folds=tuple(parts[:n_folds]),
        test=parts[n_folds],
        contribution=values.get("contribution"),
        sinks=parts[n_folds + 1],
        test_sinks=parts[n_folds + 2],
    )
