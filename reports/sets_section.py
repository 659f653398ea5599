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
from .multiples import Panel, curves, panel
from .results import Results
from .sections import grouping
from .tables import Column, Row, between, house, value

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
_PROGRESSIVE = (
    "Layers are replaced one after the other, each at a step: in the <em>order</em> of their own cost, or "
    "each time the one that costs least beside those before it (<em>greedy</em>). The order is chosen on "
    "gate rows, the cost is of test rows, in nats a token; 95 % intervals for every step at once. Dashed: 0, "
    "the original. Nothing is trained in between."
)
_KINDS = {"cheapest": "the {n} cheapest layers", "paper": "the {n} cheapest on test rows (as in the paper)"}
_EVERY = "all {n} layers measured"
_CURVES = {"order": "by their own cost", "greedy": "greedy"}


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
    return (_EVERY if every else _KINDS[kind]).format(n=row["n_layers"])


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
    return f"that is more than the sum of each alone on {sure or 'none'} of {len(found)} corpora{rest}"


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


def progressive_finding(results: Results) -> str:
    """How many layers can be replaced one after the other before perplexity rises by a tenth."""
    rows = harvested(results, "progressive")
    parts = []
    for (name, chosen), frame in _by_curve(rows):
        found = []
        for at in range(len(results.stores)):
            mine = frame.filter(pl.col("series") == at)
            if mine.is_empty():
                continue
            where = findings.label(results, at, 40) if len(results.stores) > 1 else ""
            cheap = _cheap_steps(mine)
            found.append((cheap / mine.height, f"{cheap} of {mine.height}", where))
        how = _CURVES.get(chosen, text.name(chosen, 20))
        parts.append(f"{text.name(name, 24)}, {how}: {findings.over_stores(found)}")
    if not parts:
        return "Layers replaced one after the other"
    bound = f"{TENTH:g}\N{NO-BREAK SPACE}%"
    return f"Steps at which perplexity is up by less than {bound} for sure: {'; '.join(parts)}"


TENTH = 10.0
"""Percent of perplexity up to which the progressive curve is counted."""


def _cheap_steps(rows: pl.DataFrame) -> int:
    """Steps from the first on whose upper end stays below TENTH."""
    n = 0
    for high in rows.sort("step")["ppl_hi"].to_list():
        if high is None or not high < TENTH:
            break
        n += 1
    return n


def _by_curve(rows: pl.DataFrame) -> list[tuple[tuple[str, str], pl.DataFrame]]:
    curves_of = rows.select("name", "chosen").unique(maintain_order=True).rows()
    return [
        ((name, chosen), rows.filter((pl.col("name") == name) & (pl.col("chosen") == chosen)))
        for name, chosen in curves_of
    ]


def _progressive_figure(results: Results) -> str:
    panels = [
        panel(
            f"{text.name(name, 24)}, {_CURVES.get(chosen, text.name(chosen, 20))}",
            frame,
            "delta_nats",
            ("delta_sim_lo", "delta_sim_hi"),
            x="step",
        )
        for (name, chosen), frame in _by_curve(harvested(results, "progressive"))
    ]
    domain = ends_of(panels)
    cut = any(not one.frame.filter(pl.col("value") > domain[1] + 1e-9).is_empty() for one in panels)
    return figure(
        "progressive",
        results,
        progressive_finding(results),
        _PROGRESSIVE,
        lambda size: curves(
            panels,
            axes=("layers replaced [count]", "cost [nats a token]"),
            domain=domain,
            rule=0.0,
            columns=(2, 1),
            size=size,
        ),
        "Values beyond the axis are drawn on its edge." if cut else "",
    )


def compound_table(results: Results) -> str:
    """Every set: what it costs together, the sum of its layers, and the excess."""
    columns = [
        Column("replaced by", lambda row: text.name(row["name"], 28), number=False),
        Column("layers", lambda row: set_name(results, row), number=False),
        Column("change", value("ppl_pct", text.change), spanner="perplexity"),
        Column("95 % interval", between("ppl_lo", "ppl_hi", text.change_interval), spanner="perplexity"),
        *_nats("delta_nats", "delta_lo", "delta_hi", "together [nats a token]"),
        *_nats("sum_nats", "sum_lo", "sum_hi", "sum of each alone"),
        Column("more than the sum", verdicts.cell, number=False, markup=True),
        *_nats("excess", "excess_sim_lo", "excess_sim_hi", "excess", "simultaneous"),
        Column(costs_findings.WENT_LINEAR, value("linear_share", text.percent)),
        Column("tokens", value("n_tokens", text.count)),
        Column("groups", value("n_groups", text.count)),
    ]
    rows = harvested(results, "compound").to_dicts()
    return house(rows, columns, key="table-sets", caption=compound_finding(results), group=grouping(results))


def _nats(name: str, low: str, high: str, spanner: str, words: str = "95 % interval") -> list[Column]:
    return [
        Column("Δ", value(name, text.nats), spanner=spanner),
        Column(words, between(low, high, text.nats_interval), spanner=spanner),
    ]


def progressive_table(results: Results) -> str:
    """Every step of every curve."""

    def curve(row: Row) -> str:
        return f"{text.name(row['name'], 24)}, {_CURVES.get(row['chosen'], text.name(row['chosen'], 20))}"

    columns = [
        Column("step", value("step", text.count)),
        Column("curve", curve, number=False),
        Column("layer added", value("layer", str)),
        Column("change", value("ppl_pct", text.change), spanner="perplexity"),
        Column("95 % interval", between("ppl_lo", "ppl_hi", text.change_interval), spanner="perplexity"),
        *_nats("delta_nats", "delta_sim_lo", "delta_sim_hi", "cost [nats a token]", "simultaneous"),
        *_nats("added", "added_lo", "added_hi", "added by the step"),
        *_nats("excess", "excess_lo", "excess_hi", "more than the sum"),
        Column(costs_findings.WENT_LINEAR, value("linear_share", text.percent)),
        Column("MLP FLOPs saved", value("mlp_flops_saved", text.percent)),
    ]
    rows = harvested(results, "progressive").to_dicts()
    caption = progressive_finding(results)
    return house(rows, columns, key="table-progressive", caption=caption, group=grouping(results))


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
        parts += [_progressive_figure(results), numbers("Every step", progressive_table(results))]
    return section(KEY, HEADING, *parts) if parts else ""
