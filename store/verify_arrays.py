"""The metadata of every array, and the small arrays that are written at once.

In: attributes and plan, where they may be relied on, and a way to get a file that was vouched for. Out: the
names of the files of the small arrays; problems for arrays that differ from the definition of the store, for
consolidated metadata that is stale, and for small arrays that are not what they must be. Cost: one read per
file; a position embedding is read whole.
"""

from collections.abc import Callable
from typing import Any, cast

import google_crc32c
import numpy as np

from .errors import FormatError
from .folder import GROUP, WHOLE_ARRAYS, check_group
from .layout import whole_form
from .metadata import ArraySpec, parse_array
from .parsing import get_object, parse_json
from .verify_findings import Findings, reason, shown
from .verify_ground import Ground
from .verify_scan import CRC_BYTES, unpack

Get = Callable[[str], bytes | None]
_NONE = object()


def check_arrays(ground: Ground, findings: Findings, group: bytes | None, get: Get) -> set[str]:
    """Check all arrays but for the chunks of the blocks; the files of the small arrays are returned."""
    metadata: dict[str, Any] = {}
    for spec in ground.specs.values():
        metadata[spec.name] = _check_growing(ground, findings, spec, get)
    whole: set[str] = set()
    for name in _whole_names(ground, _inline(group)):
        found, files = _check_whole(ground, findings, name, get)
        metadata[name] = found
        whole |= files
    if group is not None and ground.specs:
        _check_consolidated(ground, findings, group, metadata)
    return whole


def _whole_names(ground: Ground, inline: dict[str, Any] | None) -> list[str]:
    """Small arrays that this store has: those that are sealed; where nothing is vouched for, those that are
    there, or that are spoken of."""
    files = [(name, f"{GROUP}/{name}/zarr.json") for name in WHOLE_ARRAYS]
    if ground.manifest is not None:
        return [name for name, file in files if file in ground.manifest.files]
    known = {*(ground.listing or ()), *ground.expected}
    return [name for name, file in files if file in known or name in (inline or ()) or name == "layer"]


def _inline(group: bytes | None) -> dict[str, Any] | None:
    """The consolidated metadata in the root's zarr.json, if it has the form that zarr gives it."""
    try:
        found = get_object(parse_json(group or b"", ""), "").get("consolidated_metadata")
        return get_object(get_object(found, "").get("metadata"), "")
    except FormatError:
        return None


def _check_growing(ground: Ground, findings: Findings, spec: ArraySpec, get: Get) -> Any:
    """An array of the blocks: its metadata is the one that attributes and plan give."""
    file = f"{GROUP}/{spec.name}/zarr.json"
    found = _json(findings, file, get(file))
    if found is None:
        return None
    expected = spec.to_metadata(_compressor(ground))
    if found != expected:
        wrong = shown(key for key in {*expected, *found} if found.get(key) != expected.get(key))
        text = f"`{wrong}` is not what attributes and plan give for this array"
        findings.add("metadata", file, text, array=spec.name)
    return found


