"""Section "Can a gate see it coming?": AUC of every feature set, one gate in detail, curves, calibration.

In: the tables of the analysis `gates`. Out: HTML. Sentences are in `gates_findings`. Cost: three figures and
six tables.
"""

import polars as pl

from . import comparisons, features, findings, gates_tables, text
from . import gates_findings as said
from .figure import figure
from .gates_findings import CURVES, calibration_rows, curve_layers, linear, main_of
from .layout import layer_titles, note, numbers, of_layer, section
from .multiples import Panel, by_layer, curves, cut, domain_of, panel
from .results import Results

KEY, HEADING = "gates", "Can a gate see it coming?"

_AUC = (
    "AUC on test rows: the chance that a token of low need scores above one of high need. Dashed: 0.5, "
    "chance. Bars or bands: 95 % intervals for all layers at once."
)
_GATE = (
    "A gate is a logistic regression on a few numbers of each token: d + 1 parameters where it sees the "
    "MLP's whole input. It "
    "learns on gate rows which tokens are among the easier half by their need (the label), and is "
    "scored on test rows of every corpus. C was chosen by cross-validation over groups of documents."
)
_LATE = (
    f"{features.MARK} not available when the token has to be routed: it needs the next token, the MLP's own "
    "output, or the need itself, and only says what could be known."
)
_BEATS = (
    "AUC of one gate less AUC of a simpler one, paired over the same tokens. Dashed: 0. Bars or bands: 95 % "
    "intervals for all layers at once. A difference below the margin of the settings is not supported."
)
_CURVE = (
    "Tokens that the gate finds easiest go linear first: across, the share of tokens that go linear; up, "
    "the share of all need that they carry. Dashed: tokens drawn at random. The lower a curve, the better; "
    "<em>oracle</em> knows every need and cannot be beaten."
)
_CALIBRATION = (
    "Test tokens in bins of the predicted probability of being easy, against the share that was, with 95 % "
    "intervals over groups. Dashed: predictions that can be taken at their word."
)
_LAYERS = (
    "Shown: the layers in which this gate ranks worst, in the middle and best; the others: "
    "<code>tables/gate_curves.parquet</code>, <code>tables/gate_calibration.parquet</code>."
)


def _auc_panel(name: str, rows: pl.DataFrame, late: set[str]) -> Panel:
    chosen = rows.filter(pl.col("features") == name)
    made = panel(features.title(name, late), chosen, "auc", ("auc_sim_lo", "auc_sim_hi"))
    return Panel(made.title, made.frame, faint=name in late)


def _auc_figure(results: Results, need: str, rows: pl.DataFrame) -> str:
    late = features.late(rows)
    names = features.order(rows["features"].unique().to_list())
    # The need itself ranks perfectly: its panel would only stretch the axis of the others.
    drawn = [name for name in names if name != "oracle"] or names
    panels = [_auc_panel(name, rows, late) for name in drawn]
    domain = domain_of(panels, (0.2, 1.0), show=(0.45, 0.6), step=0.05)
    beyond = f"Values below {domain[0]:g} are drawn on the edge of the axis." if cut(panels, domain) else ""
    return figure(
        "auc",
        results,
        said.auc(results),
        f"{_AUC} The need is <em>{text.escape(findings.need_name(need))}</em>. {_LATE if late else ''}",
        lambda size: by_layer(panels, axis="AUC [1]", domain=domain, rule=0.5, size=size),
        beyond,
    )


def _beats_figure(results: Results) -> str:
    panels = [
        panel(text.name(claim, 28), rows, "difference", ("sim_lo", "sim_hi"))
        for claim, rows in said.beaten(results)
    ]
    domain = domain_of(panels, (-1.0, 1.0), show=(-0.02, 0.05), step=0.05)
    return figure(
        "beats",
        results,
        said.beats(results),
        _BEATS,
        lambda size: by_layer(
            panels, axis="difference of AUC [1]", domain=domain, rule=0.0, columns=(3, 1), size=size
        ),
        "Values beyond the axis are drawn on its edge." if cut(panels, domain) else "",
    )


