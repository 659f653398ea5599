"""Small Zarr groups written in one go (surrogates, gates), and digests of files and folders.

In: named arrays and attributes. Out: a plain Zarr v3 group with consolidated metadata, the same bytes for
the same values; put in place as a finished folder. Reading is lazy along the first axis and checks every
chunk. Cost: one write; replacing an older group removes it first, so a crash leaves none, never a mixture.
"""

import json
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from blake3 import blake3

from . import durable, in_place
from .chunks import read_chunk
from .errors import DamageError, FormatError, IncompleteError, MissingChunk, UsageError
from .layout import CRC_BYTES
from .metadata import ArraySpec, encode_chunk, group_json, parse_array
from .names import is_file_name
from .parsing import SMALL_JSON_BYTES, check_plain, get_object, parse_json, readable
from .places import LocalPlace

if TYPE_CHECKING:
    import xarray as xr

MAX_WHOLE_BYTES = 2**31  # one matrix of d = 16,384 in float64
_GROUP_KEYS = ("attributes", "zarr_format", "node_type", "consolidated_metadata")
_CONSOLIDATED_KEYS = ("kind", "must_understand", "metadata")
DIMS = {
    "layer": ("layer",),
    "weight": ("layer", "feature_out", "feature_in"),
    "bias": ("layer", "feature_out"),
    "alpha": ("layer",),
}


def write_arrays(target: Path, arrays: Mapping[str, Any], attrs: Mapping[str, Any]) -> None:
    """Write a group; each entry is an array whose dims are known by its name, or (dims, array)."""
    specs: dict[str, tuple[ArraySpec, np.ndarray]] = {}
    for name, given in arrays.items():
        dims, values = given if isinstance(given, tuple) else (DIMS.get(name), given)
        values = np.asarray(values)
        if dims is None or len(dims) != values.ndim or not values.size:
            raise UsageError(
                f"array {name!r} of shape {values.shape}: give (dims, array); its dims are {dims}"
            )
        values = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<"))
        specs[name] = (_spec(name, tuple(dims), values), values)
    aside = target.with_name(f"{target.name}.{secrets.token_hex(6)}{durable.PARTIAL}")
    try:
        durable.write_files(_files(aside, specs, attrs))
        in_place.replace_folder(aside, target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)  # there is none where all went well


def open_arrays(path: Path) -> "xr.Dataset":
    """The group as a Dataset: large arrays are read along their first axis when they are used."""
    import xarray as xr
    from xarray.core import indexing

    from .lazy import ChunkedArray

    attrs, specs = _read_group(path)
    lazy = {name: indexing.LazilyIndexedArray(ChunkedArray(path, spec)) for name, spec in specs.items()}
    variables = {name: xr.Variable(spec.dims, lazy[name]) for name, spec in specs.items()}
    coords = {name: variables.pop(name).load() for name in specs if (name,) == specs[name].dims}
    try:
        return xr.Dataset(variables, coords=coords, attrs=attrs)
    except ValueError as error:  # axes of one name and different lengths
        raise FormatError(f"{path}/zarr.json: the arrays do not fit together ({error})") from None


def _read_group(path: Path) -> tuple[dict[str, Any], dict[str, ArraySpec]]:
    """Attributes and arrays of a group, from its consolidated metadata."""
    where = str(path / "zarr.json")
    try:
        content = LocalPlace(path).read("zarr.json", limit=SMALL_JSON_BYTES)
    except FileNotFoundError:
        raise IncompleteError(f"{path} does not exist: the step that writes it has not run") from None
    root = get_object(parse_json(content, where), where, keys=_GROUP_KEYS)
    inline = get_object(
        root["consolidated_metadata"], f"{where}: consolidated_metadata", keys=_CONSOLIDATED_KEYS
    )
    attrs = get_object(root["attributes"], f"{where}: attributes")
    check_plain(attrs, f"{where}: attributes", depth=8, any_text=True)
    specs: dict[str, ArraySpec] = {}
    for name, data in get_object(inline["metadata"], f"{where}: metadata").items():
        if not is_file_name(name):
            raise FormatError(f"{where}: {name[:80]!r} cannot name an array")
        spec = parse_array(data, name, f"{where}: {name}", (None,), MAX_WHOLE_BYTES)
        if spec.chunks != _chunks(spec.shape):
            raise FormatError(f"{where}: {name}: `chunk_shape` {spec.chunks} is not cut along the first axis")
        specs[name] = spec
    if root != json.loads(group_json(attrs, {name: spec.to_metadata(None) for name, spec in specs.items()})):
        raise FormatError(f"{where}: not the metadata of a group that nearline writes")
    return attrs, specs


