"""Writing a store: create, commit each block once, seal.

In: the plan, the attributes and the small tables; then, block by block, the rows of every site in storage
dtype. Out: a store folder. Order of a commit: all chunk objects durable, then the block record; a crash in
between leaves no committed block. Cost: one BLAKE3, one crc32c and one write per chunk, from the caller's
arrays without a copy where they are C-contiguous; all of it with the GIL released.
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

from . import durable
from .attributes import Attributes, parse_attributes
from .dtypes import LAYER_SITES, SITES, numpy_dtype
from .errors import UsageError
from .folder import DOCUMENTS, GROUP, PLAN, RUNS, VOCABULARY, committed_blocks, specs_of
from .layout import AFFINE, MAX_BLOCKS, store_bytes, whole_array
from .metadata import ArraySpec, encode_chunk, group_json
from .parsing import readable
from .plan import Plan
from .records import FOLDER, BlockRecord, ChunkRecord, clean_statistics, record_name
from .sealing import seal
from .tables import DOCUMENTS as DOCUMENTS_SCHEMA
from .tables import VOCABULARY as VOCABULARY_SCHEMA
from .tables import conform, write_table


class StoreWriter:
    """Steps: `create`, `commit` for every block in any order, `seal`. One thread commits at a time."""

    def __init__(self, path: Path, plan: Plan, attributes: Attributes) -> None:
        self.path = path
        self.plan = plan
        self.attributes = attributes
        self.committed = committed_blocks(path)
        self._specs = specs_of(attributes, plan)

    @classmethod
    def create(
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
        """Begin a store in a new or empty folder; writes everything that is not a block."""
        plan.validate()
        attributes = parse_attributes(attributes.to_dict())  # checks it, and fixes number types
        _check_agreement(plan, attributes, layers, d_model, storage_dtype, sites, compressor)
        whole = _whole_arrays(layers, d_model, affine, position_embedding)
        documents = conform(documents, DOCUMENTS_SCHEMA, "documents table")
        vocabulary = conform(vocabulary, VOCABULARY_SCHEMA, "vocabulary table")
        folder = durable.claim_folder(Path(path))
        n_sites = sum(site in LAYER_SITES for site in sites)
        need = store_bytes(
            plan.n_tokens, plan.block, d_model, len(layers), n_sites, numpy_dtype(storage_dtype).itemsize
        )
        durable.check_space(folder, need if compressor is None else need // 2)
        durable.create_folder(folder / FOLDER)  # from here on the folder is this writer's
        durable.write_file(folder / PLAN, plan.to_json_bytes())
        write_table(folder / DOCUMENTS, documents)
        write_table(folder / VOCABULARY, vocabulary)
        durable.write_files(_metadata_files(folder, attributes, plan, whole))
        return cls(folder, plan, attributes)

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
        chunks: dict[str, ChunkRecord] = {}
        durable.write_files(self._chunk_files(block, {**sites, **columns}, chunks))
        record = BlockRecord(block, row0, row1, self.plan.digest, chunks, clean_statistics(statistics))
        durable.write_file(self.path / record_name(block), record.to_bytes())
        self.committed.add(block)
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


def _whole_arrays(
    layers: Sequence[int],
    d_model: int,
    affine: Mapping[str, np.ndarray],
    position_embedding: np.ndarray | None,
) -> list[tuple[ArraySpec, np.ndarray]]:
    if unknown := sorted(set(affine) - set(AFFINE)):
        raise UsageError(f"affine array {unknown[0]!r} is unknown; allowed: {', '.join(AFFINE)}")
    found: dict[str, tuple[tuple[str, ...], np.ndarray]] = {
        "layer": (("layer",), np.array(layers, dtype="<i4"))
    }
    for name, values in affine.items():
        if values.shape != (len(layers), d_model):
            raise UsageError(f"`{name}` has shape {values.shape}, needed is ({len(layers)}, {d_model})")
        found[name] = (("layer", "feature"), np.ascontiguousarray(values, dtype="<f4"))
    if position_embedding is not None:
        if position_embedding.ndim != 2 or position_embedding.shape[1] != d_model:
            raise UsageError(
                f"`position_embedding` has shape {position_embedding.shape}, needed is (n, {d_model})"
            )
        values = np.ascontiguousarray(position_embedding, dtype="<f4")
        found["position_embedding"] = (("position", "feature"), values)
    return [(whole_array(name, dims, values), values) for name, (dims, values) in found.items()]


def _metadata_files(
    folder: Path, attributes: Attributes, plan: Plan, whole: Sequence[tuple[ArraySpec, np.ndarray]]
) -> Iterator[tuple[Path, tuple[Any, ...]]]:
    """All zarr.json files, and the chunks of the arrays that are written at once."""
    group, compressor = folder / GROUP, attributes.storage.compressor
    for spec in [*specs_of(attributes, plan).values(), *(spec for spec, _ in whole)]:
        yield group / spec.name / "zarr.json", (readable(spec.to_metadata(compressor)),)
    for spec, values in whole:
        for index, row in enumerate(range(0, spec.shape[0], spec.chunks[0])):
            part = values[row : row + spec.chunks[0]]
            yield group / spec.key(index, *([0] * (len(spec.dims) - 1))), encode_chunk(part, spec, compressor)
    yield group / "zarr.json", (group_json(attributes.to_dict()),)


def _check_agreement(
    plan: Plan,
    attributes: Attributes,
    layers: Sequence[int],
    d_model: int,
    storage_dtype: str,
    sites: Sequence[str],
    compressor: str | None,
) -> None:
    """The arguments say what the attributes say: a store that contradicts its own card is refused."""
    storage = attributes.storage
    pairs = {
        "plan digest": (plan.digest, attributes.plan.digest),
        "n_blocks": (plan.n_blocks, attributes.plan.n_blocks),
        "layers": (list(layers), list(storage.layers)),
        "d_model": (d_model, attributes.model.d_model),
        "storage dtype": (storage_dtype, storage.dtype),
        "sites": (list(sites), list(storage.sites)),
        "compressor": (compressor, storage.compressor),
    }
    for name, (given, stated) in pairs.items():
        if given != stated:
            raise UsageError(f"{name} is {given!r}, the attributes say {stated!r}")
    if len(set(sites)) != len(sites) or not set(sites) <= set(SITES):
        raise UsageError(f"sites {list(sites)} must be different ones of {', '.join(SITES)}")
    if plan.n_blocks > MAX_BLOCKS:
        raise UsageError(f"{plan.n_blocks} blocks, at most {MAX_BLOCKS} are allowed; choose a larger block")


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
