"""Shortening an unfinished store to its first blocks, so that it can be sealed without the rest.

In: a store folder in which at least the first block of every split is committed. Out: the same folder as a
whole smaller store: its plan, tables and metadata are those of a harvest that had been planned so, and the
attributes say what it was cut from. All of it happens together or not at all. Cost: the token ids of what
stays are read, the small files are written again; no activation is touched.
"""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path

from .attributes import Attributes, PlanFacts
from .disk import held
from .errors import UsageError
from .folder import (
    CARD,
    DOCUMENTS,
    GROUP,
    PLAN,
    RUNS,
    VOCABULARY,
    chunk_keys,
    committed_blocks,
    load_record,
    parse_group,
    parse_plan,
    read_small,
    show_numbers,
    specs_of,
)
from .manifest import MANIFEST, SEALED
from .metadata import group_json
from .parsing import readable
from .plan import SPLITS, Plan
from .reader import Reader
from .records import FOLDER as BLOCKS
from .records import LOCKED, record_name
from .replacing import finish_replacing, replace_together
from .resuming import checked_blocks
from .smaller import smaller_documents, smaller_plan, smaller_vocabulary
from .tables import table_bytes

ROOT = f"{GROUP}/zarr.json"


def shorten(folder: Path, drop_blocks: bool = False) -> int:
    """Cut an unsealed store to the blocks before the first missing one; the token rows that it has then.

    Committed blocks behind the gap have cost a model's work: they are removed only with `drop_blocks`.
    """
    finish_replacing(folder)
    root = read_small(folder, ROOT)
    attributes = parse_group(root, str(folder / ROOT))
    plan = parse_plan(read_small(folder, PLAN), attributes, str(folder / PLAN))
    _check_idle(folder)
    n_blocks = _prefix(committed := checked_blocks(folder, attributes, plan))
    if n_blocks == plan.n_blocks:
        return plan.n_tokens
    _check_splits(folder, plan, n_blocks)
    if (behind := {block for block in committed if block > n_blocks}) and not drop_blocks:
        n_rows = sum(int(plan.block_rows[block]) for block in behind)
        raise UsageError(
            f"{folder}: {len(behind)} committed blocks ({show_numbers(behind)}; {n_rows:,} token rows) stand "
            f"behind the first missing one ({n_blocks}) and would be removed for good; collect what is "
            "missing, or add --drop-blocks (drop_blocks=True)"
        )
    cut = smaller_plan(plan, range(n_blocks))
    marked = _shortened(attributes, plan, cut)
    files = {
        PLAN: cut.to_json_bytes(),
        ROOT: group_json(marked.to_dict()),
        **_tables(folder, cut),
        **_array_metadata(marked, cut),
        **_records(folder, attributes, plan, cut),
    }
    check = functools.partial(_check_unchanged, folder, root, committed)
    replace_together(folder, files, _beyond(folder, attributes, plan, n_blocks), check)
    return cut.n_tokens


def _shortened(attributes: Attributes, plan: Plan, cut: Plan) -> Attributes:
    """The attributes under the shorter plan, with a note of the one that the harvest had."""
    entry = {
        "kind": "shortened",
        "planned_tokens": plan.n_tokens,
        "planned_blocks": plan.n_blocks,
        "planned_digest": plan.digest,
    }
    return dataclasses.replace(
        attributes,
        plan=PlanFacts.of(cut, attributes.plan.bos),
        lineage=(*attributes.lineage, entry),
    )


def _prefix(committed: set[int]) -> int:
    return next(block for block in range(len(committed) + 1) if block not in committed)


def _check_idle(folder: Path) -> None:
    """A collector that still runs would commit blocks of the longer plan."""
    for path in sorted([*(folder / RUNS).glob("*.lock"), *(folder / BLOCKS).glob(f"*{LOCKED}")]):
        if held(path):
            raise UsageError(f"a collector is at work on {folder} ({path.name}); stop it first")


def _check_unchanged(folder: Path, root: bytes, committed: set[int]) -> None:
    """Another `seal --partial`, or a collector that has finished by now, may have been faster."""
    _check_idle(folder)
    same = read_small(folder, ROOT) == root and committed_blocks(folder) == committed
    if not same or (folder / SEALED).exists():
        raise UsageError(f"{folder} was changed by another process meanwhile; nothing was shortened")


def _check_splits(folder: Path, plan: Plan, n_blocks: int) -> None:
    have = {plan.split_of(block) for block in range(n_blocks)}
    if lacking := [split for split in SPLITS if split not in have]:
        committed = show_numbers(committed_blocks(folder)) or "none"
        raise UsageError(
            f"{folder}: the blocks before the first missing one ({n_blocks}; committed: {committed}) hold "
            f"nothing of {' and '.join(lacking)}; a store needs all of {', '.join(SPLITS)}: "
            "run the same `nearline collect` command further"
        )


def _tables(folder: Path, cut: Plan) -> dict[str, bytes]:
    """The documents, with what is held of each now, and the ids that still occur."""
    reader = Reader.open(folder, require_seal=False)
    documents, vocabulary = smaller_documents(reader, cut), smaller_vocabulary(reader, range(cut.n_blocks), 1)
    return {DOCUMENTS: table_bytes(documents), VOCABULARY: table_bytes(vocabulary)}


def _array_metadata(attributes: Attributes, cut: Plan) -> dict[str, bytes]:
    compressor = attributes.storage.compressor
    return {
        f"{GROUP}/{spec.name}/zarr.json": readable(spec.to_metadata(compressor))
        for spec in specs_of(attributes, cut).values()
    }


def _records(folder: Path, attributes: Attributes, plan: Plan, cut: Plan) -> Mapping[str, bytes]:
    """The records of the blocks that stay, as blocks of the shorter plan."""
    specs, found = specs_of(attributes, plan), {}
    for name, block in ((record_name(block), block) for block in range(cut.n_blocks)):
        record = load_record(read_small(folder, name), plan, specs, block, str(folder / name))
        found[name] = dataclasses.replace(record, plan=cut.digest).to_bytes()
    return found


def _beyond(folder: Path, attributes: Attributes, plan: Plan, n_blocks: int) -> list[str]:
    """What belongs to the blocks that go; and what a seal that was interrupted had written."""
    specs = specs_of(attributes, plan)
    names = [MANIFEST, CARD]
    for block in range(n_blocks, plan.n_blocks):
        names += [record_name(block), *(f"{GROUP}/{key}" for key in chunk_keys(specs, block))]
    return [name for name in names if (folder / name).exists()]
