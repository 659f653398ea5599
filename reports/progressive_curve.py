"""One layer replaced after the other: the curve of a progressive replacement, its sentence and its table.

In: the table `progressive`. Out: HTML of a figure and a table, and a sentence. Cost: one figure, one table.
"""

import polars as pl

from . import costs_findings, findings, text
from .axes import ends_of
from .costs_findings import harvested
from .figure import figure
from .multiples import curves, panel
from .results import Results
from .sections import grouping
from .tables import Column, Row, between, house, nats_columns, value

TENTH = 10.0
"""Percent of perplexity up to which the progressive curve is counted."""

_PROGRESSIVE = (
    "Layers are replaced one after the other, each at a step: in the <em>order</em> of their own cost, or "
    "each time the one that costs least beside those before it (<em>greedy</em>). The order is chosen on "
    "gate rows, the cost is of test rows, in nats a token; 95 % intervals for every step at once. Dashed: 0, "
    "the original. Nothing is trained in between."
)
_CURVES = {"order": "by their own cost", "greedy": "greedy"}


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
            found.append((cheap / mine.height, text.out_of(cheap, mine.height), where))
        how = _CURVES.get(chosen, text.name(chosen, 20))
        parts.append(f"{text.name(name, 24)}, {how}: {findings.over_stores(found)}")
    if not parts:
        return "Layers replaced one after the other"
    bound = f"{TENTH:g}\N{NO-BREAK SPACE}%"
    return f"Steps at which perplexity is up by less than {bound} for sure: {'; '.join(parts)}"


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


def progressive_figure(results: Results) -> str:
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
        *nats_columns("delta_nats", "delta_sim_lo", "delta_sim_hi", "cost [nats a token]", "simultaneous"),
        *nats_columns("added", "added_lo", "added_hi", "added by the step"),
        *nats_columns("excess", "excess_lo", "excess_hi", "more than the sum"),
        Column(costs_findings.WENT_LINEAR, value("linear_share", text.percent)),
        Column("MLP FLOPs saved", value("mlp_flops_saved", text.percent)),
    ]
    rows = harvested(results, "progressive").to_dicts()
    caption = progressive_finding(results)
    return house(rows, columns, key="table-progressive", caption=caption, group=grouping(results))
