"""Stores with as many objects as asked for, whose chunk objects cost no disk: metadata real, chunks zero.

In: numbers of layers and blocks, rows of a block, width. Out: a sealed store. Plan, attributes, block records
and manifest are what a harvest of that size would leave; every chunk object is there, by its right name, size
and digest, but all objects of one size are one sparse file of zeros under many names. Cost: a folder and a
link per object.
"""

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import google_crc32c
import numpy as np
import pyarrow as pa
from blake3 import blake3
from helpers_store import begin, synthetic
from nearline.store import Attributes, Plan, PlanFacts, seal
from nearline.store.folder import GROUP, chunk_keys, specs_of
from nearline.store.records import BlockRecord, ChunkRecord, record_name

SITES = ("residual", "mlp_output", "embedding")
LINKS = 60_000  # names of one file; ext4 allows 65,000
PIECE = bytes(2**20)
ANY = 987_654_321  # stands for a block's number in the template of the records


def large_plan(n_blocks: int, block: int, sequences: int) -> Plan:
    """Blocks of `sequences` windows each, in batches of eight, one document per window."""
    cuts = np.linspace(0, block, sequences + 1).astype(np.int64)
    lengths = np.tile(np.diff(cuts), n_blocks).astype(np.int32)
    number = np.arange(len(lengths), dtype=np.int32)
    per_block = -(-sequences // 8)
    pattern = np.array([0, 2, 1, 0, 2], dtype=np.uint8)
    return Plan(
        n_tokens=n_blocks * block,
        block=block,
        sequence_length=int(lengths.max()),
        min_length=1,
        batch_tokens=8 * int(lengths.max()),
        seed=0,
        bos_id=0,
        document=number,
        start=np.zeros_like(number),
        length=lengths,
        bos=np.ones(len(number), bool),
        sequence_batch=(number // sequences * per_block + number % sequences // 8).astype(np.int32),
        sequence_block=number // np.int32(sequences),
        block_split=np.resize(pattern, n_blocks),
        block_rows=np.full(n_blocks, block, np.int32),
    )


def large_store(
    path: Path, *, n_layers: int, n_blocks: int, block: int = 1_000, d: int = 64, sequences: int = 6
) -> Path:
    """A sealed store of (2 · n_layers + 10) · n_blocks chunk objects."""
    plan = large_plan(n_blocks, block, sequences)
    data = synthetic(n_layers=n_layers, d=8, n_tokens=100, block=100, storage_dtype="float16")
    model = dataclasses.replace(data.attributes.model, d_model=d)
    counts = {"n_documents": plan.n_sequences, "n_groups": plan.n_sequences}
    corpus = dataclasses.replace(data.attributes.corpus, **counts)
    facts = {"model": model, "corpus": corpus, "plan": PlanFacts.of(plan, "always")}
    attributes = dataclasses.replace(data.attributes, **facts)
    affine = {"norm_weight": np.ones((n_layers, d), np.float32)}
    tables = {"documents": _documents(plan), "vocabulary": _vocabulary(plan.n_tokens)}
    arrays = {"d": d, "affine": affine, "position_embedding": None}
    # The check of free space counts bytes that sparse files never take.
    with mock.patch("nearline.store.durable.check_space"):
        begin(path, dataclasses.replace(data, plan=plan, attributes=attributes, **tables, **arrays))
    _commit_all(path, plan, attributes)
    seal(path)
    return path


def _commit_all(path: Path, plan: Plan, attributes: Attributes) -> None:
    """All blocks: only the block's number and rows differ between their records."""
    specs, links = specs_of(attributes, plan), _Links(path.parent / f"{path.name}-zeros")
    n_layers = len(attributes.storage.layers)
    statistics = {site: _statistics(1 if site == "embedding" else n_layers) for site in SITES}
    sizes = {key: specs[name].chunk_bytes for key, (name, _) in chunk_keys(specs, ANY).items()}
    chunks = {key: links.record(size) for key, size in sizes.items()}
    template = BlockRecord(ANY, ANY + 1, ANY + 2, plan.digest, chunks, statistics).to_bytes()
    for number in range(plan.n_blocks):
        row0, row1 = plan.block_range(number)
        for key, size in sizes.items():
            links.make(size, f"{path / GROUP}/{key.replace(str(ANY), str(number))}")
        content = template
        for marker, value in ((ANY, number), (ANY + 1, row0), (ANY + 2, row1)):
            content = content.replace(str(marker).encode(), str(value).encode())
        (path / record_name(number)).write_bytes(content)
    links.remove()


class _Links:
    """Chunk objects of zeros, one file per size, linked under every name that is asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._records: dict[int, ChunkRecord] = {}
        self._names: dict[int, Iterator[Path]] = {}
        folder.mkdir()

    def record(self, size: int) -> ChunkRecord:
        if size not in self._records:
            self._records[size], self._names[size] = _zeros_record(size), self._sources(size)
        return self._records[size]

    def make(self, size: int, target: str) -> None:
        os.makedirs(os.path.dirname(target), exist_ok=True)  # noqa: PTH103, PTH120  (a million of these)
        os.link(next(self._names[size]), target)

    def remove(self) -> None:
        for source in self._folder.iterdir():
            source.unlink()
        self._folder.rmdir()

    def _sources(self, size: int) -> Iterator[Path]:
        number = 0
        while True:
            source = self._folder / f"{size}-{number}"
            with source.open("wb") as file:
                file.truncate(size)
                file.seek(size)
                file.write(bytes.fromhex(self._records[size].crc32c))
            for _ in range(LINKS):
                yield source
            number += 1


def _zeros_record(size: int) -> ChunkRecord:
    digest, crc = blake3(), 0
    for start in range(0, size, len(PIECE)):
        piece = PIECE[: size - start]
        digest.update(piece)
        crc = google_crc32c.extend(crc, piece)
    trailer = crc.to_bytes(4, "little")
    return ChunkRecord(size + 4, digest.update(trailer).hexdigest(), trailer.hex())


def _statistics(n: int) -> dict[str, list]:
    return {
        "max_abs": [12.3456789 + i for i in range(n)],
        "mean_square": [0.123456789 * (i + 1) for i in range(n)],
        "n_nonfinite": [0] * n,
        "n_out_of_range": [0] * n,
    }


def _documents(plan: Plan) -> pa.Table:
    number = np.arange(plan.n_sequences, dtype=np.int32)
    names = np.array(["fit", "gate", "test"])
    hashes = np.random.default_rng(0).bytes(16 * len(number)).hex()
    return pa.table(
        {
            "document": number,
            "key": [f"doc {index}" for index in number],
            "content_hash": [hashes[32 * i : 32 * i + 32] for i in range(len(number))],
            "group": number,
            "split": names[plan.block_split[plan.sequence_block]],
            "n_tokens": plan.length,
            "n_dropped": np.zeros_like(number),
        }
    )


def _vocabulary(n_tokens: int) -> pa.Table:
    return pa.table(
        {
            "token_id": np.zeros(1, np.int32),
            "bytes": pa.array([b"x"], pa.binary()),
            "text": ["x"],
            "count": np.array([n_tokens], np.int64),
        }
    )
