"""Tables of the section on gates.

In: the tables of the analysis `gates`. Out: HTML tables, every number of the section's figures among them.
Cost: milliseconds a table.
"""

from typing import Any

import polars as pl

from . import features, findings, text, verdicts
from . import gates_findings as said
from .gates_findings import calibration_rows, curve_layers, linear, thinned
from .results import Results
from .sections import LAYER, grouping
from .tables import Column, Inner, Row, between, house, value


def _above_half(row: Any) -> bool:
    return row["auc"] is not None and row["auc"] > 0.5


def _auc_cell(key: str) -> Inner:
    def show(one: Row) -> str:
        ends = text.interval(one["auc_sim_lo"], one["auc_sim_hi"])
        return verdicts.marked(one, text.number(one["auc"]) + ("" if ends == text.NONE else f" {ends}"))

    fields = {"": "auc", " low": "auc_sim_lo", " high": "auc_sim_hi", " verdict": "verdict"}
    return Inner(key, show, fields)


def _pivot(rows: pl.DataFrame, key: str) -> list[dict[str, Any]]:
    """One row a store and layer, the rows of the table under their values of `key`."""
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for row in rows.to_dicts():
        place = {"series": row["series"], "layer": row["layer"]}
        found.setdefault((row["series"], row["layer"]), place)[f"of {row[key]}"] = row
    return list(found.values())


def auc_table(results: Results, rows: pl.DataFrame) -> str:
    """AUC of every feature set and layer, with the sign of its verdict and the simultaneous interval."""
    late = features.late(rows)
    names = features.order(rows["features"].unique().to_list())
    groups = (
        ("available when routing", [n for n in names if n not in late and n not in features.BASELINES]),
        (f"{features.MARK} not available", [n for n in names if n in late and n not in features.BASELINES]),
        ("baselines", [n for n in names if n in features.BASELINES]),
    )
    columns = [LAYER] + [
        Column(text.escape(features.title(name, late)), _auc_cell(f"of {name}"), spanner=spanner)
        for spanner, members in groups
        for name in members
    ]
    return house(
        _pivot(rows, "features"),
        columns,
        key="table-auc",
        caption=said.auc(results),
        group=grouping(results),
    )


def verdict_table(results: Results, rows: pl.DataFrame) -> str:
    """How many layers each feature set beats chance in."""
    late = features.late(rows)
    families = [
        ({"corpus": findings.label(results, at), "features": features.title(name, late)}, chosen)
        for at in range(len(results.stores))
        for name in features.order(rows["features"].unique().to_list())
        if not (chosen := rows.filter((pl.col("series") == at) & (pl.col("features") == name))).is_empty()
    ]
    group = "corpus" if len(results.stores) > 1 else None
    shown = families if group else [({"features": head["features"]}, chosen) for head, chosen in families]
    return verdicts.table(
        shown,
        key="table-auc-verdicts",
        caption="Layers in which a gate beats chance",
        group=group,
        above=_above_half,
    )


def detail_table(results: Results, rows: pl.DataFrame, name: str) -> str:
    """One gate in full."""
    columns = [
        LAYER,
        Column("verdict", verdicts.cell, number=False, markup=True),
        Column("AUC", value("auc"), spanner="ranking"),
        Column("95 % interval", between("auc_lo", "auc_hi"), spanner="ranking"),
        Column("p (Holm)", value("p_holm", text.p_value), spanner="ranking"),
        Column("AP", value("ap"), spanner="ranking"),
        Column("easy tokens", value("base_rate", text.percent)),
        Column("Brier", value("brier"), spanner="probabilities"),
        Column("of the base rate", value("brier_base"), spanner="probabilities"),
        Column("slope", value("calibration_slope"), spanner="probabilities"),
        Column("intercept", value("calibration_intercept"), spanner="probabilities"),
        Column("go linear", value("share", text.percent), spanner="at the threshold"),
        Column("need they carry", value("need_share", text.percent), spanner="at the threshold"),
        Column("threshold", value("threshold"), spanner="at the threshold"),
        Column("C", value("C", text.scientific)),
        Column("tokens", value("n_tokens", text.count), spanner="test"),
        Column("groups", value("n_groups", text.count), spanner="test"),
        Column("tokens", value("n_gate_tokens", text.count), spanner="gate"),
        Column("groups", value("n_gate_groups", text.count), spanner="gate"),
    ]
    chosen = rows.filter(pl.col("features") == name).to_dicts()
    caption = f"The gate on {text.name(name, 28)} in full"
    return house(chosen, columns, key="table-gate", caption=caption, group=grouping(results))


