"""Values of one site in batches: which arrays of a store it comes from, and how its rows are made of them.

In: pools of rows as stored. Out: the rows asked for, decoded (bfloat16, a gradient's power of two), under
the norm where `mlp_input` is recomputed, in the dtype asked for. Cost: one gather; where the values are not
given as they are stored, in tiles that stay in a core's cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Int, Shaped

from .batch_pools import Pool, Slot
from .dtypes import GRADIENT, LAYER_SITES, decode_into, encode, numpy_dtype
from .errors import OutOfRange, UsageError
from .norms import Norm, apply_norm, norm_of

if TYPE_CHECKING:
    from .reader import Reader

DTYPES = ("float32", "float16", "bfloat16", "float64")
TILE_VALUES = 2**18  # 1 MiB of float32


@dataclass(frozen=True, slots=True, eq=False)
class Values:
    """One site of a batch."""

    site: str
    slots: tuple[Slot, ...]  # what it is read from: one for each layer
    layered: bool  # whether the arrays have an axis of layers
    norms: tuple[Norm, ...]  # of each layer, where the site is recomputed from `residual`; else none
    exponents: tuple[int, ...]  # of each layer: the power of two that a gradient is stored with
    d: int
    stored: str  # dtype
    dtype: str

    @property
    def row_bytes(self) -> int:
        """Of one row of a batch."""
        return len(self.slots) * self.d * self._numpy.itemsize

    def scratch_bytes(self, batch_size: int) -> int:
        """Of a tile on its way: gathered, decoded, and twice more under a norm or when it is encoded."""
        n_rows = min(batch_size, max(1, TILE_VALUES // self.d))
        return 0 if self._is_as_stored else n_rows * self.d * 4 * 4

    @property
    def _numpy(self) -> np.dtype[Any]:
        return np.dtype("<f8") if self.dtype == "float64" else numpy_dtype(self.dtype)

    @property
    def _is_as_stored(self) -> bool:
        return self.dtype == self.stored and not self.norms and not any(self.exponents)

    def empty(self, n_rows: int) -> np.ndarray:
        shape = (len(self.slots), n_rows, self.d) if self.layered else (n_rows, self.d)
        return np.empty(shape, self._numpy)

    def take(
        self, pool: Pool, places: Int[np.ndarray, " row"], out: Shaped[np.ndarray, "*layer row feature"]
    ) -> None:
        """The rows of a pool at some places."""
        for index, slot in enumerate(self.slots):
            source, target = pool.values[slot], out[index] if self.layered else out
            if self._is_as_stored:
                # "clip" takes no copy first; every place is one of the pool's
                np.take(source, places, axis=0, out=target, mode="clip")
            else:
                self._convert(index, source, places, target)

    def _convert(self, index: int, source: np.ndarray, places: np.ndarray, out: np.ndarray) -> None:
        tile = max(1, TILE_VALUES // self.d)
        for start in range(0, len(places), tile):
            part = out[start : start + tile]
            packed = np.take(source, places[start : start + tile], axis=0)
            rows = part if self.dtype == "float32" else np.empty(part.shape, np.float32)
            decode_into(packed, self.stored, rows)
            if self.exponents[index]:
                rows *= np.float32(2.0 ** -self.exponents[index])
            if self.norms:
                with np.errstate(all="ignore"):  # of rows that are not finite
                    apply_norm(rows, self.norms[index], out=rows)
            if self.dtype == "float64":
                part[...] = rows
            elif self.dtype != "float32":
                part[...] = self._encoded(rows, index)

    def _encoded(self, rows: np.ndarray, index: int) -> np.ndarray:
        try:
            return encode(rows, self.dtype)
        except OutOfRange as error:
            problem = str(error).partition(";")[0]
            where = f"`{self.site}`" + (
                f" layer {self.slots[index][1]}" if self.slots[index][1] is not None else ""
            )
            raise OutOfRange(f"{where}: {problem}; ask for dtype='float32' or 'bfloat16'") from None


def values_of(reader: "Reader", site: str, layers: Sequence[int], layered: bool, dtype: Any) -> Values:
    """How a site's rows are made; UsageError where the store cannot give it."""
    source = _source(reader, site)
    has_layers = source in LAYER_SITES
    slots: tuple[Slot, ...] = tuple((source, layer) for layer in layers) if has_layers else ((source, None),)
    norms = tuple(norm_of(reader, layer) for layer in layers) if source != site else ()
    storage = reader.attributes.storage
    exponents = tuple(storage.gradient_exponent(layer) if site == GRADIENT else 0 for layer in layers)
    return Values(
        site,
        slots,
        layered and has_layers,
        norms,
        exponents if has_layers else (0,),
        reader.d_model,
        reader.storage_dtype,
        _dtype(dtype),
    )


def _source(reader: "Reader", site: str) -> str:
    """The stored site behind a site."""
    if site in reader.sites:
        return site
    if site == "mlp_input" and "residual" in reader.sites:
        return "residual"
    also = " and `mlp_input`, which is norm(residual)" if "residual" in reader.sites else ""
    raise UsageError(f"site {site!r} is not in {reader.path}, which has {', '.join(reader.sites)}{also}")


def _dtype(dtype: Any) -> str:
    try:
        name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
    except TypeError:
        name = str(dtype)
    if name not in DTYPES:
        raise UsageError(f"dtype={name!r}: allowed are {', '.join(DTYPES)} (bfloat16 as its bits, in uint16)")
    return name
