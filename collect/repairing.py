"""Repair a store: what is damaged is made again from its model and corpus, and must be what it was.

In: a sealed store with damage; its model and corpus, by name or alive. Out: the store whole again, or a
refusal that changes nothing. Metadata follows from the settings, so only the very bytes of the seal will do.
A block that comes out with the same bytes is put back, and nothing is recorded: the store is as it was
sealed. A block that comes out with other bytes, because another machine rounds otherwise, is accepted where
`likeness` says that it is the same block; then the whole block is replaced, so that its rows are of one run,
the store is sealed anew, and its lineage says so. Cost: one read of the store, then that of collecting the
damaged blocks; disk space for these once more meanwhile.
"""

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..store import durable
from ..store.attributes import Attributes
from ..store.errors import DamageError, UsageError
from ..store.finding import check_there, store_folder
from ..store.folder import (
    GROUP,
    PLAN,
    RUNS,
    parse_group,
    parse_plan,
    show_numbers,
)
from ..store.manifest import MANIFEST, SEALED, FileRecord, Manifest
from ..store.own import check_links
from ..store.parsing import parse_json, readable
from ..store.plan import Plan
from ..store.progress import Progress, silent
from ..store.reader import Reader
from ..store.records import record_name
from ..store.replacing import finish_replacing
from ..store.sealing import seal
from .corpora import Corpus
from .damage import Anchor, Damage, anchor_of, find_damage, is_intact
from .likeness import require_alike
from .models import LoadedModel
from .ranks import Ranks, only_one
from .resealing import record_of, replace_block
from .twin import Twin, make_twin

ROOT = f"{GROUP}/zarr.json"
SCRATCH = f"{RUNS}/repairing"


@dataclass(frozen=True, slots=True)
class Repaired:
    """`files`: those that were damaged; `blocks`: those collected again; `changed`: those among them whose
    bytes are others now, with the largest relative error that was found on the way; `parent`: the digest of
    the seal before, where that is another one now."""

    path: Path
    digest: str
    parent: str | None
    files: tuple[str, ...]
    blocks: tuple[int, ...]
    changed: tuple[int, ...]
    largest_error: float | None
    note: str


def repair(
    store: str | Path,
    *,
    model: str | LoadedModel | None = None,
    corpus: str | Corpus | None = None,
    progress: Progress = silent,
) -> Repaired:
    """Find the damage of a sealed store and undo it. `model` and `corpus`: where they are now; default: as
    the store names them."""
    check_there(store)
    folder = store_folder(store)
    check_links(folder)  # what lies in the scratch folder is removed
    with only_one(folder, Ranks()):
        finish_replacing(folder)
        seals = _seals(folder)
        anchor = anchor_of(folder)
        damage = find_damage(folder, anchor.manifest, progress)
        mended = Mended(_names(damage))
        _put_back_from_within(folder, anchor.manifest, damage)
        scratch = folder / SCRATCH
        try:
            shutil.rmtree(scratch, ignore_errors=True)  # of a repair that was interrupted
            if damage:
                known = _identity(folder, damage)
                twin = make_twin(folder, scratch, *known, damage.blocks, model, corpus, progress)
                _mend(folder, anchor, damage, twin, mended)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        digest = seal(folder)  # compares the small files with the seal; rebuilds it where it alone was lost
        if not mended.errors:
            mended.files.update(name for name, content in _seals(folder).items() if content != seals[name])
    changed, parent = list(mended.errors), anchor.digest if mended.errors else None
    return Repaired(
        path=folder,
        digest=digest,
        parent=parent,
        files=tuple(sorted(mended.files)),
        blocks=tuple(damage.blocks),
        changed=tuple(changed),
        largest_error=max(mended.errors.values(), default=None),
        note=_note(len(mended.files), damage.blocks, changed),
    )


def _seals(folder: Path) -> dict[str, bytes | None]:
    """SEALED and manifest.json as they are: each can be made anew from the other one and the rest."""
    paths = {name: folder / name for name in (SEALED, MANIFEST)}
    return {name: path.read_bytes() if path.is_file() else None for name, path in paths.items()}


@dataclass(slots=True)
class Mended:
    """Damaged files by name, and the largest error of each block that has other bytes now."""

    files: set[str]
    errors: dict[int, float] = field(default_factory=dict)


def _names(damage: Damage) -> set[str]:
    chunks = {f"{GROUP}/{key}" for keys in damage.chunks.values() for key in keys}
    return {*damage.files, *map(record_name, damage.records), *chunks}


