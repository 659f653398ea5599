"""The page's tables: which columns of the study are shown, under which headings, rounded how.

In: `Results`. Out: HTML tables by `tables.house`. Every number that a figure draws stands in one of them.
Cost: milliseconds a table.
"""

from collections.abc import Callable
from typing import Any

import polars as pl

from . import findings, sinks_findings, text
from .results import Results
from .tables import Column, Row, between, house, value
from .verdicts import LEGEND, cell, heading


def grouping(results: Results) -> Callable[[Row], str] | None:
    """Head the rows of each store with its name, where there are several."""
    names = [findings.label(results, series) for series in range(len(results.stores))]
    return None if len(names) == 1 else lambda row: names[row["series"]]


HOMES = {False: "Fitted here: how linear the MLPs are", True: "The same maps, moved: whether they transfer"}
"""What a verdict is about, by whether the maps come from another corpus."""
LAYER = Column("layer", value("layer", str))
NEED = Column("need", lambda row: findings.need_name(row["need"]), number=False)


def ordered(results: Results, table: str) -> pl.DataFrame:
    """Rows of a table of an analysis, store by store, the need that is drawn first."""
    needs = results.needs_of(table)
    numbers = pl.DataFrame({"need": needs, "order": list(range(len(needs)))})
    joined = results.tables[table].join(numbers, on="need", maintain_order="left")
    return joined.sort("series", "order", maintain_order=True)


def verdicts(results: Results) -> str:
    """How many layers have which verdict, store by store."""
    rows: list[dict[str, Any]] = []
    away = findings.moved(results)
    for series in sorted(range(len(results.stores)), key=lambda series: series in away):
        found = results.surrogates.filter(pl.col("series") == series)["verdict"].to_list()
        counts = {verdict: found.count(verdict) for verdict in findings.VERDICTS}
        label, moved = findings.label(results, series), series in away
        rows.append({"label": label, "away": moved, "all": len(found), **counts})
    columns = [
        Column("corpus", value("label", str), number=False),
        *(Column(heading(verdict), value(verdict, str)) for verdict in findings.VERDICTS),
        Column("MLPs", value("all", str)),
    ]
    head = (lambda row: HOMES[row["away"]]) if away else None
    return house(rows, columns, key="table-verdicts", caption="Verdicts by corpus", group=head) + LEGEND


def surrogates(results: Results) -> str:
    """How well one linear map stands in for each MLP, and whether it was fitted on that corpus."""
    away = findings.moved(results)
    maps = Column("maps", lambda row: "moved" if row["series"] in away else "fitted here", number=False)
    columns = [
        LAYER,
        *([maps] if away else []),
        Column("verdict", cell, number=False, markup=True),
        Column("test", value("r2_test"), spanner="R²"),
        Column("95 % interval", between("r2_lo", "r2_hi"), spanner="R²"),
        Column("simultaneous", between("r2_sim_lo", "r2_sim_hi"), spanner="R²"),
        Column("fit", value("r2_fit"), spanner="R²"),
        Column("folds", value("r2_cv"), spanner="R²"),
        Column("contribution", value("r2_contribution"), spanner="R²"),
        Column("largest token", value("largest_row", text.percent)),
        Column("alpha", value("alpha", text.scientific)),
        Column("tokens per feature", value("tokens_per_feature", lambda ratio: text.number(ratio, 1))),
        Column("condition", value("condition", text.scientific)),
    ]
    rows = results.surrogates.to_dicts()
    return house(rows, columns, key="table-surrogates", caption=findings.r2(results), group=grouping(results))


def quantiles(results: Results) -> str:
    """The distribution of the need `error` over test tokens."""
    names = {
        "q01": "1 %",
        "q05": "5 %",
        "q10": "10 %",
        "q25": "25 %",
        "q50": "median",
        "q75": "75 %",
        "q90": "90 %",
        "q95": "95 %",
        "q99": "99 %",
    }
    columns = [
        LAYER,
        Column("mean", value("mean"), spanner="error"),
        Column("95 % interval", between("mean_lo", "mean_hi"), spanner="error"),
        Column("sd", value("sd"), spanner="error"),
        *(Column(heading, value(name), spanner="quantiles of error") for name, heading in names.items()),
        Column("max", value("max"), spanner="quantiles of error"),
    ]
    rows = results.errors().to_dicts()
    return house(
        rows, columns, key="table-quantiles", caption=findings.need(results), group=grouping(results)
    )


