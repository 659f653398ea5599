"""Put a block that was collected again, with other bytes, in the place of a damaged one.

In: a sealed store, the block's number, and the scratch store that holds the new block. Out: the store, sealed
anew, with an entry `repaired` in its lineage; all of it or nothing, whatever is interrupted where. Blocks are
replaced one by one, so that only one is on disk twice. Cost: the block is written and moved once.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path

from ..store.errors import DamageError
from ..store.folder import GROUP, consolidated, load_record, parse_group, specs_of
from ..store.manifest import MANIFEST, SEALED, FileRecord, read_sealed_manifest, seal_bytes
from ..store.metadata import group_json
from ..store.places import LocalPlace
from ..store.reader import Reader
from ..store.records import BlockRecord, record_name
from ..store.replacing import replace_together

ROOT = f"{GROUP}/zarr.json"


def record_of(folder: Path, block: int, new: Reader) -> BlockRecord:
    """The record of a block as it stands in the store, where it is not damaged."""
    where = str(folder / record_name(block))
    specs = specs_of(new.attributes, new.plan)
    return load_record(LocalPlace(folder).read(record_name(block)), new.plan, specs, block, where)


def replace_block(folder: Path, parent: str, block: int, new: Reader) -> None:
    """Put the whole new block in the place of the damaged one, note it, seal anew: all of it or nothing."""
    attributes = parse_group((folder / ROOT).read_bytes(), str(folder / ROOT))
    manifest, _ = read_sealed_manifest(folder)
    assert manifest is not None
    entry = {"kind": "repaired", "blocks": [block], "parent": parent}
    past = list(attributes.lineage)
    if past and past[-1]["kind"] == "repaired" and past[-1]["parent"] == parent:
        entry["blocks"] = [*past.pop()["blocks"], block]
    attributes = dataclasses.replace(attributes, lineage=(*past, entry))
    root = group_json(attributes.to_dict(), consolidated(folder, attributes, new.plan))
    names = [record_name(block), *(f"{GROUP}/{key}" for key in new.record(block).chunks)]
    record = FileRecord.of((Path(new.path) / record_name(block)).read_bytes())
    sealed = dataclasses.replace(
        manifest,
        chunk_bytes=_chunk_bytes(folder, block, new),
        files={**manifest.files, record_name(block): record, ROOT: FileRecord.of(root)},
    ).to_bytes()
    written = {ROOT: root, MANIFEST: sealed, SEALED: seal_bytes(sealed)}
    replace_together(folder, _Contents(Path(new.path), names, written))


def _chunk_bytes(folder: Path, block: int, new: Reader) -> int:
    """Bytes of all chunk objects, this block's being the new ones. (So are those of a damaged record: then
    the sum is right once that block is replaced too.)"""
    total = 0
    for number in range(new.n_blocks):
        try:
            record = new.record(number) if number == block else record_of(folder, number, new)
        except (DamageError, FileNotFoundError):
            record = new.record(number)
        total += sum(chunk.size for chunk in record.chunks.values())
    return total


class _Contents(Mapping[str, bytes]):
    """Files of a folder, read when they are asked for, and a few that are at hand."""

    def __init__(self, folder: Path, names: list[str], written: dict[str, bytes]) -> None:
        self._folder, self._names, self._written = folder, names, written

    def __getitem__(self, name: str) -> bytes:
        return self._written[name] if name in self._written else (self._folder / name).read_bytes()

    def __iter__(self) -> Iterator[str]:
        return iter([*self._names, *self._written])

    def __len__(self) -> int:
        return len(self._names) + len(self._written)
