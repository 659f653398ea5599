"""A smaller store out of a larger one: chosen layers, sites and splits, as many whole blocks as hold N rows.

In: a sealed store, wherever it lies, and the choice. Out: a sealed store by itself, whose chunk objects are
copies of the parent's, byte for byte, under renumbered keys; its attributes name the parent. Rows keep the
parent's `sequence` and `document` numbers, so that they can be joined with its rows; documents.parquet stays
whole. Cost: the chosen chunk objects are moved once, the token columns of the chosen blocks are read once
more (for the counts of the vocabulary).
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from . import durable, points
from .beginning import metadata_files, whole_arrays
from .carrying import (
    Buffers,
    Meter,
    Moved,
    Piece,
    carry,
    holds,
    settle,
    threads_for,
)
from .contents import Contents
from .dtypes import LAYER_SITES
from .errors import DamageError, UsageError
from .folder import GROUP
from .incomplete import PULLING
from .layout import AFFINE
from .manifest import FileRecord, read_seal, read_sealed_manifest
from .marks import claim
from .metadata import group_json
from .places import LocalPlace
from .plan import SPLITS, Plan
from .progress import Progress
from .reader import Reader
from .records import BlockRecord, Number, record_name
from .sealing import seal
from .settings import parse_layers
from .smaller import Selection, Smaller, smaller_documents, smaller_vocabulary


def choose(
    reader: Reader,
    layers: str | Sequence[int] | None,
    sites: str | Sequence[str] | None,
    split: str | Sequence[str] | None,
    tokens: int | None,
) -> Selection | None:
    """The selection, each choice checked against what the store has; None when it is the whole store."""
    numbers = parse_layers(layers) if isinstance(layers, str) and layers != "all" else layers
    wanted = None if isinstance(numbers, str) or numbers is None else [int(layer) for layer in numbers]
    chosen = Selection(
        layers=_among("layer", wanted, reader.layers, reader.path),
        sites=_among("site", _names(sites), reader.sites, reader.path),
        splits=(splits := _among("split", _names(split), _splits_of(reader.plan), reader.path)),
        blocks=_blocks(reader.plan, splits, tokens),
    )
    everything = Selection(
        reader.layers, reader.sites, _splits_of(reader.plan), tuple(range(reader.n_blocks))
    )
    return None if chosen == everything else chosen


def pull_selection(reader: Reader, path: Path, chosen: Selection, progress: Progress) -> Moved:
    """Write the selection into a new folder, or go on with one that was cut short; what a whole one has lost
    since comes back."""
    smaller, target = Smaller.of(reader, chosen), LocalPlace(path)
    attributes = smaller.attributes
    meter = Meter("pull", 0, progress)
    mark = group_json(attributes.to_dict())
    if claim(target, PULLING, mark, lambda _: Reader.open(target).attributes == attributes):
        points.reached("transfer.begun")
        _fill(Contents.of(reader, chosen.blocks), smaller, target, meter)
        seal(path, own_copy=True)
        target.delete(PULLING)
        points.reached("transfer.sealed_there")
    else:
        _mend(Contents.of(reader, chosen.blocks), smaller, target, meter)
        meter.forget_kept_unless_moved()
    digest = read_seal(target) or ""
    return Moved(reader.path, target.url, digest, meter.n_files, meter.n_bytes, meter.n_kept)


def _fill(contents: Contents, smaller: Smaller, target: LocalPlace, meter: Meter) -> None:
    """Everything up to the seal, in the order of a harvest: no record before its chunk objects."""
    source, folder = contents.reader.place, target.path
    n_threads = threads_for(source, target, contents.largest)
    meter.total = sum(piece.size for piece in _pieces(contents, smaller))
    there = target.list() or {}
    durable.check_space(folder, meter.total - sum(there.values()))
    carry(source, target, _pieces(contents, smaller), meter, n_threads)
    points.reached("transfer.chunks_there")
    durable.write_files(_records(contents, smaller, folder), folder)
    points.reached("transfer.records_there")
    durable.write_files(_metadata(contents.reader, smaller, folder, n_threads), folder)
    points.reached("transfer.metadata_there")
    if set(there) != {PULLING}:
        settle(folder)


def _mend(contents: Contents, smaller: Smaller, target: LocalPlace, meter: Meter) -> None:
    """Compare every file of a sealed selection with its digest, and bring again those that differ."""
    source, folder, buffers = contents.reader.place, target.path, Buffers()
    n_threads = threads_for(source, target, contents.largest)
    meter.total = sum(piece.size for piece in _pieces(contents, smaller))
    carry(source, target, _pieces(contents, smaller), meter, n_threads)
    manifest, _ = read_sealed_manifest(target)
    assert manifest is not None  # `claim` found the seal
    small = [Piece(name, found.size, found.digest) for name, found in manifest.files.items()]
    if not (lost := [piece for piece in small if not holds(folder, piece, buffers)]):
        return
    made = dict(_records(contents, smaller, folder))
    if any(folder / piece.name not in made for piece in lost):
        made |= dict(_metadata(contents.reader, smaller, folder, n_threads))
    again = {piece: b"".join(map(bytes, made.get(folder / piece.name, ()))) for piece in lost}
    for piece, content in again.items():
        if FileRecord.of(content) != manifest.files[piece.name]:
            raise DamageError(
                f"{target.where(piece.name)} is damaged and cannot be made again with the bytes that were "
                "sealed; pull the selection into a new folder"
            )
    durable.write_files(((folder / piece.name, (content,)) for piece, content in again.items()), folder)
    for piece in again:
        meter.add(piece)


def _pieces(contents: Contents, smaller: Smaller) -> Iterator[Piece]:
    """Every chunk object of the selection, made anew each time: there may be millions."""
    for block in range(smaller.plan.n_blocks):
        yield from _block(contents, smaller, block)[1]


def _records(contents: Contents, smaller: Smaller, folder: Path) -> Iterator[tuple[Path, tuple[Any, ...]]]:
    for block in range(smaller.plan.n_blocks):
        yield folder / record_name(block), (_block(contents, smaller, block)[0].to_bytes(),)


def _metadata(
    reader: Reader, smaller: Smaller, folder: Path, n_threads: int
) -> Iterator[tuple[Path, tuple[Any, ...]]]:
    """What a harvest of just these blocks and layers would have begun with."""
    index, chosen, attributes = smaller.index, smaller.chosen, smaller.attributes
    found = {name: reader.affine(name) for name in AFFINE}
    affine = {name: values[index] for name, values in found.items() if values is not None}
    whole = whole_arrays(chosen.layers, reader.d_model, affine, reader.position_embedding)
    documents = smaller_documents(reader, smaller.plan)
    vocabulary = smaller_vocabulary(reader, chosen.blocks, n_threads)
    yield from metadata_files(folder, attributes, smaller.plan, whole, documents, vocabulary)
    yield folder / GROUP / "zarr.json", (group_json(attributes.to_dict()),)


def _names(given: str | Sequence[str] | None) -> list[str] | None:
    if given is None or given == "all":
        return None
    return [name.strip() for name in given.split(",")] if isinstance(given, str) else list(given)


def _among(kind: str, wanted: Sequence[Any] | None, has: Sequence[Any], where: str) -> tuple[Any, ...]:
    """The wanted ones in the store's order; all where nothing was said."""
    if wanted is None:
        return tuple(has)
    unknown = [name for name in wanted if name not in has]
    if unknown or not wanted:
        found = f"{kind} {unknown[0]!r} is not in" if unknown else f"no {kind} was chosen of"
        raise UsageError(f"{found} {where}; it has {', '.join(map(str, has))}")
    return tuple(name for name in has if name in wanted)


