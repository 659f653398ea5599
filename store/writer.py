"""Writing a store: begin it or go on with it, commit each block once, seal.

In: the plan, the attributes and the small tables; then, block by block, the rows of every site in storage
dtype. Out: a store folder. Order of a commit: all chunk objects durable, then the block record, which exactly
one process creates; a crash in between leaves no committed block. Two processes never write one block at once
where files can be locked: whoever commits holds a lock on blocks/000012.lock from before it looks for a
record until its own is there, and the lock dies with its process, so nothing is renamed over a block that has
a record. Where they cannot (Windows, some network disks), the one whose record comes second compares, and
takes a block back that is not what its record says; only one that is killed before it can compare leaves a
mixed block, which a full `nearline verify` finds. Cost: one BLAKE3, one crc32c and one write per chunk, from
the caller's arrays without a copy where they are C-contiguous; all of it with the GIL released.
"""

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from blake3 import blake3
from jaxtyping import Float32, Shaped

from . import durable, in_place, points
from .attributes import Attributes, parse_attributes
from .beginning import (
    begun_attributes,
    check_agreement,
    check_same,
    claim_store,
    metadata_files,
    whole_arrays,
    write_metadata,
    write_root,
)
from .disk import claimed
from .dtypes import LAYER_SITES, numpy_dtype
from .errors import DamageError, UsageError
from .folder import GROUP, RUNS, load_record, specs_of
from .layout import store_bytes
from .manifest import SEALED
from .metadata import ArraySpec, encode_chunk
from .parsing import readable
from .plan import Plan
from .records import BlockRecord, ChunkRecord, clean_statistics, lock_name, record_name
from .replacing import check_idle, finish_replacing, forget_staged
from .resuming import checked_blocks, chunk_problem, sweep_leftovers
from .sealing import seal
from .tables import DOCUMENTS as DOCUMENTS_SCHEMA
from .tables import VOCABULARY as VOCABULARY_SCHEMA
from .tables import conform


class StoreWriter:
    """Steps: `begin`, `commit` for every missing block in any order, `seal`. One thread commits at a time.

    `committed`: blocks that are done, by this process or before it. `sealed`: the store was finished when
    this process began; nothing is left to do. `begun_here`: this process began the store.
    """

    def __init__(self, path: Path, plan: Plan, attributes: Attributes, *, begun_here: bool = False) -> None:
        self.path = path
        self.plan = plan
        self.attributes = attributes
        self.begun_here = begun_here
        self.sealed = (path / SEALED).exists()
        self.committed = set(range(plan.n_blocks)) if self.sealed else checked_blocks(path, attributes, plan)
        self._specs = specs_of(attributes, plan)

    @classmethod
    def begin(
        cls,
        path: str | Path,
        *,
        plan: Plan,
        attributes: Attributes,
        layers: Sequence[int],
        d_model: int,
        storage_dtype: str,
        sites: Sequence[str],
        documents: pa.Table,
        vocabulary: pa.Table,
        affine: Mapping[str, Float32[np.ndarray, "layer feature"]],
        position_embedding: Float32[np.ndarray, "position feature"] | None = None,
        compressor: str | None = None,
    ) -> "StoreWriter":
        """Begin a store in a new or empty folder, or go on with one of the same settings.

        Any number of processes may begin the same store at once. Settings that differ from those of the store
        are refused, and nothing is changed.
        """
        plan.validate()
        attributes = parse_attributes(attributes.to_dict())  # checks it, and fixes number types
        check_agreement(plan, attributes, layers, d_model, storage_dtype, sites, compressor)
        whole = whole_arrays(layers, d_model, affine, position_embedding)
        documents = conform(documents, DOCUMENTS_SCHEMA, "documents table")
        vocabulary = conform(vocabulary, VOCABULARY_SCHEMA, "vocabulary table")
        folder = claim_store(path)
        finish_replacing(folder)
        check_idle(folder)
        begun, begun_here = begun_attributes(folder), False
        if begun is None:
            durable.check_space(folder, _bytes_of(attributes, plan, plan.n_blocks))
            begun_here = write_root(folder, attributes)
            begun = begun_attributes(folder) or attributes
        check_same(folder, begun, attributes)
        if not (folder / SEALED).exists():
            files = metadata_files(folder, attributes, plan, whole, documents, vocabulary)
            write_metadata(folder, files)
        writer = cls(folder, plan, begun, begun_here=begun_here)
        if not (begun_here or writer.sealed):
            n_missing = plan.n_blocks - len(writer.committed)
            durable.check_space(folder, _bytes_of(attributes, plan, n_missing))
            sweep_leftovers(folder, writer._specs)
            forget_staged(folder)
        return writer

    def commit(
        self,
        block: int,
        columns: Mapping[str, Shaped[np.ndarray, " token"]],
        sites: Mapping[str, Shaped[np.ndarray, "..."]],
        statistics: Mapping[str, Mapping[str, Any]],
    ) -> BlockRecord:
        """Write one block whole; on return, block and record are on disk and the arrays may be reused."""
        if block in self.committed:
            raise UsageError(f"block {block} is committed already")
        row0, row1 = self.plan.block_range(block)
        _check_block(self, block, columns, sites)
        with claimed(self.path / lock_name(block)) as mine:
            if mine is False:
                raise UsageError(f"{self._rivals(block, 'is being written')}; nothing is damaged")
            if (self.path / record_name(block)).exists():
                raise self._lost(block)
            chunks: dict[str, ChunkRecord] = {}
            durable.write_files(self._chunk_files(block, {**sites, **columns}, chunks), self.path)
            points.reached("writer.chunks_durable")
            record = BlockRecord(block, row0, row1, self.plan.digest, chunks, clean_statistics(statistics))
            if not durable.create_file(self.path / record_name(block), record.to_bytes(), within=self.path):
                raise self._lost(block)
            points.reached("writer.record_created")
        self.committed.add(block)
        if not self.begun_here:
            self._sweep(chunks)
        return record

    def seal(self) -> str:
        """Finish the store: consolidated metadata, manifest, card, SEALED. Returns the digest of the seal."""
        return seal(self.path)

    def write_run(self, facts: Mapping[str, Any]) -> Path:
        """Keep the facts of a run in runs/; they are not under the seal."""
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        target = self.path / RUNS / f"{stamp}-{secrets.token_hex(4)}.json"
        durable.write_file(target, readable(dict(facts)))
        return target

    def _rivals(self, block: int, what: str) -> str:
        return (
            f"two collectors are at work on the same blocks of {self.path} (block {block} {what} by "
            "the other one); give each its own --rank, or stop one of them"
        )

    def _lost(self, block: int) -> UsageError | DamageError:
        """Another process has committed this block: are the bytes on disk those that its record vouches for?

        This process may have renamed its own chunk objects over the other's. Then nobody can say whose are
        there, and the record goes, so that the block is collected again; of a sealed store it cannot go.
        """
        path = self.path / record_name(block)
        both = self._rivals(block, "was committed")
        try:
            record = load_record(path.read_bytes(), self.plan, self._specs, block, str(path))
            problem = chunk_problem(self.path, record, self._specs, whole=True)
        except FileNotFoundError:
            problem = "its record is gone again"
        except DamageError as error:
            problem = str(error)
        if problem is None:
            return UsageError(f"{both}; nothing is damaged, and this one stops")
        if (self.path / SEALED).exists():
            return DamageError(
                f"{both}; the other one has sealed the store, and then this one wrote over block {block}: "
                f"{problem}; run `nearline repair {self.path}`"
            )
        in_place.remove_file(path)
        return UsageError(f"{both}; {problem}: block {block} is missing now, the next run collects it again")

    def _sweep(self, chunks: Mapping[str, ChunkRecord]) -> None:
        """Remove what a process that died left beside these chunk objects, in folders of one block alone."""
        for folder in {(self.path / GROUP / key).parent for key in chunks if key.count("/") > 2}:
            durable.sweep(folder)

    def _chunk_files(
        self, block: int, values: Mapping[str, np.ndarray], chunks: dict[str, ChunkRecord]
    ) -> Iterator[tuple[Path, tuple[Any, bytes]]]:
        """Chunk objects of the block, one at a time; their records go into `chunks`."""
        for name, spec in self._specs.items():
            for key, part in _parts(spec, block, values[name]):
                body, crc = encode_chunk(part, spec, self.attributes.storage.compressor)
                digest = blake3(body).update(crc).hexdigest()
                chunks[key] = ChunkRecord(memoryview(body).nbytes + len(crc), digest, crc.hex())
                yield self.path / GROUP / key, (body, crc)