def _check_whole(ground: Ground, findings: Findings, name: str, get: Get) -> tuple[Any, set[str]]:
    """A small array: its metadata, and its values chunk by chunk."""
    file = f"{GROUP}/{name}/zarr.json"
    found = _json(findings, file, get(file))
    where = findings.place.where(file)
    try:
        spec = parse_array(found, name, where) if found is not None else None
    except FormatError as error:
        findings.add("unreadable", file, reason(error, where), array=name)
        spec = None
    if spec is None:
        return None, _sealed_files(ground, name)
    files = {file}
    for index in range(-(-spec.shape[0] // spec.chunks[0])):
        key = f"{GROUP}/{spec.key(index, *([0] * (len(spec.dims) - 1)))}"
        files.add(key)
        content = get(key)
        if content is not None:
            _check_values(ground, findings, spec, index, key, content)
    if ground.attributes is not None:
        _check_form(ground, findings, spec, found, file)
    return found, files


def _sealed_files(ground: Ground, name: str) -> set[str]:
    """All files of an array that the manifest names, where its own metadata cannot say."""
    prefix = f"{GROUP}/{name}/"
    files = ground.manifest.files if ground.manifest is not None else {}
    return {prefix + "zarr.json", *(file for file in files if file.startswith(prefix))}


def _check_form(ground: Ground, findings: Findings, spec: ArraySpec, found: Any, file: str) -> None:
    """The metadata of a small array is that of its kind, to the last key."""
    assert ground.attributes is not None
    layers, width = ground.attributes.storage.layers, ground.attributes.model.d_model
    needed = whole_form(spec.name, layers, width, spec.shape[0])
    if found != needed.to_metadata(_compressor(ground)):
        text = (
            f"it is {spec.dtype} {spec.shape} of {', '.join(spec.dims)}; needed is {needed.dtype} "
            f"{needed.shape} of {', '.join(needed.dims)}, in chunks of {needed.chunks}"
        )
        findings.add("metadata", file, text, array=spec.name)


def _check_values(
    ground: Ground, findings: Findings, spec: ArraySpec, index: int, file: str, content: bytes
) -> None:
    """One chunk of a small array: checksum, size, finite values, the layers' numbers."""
    packed = np.frombuffer(content, np.uint8)
    crc: Any = google_crc32c.value(cast("bytes", packed[:-CRC_BYTES]))
    if len(content) < CRC_BYTES or int(crc).to_bytes(4, "little") != content[-CRC_BYTES:]:
        findings.add("content", file, "the checksum of the chunk object does not match", array=spec.name)
        return
    if ground.attributes is None:
        return  # nothing says whether it is compressed
    plain = _compressor(ground) is None
    body = packed[:-CRC_BYTES] if plain else unpack(packed[:-CRC_BYTES], spec.chunk_bytes)
    if body is None or body.size != spec.chunk_bytes:
        findings.add("size", file, f"it does not hold {spec.chunk_bytes} bytes of values", array=spec.name)
        return
    values = np.ascontiguousarray(body).view(spec.dtype).reshape(spec.chunks)
    values = values[: spec.shape[0] - index * spec.chunks[0]]
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        findings.add("values", file, "a value is not finite", array=spec.name)
    if spec.name == "layer":
        layers = list(ground.attributes.storage.layers)
        if values.tolist() != layers:
            text = f"it holds layers {values.tolist()}, the attributes say {layers}"
            findings.add("metadata", file, text, array=spec.name)


def _check_consolidated(ground: Ground, findings: Findings, group: bytes, metadata: dict[str, Any]) -> None:
    """The copy of all arrays' metadata in the root is the arrays' own, and there when the store is sealed."""
    file = f"{GROUP}/zarr.json"
    held = _inline(group)
    if held is None:
        if ground.sealed or b'"consolidated_metadata"' in group:
            text = "the consolidated metadata is missing or has another form than zarr gives it"
            findings.add("metadata", file, text)
        return
    names = sorted(name for name in {*held, *metadata} if held.get(name) != metadata.get(name, _NONE))
    for name in names:
        if name not in metadata:
            text = f"the consolidated metadata is stale: it has an array `{name}`, the store has none"
        elif metadata[name] is None:
            continue  # the array's own file is named already
        elif name not in held:
            text = f"the consolidated metadata is stale: array `{name}` is missing from it"
        else:
            text = f"the consolidated metadata is stale: array `{name}` is not as its own zarr.json says"
        findings.add("metadata", file, text, array=name)
    if not names and ground.attributes is not None and ground.plan is not None:
        where = findings.place.where(file)
        try:
            check_group(group, ground.attributes, ground.plan, where)
        except FormatError as error:
            findings.add("metadata", file, reason(error, where))


def _json(findings: Findings, file: str, content: bytes | None) -> Any:
    if content is None:
        return None
    where = findings.place.where(file)
    try:
        found = parse_json(content, where)
    except FormatError as error:
        findings.add("unreadable", file, reason(error, where))
        return None
    if not isinstance(found, dict):
        findings.add("unreadable", file, "it is not a JSON object")
        return None
    return cast("dict[str, Any]", found)


def _compressor(ground: Ground) -> str | None:
    return ground.attributes.storage.compressor if ground.attributes is not None else None
