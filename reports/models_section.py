"""Section "The models side by side": every model and corpus in one table, and R² over depth in one figure.

In: `Results` of several studies, and their names. Out: HTML. Layers of models of different depth are compared
at the same share of the depth. Cost: one figure, one table.
"""

from collections.abc import Sequence
from typing import Any

import polars as pl

from . import costs_findings, findings, gates_findings, text
from .figure import figure
from .layout import numbers, section
from .multiples import Panel, curves, cut, domain_of
from .results import Results
from .tables import Column, house, value
from .verdicts import SYMBOLS

KEY, HEADING = "models", "The models side by side"
FLOOR = -0.25
PANELS = 6
"""Corpora that are drawn; all of them are in the table."""

_DEPTH = (
    "R² on test documents against the depth of the layer, from the first (0 %) to the last (100 %), with "
    "95 % intervals for all layers at once; one panel a corpus. Models are comparable on one corpus only: "
    "texts differ in how linear a layer is on them, and so do numbers of documents."
)


def _median(frame: pl.DataFrame, column: str) -> float | None:
    found = frame[column].drop_nulls().drop_nans().median()
    return float(found) if isinstance(found, int | float) else None


def rows(studies: Sequence[Results], names: Sequence[str]) -> list[dict[str, Any]]:
    """One row a model and corpus: medians over layers, ends, counts of verdicts."""
    found: list[dict[str, Any]] = []
    for results, name in zip(studies, names, strict=True):
        errors = results.errors()
        gates = gates_findings.main_rows(results) if results.has("gates") else None
        costs = (
            costs_findings.of_name(results, costs_findings.LINEAR) if results.has("interventions") else None
        )
        for at, harvest in enumerate(results.harvest.to_dicts()):
            layers = results.surrogates.filter(pl.col("series") == at)
            verdicts = layers["verdict"].to_list()
            row: dict[str, Any] = {**harvest, "model": name, "corpus": findings.label(results, at)}
            row |= {verdict: verdicts.count(verdict) for verdict in findings.VERDICTS}
            row |= {"layers": layers.height, "r2": _median(layers, "r2_test")}
            low, high = findings.extremes(layers, "r2_test") or ({}, {})
            row |= {"r2_low": low.get("r2_test"), "r2_high": high.get("r2_test")}
            row["error"] = _median(errors.filter(pl.col("series") == at), "q50")
            row["auc"] = None if gates is None else _median(gates.filter(pl.col("series") == at), "auc")
            row["cost"] = None if costs is None else _median(costs.filter(pl.col("series") == at), "ppl_pct")
            found.append(row)
    return found


def table(studies: Sequence[Results], names: Sequence[str]) -> str:
    columns = [
        Column("model", value("model", str), number=False),
        Column("corpus", value("corpus", str), number=False),
        *(
            Column(f"{SYMBOLS[verdict]} {verdict}", value(verdict, str), spanner="MLPs nearly linear")
            for verdict in findings.VERDICTS
        ),
        Column("of", value("layers", str), spanner="MLPs nearly linear"),
        Column("lowest", value("r2_low"), spanner="R² on test rows, of layers"),
        Column("median", value("r2"), spanner="R² on test rows, of layers"),
        Column("highest", value("r2_high"), spanner="R² on test rows, of layers"),
        Column("error", value("error"), spanner="median over layers"),
        Column("gate AUC", value("auc"), spanner="median over layers"),
        Column("linear cost", value("cost", text.change), spanner="median over layers"),
        Column("perplexity", value("ppl_test", lambda ppl: text.number(ppl, 2)), spanner="test rows"),
        Column("groups", value("n_groups_test", text.count), spanner="test rows"),
        Column("d", value("d_model", text.count)),
    ]
    return house(
        rows(studies, names), columns, key="table-models", caption="All models and corpora side by side"
    )


def _shared(studies: Sequence[Results]) -> list[str]:
    """Corpora of two studies or more, in the order met; without any, each study's first stands for it."""
    corpora = [set(results.harvest["corpus"].to_list()) for results in studies]
    met = dict.fromkeys(one for results in studies for one in results.harvest["corpus"].to_list())
    return [one for one in met if sum(one in there for there in corpora) > 1]


def _panel(studies: Sequence[Results], corpus: str | None) -> pl.DataFrame:
    """R² over depth of each study on one corpus (its first store of it), the study's number as series."""
    frames = []
    for number, results in enumerate(studies):
        corpora = results.harvest["corpus"].to_list()
        if corpus is not None and corpus not in corpora:
            continue
        at = 0 if corpus is None else corpora.index(corpus)
        last = max(1, int(results.harvest["n_layers"].to_list()[at]) - 1)
        mine = results.surrogates.filter(pl.col("series") == at)
        frames.append(
            mine.select(
                series=pl.lit(number, pl.Int64),
                x=pl.col("layer").cast(pl.Float64) / last,
                value=pl.col("r2_test"),
                lo=pl.col("r2_sim_lo"),
                hi=pl.col("r2_sim_hi"),
            )
        )
    return pl.concat(frames)


def finding(studies: Sequence[Results], names: Sequence[str]) -> str:
    """Each model's median R², on the first corpus that they share."""
    shared = _shared(studies)
    first = shared[0] if shared else None
    parts = []
    for number, name in enumerate(names):
        median = _median(_panel(studies, first).filter(pl.col("series") == number), "value")
        if median is not None:
            parts.append(f"{text.number(median)} in {name}")
    where = f"on {text.name(first, 60)}" if first is not None else "each on its first corpus"
    return f"The median layer has an R² of {text.listing(parts)}, {where}"


def render(studies: Sequence[Results], names: Sequence[str]) -> str:
    """The section."""
    shared: Sequence[str | None] = _shared(studies)[:PANELS] or [None]
    titles = [text.name(one, 40) if one is not None else "the first corpus of each" for one in shared]
    panels = [Panel(title, _panel(studies, one)) for title, one in zip(titles, shared, strict=True)]
    domain = domain_of(panels, (FLOOR, 1.0))
    drawn = figure(
        "models",
        studies[0],
        finding(studies, names),
        _DEPTH,
        lambda size: curves(
            panels,
            axes=("depth of the layer [%]", "R² on test rows [1]"),
            domain=domain,
            across=(0.0, 1.0),
            percent=(True, False),
            size=size,
        ),
        "Values below the axis are drawn on its edge." if cut(panels, domain) else "",
        labels=list(names),
    )
    return section(KEY, HEADING, drawn, numbers("All models and corpora", table(studies, names), opened=True))