def _splits_of(plan: Plan) -> tuple[str, ...]:
    return tuple(name for code, name in enumerate(SPLITS) if (plan.block_split == code).any())


def _blocks(plan: Plan, splits: Sequence[str], tokens: int | None) -> tuple[int, ...]:
    """The first blocks of these splits that hold `tokens` rows; all of them when there are not so many."""
    if tokens is not None and tokens < 1:
        raise UsageError(f"tokens={tokens}: at least 1 is needed")
    blocks = np.flatnonzero(np.isin(plan.block_split, [SPLITS.index(name) for name in splits]))
    if tokens is not None:
        held = np.cumsum(plan.block_rows[blocks], dtype=np.int64)
        blocks = blocks[: int(np.searchsorted(held, tokens)) + 1]
    return tuple(blocks.tolist())


def _block(contents: Contents, smaller: Smaller, block: int) -> tuple[BlockRecord, list[Piece]]:
    """The record of one block, and its chunk objects: new keys, unchanged content."""
    parent = contents.parse(smaller.chosen.blocks[block])
    keys = dict(_keys(contents, smaller, block, parent.block))
    chunks = {key: parent.chunks[old] for key, old in keys.items()}
    statistics = {
        site: {name: _of_layers(values, site, smaller.index) for name, values in of.items()}
        for site, of in parent.statistics.items()
        if site in smaller.chosen.sites
    }
    pieces = [
        Piece(f"{GROUP}/{key}", chunks[key].size, chunks[key].digest, source=f"{GROUP}/{old}")
        for key, old in keys.items()
    ]
    plan = smaller.plan
    return BlockRecord(block, *plan.block_range(block), plan.digest, chunks, statistics), pieces


def _keys(contents: Contents, smaller: Smaller, block: int, parent_block: int) -> Iterator[tuple[str, str]]:
    """Keys of the chunk objects of one block: in the selection, and in its parent."""
    for name, spec in smaller.specs.items():
        parent = contents.specs[name]
        if spec.dims[0] == "layer":
            for layer, parent_layer in enumerate(smaller.index):
                yield spec.key(layer, block, 0), parent.key(parent_layer, parent_block, 0)
        else:
            rest = [0] * (len(spec.dims) - 1)
            yield spec.key(block, *rest), parent.key(parent_block, *rest)


def _of_layers(values: list[Number], site: str, index: list[int]) -> list[Number]:
    """A statistic of the chosen layers; a site without layers has one value."""
    return [values[i] for i in index if i < len(values)] if site in LAYER_SITES else values
