"""What the token columns of one block promise, checked against the plan.

In: the columns of a block as stored, the plan and the facts of the store. Out: sentences about the first row
that breaks each promise. Pure numpy on a few small arrays; cost: a few passes over 31 bytes a row.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Shaped

from .attributes import Attributes
from .layout import TOKEN_COLUMNS
from .plan import Plan

Columns = Mapping[str, Shaped[np.ndarray, " token"]]


class Broken(NamedTuple):
    """A promise that rows of a block break."""

    column: str
    row: int  # of the block, the first one
    text: str


def broken_columns(columns: Columns, plan: Plan, attributes: Attributes, block: int) -> list[Broken]:
    """Every promise that the columns break; those that are absent (unreadable) are left out."""
    checks = (_flags, _against_plan, _sequence, _tokens, _targets, _losses)
    return [broken for check in checks for broken in check(columns, plan, attributes, block)]


def is_selection(attributes: Attributes) -> bool:
    """The store keeps the sequence numbers of a larger one."""
    return any(entry.get("kind") == "selection" for entry in attributes.lineage)


def _flags(columns: Columns, plan: Plan, attributes: Attributes, block: int) -> Iterator[Broken]:
    for name, (dtype, _) in TOKEN_COLUMNS.items():
        if dtype.kind == "b" and name in columns:
            bits = columns[name].view(np.uint8)
            yield from _first(name, bits > 1, lambda row, bits=bits: f"holds {bits[row]}, not 0 or 1")


def _against_plan(columns: Columns, plan: Plan, attributes: Attributes, block: int) -> Iterator[Broken]:
    sequences = plan.sequences_of(block)
    lengths = plan.length[sequences.start : sequences.stop]
    starts = np.cumsum(lengths) - lengths
    expected = {
        "position": np.arange(lengths.sum()) - np.repeat(starts, lengths),
        "document": np.repeat(plan.document[sequences.start : sequences.stop], lengths),
        "split": np.full(lengths.sum(), plan.block_split[block]),
    }
    if not is_selection(attributes):
        expected["sequence"] = np.repeat(np.arange(sequences.start, sequences.stop), lengths)
    for name, right in expected.items():
        if name in columns:
            found = columns[name]
            yield from _first(
                name,
                found != right,
                lambda row, found=found, right=right: f"is {found[row]}, the plan says {right[row]}",
            )


def _sequence(columns: Columns, plan: Plan, attributes: Attributes, block: int) -> Iterator[Broken]:
    """Of a selection: one number a sequence, growing inside a block."""
    if "sequence" not in columns or not is_selection(attributes):
        return
    found, inside = columns["sequence"], _inside(plan, block)
    step = np.diff(found)
    yield from _first("sequence", inside & (step != 0), lambda row: "changes inside a sequence of the plan")
    yield from _first(
        "sequence", ~inside & (step <= 0), lambda row: "does not grow from sequence to sequence"
    )


def _tokens(columns: Columns, plan: Plan, attributes: Attributes, block: int) -> Iterator[Broken]:
    if "token_id" not in columns:
        return
    found = columns["token_id"]
    yield from _first("token_id", found < 0, lambda row: f"is {found[row]}, which is no token id")
    sequences = plan.sequences_of(block)
    lengths = plan.length[sequences.start : sequences.stop]
    opens = np.zeros(len(found), bool)
    opens[(np.cumsum(lengths) - lengths)[plan.bos[sequences.start : sequences.stop]]] = True
    yield from _first(
        "token_id",
        opens & (found != (plan.bos_id if plan.bos_id is not None else -1)),
        lambda row: f"is {found[row]} where the plan puts the BOS, {plan.bos_id}",
    )
    if "special" in columns:
        right = np.isin(found, np.asarray(attributes.tokenizer.special_ids, np.int32))
        yield from _first(
            "special",
            columns["special"] != right,
            lambda row: f"is {bool(columns['special'][row])} for token id {found[row]}",
        )


def _targets(columns: Columns, plan: Plan, attributes: Attributes, block: int) -> Iterator[Broken]:
    if "target_id" not in columns:
        return
    found = columns["target_id"]
    yield from _first("target_id", found < -1, lambda row: f"is {found[row]}, which is no token id")
    if "token_id" in columns:
        following = columns["token_id"][1:]
        yield from _first(
            "target_id",
            _inside(plan, block) & (found[:-1] != following),
            lambda row: f"is {found[row]}, the next token of the sequence is {following[row]}",
        )


def _losses(columns: Columns, plan: Plan, attributes: Attributes, block: int) -> Iterator[Broken]:
    if not {"nll", "target_id", "valid"} <= set(columns):
        return
    nll, has_target, valid = columns["nll"], columns["target_id"] != -1, columns["valid"]
    yield from _first(
        "nll",
        valid & (np.isnan(nll) == has_target),
        lambda row: (
            f"is {nll[row]} where `target_id` is {columns['target_id'][row]}: it must be NaN exactly "
            "where that is -1"
        ),
    )
    yield from _first("nll", valid & np.isinf(nll), lambda row: f"is {nll[row]} where `valid` is true")


def _inside(plan: Plan, block: int) -> Bool[np.ndarray, " gap"]:
    """Between row i and i + 1 of a block: both are of one sequence."""
    sequences = plan.sequences_of(block)
    found = np.ones(int(plan.block_rows[block]), bool)
    found[np.cumsum(plan.length[sequences.start : sequences.stop]) - 1] = False
    return found[:-1]


def _first(column: str, wrong: np.ndarray, text: Callable[[int], str]) -> Iterator[Broken]:
    """The first row that is wrong, and how many more are."""
    rows = np.flatnonzero(wrong)
    if rows.size:
        row = int(rows[0])
        more = f" (and {rows.size - 1} rows more)" if rows.size > 1 else ""
        yield Broken(column, row, f"{text(row)}{more}")
