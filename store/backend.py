"""The xarray backend `engine="nearline"`: lazily indexed arrays over a Reader.

In: a store's folder, its URL, or its activations.zarr. Out: a Dataset of float32 sites and the token
columns. An index reads only the layers and blocks that it touches; a chunk that is missing or damaged
raises, with site, layer and token range.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from xarray.backends import BackendArray, BackendEntrypoint
from xarray.core import indexing

from .dtypes import LAYER_SITES
from .layout import AFFINE, TOKEN_COLUMNS
from .lazy import take
from .places import scheme_of
from .reader import Reader


class NearlineBackend(BackendEntrypoint):
    """Opens sealed stores: `xr.open_dataset(path, engine="nearline")`."""

    description = "nearline activation stores, bfloat16 decoded, every chunk checked"
    open_dataset_parameters = ("filename_or_obj", "drop_variables", "require_seal")

    def open_dataset(
        self,
        filename_or_obj: Any,
        *,
        drop_variables: str | Iterable[str] | None = None,
        require_seal: bool = True,
    ) -> xr.Dataset:
        data = dataset(Reader.open(filename_or_obj, require_seal=require_seal))
        drop = [drop_variables] if isinstance(drop_variables, str) else list(drop_variables or ())
        return data.drop_vars(drop, errors="ignore")

    def guess_can_open(self, filename_or_obj: Any) -> bool:
        """Only local folders that hold a store: plain Zarr groups are left to xarray's own engine."""
        if not isinstance(filename_or_obj, (str, Path)) or scheme_of(filename_or_obj) is not None:
            return False
        return (Path(filename_or_obj) / "activations.zarr").is_dir() and (
            Path(filename_or_obj) / "plan.json"
        ).exists()


def dataset(reader: Reader) -> xr.Dataset:
    """The lazy Dataset of a store, without Dask."""
    sites = {site: _lazy(SiteArray(reader, site), _dims(site), reader) for site in reader.sites}
    columns = {name: _lazy(ColumnArray(reader, name), ("token",), reader) for name in TOKEN_COLUMNS}
    small: dict[str, Any] = {}
    for name in AFFINE:
        if (values := reader.affine(name)) is not None:
            small[name] = (("layer", "feature"), values)
    if (positions := reader.position_embedding) is not None:
        small["position_embedding"] = (("position", "feature"), positions)
    coords = {"layer": ("layer", np.array(reader.layers, dtype=np.int32))}
    data = xr.Dataset({**sites, **columns, **small}, coords=coords, attrs=reader.attributes.to_dict())
    data.encoding["source"] = reader.path
    return data


class SiteArray(BackendArray):
    """One site as float32, by (layer, token, feature) or (token, feature)."""

    def __init__(self, reader: Reader, site: str) -> None:
        self.reader, self.site = reader, site
        self.dtype = np.dtype(np.float32)
        rows = (reader.n_tokens, reader.d_model)
        self.shape = (len(reader.layers), *rows) if site in LAYER_SITES else rows

    def __getitem__(self, key: indexing.ExplicitIndexer) -> Any:
        return take(key, self.shape, self._get)

    def _get(self, key: tuple[Any, ...]) -> Any:
        if self.site not in LAYER_SITES:
            return self._rows(None, key[0])[..., key[1]]
        numbers = np.asarray(self.reader.layers)[key[0]]
        if np.ndim(numbers) == 0:
            return self._rows(int(numbers), key[1])[..., key[2]]
        if not len(numbers):
            nothing = np.empty(self.shape, dtype=np.float32)[:0]  # its memory is never touched
            return nothing[:, key[1]][..., key[2]]
        return np.stack([self._rows(int(number), key[1])[..., key[2]] for number in numbers])

    def _rows(self, layer: int | None, key: Any) -> Any:
        return _select(
            self.reader, key, lambda b0, b1: self.reader.rows(self.site, layer, b0, b1), self.shape[-1:]
        )


class ColumnArray(BackendArray):
    """One token column."""

    def __init__(self, reader: Reader, name: str) -> None:
        self.reader, self.name = reader, name
        self.dtype = np.dtype(TOKEN_COLUMNS[name][0])
        self.shape = (reader.n_tokens,)

    def __getitem__(self, key: indexing.ExplicitIndexer) -> Any:
        return take(key, self.shape, self._get)

    def _get(self, key: tuple[Any, ...]) -> Any:
        def read(b0: int, b1: int) -> np.ndarray:
            return np.concatenate([self.reader.column_block(self.name, block) for block in range(b0, b1)])

        return _select(self.reader, key[0], read, ()).astype(self.dtype, copy=False)


def _select(reader: Reader, key: Any, read: Any, tail: tuple[int, ...]) -> Any:
    """Rows by an integer, a slice or an integer array along `token`, reading only the blocks in between."""
    block = reader.plan.block
    if isinstance(key, slice):
        start, stop, step = key.indices(reader.n_tokens)
        wanted = range(start, stop, step)
        if not len(wanted):
            return np.empty((0, *tail), dtype=np.float32)
        low, high = min(wanted[0], wanted[-1]), max(wanted[0], wanted[-1])
        values = read(low // block, high // block + 1)
        first = low // block * block
        if step > 0:
            return values[low - first : high - first + 1 : step]
        return values[np.arange(start, stop, step) - first]
    rows = np.asarray(key)
    if rows.ndim == 0:
        return read(int(rows) // block, int(rows) // block + 1)[int(rows) % block]
    out: np.ndarray | None = None
    for number in np.unique(rows // block).tolist():  # only the blocks that are touched
        values = read(number, number + 1)
        here = rows // block == number
        out = np.empty((len(rows), *values.shape[1:]), dtype=values.dtype) if out is None else out
        out[here] = values[rows[here] - number * block]
    return np.empty((0, *tail), dtype=np.float32) if out is None else out


def _lazy(array: Any, dims: tuple[str, ...], reader: Reader) -> xr.Variable:
    sizes = {"layer": 1, "token": reader.plan.block, "feature": reader.d_model}
    chunks = {dim: sizes[dim] for dim in dims}
    return xr.Variable(dims, indexing.LazilyIndexedArray(array), encoding={"preferred_chunks": chunks})


def _dims(site: str) -> tuple[str, ...]:
    return ("layer", "token", "feature") if site in LAYER_SITES else ("token", "feature")
