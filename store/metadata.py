"""Zarr v3 metadata of the few kinds of arrays we write, and the form of their chunk objects.

In: an array specification. Out: the same zarr.json that zarr itself would write for it (the tests compare),
and chunk objects: little-endian bytes, optionally zstd, then crc32c. Written by hand because it must be the
same bytes under every version of zarr, and because a chunk then goes from the caller's array to the file
without a copy.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import google_crc32c
import numpy as np
from jaxtyping import Shaped

from .errors import FormatError
from .parsing import get_int, get_list, get_object, get_str, readable

ZSTD_LEVEL = 1
_DATA_TYPES = {
    "<f4": "float32",
    "<f8": "float64",
    "<f2": "float16",
    "<u2": "uint16",
    "<i4": "int32",
    "|u1": "uint8",
    "|b1": "bool",
}
_NUMPY = {name: np.dtype(code) for code, name in _DATA_TYPES.items()}


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """One array: its name in the group, its axes, how it is cut, and what an unwritten value reads as."""

    name: str
    dims: tuple[str, ...]
    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    dtype: np.dtype[Any]
    fill: Any

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk before compressor and checksum."""
        return int(np.prod(self.chunks)) * self.dtype.itemsize

    def key(self, *index: int) -> str:
        """Key of a chunk inside the group, zarr's default encoding."""
        return "/".join([self.name, "c", *map(str, index)])

    def to_metadata(self, compressor: str | None) -> dict[str, Any]:
        return {
            "shape": list(self.shape),
            "data_type": _DATA_TYPES[self.dtype.str],
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(self.chunks)}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": _json_fill(self.fill, self.dtype),
            "codecs": _codecs(self.dtype, compressor),
            "attributes": {},
            "dimension_names": list(self.dims),
            "zarr_format": 3,
            "node_type": "array",
            "storage_transformers": [],
        }


def group_json(
    attributes: Mapping[str, Any], consolidated: Mapping[str, Mapping[str, Any]] | None = None
) -> bytes:
    """zarr.json of the root group; `consolidated`: the arrays' metadata inline, as zarr consolidates them."""
    data: dict[str, Any] = {"attributes": dict(attributes), "zarr_format": 3, "node_type": "group"}
    if consolidated is not None:
        inline = {"kind": "inline", "must_understand": False, "metadata": dict(consolidated)}
        data["consolidated_metadata"] = inline
    return readable(data)


def parse_array(data: object, name: str, where: str) -> ArraySpec:
    """The specification of an array from its zarr.json, refused unless it is of a kind that we write."""
    found = get_object(data, where)
    grid = get_object(get_object(found.get("chunk_grid"), where).get("configuration"), where)
    shape, chunks = get_list(found, "shape", where, int), get_list(grid, "chunk_shape", where, int)
    dims = get_list(found, "dimension_names", where, str)
    data_type = get_str(found, "data_type", where, _NUMPY)
    if not len(shape) == len(chunks) == len(dims) > 0 or min([*shape, *chunks]) < 1:
        raise FormatError(
            f"{where}: shape {shape}, chunks {chunks} and dimensions {dims} do not fit together"
        )
    get_int(found, "zarr_format", where, 3, 3)
    dtype = _NUMPY[data_type]
    fill = found.get("fill_value")
    return ArraySpec(
        name, tuple(dims), tuple(shape), tuple(chunks), dtype, float("nan") if fill == "NaN" else fill
    )


def encode_chunk(
    values: Shaped[np.ndarray, "..."], spec: ArraySpec, compressor: str | None
) -> tuple[Any, bytes]:
    """Body and checksum of a chunk object; no copy of values that are a whole chunk and C-contiguous."""
    if values.dtype != spec.dtype:
        raise ValueError(f"`{spec.name}` is stored as {spec.dtype}, not as {values.dtype}")
    body = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    missing = spec.chunk_bytes - body.nbytes
    if missing:  # the last chunk is padded to full size
        padding = np.full(missing // spec.dtype.itemsize, spec.fill, dtype=spec.dtype).view(np.uint8)
        body = np.concatenate([body, padding])
    packed: Any = compress(body, compressor)
    return packed, int(google_crc32c.value(packed)).to_bytes(4, "little")


def compress(body: np.ndarray, compressor: str | None) -> Any:
    if compressor is None:
        return body
    from numcodecs.zstd import Zstd  # costs an import of 0.1 s that few stores need

    return bytes(Zstd(level=ZSTD_LEVEL).encode(body))


def decompress(body: np.ndarray, out: np.ndarray) -> int:
    """Unpack a zstd body into `out` (uint8); returns the bytes written."""
    from numcodecs.zstd import Zstd

    unpacked = np.frombuffer(Zstd().decode(body), dtype=np.uint8)
    if unpacked.nbytes == out.nbytes:
        out[...] = unpacked
    return unpacked.nbytes


def _codecs(dtype: np.dtype[Any], compressor: str | None) -> list[dict[str, Any]]:
    to_bytes: dict[str, Any] = {"name": "bytes"}
    if dtype.itemsize > 1:
        to_bytes["configuration"] = {"endian": "little"}
    packing = {"name": "zstd", "configuration": {"level": ZSTD_LEVEL, "checksum": False}}
    return [to_bytes, *([packing] if compressor == "zstd" else []), {"name": "crc32c"}]


def _json_fill(fill: Any, dtype: np.dtype[Any]) -> Any:
    if dtype.kind == "f":
        return "NaN" if np.isnan(fill) else float(fill)
    return bool(fill) if dtype.kind == "b" else int(fill)
