"""Sealing: from a folder with all blocks committed to a store that says it is whole.

In: a store folder. Out: consolidated metadata, README.md, manifest.json and, last of all, SEALED; the
digest of the seal is returned. Everything is read back from disk, so a store that other processes wrote can
be sealed too, and by any number of processes at once: exactly one creates SEALED, the others read it back.
Cost: the small files are read, every chunk object is looked at (its size), none is read.
"""

from pathlib import Path

from blake3 import blake3

from . import durable, points
from .attributes import Attributes
from .card import card
from .disk import sync_folders
from .errors import DamageError, MissingChunk, StoreNotSealed
from .finding import check_there, store_folder
from .folder import (
    CARD,
    DOCUMENTS,
    GROUP,
    PLAN,
    VOCABULARY,
    Where,
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
)
from .incomplete import begun_copy
from .manifest import MANIFEST, SEALED, FileRecord, Manifest, seal_bytes
from .metadata import group_json
from .missing import missing_in_words
from .places import LocalPlace, place_of
from .plan import Plan
from .records import FOLDER as BLOCKS
from .records import BlockRecord, record_name
from .replacing import finish_replacing, forget_staged
from .resuming import sweep_leftovers, sweep_locks

ROOT = f"{GROUP}/zarr.json"


def seal(
    path: str | Path, partial: bool = False, *, drop_blocks: bool = False, own_copy: bool = False
) -> str:
    """Seal a store and return the digest of its manifest; StoreNotSealed lists the missing blocks.

    `partial`: a store that lacks blocks is first cut down to those before the first missing one; committed
    blocks behind it are removed only with `drop_blocks`. A store that is sealed already is compared with its
    seal, which is repaired where the rest vouches for it. A copy in the making is refused, for what has not
    arrived yet would be left out, unless the caller says that it has made the copy (`own_copy`).
    """
    check_there(path)
    folder = store_folder(path)
    sealed = (folder / SEALED).exists()
    if not sealed and not own_copy and (unfinished := begun_copy(LocalPlace(folder))) is not None:
        raise unfinished
    finish_replacing(folder)
    if partial and not sealed:
        from .shortening import shorten  # it uses this module's neighbours, and few runs need it

        shorten(folder, drop_blocks)
    attributes = parse_group(read_small(folder, ROOT), str(folder / ROOT))
    plan = parse_plan(read_small(folder, PLAN), attributes, str(folder / PLAN))
    forget_staged(folder)
    sweep_leftovers(folder, specs_of(attributes, plan))
    if (folder / SEALED).exists():
        return _sealed_again(folder, attributes, plan)
    check_all_committed(folder, plan)
    sweep_locks(folder)
    metadata = group_json(attributes.to_dict(), consolidated(folder, attributes, plan))
    durable.write_files([(folder / ROOT, (metadata,))], folder)
    points.reached("sealing.consolidated")
    manifest = _manifest(folder, attributes, plan)
    content = manifest.to_bytes()
    durable.write_files([(folder / MANIFEST, (content,))], folder)
    points.reached("sealing.manifest_written")
    text = card(folder.resolve().name, attributes, plan, manifest.chunk_bytes)
    durable.write_files([(folder / CARD, (text.encode(),))], folder)
    points.reached("sealing.card_written")
    sync_folders([folder / BLOCKS])  # a process that died may have made a record's name and not synced it
    created = durable.create_file(folder / SEALED, seal_bytes(content), within=folder)
    points.reached("sealing.sealed")
    return blake3(content).hexdigest() if created else _sealed_again(folder, attributes, plan)


def check_all_committed(where: Where, plan: Plan) -> None:
    """StoreNotSealed, with the missing blocks, unless every block of the plan has a record."""
    missing = set(range(plan.n_blocks)) - committed_blocks(where)
    if missing:
        place = place_of(where)
        raise StoreNotSealed(
            f"{place.url} is not whole: {missing_in_words(place, missing, plan.n_blocks)}; "
            "the same `nearline collect` command collects them and seals the store"
        )


def _sealed_again(folder: Path, attributes: Attributes, plan: Plan) -> str:
    """The digest of a store that has a SEALED: what is there must be what was sealed.

    manifest.json and SEALED each follow from the rest: one that is lost is written again where the other one
    still says that the rest is what was sealed.
    """
    if missing := set(range(plan.n_blocks)) - committed_blocks(folder):
        raise DamageError(
            f"{folder} was sealed and now lacks {len(missing)} block records ({show_numbers(missing)}); "
            f"run `nearline verify {folder}`"
        )
    content = _manifest(folder, attributes, plan).to_bytes()
    sealed, found = seal_bytes(content), _read(folder / MANIFEST)
    if _read(folder / SEALED) == sealed:
        if found != content:
            durable.write_files([(folder / MANIFEST, (content,))], folder)
    elif found == content and not _is_seal(_read(folder / SEALED)):
        durable.write_files([(folder / SEALED, (sealed,))], folder)
    elif not _is_seal(_read(folder / SEALED)):
        raise DamageError(
            f"{folder}: {SEALED} and {MANIFEST} are both damaged, so that nothing vouches for the small "
            f"files; fetch them from a copy, or remove both and run `nearline seal {folder}`, which seals "
            "what is there"
        )
    else:
        raise DamageError(
            f"{folder} was sealed as something else, a small file has changed since; "
            f"run `nearline verify {folder}`"
        )
    return blake3(content).hexdigest()


def _is_seal(content: bytes) -> bool:
    """Whether the two lines of a SEALED agree with each other."""
    return content == f"{(digest := content[:64].decode('ascii', 'replace'))}\n".encode() + (
        f"{blake3(digest.encode()).hexdigest()}\n".encode()
    )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""


def _manifest(folder: Path, attributes: Attributes, plan: Plan) -> Manifest:
    """The manifest of what is on disk; the sizes of all chunk objects are compared with the records."""
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
    for name in metadata_names(folder, attributes, plan):
        files[name] = FileRecord.of(read_small(folder, name))
    return Manifest(plan.digest, plan.n_tokens, plan.n_blocks, n_objects, n_bytes, files)


def _check_sizes(folder: Path, record: BlockRecord, attributes: Attributes, plan: Plan) -> None:
    names = chunk_keys(specs_of(attributes, plan), record.block)
    again = "the same `nearline collect` command collects its block again"
    for key, chunk in record.chunks.items():
        site, index = names[key]
        layer = "" if index is None else f" layer {attributes.storage.layers[index]}"
        spot = f"`{site}`{layer}, tokens {record.row0}-{record.row1 - 1} ({folder / GROUP / key})"
        try:
            size = (folder / GROUP / key).stat().st_size
        except FileNotFoundError:
            raise MissingChunk(f"{spot}: the chunk object is missing; {again}") from None
        if size != chunk.size:
            raise DamageError(f"{spot}: {size} bytes, {chunk.size} expected; {again}")


def metadata_names(folder: Path, attributes: Attributes, plan: Plan) -> list[str]:
    """Every file under the seal that is no block record and no chunk of a block."""
    growing = {spec.name for spec in specs_of(attributes, plan).values()}
    names = [PLAN, DOCUMENTS, VOCABULARY, ROOT]
    for array in array_names(attributes, plan, folder):
        names.append(f"{GROUP}/{array}/zarr.json")
        if array not in growing:
            spec = load_spec(folder, array)
            chunks = range(-(-spec.shape[0] // spec.chunks[0]))
            names += [f"{GROUP}/{spec.key(index, *([0] * (len(spec.dims) - 1)))}" for index in chunks]
    return names
