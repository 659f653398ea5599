"""Charts of a study for notebooks: the page's own, each with its finding, its legend and plain colours.

In: a study (`nearline.open(path)`, or its folder). Out: Altair charts, values that can be changed, saved or
laid side by side. Altair's usual way to show one fetches its drawing library from the network;
`altair.renderers.enable("svg")` draws without. Cost: the tables of the study are read and checked anew each
time (kilobytes to a few megabytes).
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import altair as alt
import polars as pl

from ..store import IncompleteError, UsageError
from ..store.names import typed
from . import charts, costs_findings, features, findings, gates_findings, text
from .axes import ends_of
from .chart_style import WIDE, Size, largest
from .multiples import Panel, by_layer, domain_of, panel
from .results import Results, read

NOTEBOOK = Size(width=640, font=12)
LINE = 100  # characters of a title
_LEGEND = {"title": None, "orient": "bottom", "labelLimit": 400, "symbolOpacity": 1}
_VARIABLE = re.compile(r"var\(--[\w-]+,(#[0-9a-fA-F]+)\)")


class HasPath(Protocol):
    """An opened study."""

    @property
    def path(self) -> Path: ...


Where = HasPath | str | Path


def held_out_r2(study: Where) -> alt.TopLevelMixin:
    """R² of every layer's linear map on test rows, with pointwise and simultaneous intervals."""
    results = _read(study)
    drawn = charts.held_out_r2(results.surrogates, claim_at=results.claim_at, size=NOTEBOOK)
    return _standalone(drawn, findings.r2(results), findings.labels(results))


def need_quantiles(study: Where) -> alt.TopLevelMixin:
    """The need `error` of test tokens in every layer: median, middle half, 5 % to 95 %."""
    results = _read(study)
    drawn = charts.need_quantiles(results.errors(), size=NOTEBOOK)
    return _standalone(drawn, findings.need(results), findings.labels(results))


def shares_below(study: Where) -> alt.TopLevelMixin:
    """Shares of test tokens with an error below 0.5 and below 1, with intervals."""
    results = _read(study)
    drawn = charts.shares_below(results.errors(), size=NOTEBOOK)
    return _standalone(drawn, findings.shares(results), findings.labels(results))


def need_histograms(study: Where, layers: int | Sequence[int] | None = None) -> alt.TopLevelMixin:
    """How many test tokens have which error; by default of the least, middle and most linear layer."""
    results = _read(study)
    chosen = [layers] if isinstance(layers, int) else list(layers or ())
    chosen = chosen or findings.representatives(results.surrogates, "r2_test")
    bins = results.histogram.filter(pl.col("need") == "error")
    there = bins["layer"].unique().sort().to_list()
    if missing := [layer for layer in chosen if layer not in there]:
        raise UsageError(
            f"layer {missing[0]} is not in study {results.study}, which has {text.layers(there)}"
        )
    share = pl.col("count") / pl.col("count").sum().over("series", "layer")
    bins = bins.with_columns(density=10 * share / (pl.col("bin_hi") - pl.col("bin_lo")))
    bins = bins.filter(pl.col("layer").is_in(chosen) & pl.col("density").is_finite())
    upto = largest(results.errors().filter(pl.col("layer").is_in(chosen)), "q99", at_least=0.5)
    panels = [(layer, f"layer {layer}") for layer in chosen]
    drawn = charts.histograms(bins, panels, upto=upto, size=WIDE)
    return _standalone(drawn, findings.histogram(results), findings.labels(results))


def gate_auc(study: Where, names: Sequence[str] | None = None) -> alt.TopLevelMixin:
    """AUC of the gates on test rows, a panel a feature set; all but the oracle by default."""
    results = _read(study, "gates", "analyze", "--only gates")
    _, found = results.first("gates")
    rows = gates_findings.linear(found)
    there = features.order(rows["features"].unique().to_list())
    chosen = list(names) if names is not None else [name for name in there if name != "oracle"] or there
    if missing := [name for name in chosen if name not in there]:
        raise UsageError(
            f"study {results.study} has no gate on {missing[0]!r}; it has gates on {', '.join(there)}"
        )
    late = features.late(rows)
    panels = [
        Panel(made.title, made.frame, faint=name in late)
        for name in chosen
        for made in [_of(rows, name, features.title(name, late))]
    ]
    domain = domain_of(panels, (0.2, 1.0), show=(0.45, 0.6), step=0.05)
    drawn = by_layer(panels, axis="AUC [1]", domain=domain, rule=0.5, columns=(4, 1), size=WIDE)
    return _standalone(drawn, gates_findings.auc(results), findings.labels(results))