def _drawn_curves(results: Results) -> tuple[list[str], int, pl.DataFrame]:
    """Feature sets that are drawn, the store, and its rows with the number of the set as series."""
    _, rows = results.first("gate_curves")
    there, at = set(rows["features"].to_list()), int(rows["series"].to_list()[0])
    names = [name for name in CURVES if name in there]
    numbered = pl.DataFrame(
        {"features": names, "number": list(range(len(names)))},
        schema={"features": pl.String, "number": pl.Int64},
    )
    first = linear(rows).filter((pl.col("series") == at) & pl.col("need_share").is_not_null())
    joined = first.join(numbered, on="features", maintain_order="left")
    return names, at, joined.with_columns(series=pl.col("number"))


def _curve_figure(results: Results) -> str:
    names, at, rows = _drawn_curves(results)
    titles = layer_titles(curve_layers(results, "gate_curves"))
    panels = [panel(title, of_layer(rows, layer), "need_share", x="share") for layer, title in titles.items()]
    if rows.is_empty() or not panels:
        return ""
    late = features.late(results.tables["gates"])
    where = f" On {text.escape(findings.label(results, at))}." if len(results.stores) > 1 else ""
    return figure(
        "curves",
        results,
        said.curves(results),
        f"{_CURVE}{where} {_LAYERS}",
        lambda size: curves(
            panels,
            axes=("tokens that go linear [%]", "need they carry [%]"),
            domain=(0.0, 1.0),
            across=(0.0, 1.0),
            diagonal=True,
            percent=True,
            points=False,
            size=size,
        ),
        labels=[features.title(name, late) for name in names],
    )


def _calibration_figure(results: Results) -> str:
    rows = calibration_rows(results).filter(pl.col("predicted").is_not_null())
    titles = layer_titles(curve_layers(results, "gate_calibration"))
    panels = [
        panel(title, of_layer(rows, layer), "observed", ("observed_lo", "observed_hi"), x="predicted")
        for layer, title in titles.items()
    ]
    if rows.is_empty() or not panels:
        return ""
    return figure(
        "calibration",
        results,
        said.calibration(results),
        f"{_CALIBRATION} {_LAYERS}",
        lambda size: curves(
            panels,
            axes=("predicted to be easy [%]", "were easy [%]"),
            domain=(0.0, 1.0),
            across=(0.0, 1.0),
            diagonal=True,
            percent=True,
            size=size,
        ),
    )


def render(results: Results) -> str:
    """The section; nothing where the analysis was not run."""
    if not results.has("gates"):
        return ""
    need, rows = results.first("gates")
    rows = linear(rows)
    late, names = features.late(rows), features.order(rows["features"].unique().to_list())
    parts = [
        f"<p>{_GATE}</p>",
        _auc_figure(results, need, rows),
        note(f"Feature sets: {features.legend(names, late)}"),
        numbers("Verdicts on every feature set: AUC above 0.5", gates_tables.verdict_table(results, rows)),
        numbers("AUC of every feature set and layer", gates_tables.auc_table(results, rows)),
        numbers("One gate in full", gates_tables.detail_table(results, rows, main_of(rows))),
        numbers("Gates of other sizes", gates_tables.sizes_table(results)),
        numbers("Other needs", gates_tables.other_needs_table(results)),
    ]
    if claims := said.beaten(results):
        caption, names = said.beats(results), [claim for claim, _ in claims]
        parts += [
            _beats_figure(results),
            numbers("Verdicts", comparisons.verdict_table(results, claims, "table-beats-verdicts")),
            numbers(
                "Differences of every layer and need",
                comparisons.table(results, names, "table-beats", caption),
            ),
        ]
    if results.has("gate_labels"):
        parts.append(numbers("Which tokens count as easy", gates_tables.label_table(results)))
    if results.has("gate_curves"):
        parts.append(_curve_figure(results))
        parts.append(numbers("Shares of need of the layers drawn", gates_tables.curve_table(results)))
    if results.has("gate_calibration"):
        parts.append(_calibration_figure(results))
        parts.append(numbers("Bins of the layers drawn", gates_tables.calibration_table(results)))
    return section(KEY, HEADING, *parts)
