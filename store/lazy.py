"""Lazily indexed arrays of a small Zarr group, for xarray: apart because xarray takes long to import.

In: a group's folder and an array's specification. Out: values by index; the chunks touched are read and
checked.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from xarray.backends import BackendArray
from xarray.core import indexing

from .metadata import ArraySpec
from .whole import read_rows


def take(key: indexing.ExplicitIndexer, shape: tuple[int, ...], get: Callable[[tuple[Any, ...]], Any]) -> Any:
    """What `key` selects, when `get` takes integers, slices and integer arrays, one per axis.

    Empty slices are written forwards first: xarray cannot turn round one that runs backwards over nothing.
    """
    plain = tuple(
        slice(0, 0, 1) if isinstance(part, slice) and not len(range(*part.indices(size))) else part
        for part, size in zip(key.tuple, shape, strict=True)
    )
    return indexing.explicit_indexing_adapter(type(key)(plain), shape, indexing.IndexingSupport.OUTER, get)


class ChunkedArray(BackendArray):
    """An array that is cut along its first axis only."""

    def __init__(self, path: Path, spec: ArraySpec) -> None:
        self.path, self.spec = path, spec
        self.dtype, self.shape = spec.dtype, spec.shape

    def __getitem__(self, key: indexing.ExplicitIndexer) -> Any:
        return take(key, self.shape, self._get)

    def _get(self, key: tuple[Any, ...]) -> Any:
        first = key[0]
        numbers = range(*first.indices(self.shape[0])) if isinstance(first, slice) else np.atleast_1d(first)
        entries = [self._entry(int(index) % self.shape[0], key[1:]) for index in numbers]
        if not entries:
            return np.empty(self.shape, dtype=self.dtype)[:0]
        return entries[0] if not isinstance(first, slice) and np.ndim(first) == 0 else np.stack(entries)

    def _entry(self, index: int, rest: tuple[Any, ...]) -> Any:
        values = read_rows(self.path, self.spec, index, index + 1)[0]
        for axis in reversed(range(len(rest))):  # one axis at a time: outer indexing
            values = values[(slice(None),) * axis + (rest[axis],)]
        return values