def _of(rows: pl.DataFrame, name: str, title: str) -> Panel:
    return panel(title, rows.filter(pl.col("features") == name), "auc", ("auc_sim_lo", "auc_sim_hi"))


def costs(study: Where, names: Sequence[str] = ("linear",)) -> alt.TopLevelMixin:
    """What replacing one MLP of the live model costs, in percent of perplexity, a panel an intervention."""
    results = _read(study, "interventions", "measure", "")
    there = costs_findings.names(results)
    if missing := [name for name in names if name not in there]:
        raise UsageError(f"study {results.study} has not measured {missing[0]!r}; it has {', '.join(there)}")
    panels = [
        panel(
            text.name(name, 28),
            costs_findings.of_name(results, name),
            "ppl_pct",
            ("ppl_sim_lo", "ppl_sim_hi"),
        )
        for name in names
    ]
    drawn = by_layer(
        panels,
        axis="change of perplexity [%]",
        domain=ends_of(panels),
        rule=0.0,
        columns=(2, 1),
        size=WIDE,
    )
    return _standalone(drawn, costs_findings.claim(results, names[0]), findings.labels(results))


def _read(study: Where, table: str = "", command: str = "", flags: str = "") -> Results:
    """The results of a study; IncompleteError where a chart needs a table that no step has written."""
    path = Path(study) if isinstance(study, str | Path) else study.path
    results = read(path)
    if table and not results.has(table):
        words = " ".join(word for word in ("nearline", command, typed(path), flags) if word)
        raise IncompleteError(f"study {results.study} has no table `{table}`: run `{words}` first")
    return results


def _standalone(chart: alt.TopLevelMixin, finding: str, labels: Sequence[str]) -> alt.TopLevelMixin:
    """A chart of the page as it stands without the page: title, legend, colours that need no style sheet."""
    spec = _coloured(chart.to_dict())
    spec.pop("$schema")
    spec["config"] |= {"background": "#ffffff"}
    if len(labels) > 1:
        # One legend for all panels and marks: Vega-Lite joins those that say the same.
        _legend(spec, f"{json.dumps(list(labels))}[datum.value]")
    title = {"text": _lines(finding), "anchor": "start", "fontSize": 13, "offset": 26}
    beside = spec.pop("title", None)
    if isinstance(beside, dict):  # what the axes show, where panels share it
        title |= {"subtitle": beside["text"], "subtitleColor": "#6a7076"}
    spec["title"] = title
    return alt.Chart.from_dict(spec)


def _lines(sentence: str) -> list[str]:
    lines = [""]
    for word in sentence.split(" "):
        if lines[-1] and len(lines[-1]) + len(word) >= LINE:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return lines


def _coloured(value: Any) -> Any:
    """The same specification with each CSS variable replaced by the colour it falls back to."""
    if isinstance(value, dict):
        return {key: _coloured(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_coloured(part) for part in value]
    return _VARIABLE.sub(r"\1", value) if isinstance(value, str) else value


def _legend(value: Any, names: str) -> None:
    """Give the colours and shapes of series a legend. Names of stores are data inside a JSON string."""
    if isinstance(value, dict):
        for channel in ("color", "shape"):
            encoding = value.get(channel)
            if isinstance(encoding, dict) and encoding.get("field") == "series":
                encoding["legend"] = {
                    "title": None,
                    "labelExpr": names,
                    "orient": "bottom",
                    "labelLimit": 400,
                }
        for part in value.values():
            _legend(part, names)
    elif isinstance(value, list):
        for part in value:
            _legend(part, names)
