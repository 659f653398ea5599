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
from .verdicts import LEGEND, heading

KEY, HEADING = "models", "The models side by side"
FLOOR = -0.25
PANELS = 6
"""Corpora that are drawn; all of them are in the table."""

_DEPTH = (
    "R² on test documents against the depth of the layer, from the first (0 %) to the last (100 %), with "
    "95 % intervals for all layers at once; one panel a corpus. Models are comparable on one corpus only: "
    "texts differ in how linear a layer is on them, and so do numbers of documents; medians over layers only "
    "where these are all layers of each. Where the maps were "
    "<em>moved</em> from another corpus, R² says how well they transfer, not how linear a layer is."
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
            row["moved"] = at in findings.moved(results)
            row |= {verdict: verdicts.count(verdict) for verdict in findings.VERDICTS}
            row |= {"layers": layers.height, "r2": _median(layers, "r2_test")}  # n_layers: the model's own
            low, high = findings.extremes(layers, "r2_test") or ({}, {})
            row |= {"r2_low": low.get("r2_test"), "r2_high": high.get("r2_test")}
            row["error"] = _median(errors.filter(pl.col("series") == at), "q50")
            for name_of, frame, column in (("auc", gates, "auc"), ("cost", costs, "ppl_pct")):
                mine = None if frame is None else frame.filter(pl.col("series") == at)
                row[name_of] = None if mine is None else _median(mine, column)
                row[f"{name_of}_layers"] = None if mine is None else mine["layer"].n_unique()
            found.append(row)
    return found


def table(studies: Sequence[Results], names: Sequence[str]) -> str:
    columns = [
        Column("model", value("model", str), number=False),
        Column("corpus", value("corpus", str), number=False),
        Column("maps", lambda row: "moved here" if row["moved"] else "fitted here", number=False),
        *(
            Column(heading(verdict), value(verdict, str), spanner="MLPs nearly linear")
            for verdict in findings.VERDICTS
        ),
        Column("looked at", value("layers", str), spanner="layers"),
        Column("of the model", value("n_layers", str), spanner="layers"),
        Column("lowest", value("r2_low"), spanner="R² on test rows, of layers"),
        Column("median", value("r2"), spanner="R² on test rows, of layers"),
        Column("highest", value("r2_high"), spanner="R² on test rows, of layers"),
        Column("error", value("error"), spanner="median over layers"),
        Column("gate AUC", value("auc"), spanner="median over layers"),
        Column("layers of AUC", value("auc_layers", text.count), spanner="median over layers"),
        Column("linear cost", value("cost", text.change), spanner="median over layers"),
        Column("layers of cost", value("cost_layers", text.count), spanner="median over layers"),
        Column("perplexity", value("ppl_test", lambda ppl: text.number(ppl, 2)), spanner="test rows"),
        Column("groups", value("n_groups_test", text.count), spanner="test rows"),
        Column("d", value("d_model", text.count)),
    ]
    caption = "All models and corpora side by side"
    return house(rows(studies, names), columns, key="table-models", caption=caption) + LEGEND


def _shared(studies: Sequence[Results]) -> list[str]:
    """Corpora of two studies or more, those that most studies fitted first, else in the order met; without
    any, each study's first stands for it.
    """
    corpora = [set(results.harvest["corpus"].to_list()) for results in studies]
    met = dict.fromkeys(one for results in studies for one in results.harvest["corpus"].to_list())
    shared = [one for one in met if sum(one in there for there in corpora) > 1]
    return sorted(shared, key=lambda one: len(_moved(studies, one)))


def _store(results: Results, corpus: str) -> int:
    """The first store of a corpus; one that was fitted before one that the maps moved to."""
    there = [at for at, one in enumerate(results.harvest["corpus"].to_list()) if one == corpus]
    away = findings.moved(results)
    return min(there, key=lambda at: at in away)


def _place(results: Results, corpus: str | None) -> int:
    """The store of a study that stands for a corpus; for none in common, the one that was fitted."""
    return next(iter(findings.at_home(results)), 0) if corpus is None else _store(results, corpus)


def _moved(studies: Sequence[Results], corpus: str) -> list[int]:
    """Numbers of the studies whose maps come from another corpus than this."""
    there = [at for at, one in enumerate(studies) if corpus in one.harvest["corpus"].to_list()]
    return [at for at in there if _store(studies[at], corpus) in findings.moved(studies[at])]


def _panel(studies: Sequence[Results], corpus: str | None) -> pl.DataFrame:
    """R² over depth of each study on one corpus (one store of it), the study's number as series."""
    frames = []
    for number, results in enumerate(studies):
        corpora = results.harvest["corpus"].to_list()
        if corpus is not None and corpus not in corpora:
            continue
        at = _place(results, corpus)
        last = max(1, findings.n_layers(results, at) - 1)
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
    """Each model's median R² on a corpus that they share, where all layers of each were looked at and
    its maps were fitted there; else why the medians do not compare.
    """
    shared = _shared(studies)
    first = shared[0] if shared else None
    parts, against = [], [] if shared else ["each was fitted on a corpus of its own"]
    for results, name in zip(studies, names, strict=True):
        if first is not None and first not in results.harvest["corpus"].to_list():
            continue
        at = _place(results, first)
        mine = results.surrogates.filter(pl.col("series") == at)
        looked_at, there = mine["layer"].n_unique(), findings.n_layers(results, at)
        if looked_at < there:
            against.append(f"{looked_at} of {there} layers were looked at in {name}")
        elif (median := _median(mine, "r2_test")) is not None:
            parts.append(f"{text.number(median)} in {name}")
    if away := [names[at] for at in ([] if first is None else _moved(studies, first))]:
        against.append(f"the maps of {text.listing(away)} were not fitted on {text.name(first or '', 60)}")
    if against or not parts:
        return f"The models' medians over layers do not compare: {'; '.join(against) or 'no layer has an R²'}"
    where = f"on {text.name(first or '', 60)}, where the maps were fitted"
    return f"The median of all layers has an R² of {text.listing(parts)}, {where}"


def _title(studies: Sequence[Results], corpus: str | None) -> str:
    """What a panel shows, and whether the maps were moved to its corpus."""
    if corpus is None:
        return "the fitted corpus of each"
    away, there = len(_moved(studies, corpus)), sum(corpus in one.harvest["corpus"] for one in studies)
    words = "" if not away else " (maps moved)" if away == there else f" (maps of {away} moved)"
    return f"{text.name(corpus, 40)}{words}"


def render(studies: Sequence[Results], names: Sequence[str]) -> str:
    """The section."""
    shared: Sequence[str | None] = _shared(studies)[:PANELS] or [None]
    titles = [_title(studies, one) for one in shared]
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
