"""Section "What does replacing one MLP cost?": cost by layer, routers at equal share, share against cost.

In: the tables of a measurement. Out: HTML, empty where none was made. Sentences are in `costs_findings`.
Cost: three figures and up to eight tables.
"""

from . import costs_findings as said
from . import costs_published, findings, pareto, text
from . import costs_tables as tables
from .axes import beyond, ends_of
from .figure import figure
from .layout import note, numbers, section
from .multiples import by_layer, panel
from .results import Results

KEY, HEADING = "costs", "What does replacing one MLP cost?"

_COST = (
    "Change of perplexity on test rows when one MLP of the live model is replaced, paired over the same "
    "tokens: 100 · (exp Δ − 1), Δ in nats a token. Dashed: 0, the original. Bars or bands: 95 % intervals "
    "for all layers at once; where the whole bar lies above 0, the replacement costs something. Position 0 "
    "and special tokens keep the MLP, and are left out of the shares that <em>went linear</em>."
)
_ROUTERS = (
    "What a router costs less than another at the same share of linear tokens, in nats a token, paired over "
    "the same tokens; against random routing, at the share that the router reached. Dashed: 0. Bars or "
    "bands: 95 % intervals for all layers at once. Only what lies above 0 as a whole says that the router is "
    "worth more than the other."
)
_SELECTION = (
    "The paper takes the best of several gates by the perplexity of the very tokens that it then reports. "
    "How much too good that is: the choice is made again without each group of documents, and scored on the "
    "group left out."
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
    found = [said.cost(results)] if said.LINEAR in said.names(results) else []
    if gate := said.main_gate(results):
        found.append(said.cost(results, gate))
    against = said.beats_random(results) if results.has("routers") else ""
    return [*found, against] if against else found


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
    parts += costs_published.render(results)
    if results.has("routers") and said.comparisons(results):
        parts += [
            _router_figure(results),
            numbers("Verdicts on routers", tables.router_verdicts(results)),
            numbers("Gains of every layer", tables.routers(results)),
        ]
    parts += pareto.render(results)
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
