"""What stands in a store folder, sealed or not: attributes, plan, arrays, block records.

In: the folder. Out: checked values of each small file. Used by the reader, by `seal` and by `info`; reads
no chunk.
"""

from pathlib import Path
from typing import Any

from .attributes import Attributes, parse_attributes
from .dtypes import array_name
from .errors import DamageError, FormatError, IncompleteError, StoreNotFound
from .layout import AFFINE, block_arrays
from .metadata import ArraySpec, parse_array
from .parsing import get_object, parse_json
from .plan import Plan
from .records import FOLDER, BlockRecord, parse_record, record_name

GROUP = "activations.zarr"
PLAN = "plan.json"
DOCUMENTS = "documents.parquet"
VOCABULARY = "vocabulary.parquet"
CARD = "README.md"
RUNS = "runs"
WHOLE_ARRAYS = ("layer", *AFFINE, "position_embedding")


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


def read_small(folder: Path, name: str) -> bytes:
    """Content of a metadata file of the store."""
    try:
        return (folder / name).read_bytes()
    except FileNotFoundError:
        raise IncompleteError(f"{folder / name} does not exist: the store was never begun properly") from None
    except OSError as error:
        raise DamageError(f"{folder / name}: cannot be read ({error.strerror})") from error


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


def load_spec(folder: Path, name: str) -> ArraySpec:
    """Specification of one array from its zarr.json."""
    where = f"{folder / GROUP / name}/zarr.json"
    return parse_array(parse_json(read_small(folder, f"{GROUP}/{name}/zarr.json"), where), name, where)


def specs_of(attributes: Attributes, plan: Plan) -> dict[str, ArraySpec]:
    """The arrays that grow by blocks, by site or column."""
    storage = attributes.storage
    width = attributes.model.d_model
    return block_arrays(plan.n_tokens, plan.block, storage.layers, width, storage.dtype, storage.sites)


def array_names(attributes: Attributes, plan: Plan, folder: Path) -> list[str]:
    """Names of all arrays of the group, those that are optional as they stand on disk."""
    whole = [name for name in WHOLE_ARRAYS if (folder / GROUP / name / "zarr.json").exists()]
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


def committed_blocks(folder: Path) -> set[int]:
    """Numbers of the blocks that have a record."""
    names = [entry.name for entry in (folder / FOLDER).glob("*.json")] if (folder / FOLDER).is_dir() else []
    return {
        int(name[:-5]) for name in names if name[:-5].isdigit() and record_name(int(name[:-5])).endswith(name)
    }


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


def consolidated(folder: Path, attributes: Attributes, plan: Plan) -> dict[str, dict[str, Any]]:
    """Metadata of every array, from the definition of the store and not from a listing of the disk."""
    compressor = attributes.storage.compressor
    specs = {spec.name: spec for spec in specs_of(attributes, plan).values()}
    names = array_names(attributes, plan, folder)
    return {name: (specs.get(name) or load_spec(folder, name)).to_metadata(compressor) for name in names}
