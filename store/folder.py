"""What stands in a store, sealed or not: attributes, plan, arrays, block records.

In: a place (a folder, a URL). Out: checked values of each small file. Used by the reader, by `seal`, `info`,
`verify` and by what moves stores; reads no chunk. Cost: one read per file.
"""

import dataclasses
from pathlib import Path
from typing import Any

from blake3 import blake3

from .attributes import Attributes, PlanFacts, parse_attributes
from .dtypes import array_name
from .errors import DamageError, FormatError, IncompleteError
from .layout import AFFINE, block_arrays, whole_form
from .manifest import MANIFEST, PULLING, PUSHING, SEALED, Manifest
from .metadata import MAX_CHUNK_BYTES, ArraySpec, group_json, largest_object, parse_array
from .parsing import MAX_JSON_BYTES, get_object, parse_json, readable
from .places import Place, place_of
from .plan import Plan
from .records import FOLDER, BlockRecord, parse_record, record_name

GROUP = "activations.zarr"
PLAN = "plan.json"
DOCUMENTS = "documents.parquet"
VOCABULARY = "vocabulary.parquet"
CARD = "README.md"
MOMENTS = "moments.json"  # of a folder that holds sums of rows and no rows
RUNS = "runs"
SIGNS = (SEALED, MANIFEST, PLAN, f"{GROUP}/zarr.json", PUSHING, PULLING)  # of a store, whole or not
WHOLE_ARRAYS = ("layer", *AFFINE, "position_embedding")


Where = str | Path | Place  # a path, a URL, or a place already opened


def read_small(where: Where, name: str, manifest: Manifest | None = None) -> bytes:
    """Content of a metadata file of the store; with the manifest of its seal, the content that was sealed."""
    place = place_of(where)
    try:
        content = place.read(name)
    except FileNotFoundError:
        from .incomplete import begun_copy  # which is built on this module

        spot = place.where(name)
        if manifest is not None:
            raise DamageError(
                f"{spot}: the file is missing; `nearline repair` puts it back, or fetch it from a copy"
            ) from None
        never = IncompleteError(f"{spot} does not exist: the store was never begun properly")
        raise begun_copy(place) or never from None
    return content if manifest is None else manifest.check(name, content, place.where(name))


def parse_group(content: bytes, where: str) -> Attributes:
    """Attributes out of the root group's zarr.json."""
    group = get_object(parse_json(content, where), where)
    if group.get("node_type") != "group" or group.get("zarr_format") != 3:
        raise FormatError(f"{where}: not the metadata of a Zarr v3 group")
    optional = {"consolidated_metadata"} & set(group)
    get_object(group, where, keys=("attributes", "node_type", "zarr_format", *optional))
    return parse_attributes(group.get("attributes"), where)


def parse_plan(content: bytes, attributes: Attributes, where: str) -> Plan:
    """The plan, refused when it is not the one that the attributes name, and before it is parsed at that."""
    if (digest := blake3(content).hexdigest()) != attributes.plan.digest:
        raise DamageError(
            f"{where}: the file has digest {digest}, the attributes say {attributes.plan.digest}"
        )
    plan = Plan.parse(parse_json(content, where, MAX_JSON_BYTES), where)
    facts = PlanFacts.of(plan, attributes.plan.bos)
    for field in dataclasses.fields(PlanFacts):
        if getattr(facts, field.name) != getattr(attributes.plan, field.name):
            raise DamageError(f"{where}: its `{field.name}` is not the one that the attributes state")
    for spec in specs_of(attributes, plan).values():
        if spec.chunk_bytes > MAX_CHUNK_BYTES:
            raise FormatError(
                f"{where}: `block` {plan.block} makes chunks of {spec.chunk_bytes} bytes for `{spec.name}`, "
                f"at most {MAX_CHUNK_BYTES} are read"
            )
    return plan


def check_group(content: bytes, attributes: Attributes, plan: Plan, where: str) -> None:
    """The root group's zarr.json holds the attributes and, once consolidated, the metadata of exactly the
    arrays that attributes and plan give: what xarray reads of a store is what we read."""
    storage, metadata = attributes.storage, None
    inline = get_object(parse_json(content, where), where).get("consolidated_metadata")
    if inline is not None:
        given = get_object(get_object(inline, where).get("metadata"), where)
        specs = [*specs_of(attributes, plan).values()]
        for name in set(given) & set(WHOLE_ARRAYS):
            found = parse_array(given[name], name, f"{where}: {name}", (storage.compressor,))
            specs.append(whole_form(name, storage.layers, attributes.model.d_model, found.shape[0]))
        metadata = {spec.name: spec.to_metadata(storage.compressor) for spec in specs}
    if content != group_json(attributes.to_dict(), metadata):
        raise FormatError(f"{where}: `consolidated_metadata` is not that of the arrays of this store")


