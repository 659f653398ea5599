"""Share of linear tokens against cost: the figure of routers on three layers, its finding and its table.

In: the tables of a measurement. Out: HTML, empty where no front was measured. Cost: one figure.
"""

import polars as pl

from . import costs_findings as said
from . import findings, text
from .figure import figure
from .layout import layer_titles, numbers, of_layer
from .multiples import Panel, curves, panel
from .results import Results
from .sections import LAYER, grouping
from .tables import Column, between, house, value

SHOWN = 6
"""Families of routers that are drawn in one figure: as many as there are colours."""

_PARETO = (
    "Across: the share of tokens that go linear. Up: what that costs, with 95 % intervals. Every curve "
    "begins at the original model (no token, no cost) and ends at the linear map for all tokens. Dashed: 0. "
    "The lower a curve, the better. The oracle knows every need before the MLP has run, which nobody does; "
    "it is no upper bound either, since the need is not the loss. Every panel has its own scale."
)


def _families(rows: pl.DataFrame) -> list[str]:
    """Families of routers that are drawn, in the order of colours: those that stand at most shares first."""
    named = [
        said.router(name).family for name in said.order(rows["name"].unique(maintain_order=True).to_list())
    ]
    routed = [
        family for family in named if family.partition("@")[0] in ("gated", "random", "token_list", "oracle")
    ]
    # The gate, then chance, then whatever else was measured; the oracle last.
    ranked = sorted(
        dict.fromkeys(routed), key=lambda one: (one.startswith("oracle"), one not in (said.GATE, "random"))
    )
    kept = ranked[: SHOWN - 1] + [one for one in ranked[SHOWN - 1 :] if one.startswith("oracle")][:1]
    return kept if len(kept) == SHOWN else ranked[:SHOWN]


def shown_layers(results: Results) -> list[int]:
    """Layers whose linear map costs least, in the middle and most."""
    frame = said.harvested(results, "pareto").filter(pl.col("chosen") == said.ONE)
    there = frame["layer"].unique().to_list()
    known = said.of_name(results, said.LINEAR).filter(pl.col("layer").is_in(there))
    return findings.representatives(known, "delta_nats")


def drawn_curves(results: Results, at: int) -> tuple[list[str], pl.DataFrame]:
    """Families drawn, and their points in one store with the number of the family as series; the curves'
    common ends are added to each.
    """
    rows = said.harvested(results, "pareto").filter((pl.col("series") == at) & (pl.col("chosen") == said.ONE))
    families = _families(rows)
    numbered = {family: number for number, family in enumerate(families)}
    points = []
    for row in rows.to_dicts():
        point = {"layer": row["layer"], "x": row["linear_share"], "y": row["delta_nats"]}
        point |= {"lo": row["delta_lo"], "hi": row["delta_hi"]}
        if row["name"] == said.LINEAR:
            nothing = {"layer": row["layer"], "x": 0.0, "y": 0.0, "lo": None, "hi": None}
            points += [end | {"series": number} for end in (nothing, point) for number in numbered.values()]
        elif (family := said.router(row["name"]).family) in numbered:
            points.append(point | {"series": numbered[family]})
    schema = {"layer": pl.Int64, "x": pl.Float64, "y": pl.Float64, "lo": pl.Float64, "hi": pl.Float64}
    frame = pl.DataFrame(points, schema=schema | {"series": pl.Int64}, orient="row")
    return families, frame.drop_nulls(("x", "y")).sort("series", "layer", "x", maintain_order=True)


def finding(results: Results) -> str:
    """Which of the routers are on the front, counted over layers."""
    rows = said.harvested(results, "pareto").filter((pl.col("chosen") == said.ONE) & pl.col("on_front"))
    routed = [
        said.router(row["name"]).family for row in rows.to_dicts() if (row["linear_share"] or 1.0) < 1.0
    ]
    if not routed:
        return "Share of linear tokens against cost"
    most = max(dict.fromkeys(routed), key=routed.count)
    n_layers = rows.select("series", "layer").unique().height
    at = rows.filter(pl.col("name").map_elements(lambda name: said.router(name).family, pl.String) == most)
    cases = "layers" if len(results.stores) == 1 else "pairs of layer and store"
    return (
        f"By point estimates, {text.name(most, 28)} is on the front of share and cost in "
        f"{text.out_of(at.select('series', 'layer').unique().height, n_layers, cases)}"
    )


def render(results: Results) -> list[str]:
    """The figure and its table; nothing where no front was measured."""
    if not results.has("pareto"):
        return []
    table = _points(results, shown_layers(results))
    return [_figure(results), numbers("Points of the layers drawn", table)]


def _figure(results: Results) -> str:
    layers = shown_layers(results)
    stores = said.harvested(results, "pareto")["series"].unique().sort().to_list()
    if not layers or not stores:
        return ""
    families, rows = drawn_curves(results, stores[0])
    panels = [
        panel(title, of_layer(rows, layer), "y", ("lo", "hi"), x="x")
        for layer, title in layer_titles(layers).items()
    ]
    panels = [one for one in panels if not one.frame.is_empty()]
    if not families or not panels:
        return ""
    return _drawn(results, families, panels, stores[0])


def _drawn(results: Results, families: list[str], panels: list[Panel], at: int) -> str:
    where = f" On {text.escape(findings.label(results, at))}." if len(results.stores) > 1 else ""
    shown = (
        " Shown: the layers whose linear map costs least, in the middle and most." if len(panels) == 3 else ""
    )
    return figure(
        "pareto",
        results,
        finding(results),
        f"{_PARETO}{where}{shown}",
        lambda size: curves(
            panels,
            axes=("tokens that go linear [%]", "cost [nats a token]"),
            domain=None,
            across=(0.0, 1.0),
            percent=(True, False),
            rule=0.0,
            size=size,
        ),
        labels=[text.name(family, 28) for family in families],
    )


def _points(results: Results, layers: list[int]) -> str:
    """Share against cost of everything that was measured, in the layers drawn."""
    rows = said.harvested(results, "pareto").filter(
        (pl.col("chosen") == said.ONE) & pl.col("layer").is_in(layers)
    )
    columns = [
        LAYER,
        Column("replaced", lambda row: text.name(row["name"], 32), number=False),
        Column(said.WENT_LINEAR, value("linear_share", text.percent)),
        Column("Δ [nats a token]", value("delta_nats", text.nats)),
        Column("95 % interval", between("delta_lo", "delta_hi", text.nats_interval)),
        Column("on the front", lambda row: "yes" if row["on_front"] else "", number=False),
    ]
    ordered = rows.sort("series", "layer", "linear_share", maintain_order=True).to_dicts()
    caption = "Share of tokens against cost, of everything that was measured"
    return house(ordered, columns, key="table-pareto", caption=caption, group=grouping(results))