def _parts(spec: ArraySpec, block: int, values: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Chunks of one array in one block: key and values."""
    if spec.dims[0] != "layer":
        yield spec.key(block, *([0] * (values.ndim - 1))), values
        return
    for layer in range(spec.shape[0]):
        yield spec.key(layer, block, 0), values[layer]


def _bytes_of(attributes: Attributes, plan: Plan, n_blocks: int) -> int:
    """Bytes that so many blocks will take; with a compressor at least half of what they have without."""
    storage = attributes.storage
    n_sites = sum(site in LAYER_SITES for site in storage.sites)
    itemsize, n_tokens = numpy_dtype(storage.dtype).itemsize, min(n_blocks * plan.block, plan.n_tokens)
    need = store_bytes(n_tokens, plan.block, attributes.model.d_model, len(storage.layers), n_sites, itemsize)
    return need if storage.compressor is None else need // 2


def _check_block(
    writer: StoreWriter, block: int, columns: Mapping[str, np.ndarray], sites: Mapping[str, np.ndarray]
) -> None:
    """Every array is there, of its dtype and shape, and the columns keep what the format promises."""
    given = {**sites, **columns}
    specs = writer._specs  # pyright: ignore[reportPrivateUsage]
    if wrong := sorted(set(given) ^ set(specs)):
        state = "missing" if wrong[0] in specs else "not an array of this store"
        raise UsageError(f"block {block}: `{wrong[0]}` is {state}; needed: {', '.join(specs)}")
    rows = int(writer.plan.block_rows[block])
    for name, spec in specs.items():
        shape = tuple(
            rows if dim == "token" else size for dim, size in zip(spec.dims, spec.shape, strict=True)
        )
        if given[name].shape != shape or given[name].dtype != spec.dtype:
            found = f"{given[name].dtype} {given[name].shape}"
            raise UsageError(f"block {block}: `{name}` is {found}, needed is {spec.dtype} {shape}")
    if (columns["split"] != writer.plan.block_split[block]).any():
        raise UsageError(f"block {block}: `split` is not {writer.plan.split_of(block)} in every row")
    unlike = (np.isnan(columns["nll"]) != (columns["target_id"] < 0)) & columns["valid"]
    if unlike.any():
        row = int(np.flatnonzero(unlike)[0])
        raise UsageError(f"block {block} row {row}: `nll` must be NaN exactly where `target_id` is -1")
