"""Sealing: from a folder with all blocks committed to a store that says it is whole.

In: a store folder. Out: consolidated metadata, README.md, manifest.json and, last of all, SEALED; the
digest of the seal is returned. Everything is read back from disk, so a store that another process wrote can
be sealed too. Cost: the small files are read, every chunk object is looked at (its size), none is read.
"""

from pathlib import Path

from blake3 import blake3

from . import durable
from .attributes import Attributes
from .card import card
from .errors import DamageError, MissingChunk, StoreNotSealed
from .folder import (
    CARD,
    DOCUMENTS,
    GROUP,
    PLAN,
    VOCABULARY,
    array_names,
    chunk_keys,
    committed_blocks,
    consolidated,
    load_record,
    load_spec,
    parse_group,
    parse_plan,
    read_small,
    show_numbers,
    specs_of,
    store_folder,
)
from .manifest import MANIFEST, SEALED, FileRecord, Manifest, seal_bytes
from .metadata import group_json
from .plan import Plan
from .records import BlockRecord, record_name


def seal(path: str | Path) -> str:
    """Seal a store and return the digest of its manifest; StoreNotSealed lists the missing blocks."""
    folder = store_folder(path)
    attributes = parse_group(read_small(folder, f"{GROUP}/zarr.json"), str(folder / GROUP / "zarr.json"))
    plan = parse_plan(read_small(folder, PLAN), attributes, str(folder / PLAN))
    check_all_committed(folder, plan)
    files, totals = _block_files(folder, attributes, plan)
    metadata = group_json(attributes.to_dict(), consolidated(folder, attributes, plan))
    durable.write_file(folder / GROUP / "zarr.json", metadata)
    for name in _metadata_names(folder, attributes, plan):
        files[name] = FileRecord.of(read_small(folder, name))
    manifest = Manifest(plan.digest, plan.n_tokens, plan.n_blocks, *totals, files).to_bytes()
    durable.write_file(folder / MANIFEST, manifest)
    durable.write_file(folder / CARD, card(folder.resolve().name, attributes, plan, totals[1]).encode())
    durable.write_file(folder / SEALED, seal_bytes(manifest))
    return blake3(manifest).hexdigest()


def check_all_committed(folder: Path, plan: Plan) -> None:
    """StoreNotSealed, with the missing blocks, unless every block of the plan has a record."""
    missing = set(range(plan.n_blocks)) - committed_blocks(folder)
    if missing:
        raise StoreNotSealed(
            f"{folder} is not whole: {len(missing)} of {plan.n_blocks} blocks are missing "
            f"({show_numbers(missing)}); the harvest was interrupted; run it again into a new folder"
        )


def _block_files(
    folder: Path, attributes: Attributes, plan: Plan
) -> tuple[dict[str, FileRecord], tuple[int, int]]:
    """The block records as files, and their chunk objects and bytes in number; sizes on disk are checked."""
    specs = specs_of(attributes, plan)
    files: dict[str, FileRecord] = {}
    n_objects = n_bytes = 0
    for block in range(plan.n_blocks):
        content = read_small(folder, record_name(block))
        record = load_record(content, plan, specs, block, str(folder / record_name(block)))
        _check_sizes(folder, record, attributes, plan)
        files[record_name(block)] = FileRecord.of(content)
        n_objects += len(record.chunks)
        n_bytes += sum(chunk.size for chunk in record.chunks.values())
    return files, (n_objects, n_bytes)


def _check_sizes(folder: Path, record: BlockRecord, attributes: Attributes, plan: Plan) -> None:
    names = chunk_keys(specs_of(attributes, plan), record.block)
    for key, chunk in record.chunks.items():
        site, index = names[key]
        layer = "" if index is None else f" layer {attributes.storage.layers[index]}"
        spot = f"`{site}`{layer}, tokens {record.row0}-{record.row1 - 1} ({folder / GROUP / key})"
        try:
            size = (folder / GROUP / key).stat().st_size
        except FileNotFoundError:
            raise MissingChunk(
                f"{spot}: the chunk object is missing; collect block {record.block} again"
            ) from None
        if size != chunk.size:
            raise DamageError(
                f"{spot}: {size} bytes, {chunk.size} expected; collect block {record.block} again"
            )


def _metadata_names(folder: Path, attributes: Attributes, plan: Plan) -> list[str]:
    """Every file under the seal that is no block record and no chunk of a block."""
    growing = {spec.name for spec in specs_of(attributes, plan).values()}
    names = [PLAN, DOCUMENTS, VOCABULARY, f"{GROUP}/zarr.json"]
    for array in array_names(attributes, plan, folder):
        names.append(f"{GROUP}/{array}/zarr.json")
        if array not in growing:
            spec = load_spec(folder, array)
            chunks = range(-(-spec.shape[0] // spec.chunks[0]))
            names += [f"{GROUP}/{spec.key(index, *([0] * (len(spec.dims) - 1)))}" for index in chunks]
    return names
