"""What a selection says of itself: plan, attributes and tables of a smaller store, out of its parent's.

In: the parent's reader and the choice. Out: the same facts cut down to the chosen layers, sites and blocks;
the attributes gain an entry of lineage that names the parent. Cost: O(sequences) and O(documents); the token
columns of the chosen blocks are read for the counts of the vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Int

from .attributes import Attributes, NormFacts, PlanFacts
from .carrying import in_parallel
from .dtypes import GRADIENT
from .errors import DamageError
from .folder import DOCUMENTS, VOCABULARY, specs_of
from .metadata import ArraySpec
from .plan import Plan
from .reader import Reader


@dataclass(frozen=True, slots=True)
class Selection:
    """What is taken of a parent: model layers, sites, splits, and blocks by the parent's numbers."""

    layers: tuple[int, ...]
    sites: tuple[str, ...]
    splits: tuple[str, ...]
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Smaller:
    """The definition of the store that a selection makes."""

    chosen: Selection
    plan: Plan
    attributes: Attributes
    specs: dict[str, ArraySpec]
    index: list[int]  # of the chosen layers among the parent's

    @classmethod
    def of(cls, reader: Reader, chosen: Selection) -> "Smaller":
        plan = smaller_plan(reader.plan, chosen.blocks)
        index = [reader.layers.index(layer) for layer in chosen.layers]
        attributes = smaller_attributes(reader, plan, chosen)
        return cls(chosen, plan, attributes, specs_of(attributes, plan), index)


def smaller_plan(plan: Plan, blocks: Sequence[int]) -> Plan:
    """The plan of these blocks alone: sequences, batches and blocks are renumbered, their order stays."""
    taken = np.isin(plan.sequence_block, blocks)
    columns: dict[str, Any] = {
        name: getattr(plan, name)[taken] for name in ("document", "start", "length", "bos")
    }
    smaller = replace(
        plan,
        n_tokens=int(plan.block_rows[list(blocks)].sum(dtype=np.int64)),
        **columns,
        sequence_batch=_renumber(plan.sequence_batch[taken]),
        sequence_block=_renumber(plan.sequence_block[taken]),
        block_split=plan.block_split[list(blocks)],
        block_rows=plan.block_rows[list(blocks)],
    )
    smaller.validate("selection")
    return smaller


def smaller_attributes(reader: Reader, plan: Plan, chosen: Selection) -> Attributes:
    """The parent's attributes, cut to the chosen layers and sites, with one more entry of lineage."""
    parent = reader.attributes
    index = [reader.layers.index(layer) for layer in chosen.layers]
    norm: dict[str, Any] = {
        field.name: tuple(getattr(parent.norm, field.name)[i] for i in index) for field in fields(NormFacts)
    }
    exponents = parent.storage.gradient_exponents
    kept = bool(exponents) and GRADIENT in chosen.sites
    exponents = tuple(exponents[i] for i in index) if kept else ()
    entry = {
        "kind": "selection",
        "parent": reader.digest,
        "parent_plan": reader.plan.digest,
        "layers": list(chosen.layers),
        "sites": list(chosen.sites),
        "splits": list(chosen.splits),
        "tokens": plan.n_tokens,
    }
    return replace(
        parent,
        plan=PlanFacts.of(plan, parent.plan.bos),
        norm=NormFacts(**norm),
        storage=replace(
            parent.storage, sites=chosen.sites, layers=chosen.layers, gradient_exponents=exponents
        ),
        lineage=(*parent.lineage, entry),
    )


def smaller_documents(reader: Reader, plan: Plan) -> pa.Table:
    """Every document of the parent; what is stored of it here, and what is not."""
    table, parent = reader.documents, reader.plan
    if int(parent.document.max()) >= table.num_rows:
        raise DamageError(f"{reader.path}: the plan names more documents than {DOCUMENTS} has")
    rows, stored, before = (
        np.bincount(of.document, weights=of.length - drop, minlength=table.num_rows).astype(np.int64)
        for of, drop in ((plan, 0), (plan, plan.bos), (parent, parent.bos))
    )
    columns = {
        "n_tokens": pa.array(rows, pa.int32()),
        "n_dropped": pa.array(table["n_dropped"].to_numpy() + before - stored, pa.int32()),
    }
    for name, column in columns.items():
        table = table.set_column(table.schema.get_field_index(name), name, column)
    return table


def smaller_vocabulary(reader: Reader, blocks: Sequence[int], n_threads: int) -> pa.Table:
    """The ids that occur in these blocks as token or target; the count is of rows whose token it is."""
    table = reader.vocabulary
    counts: dict[int, int] = {}
    found: list[tuple[np.ndarray, np.ndarray]] = []
    in_parallel(
        lambda block: found.append(
            (reader.column_block("token_id", block), reader.column_block("target_id", block))
        ),
        blocks,
        n_threads,
    )
    for tokens, targets in found:
        for token, count in zip(
            *(part.tolist() for part in np.unique(tokens, return_counts=True)), strict=True
        ):
            counts[token] = counts.get(token, 0) + count
        counts |= {token: counts.get(token, 0) for token in np.unique(targets[targets >= 0]).tolist()}
    ids: list[int] = table["token_id"].to_pylist()
    if unknown := sorted(set(counts) - set(ids)):
        raise DamageError(f"{reader.path}: token id {unknown[0]} occurs in rows, but not in {VOCABULARY}")
    table = table.filter(pa.array([token in counts for token in ids], pa.bool_()))
    column = pa.array([counts[token] for token in ids if token in counts], pa.int64())
    return table.set_column(table.schema.get_field_index("count"), "count", column)


def _renumber(numbers: Int[np.ndarray, " entry"]) -> Int[np.ndarray, " entry"]:
    """Increasing numbers with gaps as increasing numbers without."""
    return np.unique(numbers, return_inverse=True)[1].astype(np.int32)