def shares(results: Results) -> str:
    """Shares of tokens below 0.5 and 1, the skew, and what they are estimated from."""
    columns = [
        LAYER,
        Column("share", value("share_below_half", text.percent), spanner="error below 0.5"),
        Column(
            "95 % interval",
            between("share_below_half_lo", "share_below_half_hi", text.percent_interval),
            spanner="error below 0.5",
        ),
        Column("share", value("share_below_one", text.percent), spanner="error below 1"),
        Column(
            "95 % interval",
            between("share_below_one_lo", "share_below_one_hi", text.percent_interval),
            spanner="error below 1",
        ),
        Column("squared error in top 5 %", value("top5_share", text.percent)),
        Column("skewness", value("skew", lambda skew: text.number(skew, 2))),
        Column("tokens", value("n_tokens", text.count)),
        Column("groups", value("n_groups", text.count)),
    ]
    rows = results.errors().to_dicts()
    return house(rows, columns, key="table-shares", caption=findings.shares(results), group=grouping(results))


def other_needs(results: Results) -> str:
    """Mean and median of the needs that the figures leave out."""
    wanted = results.needs.filter((pl.col("split") == "test") & (pl.col("population") == "body"))
    names = [need for need in wanted["need"].unique().sort().to_list() if need != "error"]
    rows: dict[tuple[int, int], dict[str, Any]] = {}
    for row in wanted.to_dicts():
        cell = rows.setdefault(
            (row["series"], row["layer"]), {"series": row["series"], "layer": row["layer"]}
        )
        cell |= {f"{row['need']} {part}": row[part] for part in ("mean", "mean_lo", "mean_hi", "q50")}
    columns = [LAYER]
    for need in names:
        heading = text.escape(text.name(need, 24))
        columns += [
            Column("mean", value(f"{need} mean", may_miss=True), spanner=heading),
            Column(
                "95 % interval",
                between(f"{need} mean_lo", f"{need} mean_hi", may_miss=True),
                spanner=heading,
            ),
            Column("median", value(f"{need} q50", may_miss=True), spanner=heading),
        ]
    caption = "Other needs of test tokens"
    return house(list(rows.values()), columns, key="table-needs", caption=caption, group=grouping(results))


def sinks(results: Results) -> str:
    """Sinks against the body of tokens: R² and mean need."""
    means = {
        population: {(row["series"], row["layer"]): row for row in results.errors(population).to_dicts()}
        for population in ("body", "sink")
    }
    rows, single = [], set(sinks_findings.one_vector(results).select("series", "layer").rows())
    for row in results.surrogates.to_dicts():
        place = (row["series"], row["layer"])
        body, sink = (means[population].get(place, {}) for population in ("body", "sink"))
        rows.append(
            {
                **row,
                "body": body.get("mean"),
                "body_lo": body.get("mean_lo"),
                "body_hi": body.get("mean_hi"),
                "sink": sink.get("mean"),
                # Of one vector there is nothing to estimate: its interval would have no width.
                "sink_lo": None if place in single else sink.get("mean_lo"),
                "sink_hi": None if place in single else sink.get("mean_hi"),
            }
        )
    columns = [
        LAYER,
        Column("body", value("r2_test"), spanner="R²"),
        Column("sinks", value("r2_sink"), spanner="R²"),
        Column("body", value("body"), spanner="mean error"),
        Column("95 % interval", between("body_lo", "body_hi"), spanner="mean error"),
        Column("sinks", value("sink"), spanner="mean error"),
        Column("95 % interval", between("sink_lo", "sink_hi"), spanner="mean error"),
        Column("body", value("n_test_tokens", text.count), spanner="test tokens"),
        Column("sinks", value("n_sink", text.count), spanner="test tokens"),
    ]
    return house(
        rows, columns, key="table-sinks", caption=sinks_findings.finding(results), group=grouping(results)
    )
