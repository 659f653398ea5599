"""Beginning a store, or joining one that is begun: everything in its folder that is not a block.

In: the settings of a run and a folder that is new, empty, or holds an unfinished store. Out: the metadata
files, each written by whichever process comes first and compared by all others; a folder of something else
or a store of other settings is refused before anything is written. Cost: some forty small files.
"""

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from . import durable, points
from .attributes import Attributes
from .differences import difference, proof_difference
from .dtypes import SITES
from .errors import DamageError, FormatError, UsageError
from .folder import DOCUMENTS, GROUP, PLAN, RUNS, VOCABULARY, parse_group, read_small, specs_of
from .layout import AFFINE, MAX_BLOCKS, whole_array
from .metadata import ArraySpec, encode_chunk, group_json
from .own import FILES, FOLDERS, check_links
from .parsing import readable
from .plan import Plan
from .records import FOLDER as BLOCKS
from .tables import parse_table, table_bytes

ROOT = f"{GROUP}/zarr.json"
OWN = FILES | FOLDERS

logger = logging.getLogger("nearline")
Whole = Sequence[tuple[ArraySpec, np.ndarray]]
Files = list[tuple[Path, tuple[Any, ...]]]


def claim_store(path: str | Path) -> Path:
    """Check early that a store can be begun or continued at `path`; the folder is created."""
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file; name a new or an empty folder")
    durable.make_folder(folder)
    found = {entry.name for entry in folder.iterdir() if not durable.is_temporary(entry.name)}
    begun = (folder / ROOT).exists()  # looked at after the listing: whoever begins writes it first
    foreign = sorted(found - (OWN if begun else {GROUP, RUNS}))
    if not begun and (folder / GROUP).is_dir():
        foreign += [f"{GROUP}/{name}" for name in _unlike_partials(folder / GROUP)]
    if not begun:
        foreign += [f"{RUNS}/{name}" for name in _unlike_runs(folder / RUNS)]
    if foreign:
        shown = ", ".join(foreign[:3]) + (", ..." if len(foreign) > 3 else "")
        kind = "holds more than a store" if begun else "is not empty"
        raise UsageError(f"{folder} {kind} (it holds {shown}); name a new or an empty folder")
    check_links(folder)
    durable.check_writable(folder)
    return folder


def _unlike_partials(folder: Path) -> list[str]:
    found = sorted(entry.name for entry in folder.iterdir() if not durable.is_temporary(entry.name))
    return [] if (folder / "zarr.json").exists() else found  # or it was begun since we looked


def _unlike_runs(folder: Path) -> list[str]:
    """What is no lock of a rank: `runs` is a common name, and a run that fails gives its folder back."""
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    return sorted(name for name in names if re.fullmatch(r"rank-[0-9]+\.lock", name) is None)


def begun_attributes(folder: Path) -> Attributes | None:
    """The attributes that a store was begun with; None where no store was begun."""
    path = folder / ROOT
    if not path.exists() or not path.stat().st_size:
        return None
    return parse_group(read_small(folder, ROOT), str(path))


def check_same(folder: Path, begun: Attributes, now: Attributes) -> None:
    """UsageError with the first difference, unless a run with `now` may continue what `begun` says."""
    if found := difference(begun, now):
        raise UsageError(f"{folder}: {found}")
    if found := proof_difference(begun, now):
        logger.warning("%s: %s; this machine rounds otherwise, the store goes on", folder, found)


def write_root(folder: Path, attributes: Attributes) -> bool:
    """Begin the store; False where another process has begun it."""
    content = group_json(attributes.to_dict())
    (created,) = _create([(folder / ROOT, (content,))], folder)
    points.reached("writer.root_begun")
    return created


def write_metadata(folder: Path, files: Files) -> None:
    """All other files that are no block: written where they are missing, else compared."""
    for (path, buffers), created in zip(files, _create(files, folder), strict=True):
        if not created:
            wanted = b"".join(memoryview(buffer).cast("B") for buffer in buffers)
            _check_file(folder, path, wanted)
    durable.make_folder(folder / BLOCKS)
    points.reached("writer.metadata_begun")


def _create(files: Files, folder: Path) -> list[bool]:
    """Create what is missing. An empty file is missing too (see `create_files`)."""
    created = durable.create_files(files, folder)
    empty = [not new and not path.stat().st_size for (path, _), new in zip(files, created, strict=True)]
    durable.write_files([file for file, again in zip(files, empty, strict=True) if again], folder)
    return [new or again for new, again in zip(created, empty, strict=True)]


def _check_file(folder: Path, path: Path, wanted: bytes) -> None:
    """The settings agree, so the file must too: if not, it was damaged, or an input has changed unseen."""
    found = read_small(folder, path.relative_to(folder).as_posix())
    if found == wanted:
        return
    if path.suffix == ".parquet":
        try:
            one, other = parse_table(found, None, str(path)), parse_table(wanted, None, str(path))
        except FormatError as error:
            raise DamageError(f"{error}; remove this file and run again: it is written anew") from None
        names = one.column_names if one.column_names == other.column_names else []
        if column := next((name for name in names if one[name] != other[name]), None):
            raise UsageError(
                f"{path} differs in column `{column}` from the table of this run; name a new folder, or "
                "repeat the settings"
            )
    raise DamageError(
        f"{path} is not what these settings give: the file is damaged, or this machine computes otherwise; "
        "if it is damaged, remove it and run again: it is written anew"
    )


def metadata_files(
    folder: Path,
    attributes: Attributes,
    plan: Plan,
    whole: Whole,
    documents: pa.Table,
    vocabulary: pa.Table,
) -> Files:
    """Plan, tables, each array's zarr.json, and the chunks of the arrays that are written at once."""
    small = {
        PLAN: plan.to_json_bytes(),
        DOCUMENTS: table_bytes(documents),
        VOCABULARY: table_bytes(vocabulary),
    }
    files: Files = [(folder / name, (content,)) for name, content in small.items()]
    return [*files, *_array_files(folder / GROUP, attributes, plan, whole)]


def _array_files(
    group: Path, attributes: Attributes, plan: Plan, whole: Whole
) -> Iterator[tuple[Path, tuple[Any, ...]]]:
    compressor = attributes.storage.compressor
    for spec in [*specs_of(attributes, plan).values(), *(spec for spec, _ in whole)]:
        yield group / spec.name / "zarr.json", (readable(spec.to_metadata(compressor)),)
    for spec, values in whole:
        for index, row in enumerate(range(0, spec.shape[0], spec.chunks[0])):
            part = values[row : row + spec.chunks[0]]
            yield group / spec.key(index, *([0] * (len(spec.dims) - 1))), encode_chunk(part, spec, compressor)


def whole_arrays(
    layers: Sequence[int],
    d_model: int,
    affine: Mapping[str, np.ndarray],
    position_embedding: np.ndarray | None,
) -> list[tuple[ArraySpec, np.ndarray]]:
    """The small arrays that are written at once: layer numbers, norm parameters, positions."""
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


def check_agreement(
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