def _note(n_files: int, blocks: list[int], changed: list[int]) -> str:
    if not n_files:
        return "nothing to do: every file is what was sealed"
    files = f"{n_files} file{'s' * (n_files > 1)}"
    again = f", block{'s' * (len(blocks) > 1)} {show_numbers(blocks)} collected again" if blocks else ""
    if not changed:
        return f"{files} put back{again}: the store is as it was sealed"
    have = "s {} have" if len(changed) > 1 else " {} has"
    return (
        f"{files} damaged{again}; block{have.format(show_numbers(changed))} other bytes now (values within "
        "the proof's tolerance), so the store is sealed anew and its lineage says so"
    )


def _identity(folder: Path, damage: Damage) -> tuple[Attributes | None, Plan | None]:
    """The attributes, which say what to collect, and the plan; None for what is damaged."""
    if ROOT in damage.files:
        return None, None
    attributes = parse_group((folder / ROOT).read_bytes(), str(folder / ROOT))
    if any(entry["kind"] == "selection" for entry in attributes.lineage):
        raise UsageError(f"{folder} is a part of another store: `nearline pull` it again from there")
    if PLAN in damage.files:
        return attributes, None
    return attributes, parse_plan((folder / PLAN).read_bytes(), attributes, str(folder / PLAN))


def _put_back_from_within(folder: Path, manifest: Manifest, damage: Damage) -> None:
    """Metadata of arrays stands twice in a sealed store: the root's copy needs no model."""
    if ROOT in damage.files or not damage.files:
        return
    group: Any = parse_json((folder / ROOT).read_bytes(), str(folder / ROOT))
    copies = group["consolidated_metadata"]["metadata"]  # of the form that was sealed
    found = {f"{GROUP}/{name}/zarr.json": readable(data) for name, data in copies.items()}
    good = {
        name: found[name]
        for name in damage.files & set(found)
        if FileRecord.of(found[name]) == manifest.files[name]
    }
    durable.write_files(((folder / name, (content,)) for name, content in good.items()), folder)
    damage.files -= set(good)


def _mend(folder: Path, anchor: Anchor, damage: Damage, twin: Twin, mended: Mended) -> None:
    """Decide everything, then write."""
    files = {name: twin.content(name) for name in damage.files}
    for name, content in files.items():
        if content is None or FileRecord.of(content) != anchor.manifest.files[name]:
            raise DamageError(
                f"{folder / name} cannot be made again with the bytes that were sealed (its model, corpus or "
                "library versions are not what they were); nothing was changed, restore it from a copy"
            )
    new, same = Reader.open(twin.path, require_seal=False), dict[int, list[str]]()
    for block in damage.blocks:
        names = _same_files(folder, anchor.manifest, damage, block, new)
        if names is not None:
            same[block] = names
            mended.files |= set(names)
            continue
        if anchor.digest is None:
            raise DamageError(f"{folder}: {SEALED} and block {block} are damaged; restore it from a copy")
        record = None if block in damage.records else record_of(folder, block, new)
        bad = damage.chunks.get(block, set())
        mended.errors[block] = require_alike(folder, block, record, bad, new, twin.routes_from)
    durable.write_files(((folder / name, (content,)) for name, content in files.items() if content), folder)
    for names in same.values():  # chunk objects, then their record
        durable.write_files(((folder / name, ((twin.path / name).read_bytes(),)) for name in names), folder)
    for block in mended.errors:
        assert anchor.digest is not None
        replace_block(folder, anchor.digest, block, new)


def _same_files(
    folder: Path, manifest: Manifest, damage: Damage, block: int, new: Reader
) -> list[str] | None:
    """Damaged files of a block, by name, if the new ones are the very same; None if any is not."""
    name, record = record_name(block), new.record(block)
    if block not in damage.records:
        known = record_of(folder, block, new).chunks
        keys = damage.chunks[block]
        same = all(record.chunks[key].digest == known[key].digest for key in keys)
        return [f"{GROUP}/{key}" for key in sorted(keys)] if same else None
    if FileRecord.of((Path(new.path) / name).read_bytes()) != manifest.files[name]:
        return None
    keys = {key for key, chunk in record.chunks.items() if not is_intact(folder, key, chunk.digest)}
    return [*(f"{GROUP}/{key}" for key in sorted(keys)), name]
