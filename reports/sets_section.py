"""Section "What do several layers cost together?": sets of layers, and one layer after the other.

In: the tables `compound` and `progressive`. Out: HTML, empty without either. Cost: two figures, two tables.
"""

from typing import Any

import polars as pl

from . import costs_findings, dots, findings, text, verdicts
from .axes import ends_of
from .costs_findings import harvested
from .figure import figure
from .layout import numbers, section
from .multiples import Panel
from .progressive_curve import progressive_figure, progressive_table
from .results import Results
from .sections import grouping
from .tables import Column, Row, between, house, nats_columns, value

KEY, HEADING = "sets", "What do several layers cost together?"
MOST = 10
"""Sets that are drawn; all of them are in the table."""

_SETS = (
    "What a set of layers costs when it is replaced together, in nats a token with 95 % intervals, and the "
    "sum of what its layers cost one by one. Dashed: 0, the original. Where the first lies above the second, "
    "costs do not add up: each layer makes the next one worse. <em>cheapest</em>: the layers that cost least "
    "on gate rows; <em>paper</em>: on the very test rows that are scored, as in the paper, so without a "
    "verdict."
)
_KINDS = {"cheapest": "the {n} cheapest layers", "paper": "the {n} cheapest on test rows (as in the paper)"}


def set_name(results: Results, row: Row) -> str:
    """What a set is called: how it was chosen, and its layers."""
    kind = str(row["chosen"]).partition("@")[0]
    layers = text.layers([int(layer) for layer in str(row["layers"]).split(",") if layer.isdecimal()])
    if row["chosen"] == "all":
        return f"all of {layers}"
    return f"{_chosen(results, row)}: {layers}" if kind in _KINDS else layers


def _chosen(results: Results, row: Row) -> str:
    """`the 5 cheapest layers`: as many as were taken, which are all there were where fewer were measured than
    asked for.
    """
    kind, _, asked = str(row["chosen"]).partition("@")
    there = costs_findings.of_name(results, row["name"]) if results.has("interventions") else pl.DataFrame()
    mine = 0 if there.is_empty() else there.filter(pl.col("series") == row["series"])["layer"].n_unique()
    every = row["n_layers"] == mine or (asked.isdecimal() and row["n_layers"] < int(asked))
    if every:
        return f"{text.every(row['n_layers'], 'layers')} measured"
    return _KINDS[kind].format(n=row["n_layers"])


def compound_finding(results: Results) -> str:
    """What the cheapest layers cost together, store by store, and whether that is more than their sum."""
    rows = harvested(results, "compound")
    mine = rows.filter(
        pl.col("chosen").str.starts_with("cheapest@") & (pl.col("name") == costs_findings.LINEAR)
    )
    mine = mine if not mine.is_empty() else rows
    first = mine.group_by("series", maintain_order=True).first()
    parts = []
    for row in first.to_dicts():
        where = findings.label(results, row["series"], 40) if len(results.stores) > 1 else ""
        parts.append((row["ppl_pct"] or 0.0, f"{costs_findings.changed(row)} of perplexity", where))
    if not parts:
        return "Sets of layers replaced together"
    row = first.row(0, named=True)
    return f"{_head(results, row)} cost {findings.over_stores(parts)}; {_excess(results, mine)}"


def _head(results: Results, row: Row) -> str:
    kind = str(row["chosen"]).partition("@")[0]
    found = _chosen(results, row) if kind == "cheapest" else "the layers of the first set"
    what = found[0].upper() + found[1:]
    by = "their linear maps" if row["name"] == costs_findings.LINEAR else text.name(row["name"], 28)
    return f"{what}, replaced together by {by},"


