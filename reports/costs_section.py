"""Section "What does replacing one MLP cost?": cost by layer, routers at equal share, share against cost.

In: the tables of a measurement. Out: HTML, empty where none was made. Sentences are in `costs_findings`.
Cost: three figures and up to eight tables.
"""

import polars as pl

from . import costs_findings as said
from . import costs_tables as tables
from . import findings, published, text
from .axes import beyond, ends_of
from .figure import figure
from .layout import layer_titles, note, numbers, of_layer, section
from .multiples import Panel, by_layer, curves, panel
from .results import Results

KEY, HEADING = "costs", "What does replacing one MLP cost?"
SHOWN = 6
"""Families of routers that are drawn in one figure: as many as there are colours."""

_COST = (
    "Change of perplexity on test rows when one MLP of the live model is replaced, paired over the same "
    "tokens: 100 · (exp Δ − 1), Δ in nats a token. Dashed: 0, the original. Bars or bands: 95 % intervals "
    "for all layers at once; where the whole bar lies above 0, the replacement costs something. Position 0 "
    "and special tokens keep the MLP."
)
_ROUTERS = (
    "What a router costs less than another at the same share of linear tokens, in nats a token, paired over "
    "the same tokens; against random routing, at the share that the router reached. Dashed: 0. Bars or "
    "bands: 95 % intervals for all layers at once. Only what lies above 0 as a whole says that the router is "
    "worth more than the other."
)
_PARETO = (
    "Across: the share of tokens that go linear. Up: what that costs, with 95 % intervals. Every curve "
    "begins at the original model (no token, no cost) and ends at the linear map for all tokens. Dashed: 0. "
    "The lower a curve, the better. The oracle knows every need before the MLP has run, which nobody does; "
    "it is no upper bound either, since the need is not the loss. Every panel has its own scale."
)
_SELECTION = (
    "The paper takes the best of several gates by the perplexity of the very tokens that it then reports. "
    "How much too good that is: the choice is made again without each group of documents, and scored on the "
    "group left out."
)
_PUBLISHED = (
    "Published for {model}, {basis}: WikiText-103, surrogates fitted on 10,000 tokens, every position "
    "replaced, layers and gates scored on the tokens they were chosen on, intervals over rows where there "
    "are any. Ours: corpora, windows and fits named above. The two are beside one another, not the same "
    "measurement."
)


def _cost_figure(results: Results) -> str:
    gate = said.main_gate(results)
    shown = [name for name in (said.LINEAR, gate) if name is not None and name in said.names(results)]
    shown = shown or said.names(results)[:2]
    titles = {said.LINEAR: "linear map"}
    panels = [
        panel(
            titles.get(name, text.name(name, 28)),
            said.of_name(results, name),
            "ppl_pct",
            ("ppl_sim_lo", "ppl_sim_hi"),
        )
        for name in shown
    ]
    domain = ends_of(panels)
    sentence = said.cost(results) if said.LINEAR in shown else said.claim(results, shown[0])
    return figure(
        "costs",
        results,
        sentence,
        _COST,
        lambda size: by_layer(
            panels, axis="change of perplexity [%]", domain=domain, rule=0.0, columns=(2, 1), size=size
        ),
        beyond(panels, domain, text.change, findings.labels(results)),
    )


def _router_figure(results: Results) -> str:
    panels = [
        panel(said.against(other), rows, "difference", ("sim_lo", "sim_hi"))
        for other, rows in said.comparisons(results)
    ]
    domain = ends_of(panels)
    return figure(
        "routers",
        results,
        said.beats(results),
        _ROUTERS,
        lambda size: by_layer(
            panels,
            axis="gain at equal share [nats a token]",
            domain=domain,
            rule=0.0,
            columns=(3, 1),
            size=size,
        ),
        beyond(panels, domain, text.nats, findings.labels(results)),
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


def pareto_layers(results: Results) -> list[int]:
    """Layers whose linear map costs least, in the middle and most."""
    frame = said.harvested(results, "pareto").filter(pl.col("chosen") == said.ONE)
    there = frame["layer"].unique().to_list()
    known = said.of_name(results, said.LINEAR).filter(pl.col("layer").is_in(there))
    return findings.representatives(known, "delta_nats")


def _pareto_curves(results: Results, at: int) -> tuple[list[str], pl.DataFrame]:
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


def pareto_finding(results: Results) -> str:
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
        f"{at.select('series', 'layer').unique().height} of {n_layers} {cases}"
    )