def sizes_table(results: Results) -> str:
    """AUC of the gates of other sizes: the paper's principal components, and C = 1."""
    _, rows = results.first("gates")
    frame = rows.filter(pl.col("features") == said.main_of(linear(rows)))
    sizes = frame["size"].unique(maintain_order=True).to_list()
    if len(sizes) < 2:
        return ""
    columns = [LAYER] + [Column(text.escape(text.name(size, 20)), _auc_cell(f"of {size}")) for size in sizes]
    return house(
        _pivot(frame, "size"),
        columns,
        key="table-sizes",
        caption="AUC of gates of other sizes",
        group=grouping(results),
    )


def other_needs_table(results: Results) -> str:
    """AUC of the main gate on the needs that are not drawn."""
    needs = results.needs_of("gates")[1:]
    frame = linear(results.tables["gates"]).filter(
        (pl.col("features") == said.main_of(linear(results.first("gates")[1]))) & pl.col("need").is_in(needs)
    )
    if frame.is_empty():
        return ""
    columns = [LAYER] + [
        Column(text.escape(findings.need_name(need)), _auc_cell(f"of {need}")) for need in needs
    ]
    return house(
        _pivot(frame, "need"),
        columns,
        key="table-gate-needs",
        caption="AUC of the gate on the input, by need",
        group=grouping(results),
    )


def curve_table(results: Results) -> str:
    """Share of need at some shares of tokens, for the layers and stores of the figure."""
    _, rows = results.first("gate_curves")
    layers = curve_layers(results, "gate_curves")
    names = [name for name in said.CURVES if name in set(rows["features"].to_list())]
    chosen = linear(rows).filter(pl.col("layer").is_in(layers) & pl.col("features").is_in(names))
    if chosen.is_empty():
        return ""
    found: dict[tuple[int, int, str], dict[str, Any]] = {}
    for row in chosen.to_dicts():
        place = {key: row[key] for key in ("series", "layer", "features")}
        line = found.setdefault((row["series"], row["layer"], row["features"]), place)
        line[f"{row['share']:.6g}"] = row["need_share"]
    late = features.late(results.tables["gates"])

    shares = thinned(chosen["share"].unique().sort().to_list())
    columns = [
        LAYER,
        Column("features", lambda row: features.title(row["features"], late), number=False),
        *(
            Column(
                text.percent(share),
                value(f"{share:.6g}", text.percent, may_miss=True),
                spanner="need carried by this share of tokens",
            )
            for share in shares
        ),
    ]
    ordered = sorted(
        found.values(), key=lambda row: (row["series"], row["layer"], names.index(row["features"]))
    )
    return house(ordered, columns, key="table-curves", caption=said.curves(results), group=grouping(results))


def calibration_table(results: Results) -> str:
    layers = curve_layers(results, "gate_calibration")
    rows = calibration_rows(results).filter(pl.col("layer").is_in(layers))
    columns = [
        LAYER,
        Column("bin", value("bin", str)),
        Column("predicted", value("predicted", text.percent)),
        Column("observed", value("observed", text.percent)),
        Column("95 % interval", between("observed_lo", "observed_hi", text.percent_interval)),
        Column("tokens", value("n_tokens", text.count)),
    ]
    return house(
        rows.to_dicts(),
        columns,
        key="table-calibration",
        caption=said.calibration(results),
        group=grouping(results),
    )


def label_table(results: Results) -> str:
    """Which tokens count as easy, and how easy they are."""
    _, rows = results.first("gate_labels")
    columns = [
        LAYER,
        Column("rule", lambda row: text.name(row["rule"], 24), number=False),
        Column("easy up to a need of", value("cut")),
        Column("gate", value("share_gate", text.percent), spanner="easy tokens"),
        Column("test", value("share_test", text.percent), spanner="easy tokens"),
        Column("below 0.5", value("share_below_half", text.percent), spanner="tokens with a need"),
        Column("below 1", value("share_below_one", text.percent), spanner="tokens with a need"),
    ]
    return house(
        rows.to_dicts(), columns, key="table-labels", caption="Labels of gates", group=grouping(results)
    )