def _excess(results: Results, rows: pl.DataFrame) -> str:
    """Where the cost of the first set is above the sum of the single costs for sure."""
    first = rows.group_by("series", maintain_order=True).first()
    found = first["verdict"].to_list()
    if len(found) == 1:
        words = {
            "supported": "that is more than the sum of what each costs alone",
            "not supported": "that is less than the sum of what each costs alone",
        }
        return words.get(
            str(found[0]), f"whether that is more than the sum of each alone: {text.name(found[0], 40)}"
        )
    sure = found.count("supported")
    counts = [f"{word} on {found.count(word)}" for word in dict.fromkeys(found) if word != "supported"]
    rest = f" ({', '.join(text.name(one, 40) for one in counts)})" if counts else ""
    return f"that is more than the sum of each alone on {text.out_of(sure, len(found), 'corpora')}{rest}"


def _compound_figure(results: Results) -> str:
    several = len(results.stores) > 1
    shown = harvested(results, "compound").to_dicts()[:MOST]
    points: list[dict[str, Any]] = []
    for number, row in enumerate(shown):
        where = f", {findings.label(results, row['series'], 30)}" if several else ""
        name = f"{text.name(row['name'], 24)} in {set_name(results, row)}{where}"
        measured = {"value": row["delta_nats"], "lo": row["delta_lo"], "hi": row["delta_hi"]}
        added = {"value": row["sum_nats"], "lo": row["sum_lo"], "hi": row["sum_hi"]}
        points += [
            {"row": number, "name": text.name(name, 110), "series": series, **one}
            for series, one in enumerate((measured, added))
        ]
    schema = {"row": pl.Int64, "name": pl.String, "series": pl.Int64}
    frame = pl.DataFrame(points, schema=schema | dict.fromkeys(("value", "lo", "hi"), pl.Float64))
    domain = ends_of([Panel("", frame)])
    cut = not frame.filter(~pl.col("value").is_between(*domain)).is_empty()
    more = len(harvested(results, "compound")) - len(shown)
    notes = ["Values beyond the axis are drawn on its edge."] if cut else []
    notes += [f"{more} more sets are in the table."] if more > 0 else []
    return figure(
        "sets",
        results,
        compound_finding(results),
        _SETS,
        lambda size: dots.by_name(frame, axis="cost [nats a token]", domain=domain, rule=0.0, size=size),
        " ".join(notes),
        labels=["replaced together", "sum of each alone"],
    )


def compound_table(results: Results) -> str:
    """Every set: what it costs together, the sum of its layers, and the excess."""
    columns = [
        Column("replaced by", lambda row: text.name(row["name"], 28), number=False),
        Column("layers", lambda row: set_name(results, row), number=False),
        Column("change", value("ppl_pct", text.change), spanner="perplexity"),
        Column("95 % interval", between("ppl_lo", "ppl_hi", text.change_interval), spanner="perplexity"),
        *nats_columns("delta_nats", "delta_lo", "delta_hi", "together [nats a token]"),
        *nats_columns("sum_nats", "sum_lo", "sum_hi", "sum of each alone"),
        Column("more than the sum", verdicts.cell, number=False, markup=True),
        *nats_columns("excess", "excess_sim_lo", "excess_sim_hi", "excess", "simultaneous"),
        Column(costs_findings.WENT_LINEAR, value("linear_share", text.percent)),
        Column("tokens", value("n_tokens", text.count)),
        Column("groups", value("n_groups", text.count)),
    ]
    rows = harvested(results, "compound").to_dicts()
    return house(rows, columns, key="table-sets", caption=compound_finding(results), group=grouping(results))


def is_there(results: Results) -> bool:
    """Whether there is anything to show."""
    return results.has("compound") or results.has("progressive")


def answers(results: Results) -> list[str]:
    """The sentence on the first set."""
    return [compound_finding(results)] if results.has("compound") else []


def render(results: Results) -> str:
    """The section; nothing where no set of layers was measured."""
    parts: list[str] = []
    if results.has("compound"):
        parts += [_compound_figure(results), numbers("Every set of layers", compound_table(results))]
    if results.has("progressive"):
        parts += [progressive_figure(results), numbers("Every step", progressive_table(results))]
    return section(KEY, HEADING, *parts) if parts else ""