def _pareto_figure(results: Results) -> str:
    layers = pareto_layers(results)
    stores = said.harvested(results, "pareto")["series"].unique().sort().to_list()
    if not layers or not stores:
        return ""
    families, rows = _pareto_curves(results, stores[0])
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
        pareto_finding(results),
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


def legend(results: Results) -> str:
    """What the interventions measured do, as HTML; those that do the same share a line."""
    named: dict[str, list[str]] = {}
    for name in said.order(said.names(results)):
        if meaning := said.meaning(name):
            named.setdefault(meaning, []).append(f"<b>{text.escape(text.name(name, 28))}</b>")
    parts = [f"{', '.join(names)}: {meaning}" for meaning, names in named.items()]
    return f"Replacements: {'; '.join(parts)}." if parts else ""


def is_there(results: Results) -> bool:
    """Whether there is anything to show."""
    return results.has("interventions") and not said.singles(results).is_empty()


def answers(results: Results) -> list[str]:
    """The sentences of the opening: the linear map, the gate, and the gate against chance."""
    if not is_there(results):
        return []
    found = [said.claim(results)] if said.LINEAR in said.names(results) else []
    if gate := said.main_gate(results):
        found.append(said.claim(results, gate))
    against = said.beats_random(results) if results.has("routers") else ""
    return [*found, against] if against else found


def _paper(results: Results) -> list[str]:
    first = results.harvest.row(0, named=True)
    paper = published.of_model(first["model"], first["n_layers"])
    if paper is None:
        return []
    words = _PUBLISHED.format(model=paper.model, basis=paper.basis)
    return [
        note(words),
        numbers("The paper's numbers beside these", tables.beside_the_paper(results), opened=True),
    ]


def render(results: Results) -> str:
    """The section; nothing where no measurement was made."""
    if not is_there(results):
        return ""
    parts = [_cost_figure(results), numbers("Verdicts on every replacement", tables.verdict_table(results))]
    if said.LINEAR in said.names(results):
        caption = said.cost(results)
        parts.append(
            numbers(
                "The linear map, every layer",
                tables.detail(results, said.LINEAR, "table-linear-cost", caption),
            )
        )
    if gate := said.main_gate(results):
        parts.append(f"<p>{text.escape(said.gate_cost(results))}.</p>")
        parts.append(
            numbers(
                "The gate, every layer",
                tables.detail(results, gate, "table-gate-cost", said.gate_cost(results)),
            )
        )
    parts += [numbers("Every replacement and layer", tables.every(results)), note(legend(results))]
    parts += _paper(results)
    if results.has("routers") and said.comparisons(results):
        parts += [
            _router_figure(results),
            numbers("Verdicts on routers", tables.router_verdicts(results)),
            numbers("Gains of every layer", tables.routers(results)),
        ]
    if results.has("pareto"):
        parts.append(_pareto_figure(results))
        parts.append(numbers("Points of the layers drawn", tables.points(results, pareto_layers(results))))
    if results.has("sinks"):
        parts += [
            note(f"<b>{text.escape(said.sinks(results))}.</b>"),
            numbers("Sinks apart", tables.sinks(results)),
        ]
    if results.has("context_lengths"):
        parts.append(note(f"<b>{text.escape(said.lengths(results))}.</b>"))
        parts.append(numbers("Cost by length of window", tables.lengths(results)))
    if results.has("paper_selection"):
        parts.append(note(f"<b>{text.escape(said.selection(results))}.</b> {_SELECTION}"))
        parts.append(numbers("The paper's choice of gates", tables.selection(results)))
    return section(KEY, HEADING, *parts)
