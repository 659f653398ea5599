"""Zarr v3 metadata of the few kinds of arrays we write, and the form of their chunk objects.

In: an array specification. Out: the same zarr.json that zarr itself would write for it (the tests compare),
and chunk objects: little-endian bytes, optionally zstd, then crc32c. Written by hand because it must be the
same bytes under every version of zarr, and because a chunk then goes from the caller's array to the file
without a copy. Reading takes only what we write: a key, codec, grid or fill value of another kind is
refused, and so is a size that no array of ours has, before anything is sized by it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import google_crc32c
import numpy as np
from jaxtyping import Shaped

from .errors import FormatError
from .parsing import canonical, get_ints, get_list, get_object, get_str, readable

ZSTD_LEVEL = 1
COMPRESSORS = (None, "zstd")
MAX_CHUNK_BYTES = 65 * 2**20  # a chunk of a store: 64 MiB, and a little for blocks set by hand
MAX_CHUNKS = 2**14  # along one axis
MAX_ARRAY_BYTES = 2**53
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
_KEYS = (
    "node_type",
    "zarr_format",
    "data_type",
    "dimension_names",
    "shape",
    "chunk_grid",
    "chunk_key_encoding",
    "fill_value",
    "codecs",
    "storage_transformers",
    "attributes",
)


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
        return math.prod(self.chunks) * self.dtype.itemsize

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


def parse_array(
    data: object,
    name: str,
    where: str,
    compressors: Sequence[str | None] = COMPRESSORS,
    most_bytes: int = MAX_CHUNK_BYTES,
) -> ArraySpec:
    """The specification of an array from its zarr.json, refused unless it is of a kind that we write: with
    one of these compressors, and chunks of at most so many bytes."""
    found = get_object(data, where, keys=_KEYS)
    grid = get_object(get_object(found["chunk_grid"], where).get("configuration"), where)
    shape, chunks = (
        get_ints(found, "shape", where, 1, most=8),
        get_ints(grid, "chunk_shape", where, 1, most=8),
    )
    dims = get_list(found, "dimension_names", where, str, most=8)
    dtype = _NUMPY[get_str(found, "data_type", where, _NUMPY)]
    if not len(shape) == len(chunks) == len(dims) > 0:
        raise FormatError(f"{where}: `shape`, `chunk_shape` and `dimension_names` differ in length")
    if len(set(dims)) < len(dims) or not all(dim.isidentifier() and len(dim) <= 64 for dim in dims):
        raise FormatError(f"{where}: `dimension_names` must be different names")
    spec = ArraySpec(name, tuple(dims), tuple(shape), tuple(chunks), dtype, _parse_fill(found, dtype, where))
    _check_size(spec, where, most_bytes)
    possible = [spec.to_metadata(compressor) for compressor in compressors]
    if canonical(found) not in map(canonical, possible):
        nearest = next((form for form in possible if form["codecs"] == found["codecs"]), possible[0])
        wrong = next(key for key in _KEYS if canonical(found[key]) != canonical(nearest[key]))
        raise FormatError(f"{where}: `{wrong}` is not of a kind that nearline writes")
    return spec


def _parse_fill(found: Mapping[str, Any], dtype: np.dtype[Any], where: str) -> Any:
    """NaN for floats; a value of the array's own range for everything else."""
    fill = found["fill_value"]
    if dtype.kind == "f":
        good = fill == "NaN"
    elif dtype.kind == "b":
        good = type(fill) is bool
    else:
        good = type(fill) is int and np.iinfo(dtype).min <= fill <= np.iinfo(dtype).max
    if not good:
        raise FormatError(f"{where}: `fill_value` is none that nearline writes for {dtype}")
    return float("nan") if dtype.kind == "f" else fill


def _check_size(spec: ArraySpec, where: str, most_bytes: int) -> None:
    """Python's integers do not overflow: the products are what they say."""
    n_chunks = [-(-size // step) for size, step in zip(spec.shape, spec.chunks, strict=True)]
    if spec.chunk_bytes > most_bytes:
        raise FormatError(
            f"{where}: `chunk_shape` makes chunks of {spec.chunk_bytes} bytes, at most {most_bytes} are read"
        )
    if max(n_chunks) > MAX_CHUNKS or math.prod(n_chunks) * spec.chunk_bytes > MAX_ARRAY_BYTES:
        raise FormatError(f"{where}: `shape` is larger than any array of a store: {list(spec.shape)}")


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


def largest_object(spec: ArraySpec) -> int:
    """Bytes that a chunk object may have; zstd adds less than 1 % to what it cannot compress."""
    return spec.chunk_bytes + spec.chunk_bytes // 64 + 2**12


def compress(body: np.ndarray, compressor: str | None) -> Any:
    if compressor is None:
        return body
    from numcodecs.zstd import Zstd  # costs an import of 0.1 s that few stores need

    return bytes(Zstd(level=ZSTD_LEVEL).encode(body))


def decompress(body: np.ndarray, out: np.ndarray) -> int:
    """Unpack a zstd body into `out` (uint8); returns the bytes that it holds, -1 for no zstd frame.

    The frame's header is asked first: a body of another size than `out` is left packed, whatever it would
    grow to.
    """
    n_bytes = _frame_content_size(body[:18].tobytes())
    if n_bytes != out.nbytes:
        return n_bytes
    from numcodecs.zstd import Zstd

    try:
        unpacked = np.frombuffer(Zstd().decode(body, out), dtype=np.uint8)
    except (RuntimeError, ValueError):  # a damaged frame, or several frames that together are larger
        return -1
    return unpacked.nbytes


def _frame_content_size(head: bytes) -> int:
    """The content size that a zstd frame states (RFC 8878, 3.1.1); -1 where it states none."""
    if len(head) < 6 or head[:4] != b"\x28\xb5\x2f\xfd":
        return -1
    single, n_dictionary = head[4] >> 5 & 1, (0, 1, 2, 4)[head[4] & 3]
    n_size = (single, 2, 4, 8)[head[4] >> 6]
    start = 5 + (1 - single) + n_dictionary
    if not n_size or len(head) < start + n_size:
        return -1
    return int.from_bytes(head[start : start + n_size], "little") + (256 if n_size == 2 else 0)


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
