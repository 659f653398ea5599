"""Everything that a sealed store consists of, as pieces to move: name, size and digest of each file.

In: a sealed store, wherever it lies. Out: its chunk objects, block records and metadata files. The store is
data from elsewhere: names that are no part of a store and sizes that its own arrays cannot have are refused
before a piece is handed out. Cost: reads manifest, metadata and block records, no chunk; holds the records
(about 180 bytes a chunk object).
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .carrying import THREADS, Piece, in_parallel
from .errors import DamageError, FormatError, UsageError
from .folder import (
    DOCUMENTS,
    GROUP,
    PLAN,
    VOCABULARY,
    WHOLE_ARRAYS,
    chunk_keys,
    load_record,
    specs_of,
)
from .layout import CRC_BYTES
from .manifest import Manifest
from .metadata import ArraySpec
from .parsing import MAX_JSON_BYTES
from .places import LocalPlace
from .reader import Reader
from .records import BlockRecord, record_name


@dataclass(frozen=True, slots=True, eq=False)
class Contents:
    """A sealed store's files, all named and measured by its manifest and its block records."""

    reader: Reader
    manifest: Manifest
    digest: str  # of the seal
    specs: dict[str, ArraySpec]
    records: dict[int, bytes]  # block records as they are stored, by block
    sizes: dict[int, tuple[int, int]]  # number and bytes of a block's chunk objects

    @classmethod
    def of(cls, reader: Reader, blocks: Iterable[int] | None = None) -> "Contents":
        """The contents of a sealed store; with `blocks`, only those blocks' records are read."""
        manifest, digest = reader.manifest, reader.digest
        if manifest is None or digest is None:
            raise UsageError(f"{reader.path} is not sealed: only a sealed store can be moved; seal it first")
        specs = specs_of(reader.attributes, reader.plan)
        _check_names(reader, manifest, specs)
        contents = cls(reader, manifest, digest, specs, {}, {})
        chosen = range(reader.n_blocks) if blocks is None else blocks
        in_parallel(contents.load, chosen, 1 if isinstance(reader.place, LocalPlace) else THREADS)
        if blocks is None:
            contents.check_counts()
        return contents

    @property
    def largest(self) -> int:
        """Bytes of the largest piece that may come."""
        files = [found.size for found in self.manifest.files.values()]
        return max(*files, *map(largest_object, self.specs.values()))

    def load(self, block: int) -> None:
        """Read and check one block record."""
        name, place = record_name(block), self.reader.place
        try:
            content = place.read(name, limit=self.manifest.files[name].size)
        except FileNotFoundError:
            raise DamageError(f"{place.where(name)}: the block record is missing") from None
        self.manifest.check(name, content, place.where(name))
        record = self.parse(block, content)
        self.check_sizes(record, place.where(name))
        self.records[block] = content
        self.sizes[block] = len(record.chunks), sum(chunk.size for chunk in record.chunks.values())

    def parse(self, block: int, content: bytes | None = None) -> BlockRecord:
        """The record of a block that was loaded."""
        content = self.records[block] if content is None else content
        where = self.reader.place.where(record_name(block))
        return load_record(content, self.reader.plan, self.specs, block, where)

    def check_sizes(self, record: BlockRecord, where: str) -> None:
        """An object is as large as its array's chunks are: nobody can make us fetch or hold more."""
        plain = self.reader.attributes.storage.compressor is None
        names = chunk_keys(self.specs, record.block)
        for key, chunk in record.chunks.items():
            most = largest_object(self.specs[names[key][0]])
            exact = self.specs[names[key][0]].chunk_bytes + CRC_BYTES
            if chunk.size > most or (plain and chunk.size != exact):
                raise DamageError(f"{where}: {key} cannot have {chunk.size} bytes, its array says {exact}")

    def check_counts(self) -> None:
        """The totals that the manifest states are those of the records."""
        n_objects, n_bytes = (sum(counts) for counts in zip(*self.sizes.values(), strict=True))
        stated = (self.manifest.n_objects, self.manifest.chunk_bytes)
        if (n_objects, n_bytes) != stated:
            raise DamageError(
                f"{self.reader.path}: the manifest counts {stated[0]} chunk objects of {stated[1]} bytes, "
                f"the block records {n_objects} of {n_bytes}"
            )

    @property
    def n_bytes(self) -> int:
        """Of all pieces."""
        return self.manifest.chunk_bytes + sum(found.size for found in self.manifest.files.values())

    def chunks(self) -> Iterator[Piece]:
        """Chunk objects, block by block."""
        for block in sorted(self.records):
            for key, chunk in self.parse(block).chunks.items():
                yield Piece(f"{GROUP}/{key}", chunk.size, chunk.digest)

    def record_files(self) -> Iterator[Piece]:
        for block in sorted(self.records):
            found = self.manifest.files[record_name(block)]
            yield Piece(record_name(block), found.size, found.digest)

    def metadata_files(self) -> Iterator[Piece]:
        blocks = {record_name(block) for block in range(self.reader.n_blocks)}
        for name, found in self.manifest.files.items():
            if name not in blocks:
                yield Piece(name, found.size, found.digest)

    def pieces(self) -> Iterator[Piece]:
        """All of them, in the order in which they go out: what a reader needs to believe comes last."""
        yield from self.chunks()
        yield from self.record_files()
        yield from self.metadata_files()


def largest_object(spec: ArraySpec) -> int:
    """Bytes that a chunk object may have; zstd adds less than 1 % to what it cannot compress."""
    return spec.chunk_bytes + spec.chunk_bytes // 64 + 2**12


def _check_names(reader: Reader, manifest: Manifest, specs: dict[str, ArraySpec]) -> None:
    """The manifest names every block record and metadata file of this store, and nothing else."""
    arrays = {spec.name for spec in specs.values()}
    needed = {PLAN, DOCUMENTS, VOCABULARY, f"{GROUP}/zarr.json"}
    needed |= {f"{GROUP}/{name}/zarr.json" for name in arrays}
    needed |= {record_name(block) for block in range(reader.n_blocks)}
    where = f"{reader.path}: the manifest"
    if missing := sorted(needed - set(manifest.files)):
        raise FormatError(f"{where} does not name {missing[0]}")
    for name, found in manifest.files.items():
        if name not in needed and not _is_whole_array(name):
            raise FormatError(f"{where} names {name!r}, which is no file of a store")
        if found.size > MAX_JSON_BYTES:
            raise FormatError(f"{where} gives {name} {found.size} bytes, at most {MAX_JSON_BYTES} are moved")


def _is_whole_array(name: str) -> bool:
    """A file of one of the small arrays that are written at once: its metadata, or a chunk by its numbers."""
    array, _, rest = name.removeprefix(f"{GROUP}/").partition("/")
    if not name.startswith(f"{GROUP}/") or array not in WHOLE_ARRAYS:
        return False
    return rest == "zarr.json" or re.fullmatch(r"c(/[0-9]+)+", rest) is not None
