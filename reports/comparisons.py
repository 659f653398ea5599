"""Paired differences between gates: which were made, their verdicts and their table.

In: the table `gate_differences`. Out: frames and HTML tables; the sections on gates and on token and
context show one half each. Cost: milliseconds a table.
"""

from collections.abc import Mapping, Sequence

import polars as pl

from . import findings, text, verdicts
from .results import Results
from .sections import LAYER, NEED, grouping, ordered
from .tables import Column, Row, between, house, value


def of(results: Results) -> list[tuple[str, pl.DataFrame]]:
    """Claims in the order of the table and, for the need that is drawn, their rows."""
    _, rows = results.first("gate_differences")
    names = rows["claim"].unique(maintain_order=True).to_list()
    return [(name, rows.filter(pl.col("claim") == name)) for name in names]


def _positive(row: Mapping[str, object]) -> bool:
    difference = row["difference"]
    return isinstance(difference, float) and difference > 0


def verdict_table(results: Results, found: Sequence[tuple[str, pl.DataFrame]], key: str) -> str:
    """Counts of verdicts, claim by claim and store by store."""
    several = len(results.stores) > 1
    families = [
        ({"claim": text.name(claim, 60)} | ({"corpus": findings.label(results, at)} if several else {}), rows)
        for claim, frame in found
        for at in range(len(results.stores))
        if not (rows := frame.filter(pl.col("series") == at)).is_empty()
    ]
    caption = "Verdicts on differences of AUC"
    group = "claim" if several else None
    return verdicts.table(families, key=key, caption=caption, group=group, above=_positive)


def table(results: Results, claims: Sequence[str], key: str, caption: str) -> str:
    """The differences of some claims, every layer and need."""
    columns = [
        LAYER,
        NEED,
        Column("compared", lambda row: f"{_gate(row['larger'])} − {_gate(row['smaller'])}", number=False),
        Column("verdict", verdicts.cell, number=False, markup=True),
        Column("larger", value("auc_larger"), spanner="AUC"),
        Column("smaller", value("auc_smaller"), spanner="AUC"),
        Column("", value("difference"), spanner="difference"),
        Column("95 % interval", between("lo", "hi"), spanner="difference"),
        Column("simultaneous", between("sim_lo", "sim_hi"), spanner="difference"),
        Column("difference", value("within"), spanner="within one token"),
        Column("simultaneous", between("within_sim_lo", "within_sim_hi"), spanner="within one token"),
        Column("p (Holm)", value("p_holm", text.p_value)),
        Column("tokens", value("n_tokens", text.count)),
        Column("groups", value("n_groups", text.count)),
    ]
    rows = ordered(results, "gate_differences").filter(pl.col("claim").is_in(list(claims))).to_dicts()
    return house(rows, columns, key=key, caption=caption, group=grouping(results))


def _gate(stored: Row | str) -> str:
    """A gate of the table, features@size, by its features where it is a linear one."""
    return text.name(str(stored).removesuffix("@linear"), 28)
