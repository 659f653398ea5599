"""The paper's published costs beside those measured here, where the model is one of the paper's.

In: the tables of a measurement. Out: HTML, empty for other models. Cost: milliseconds.
"""

from . import costs_findings as said
from . import published, text
from .costs_tables import cell, pivot
from .layout import note, numbers
from .results import Results
from .sections import LAYER, grouping
from .tables import Column, house, value

_PUBLISHED = (
    "Published for {model}, {basis}: WikiText-103, surrogates fitted on 10,000 tokens, every position "
    "replaced, layers and gates scored on the tokens they were chosen on, intervals over rows where there "
    "are any. Ours: corpora, windows and fits named above. The two are beside one another, not the same "
    "measurement."
)


def render(results: Results) -> list[str]:
    """What the numbers beside one another are, and the table; nothing for other models."""
    first = results.harvest.row(0, named=True)
    paper = published.of_model(first["model"], first["n_layers"])
    if paper is None:
        return []
    words = _PUBLISHED.format(model=paper.model, basis=paper.basis)
    return [
        note(words),
        numbers("The paper's numbers beside these", _table(results), opened=True),
    ]


def _table(results: Results) -> str:
    """Ours beside the paper's, layer by layer, where the model is one of the paper's."""
    first = results.harvest.row(0, named=True)
    paper = published.of_model(first["model"], first["n_layers"])
    if paper is None:
        return ""
    gate = said.main_gate(results)
    ours = {"linear": said.LINEAR, "everywhere": said.LINEAR + said.EVERYWHERE, "gate": gate}
    rows = {(row["series"], row["layer"]): row for row in pivot(said.singles(results), "name")}
    columns = [
        LAYER,
        Column("every MLP token linear", value("paper", text.change), spanner=paper.model),
        *(
            [
                Column("gate", value("paper gate", text.change), spanner=paper.model),
                Column("went linear", value("paper share", text.percent), spanner=paper.model),
            ]
            if paper.gated
            else []
        ),
        *(
            Column(heading, cell(f"of {ours[key]}"), spanner="here")
            for key, heading in (
                ("everywhere", "every token linear"),
                ("linear", "sinks left alone"),
                ("gate", text.escape(text.name(gate or "", 28))),
            )
            if ours[key] in said.names(results)
        ),
    ]
    lines = [
        row
        | {
            "paper": paper.linear[layer],
            "paper gate": paper.gated[layer] if paper.gated else None,
            "paper share": _share(paper.share[layer]) if paper.share else None,
        }
        for (_, layer), row in rows.items()
        if 0 <= layer < len(paper.linear)
    ]
    caption = f"What the paper published for {paper.model}, and what was measured here"
    return house(lines, columns, key="table-published", caption=caption, group=grouping(results))


def _share(percent: float | None) -> float | None:
    return None if percent is None else percent / 100
