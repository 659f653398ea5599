"""Section "Do token needs carry over to another corpus?": correlations, the paper's procedure, token lists.

In: the tables `nofly` and `nofly_tokens`. Out: HTML, empty where the analysis was not run. Cost: two
figures and a handful of tables.
"""

import polars as pl

from . import findings, text
from . import nofly_findings as said
from . import nofly_tables as tables
from .figure import figure
from .layout import numbers, paragraph, section
from .multiples import by_layer, cut, domain_of, panel
from .results import Results

KEY, HEADING = "nofly", "Do token needs carry over to another corpus?"
LEAST, MOST = -1.0, 1.5
"""Ends of the axis of correlations: a disattenuated one may leave [−1, 1]."""

_R = (
    "First panel: the correlation of tokens' mean needs in two corpora, with 95 % intervals. Second: the "
    "ceiling √(reliability of A · reliability of B), which r cannot exceed however stable tokens are, "
    "because means of few occurrences are mostly noise. Third: r over what is no noise (disattenuated), "
    "with 95 % intervals for all layers at once. The claim judged is that it is above 0. Where a "
    "reliability is not told from 0, neither is anything else."
)
_PAPER = (
    "The paper lists the tokens of highest mean need in one corpus and looks them up in another. Here the "
    "list is made on half of the documents of a corpus and looked up in the other half, and in the other "
    "corpus: the same tokens in three samples (means less the corpus's median, where a need is never "
    "negative). Whoever is listed was chosen for what was high, chance included, and is lower the next "
    "time: the fall from the first panel to the second is regression to the mean and says nothing about "
    "corpora. Only the step from the second panel to the third does."
)
_ONE_STORE = "The study has one store: there is no other corpus to compare with"


def _correlation_figure(results: Results) -> str:
    need, surrogate, key, rows = said.drawn(results)
    panels = [
        panel("r of token means", rows, "r", ("r_lo", "r_hi")),
        panel("ceiling of r", rows, "ceiling"),
        panel(
            "r, disattenuated", rows, "r_disattenuated", ("r_disattenuated_sim_lo", "r_disattenuated_sim_hi")
        ),
    ]
    domain = domain_of(panels, (LEAST, MOST), show=(0.0, 1.0), step=0.25)
    found = said.pairs(results)
    named = (
        f" A is {text.escape(findings.label(results, found[0][0]))}, B "
        f"{text.escape(findings.label(results, found[0][1]))}."
        if len(found) == 1
        else f" A {said.ARROW} B: see the colours."
    )
    what = (
        f" Need: <em>{text.escape(findings.need_name(need))}</em>; surrogate: "
        f"{text.escape(tables.surrogate(results, surrogate))}; tokens by their "
        f"{text.escape(text.name(key, 20))} id."
    )
    return figure(
        "nofly",
        results,
        said.correlation(results),
        _R + named + what,
        lambda size: by_layer(
            panels, axis="correlation [1]", domain=domain, rule=0.0, columns=(3, 1), size=size
        ),
        "Values beyond the axis are drawn on its edge." if cut(panels, domain) else "",
        labels=[said.pair_label(results, pair) for pair in said.pairs(results)],
    )


def _paper_figure(results: Results) -> str:
    need, _, _, rows = said.drawn(results)
    columns = {
        "half_list_mean": "documents that chose it",
        "list_mean_a_heldout": "others of the same corpus",
        "half_list_mean_b": "the other corpus",
    }
    if all(rows[column].null_count() == rows.height for column in columns):
        return ""
    panels = [panel(title, rows, column) for column, title in columns.items()]
    top = max(value for one in panels for value in [0.0, *one.frame["value"].drop_nulls().to_list()])
    low = min(value for one in panels for value in [0.0, *one.frame["value"].drop_nulls().to_list()])
    step = _step(top - low)
    domain = domain_of(panels, (low - step, top + step), show=(0.0,), step=step)
    return figure(
        "list",
        results,
        said.regression_to_the_mean(results),
        _PAPER,
        lambda size: by_layer(
            panels,
            axis=f"mean {findings.need_name(need)} of the list, less the median [1]",
            domain=domain,
            columns=(3, 1),
            size=size,
        ),
        labels=[said.pair_label(results, pair) for pair in said.pairs(results)],
    )


def _step(range_: float) -> float:
    """A tenth of a range, in one significant digit."""
    return float(f"{max(range_, 1e-6) / 10:.0e}")


def _lists(results: Results) -> str:
    """Tokens of highest mean need, in the layers where r is lowest, in the middle and highest."""
    if not results.has("nofly_tokens"):
        return ""
    frame = said.drawn(results)[3]
    there = said.drawn(results, "nofly_tokens")[3]["layer"].unique().to_list()
    layers = findings.representatives(frame.filter(pl.col("layer").is_in(there)), "r")
    parts = []
    for at, pair in enumerate(said.pairs(results)):
        lists = [
            f"<h4>Layer {layer}</h4>{table}"
            for layer in layers
            if (table := tables.tokens(results, at, layer))
        ]
        label = text.escape(said.pair_label(results, pair))
        parts.append(numbers(f"Tokens of highest mean need, {label}", "".join(lists)))
    return "\n".join(part for part in parts if part)


def render(results: Results) -> str:
    """The section; nothing where the analysis was not run."""
    if "nofly" not in results.tables:
        return ""
    if not results.has("nofly"):
        return section(KEY, HEADING, paragraph(_ONE_STORE))
    return section(
        KEY,
        HEADING,
        _correlation_figure(results),
        numbers("Verdicts by surrogate and kind of token", tables.verdict_table(results)),
        numbers("Correlations of every layer", tables.correlations(results)),
        numbers("Other surrogates, tokens and needs", tables.others(results)),
        _paper_figure(results),
        numbers("The paper's procedure, every layer", tables.paper(results)),
        _lists(results),
    )
