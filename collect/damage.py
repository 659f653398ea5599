"""What of a sealed store is not what was sealed, file by file, so that it can be made again.

In: a store folder with its SEALED. Out: names of the files and, per block, keys of the chunk objects that are
missing or have other bytes. The manifest is the anchor: it is taken from the seal, or rebuilt where the rest
still vouches for it. Cost: every byte of the store is read once, on threads.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from ..store.errors import DamageError, EnvironmentFault, IncompleteError, NearlineError
from ..store.folder import GROUP
from ..store.manifest import MANIFEST, SEALED, FileRecord, Manifest, parse_manifest, read_sealed_manifest
from ..store.parsing import parse_json
from ..store.places import LocalPlace, refused
from ..store.progress import Progress
from ..store.records import BlockRecord, parse_record, record_name
from ..store.resuming import file_digest
from ..store.sealing import seal


@dataclass(frozen=True, slots=True)
class Anchor:
    """What the store was sealed as. `digest` is None where SEALED itself is damaged: then only the very bytes
    of the manifest will do."""

    manifest: Manifest
    digest: str | None


@dataclass(slots=True)
class Damage:
    """Damaged metadata files, blocks whose record is damaged, and damaged chunk objects by block and key."""

    files: set[str] = field(default_factory=set)
    records: set[int] = field(default_factory=set)
    chunks: dict[int, set[str]] = field(default_factory=dict)

    @property
    def blocks(self) -> list[int]:
        """Blocks of which something has to be collected again."""
        return sorted({*self.records, *self.chunks})

    def __bool__(self) -> bool:
        return bool(self.files or self.records or self.chunks)


def anchor_of(folder: Path) -> Anchor:
    """The manifest of the store's seal."""
    if not (folder / SEALED).exists():
        raise IncompleteError(
            f"{folder} is not sealed; the same `nearline collect` command continues and tests what it finds"
        )
    for attempt in (1, 2):
        try:
            manifest, digest = read_sealed_manifest(folder)
            assert manifest is not None
            return Anchor(manifest, digest)
        except DamageError:
            if attempt == 1:
                _rebuild_seal(folder)
    where = str(folder / MANIFEST)
    try:
        return Anchor(parse_manifest(parse_json(LocalPlace(folder).read(MANIFEST), where), where), None)
    except (DamageError, FileNotFoundError):
        raise DamageError(
            f"{folder}: {MANIFEST} is damaged and so is something else, so nothing says any more what was "
            "sealed; restore the store from a copy"
        ) from None


def _rebuild_seal(folder: Path) -> None:
    """manifest.json and SEALED follow from the rest, where that is sound."""
    try:
        seal(folder)
    except EnvironmentFault:
        raise
    except NearlineError:
        return


def find_damage(folder: Path, manifest: Manifest, progress: Progress) -> Damage:
    """Compare every file under the seal with its digest."""
    damage, n_blocks = Damage(), manifest.n_blocks
    of_block = {record_name(block): block for block in range(n_blocks)}
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1), thread_name_prefix="nearline-repair") as pool:
        for done, (name, expected) in enumerate(manifest.files.items()):
            content = _read(folder, name, expected.size)
            if content is None or FileRecord.of(content) != expected:
                damage.records.add(of_block[name]) if name in of_block else damage.files.add(name)
            elif name in of_block:
                record = parse_record(parse_json(content, name), str(folder / name))
                bad = _bad_chunks(folder, record, pool)
                damage.chunks |= {record.block: bad} if bad else {}
            progress("look for damage", done + 1, len(manifest.files), "files")
    return damage


def _bad_chunks(folder: Path, record: BlockRecord, pool: ThreadPoolExecutor) -> set[str]:
    good = pool.map(lambda item: is_intact(folder, *item), ((k, c.digest) for k, c in record.chunks.items()))
    return {key for key, fine in zip(record.chunks, good, strict=True) if not fine}


def is_intact(folder: Path, key: str, digest: str) -> bool:
    """The chunk object is there, can be read, and has this digest."""
    try:
        return file_digest(folder / GROUP / key) == digest
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        found = refused(str(folder / GROUP / key), "read", error)
        if isinstance(found, DamageError):
            return False
        raise found from error  # a reason that may pass says nothing about the file


def _read(folder: Path, name: str, size: int) -> bytes | None:
    try:
        return LocalPlace(folder).read(name, limit=size)
    except (FileNotFoundError, DamageError):
        return None