def load_spec(where: Where, name: str) -> ArraySpec:
    """Specification of one array from its zarr.json."""
    place, file = place_of(where), f"{GROUP}/{name}/zarr.json"
    spot = place.where(file)
    return parse_array(parse_json(read_small(place, file), spot), name, spot)


def parse_whole(content: bytes, name: str, attributes: Attributes, where: str) -> ArraySpec:
    """Specification of a small array from its zarr.json, refused unless it is the one that the attributes
    call for, byte for byte; they leave open only how many positions an embedding has."""
    storage = attributes.storage
    n_positions = parse_array(parse_json(content, where), name, where, (storage.compressor,)).shape[0]
    spec = whole_form(name, storage.layers, attributes.model.d_model, n_positions)
    if content != readable(spec.to_metadata(storage.compressor)):
        raise DamageError(f"{where}: the metadata of the array does not fit the attributes")
    return spec


def specs_of(attributes: Attributes, plan: Plan) -> dict[str, ArraySpec]:
    """The arrays that grow by blocks, by site or column."""
    storage = attributes.storage
    width = attributes.model.d_model
    return block_arrays(plan.n_tokens, plan.block, storage.layers, width, storage.dtype, storage.sites)


def array_names(attributes: Attributes, plan: Plan, where: Where) -> list[str]:
    """Names of all arrays of the group, those that are optional as they stand there."""
    place = place_of(where)
    whole = [name for name in WHOLE_ARRAYS if place.size(f"{GROUP}/{name}/zarr.json") is not None]
    return sorted([*(spec.name for spec in specs_of(attributes, plan).values()), *whole])


def chunk_keys(specs: dict[str, ArraySpec], block: int) -> dict[str, tuple[str, int | None]]:
    """Keys of all chunk objects of a block; each with its site or column and its layer index."""
    found: dict[str, tuple[str, int | None]] = {}
    for name, spec in specs.items():
        if spec.dims[0] == "layer":
            array = spec.key()  # a store may have a million keys
            found |= {f"{array}/{index}/{block}/0": (name, index) for index in range(spec.shape[0])}
        else:
            found[spec.key(block, *([0] * (len(spec.dims) - 1)))] = (name, None)
    return found


def committed_blocks(where: Where) -> set[int]:
    """Numbers of the blocks that have a record; none where files cannot be listed."""
    names = list(place_of(where).list(f"{FOLDER}/") or ())
    numbers = {name: name[len(FOLDER) + 1 : -5] for name in names}
    found = {int(number) for number in numbers.values() if number.isdigit() and number.isascii()}
    return {number for number in found if record_name(number) in numbers}


def load_record(
    content: bytes, plan: Plan, specs: dict[str, ArraySpec], block: int, where: str
) -> BlockRecord:
    """A block record, refused unless it belongs to this plan and names exactly the chunks of this block."""
    record = parse_record(parse_json(content, where), where)
    if (record.block, record.plan) != (block, plan.digest) or (record.row0, record.row1) != plan.block_range(
        block
    ):
        raise DamageError(f"{where}: the record belongs to another block or another plan")
    keys = chunk_keys(specs, block)
    if record.chunks.keys() != keys.keys():
        raise DamageError(f"{where}: the record does not name the chunks of this store's arrays")
    most = {name: largest_object(spec) for name, spec in specs.items()}
    for key, chunk in record.chunks.items():
        if chunk.size > most[keys[key][0]]:
            raise DamageError(f"{where}: chunk {key} cannot have {chunk.size} bytes")
    for site, values in record.statistics.items():
        n_entries = specs[site].shape[0] if site in specs and specs[site].dims[0] == "layer" else 1
        if site not in specs or set(map(len, values.values())) - {n_entries}:
            raise DamageError(f"{where}: `statistics.{site}` does not fit the layers and sites of this store")
    return record


def show_numbers(numbers: set[int] | list[int], limit: int = 8) -> str:
    """`0-3, 7, 9-12` with at most `limit` ranges."""
    ordered = sorted(numbers)
    ranges: list[list[int]] = []
    for number in ordered:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    shown = [f"{low}" if low == high else f"{low}-{high}" for low, high in ranges[:limit]]
    return ", ".join(shown) + (", ..." if len(ranges) > limit else "")


def site_of_array(name: str, attributes: Attributes) -> str:
    """The site whose values an array holds, or the array's own name."""
    dtype = attributes.storage.dtype
    return next((site for site in attributes.storage.sites if array_name(site, dtype) == name), name)


def consolidated(where: Where, attributes: Attributes, plan: Plan) -> dict[str, dict[str, Any]]:
    """Metadata of every array, from the definition of the store and not from a listing of the disk."""
    compressor = attributes.storage.compressor
    specs = {spec.name: spec for spec in specs_of(attributes, plan).values()}
    names = array_names(attributes, plan, where)
    return {name: (specs.get(name) or load_spec(where, name)).to_metadata(compressor) for name in names}
