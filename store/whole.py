"""Small Zarr groups written in one go (surrogates, gates), and digests of files and folders.

In: named arrays and attributes. Out: a plain Zarr v3 group with consolidated metadata, the same bytes for
the same values; put in place as a finished folder. Reading is lazy along the first axis and checks every
chunk. Cost: one write; replacing an older group removes it first, so a crash leaves none, never a mixture.
"""

import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from blake3 import blake3

from . import durable
from .chunks import read_chunk
from .errors import FormatError, IncompleteError, UsageError
from .metadata import ArraySpec, encode_chunk, group_json, parse_array
from .parsing import get_object, parse_json, readable
from .places import LocalPlace

if TYPE_CHECKING:
    import xarray as xr

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
        durable.replace_folder(aside, target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)  # there is none where all went well


def open_arrays(path: Path) -> "xr.Dataset":
    """The group as a Dataset: large arrays are read along their first axis when they are used."""
    import xarray as xr
    from xarray.core import indexing

    from .lazy import ChunkedArray

    if not (path / "zarr.json").exists():
        raise IncompleteError(f"{path} does not exist: the step that writes it has not run")
    root = get_object(
        parse_json((path / "zarr.json").read_bytes(), str(path / "zarr.json")), str(path / "zarr.json")
    )
    inline = get_object(root.get("consolidated_metadata"), f"{path}/zarr.json: consolidated_metadata")
    variables: dict[str, Any] = {}
    for name, data in get_object(inline.get("metadata"), f"{path}/zarr.json: metadata").items():
        spec = parse_array(data, name, f"{path}/zarr.json: {name}")
        lazy = indexing.LazilyIndexedArray(ChunkedArray(path, spec))
        variables[name] = xr.Variable(spec.dims, lazy)
    coords = {name: variables.pop(name).load() for name in list(variables) if (name,) == variables[name].dims}
    attrs = get_object(root.get("attributes"), f"{path}/zarr.json: attributes")
    return xr.Dataset(variables, coords=coords, attrs=attrs)


def read_rows(path: Path, spec: ArraySpec, start: int, stop: int) -> np.ndarray:
    """Entries [start, stop) along the first axis."""
    step = spec.chunks[0]
    low, high = start // step, -(-stop // step)
    out = np.empty((min(high * step, spec.shape[0]) - low * step, *spec.shape[1:]), dtype=spec.dtype)
    for index in range(low, high):
        key = spec.key(index, *([0] * (len(spec.dims) - 1)))
        part = out[(index - low) * step : (index - low + 1) * step]
        spot = f"`{spec.name}` {spec.dims[0]} {index * step} ({path / key})"
        read_chunk(LocalPlace(path), key, spec, None, part, spot)
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
    chunks = (1, *values.shape[1:]) if values.ndim > 2 else values.shape
    fill = float("nan") if values.dtype.kind == "f" else 0
    spec = ArraySpec(name, dims, values.shape, chunks, values.dtype, fill)
    try:
        spec.to_metadata(None)
    except KeyError:
        raise UsageError(f"array {name!r}: dtype {values.dtype} has no place in the format") from None
    return spec


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