def read_rows(path: Path, spec: ArraySpec, start: int, stop: int) -> np.ndarray:
    """Entries [start, stop) along the first axis. The chunk objects are there, in full size, before memory is
    taken for what the metadata promises."""
    step, place = spec.chunks[0], LocalPlace(path)
    low, high = start // step, -(-stop // step)
    keys = [spec.key(index, *([0] * (len(spec.dims) - 1))) for index in range(low, high)]
    spots = [f"`{spec.name}` {spec.dims[0]} {(low + i) * step} ({path / key})" for i, key in enumerate(keys)]
    for key, spot in zip(keys, spots, strict=True):
        if (size := place.size(key)) is None:
            raise MissingChunk(f"{spot}: the chunk object is missing; run the step again that writes it")
        if size != spec.chunk_bytes + CRC_BYTES:
            raise DamageError(f"{spot}: {size} bytes, {spec.chunk_bytes + CRC_BYTES} expected")
    out = np.empty((min(high * step, spec.shape[0]) - low * step, *spec.shape[1:]), dtype=spec.dtype)
    for at, (key, spot) in enumerate(zip(keys, spots, strict=True)):
        read_chunk(place, key, spec, None, out[at * step : (at + 1) * step], spot)
    return out[start - low * step : stop - low * step]


def digest_of(path: Path) -> str:
    """BLAKE3 of a file, or of a folder: over the sorted names and digests of all files in it."""
    if not path.exists():
        raise IncompleteError(f"{path} does not exist; a step that says it wrote this file did not")
    if path.is_file():
        return _file_digest(path)
    files = sorted(entry for entry in path.rglob("*") if entry.is_file())
    listed = "".join(f"{entry.relative_to(path).as_posix()}\n{_file_digest(entry)}\n" for entry in files)
    return blake3(listed.encode()).hexdigest()


def _file_digest(path: Path) -> str:
    digest = blake3()
    with path.open("rb") as file:
        while piece := file.read(2**22):
            digest.update(piece)
    return digest.hexdigest()


def _spec(name: str, dims: tuple[str, ...], values: np.ndarray) -> ArraySpec:
    """Matrices are cut along the first axis, one a chunk; vectors and tables stay whole."""
    fill = float("nan") if values.dtype.kind == "f" else 0
    spec = ArraySpec(name, dims, values.shape, _chunks(values.shape), values.dtype, fill)
    try:
        spec.to_metadata(None)
    except KeyError:
        raise UsageError(f"array {name!r}: dtype {values.dtype} has no place in the format") from None
    return spec


def _chunks(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (1, *shape[1:]) if len(shape) > 2 else shape


def _files(
    folder: Path, specs: Mapping[str, tuple[ArraySpec, np.ndarray]], attrs: Mapping[str, Any]
) -> Iterator[tuple[Path, tuple[Any, ...]]]:
    for name, (spec, values) in specs.items():
        yield folder / name / "zarr.json", (readable(spec.to_metadata(None)),)
        for index, row in enumerate(range(0, spec.shape[0], spec.chunks[0])):
            key = spec.key(index, *([0] * (len(spec.dims) - 1)))
            yield folder / key, encode_chunk(values[row : row + spec.chunks[0]], spec, None)
    metadata = {name: spec.to_metadata(None) for name, (spec, _) in specs.items()}
    try:
        yield folder / "zarr.json", (group_json(attrs, metadata),)
    except (TypeError, ValueError) as error:
        raise FormatError(f"{folder.name}: attributes cannot be written as JSON ({error})") from None
