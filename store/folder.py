"""What stands in a store, sealed or not: attributes, plan, arrays, block records.

In: a place (a folder, a URL). Out: checked values of each small file. Used by the reader, by `seal`, `info`,
`verify` and by what moves stores; reads no chunk. Cost: one read per file.
"""

from pathlib import Path
from typing import Any

from .attributes import Attributes, parse_attributes
from .dtypes import array_name
from .errors import DamageError, FormatError, IncompleteError, StoreNotFound
from .layout import AFFINE, block_arrays
from .manifest import MANIFEST, SEALED, Manifest
from .metadata import ArraySpec, parse_array
from .parsing import get_object, parse_json
from .places import LocalPlace, Place, parent_of, place_of
from .plan import Plan
from .records import FOLDER, BlockRecord, parse_record, record_name

GROUP = "activations.zarr"
PLAN = "plan.json"
DOCUMENTS = "documents.parquet"
VOCABULARY = "vocabulary.parquet"
CARD = "README.md"
RUNS = "runs"
WHOLE_ARRAYS = ("layer", *AFFINE, "position_embedding")


Where = str | Path | Place  # a path, a URL, or a place already opened


def store_place(where: Where) -> Place:
    """The place of a store, from itself or from its activations.zarr; StoreNotFound when there is none."""
    place = place_of(where)
    if isinstance(place, LocalPlace):
        return LocalPlace(store_folder(place.path))
    if any(place.size(name) is not None for name in (SEALED, MANIFEST, PLAN, f"{GROUP}/zarr.json")):
        return place
    if place.url.rstrip("/").endswith(f"/{GROUP}"):
        return store_place(parent_of(place))
    raise StoreNotFound(f"{place.url} is not a nearline store: it holds neither {SEALED} nor {PLAN}")


def store_folder(path: str | Path) -> Path:
    """The store's folder, from itself or from its activations.zarr; StoreNotFound when there is none."""
    folder = Path(path)
    if folder.name == GROUP and not (folder / GROUP).exists():
        folder = folder.parent
    if not folder.exists():
        raise StoreNotFound(
            f"{folder} does not exist; `nearline collect MODEL CORPUS {folder.name}` makes a store"
        )
    if not (folder / PLAN).exists() and not (folder / GROUP).exists():
        raise StoreNotFound(f"{folder} is not a nearline store: it holds neither {PLAN} nor {GROUP}")
    return folder


def read_small(where: Where, name: str, manifest: Manifest | None = None) -> bytes:
    """Content of a metadata file of the store; with the manifest of its seal, the content that was sealed."""
    place = place_of(where)
    try:
        content = place.read(name)
    except FileNotFoundError:
        spot = place.where(name)
        if manifest is not None:
            raise DamageError(f"{spot}: the file is missing; fetch it or restore it from a copy") from None
        raise IncompleteError(f"{spot} does not exist: the store was never begun properly") from None
    return content if manifest is None else manifest.check(name, content, place.where(name))


def parse_group(content: bytes, where: str) -> Attributes:
    """Attributes out of the root group's zarr.json."""
    group = get_object(parse_json(content, where), where)
    if group.get("node_type") != "group" or group.get("zarr_format") != 3:
        raise FormatError(f"{where}: not the metadata of a Zarr v3 group")
    return parse_attributes(group.get("attributes"), where)


def parse_plan(content: bytes, attributes: Attributes, where: str) -> Plan:
    """The plan, refused when it is not the one that the attributes name."""
    plan = Plan.parse(parse_json(content, where), where)
    if plan.digest != attributes.plan.digest:
        raise DamageError(
            f"{where}: the plan has digest {plan.digest}, the attributes say {attributes.plan.digest}"
        )
    return plan


def load_spec(where: Where, name: str) -> ArraySpec:
    """Specification of one array from its zarr.json."""
    place, file = place_of(where), f"{GROUP}/{name}/zarr.json"
    spot = place.where(file)
    return parse_array(parse_json(read_small(place, file), spot), name, spot)


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
            found |= {spec.key(index, block, 0): (name, index) for index in range(spec.shape[0])}
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
    if set(record.chunks) != set(chunk_keys(specs, block)):
        raise DamageError(f"{where}: the record does not name the chunks of this store's arrays")
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
