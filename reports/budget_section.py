"""Section "Does it save time?": FLOPs that are saved on paper beside seconds that were saved on the clock.

In: the tables `budget` and `timing`, each optional. Out: HTML, empty without either. Cost: one figure, two
tables.
"""

from typing import Any

import polars as pl

from . import costs_findings, dots, findings, text
from .figure import figure
from .layout import note, numbers, section
from .results import Results
from .tables import Column, Row, between, house, value

KEY, HEADING = "budget", "Does it save time?"
ORIGINAL = "original"
MOST = 12
"""Configurations that are drawn; all of them are in the tables."""
FLOPS_ROWS = 150
"""Configurations in the table of FLOPs: those that save most."""
SURE = 0.01
"""A quarter of the runs must lie this far on one side of the original before a sentence says so."""

_TIMES = (
    "Time of one run as a share of the original's in the same round (median and quartiles of interleaved "
    "runs), beside the FLOPs that are left. Dashed: the original. <em>Prefill</em>: one forward pass over "
    "whole windows; <em>decode</em>: one token after another with a key-value cache. FLOPs are counted from "
    "the shapes of the modules at the share of tokens that went linear; what they promise is not what a "
    "device does: memory traffic and small products cost time and no FLOPs."
)
_FLOPS = (
    "A multiplication and an addition are two. Saved: of the MLPs of all layers, and of the whole model with "
    "attention at this length and the head; surrogates and gates are paid for. Parameters are given back "
    "only where no token needs the MLP any more: a gate keeps it, and so do the sinks where these are "
    "left alone. <em>Went linear</em> is a share of all tokens here, sinks included; in the tables of cost, "
    "of the tokens that a replacement may reach. <em>Perplexity</em>: what the same replacement costs on "
    "test rows."
)


def _layers(row: Row) -> str:
    found = [int(layer) for layer in str(row["layers"] or "").split(",") if layer.isdecimal()]
    return text.layers(found) if found else "no layer"


def configuration(row: Row) -> str:
    """`gated@input in layers 2–4, prefill, batch of 8`."""
    head = text.name(row["name"], 28)
    where = "" if row["name"] == ORIGINAL else f" in {_layers(row)}"
    batch = f", batch of {text.count(row['batch_size'])}" if "batch_size" in row else ""
    return f"{head}{where}, {text.name(row['phase'], 20)}{batch}"


def timed(results: Results, table: str = "timing") -> pl.DataFrame:
    """Configurations that were timed, the original left out."""
    return results.tables[table].filter(pl.col("name") != ORIGINAL)


def time_finding(results: Results, table: str = "timing") -> str:
    """How many configurations are faster than the original, and the largest saving beside its FLOPs."""
    rows = timed(results, table).filter(pl.col("ratio").is_not_null())
    if rows.is_empty():
        return "Time of the replaced models"
    faster = rows.filter(pl.col("ratio_q75") < 1 - SURE).height
    slower = rows.filter(pl.col("ratio_q25") > 1 + SURE).height
    best = rows.sort("ratio").row(0, named=True)
    return (
        f"On {text.name(best['device'], 24)}, {faster} of {rows.height} configurations are faster than the "
        f"original and {slower} slower, by three quarters of the runs; the fastest, {configuration(best)}, "
        f"takes {text.percent(best['ratio'])} of its time with {text.percent(_left(best))} of its FLOPs"
    )


def _left(row: Row) -> float | None:
    return None if row["flops_saved"] is None else 1.0 - row["flops_saved"]


def _time_figure(results: Results) -> str:
    rows = timed(results).filter(pl.col("ratio").is_not_null()).to_dicts()
    shown = rows[:MOST]
    points: list[dict[str, Any]] = []
    for number, row in enumerate(shown):
        name = text.name(configuration(row), 90)
        time = {"value": row["ratio"], "lo": row["ratio_q25"], "hi": row["ratio_q75"]}
        flops = {"value": _left(row), "lo": None, "hi": None}
        points += [
            {"row": number, "name": name, "series": series, **one} for series, one in enumerate((time, flops))
        ]
    schema = {"row": pl.Int64, "name": pl.String, "series": pl.Int64}
    frame = pl.DataFrame(points, schema=schema | dict.fromkeys(("value", "lo", "hi"), pl.Float64))
    top = max([1.1, *(value for value in frame["hi"].drop_nulls().to_list() if value < 3.0)])
    domain = (0.0, round(top + 0.05, 2))
    more = len(rows) - len(shown)
    return figure(
        "times",
        results,
        time_finding(results),
        _TIMES,
        lambda size: dots.by_name(
            frame, axis="of the original [%]", domain=domain, rule=1.0, percent=True, size=size
        ),
        f"{more} more configurations are in the table." if more > 0 else "",
        labels=["time", "FLOPs"],
    )


def flops_finding(results: Results) -> str:
    """The largest saving of FLOPs, and what it costs in perplexity where that was measured."""
    rows = results.tables["budget"].filter((pl.col("name") != ORIGINAL) & pl.col("flops_saved").is_not_null())
    if rows.is_empty():
        return "FLOPs of the replaced models"
    best = rows.sort("flops_saved", descending=True, maintain_order=True).row(0, named=True)
    start = "Counted in FLOPs" if results.has("timing") else "No time was measured. Counted in FLOPs"
    how = "their linear maps" if best["name"] == costs_findings.LINEAR else text.name(best["name"], 28)
    cost = _cost(_costs(results), best)
    price = (
        "its cost in perplexity was not measured"
        if cost is None
        else f"it costs {costs_findings.changed(cost)} of perplexity{_where(results, cost)}"
    )
    return (
        f"{start}, replacing the MLPs of {_layers(best)} by {how} saves most: "
        f"{text.percent(best['flops_saved'])} of those of the whole model, "
        f"{text.percent(best['mlp_flops_saved'])} of those of all MLPs ({text.name(best['phase'], 20)}); "
        f"{price}"
    )


def _where(results: Results, cost: Row) -> str:
    return f" on {findings.label(results, cost['series'], 40)}" if len(results.stores) > 1 else ""


# Of each replacement, what it costs on the stores where that was measured, in their order.
_Costs = dict[tuple[str, frozenset[str]], list[Row]]


def _replacement(row: Row) -> tuple[str, frozenset[str]]:
    """The order in which layers were chosen is no other replacement."""
    return row["name"], frozenset(str(row["layers"]).split(","))


def _costs(results: Results) -> _Costs:
    found: _Costs = {}
    if results.has("interventions"):
        for row in costs_findings.harvested(results, "interventions").to_dicts():
            found.setdefault(_replacement(row), []).append(row)
    return found


def _cost(costs: _Costs, row: Row) -> Row | None:
    """What a replacement costs where its share was measured; on the first store, where that has no name."""
    same = costs.get(_replacement(row), [])
    return next((one for one in same if row["store"] in (None, one["store"])), None)


def times_table(results: Results, table: str = "timing", key: str = "table-times") -> str:
    """Seconds of every configuration, beside what FLOPs promise."""

    def seconds(row: Row) -> str:
        return text.number(row["seconds"], 4)

    def quartiles(row: Row) -> str:
        return text.interval(row["seconds_q25"], row["seconds_q75"], 4)

    columns = [
        Column("configuration", configuration, number=False),
        Column("tokens", value("sequence_length", text.count)),
        Column("went linear, of all tokens", value("share", text.percent)),
        Column("median", seconds, spanner="seconds a run"),
        Column("quartiles", quartiles, spanner="seconds a run"),
        Column("tokens a second", value("tokens_per_second", lambda one: text.number(one, 1))),
        Column("median", value("ratio", text.percent), spanner="time, of the original's"),
        Column("quartiles", _quartiles, spanner="time, of the original's"),
        Column("time", value("time_saved", text.percent), spanner="saved"),
        Column("FLOPs", value("flops_saved", text.percent), spanner="saved"),
        Column("runs", value("n_runs", text.count)),
        Column("device", _device, number=False),
    ]
    rows = results.tables[table].to_dicts()
    return house(rows, columns, key=key, caption=time_finding(results, table))


def _quartiles(row: Row) -> str:
    return text.percent_interval(row["ratio_q25"], row["ratio_q75"])


def _device(row: Row) -> str:
    threads = f", {text.count(row['threads'])} threads" if row["threads"] else ""
    return f"{text.name(row['device'], 24)}, {text.name(row['dtype'], 16)}{threads}"


def flops_table(results: Results) -> str:
    """FLOPs by module of every configuration."""

    def mega(flops: float | None) -> str:
        return text.NONE if flops is None else text.number(flops / 1e6, 2)

    def store(row: Row) -> str:
        if row["store"] is None or row["store"] not in results.stores:
            return text.NONE if row["store"] is None else text.name(row["store"], 40)
        return findings.label(results, results.stores.index(row["store"]), 40)

    def priced(row: Row) -> str:
        return text.NONE if row["series"] is None else findings.label(results, row["series"], 40)

    modules = ("mlp", "surrogate", "gate", "attention", "other", "head", "total")
    spanner = "million FLOPs a token"
    columns = [
        Column("configuration", configuration, number=False),
        Column("share measured on", store, number=False),
        Column("tokens", value("sequence_length", text.count)),
        Column("went linear, of all tokens", value("share", text.percent)),
        *(Column(name, value(f"{name}_flops", mega), spanner=spanner) for name in modules),
        Column("of MLPs", value("mlp_flops_saved", text.percent), spanner="FLOPs saved"),
        Column("of the model", value("flops_saved", text.percent), spanner="FLOPs saved"),
        *([Column("on", priced, number=False, spanner="perplexity")] if len(results.stores) > 1 else []),
        Column("change", value("ppl_pct", text.change), spanner="perplexity"),
        Column("95 % interval", between("ppl_lo", "ppl_hi", text.change_interval), spanner="perplexity"),
        Column("of the model", value("parameters", text.count), spanner="parameters"),
        Column("saved", value("parameters_saved", text.count), spanner="parameters"),
        Column(
            "with sinks replaced too", value("parameters_saved_at_most", text.count), spanner="parameters"
        ),
    ]
    # Where there are more than the page shows, those that save most are shown.
    first = pl.col("name") != ORIGINAL
    ranked = results.tables["budget"].sort(
        first, "flops_saved", descending=[False, True], nulls_last=True, maintain_order=True
    )
    caption = flops_finding(results)
    costs, rows = _costs(results), []
    for row in ranked.to_dicts():
        cost = _cost(costs, row) or {}
        rows.append(row | {name: cost.get(name) for name in ("ppl_pct", "ppl_lo", "ppl_hi", "series")})
    return house(rows, columns, key="table-flops", caption=caption, most=FLOPS_ROWS)


def is_there(results: Results) -> bool:
    """Whether there is anything to show."""
    return results.has("budget") or (results.has("timing") and not timed(results).is_empty())


def answers(results: Results) -> list[str]:
    """Time where it was measured, else FLOPs."""
    if results.has("timing") and not timed(results).is_empty():
        return [time_finding(results)]
    return [flops_finding(results)] if results.has("budget") else []


def render(results: Results) -> str:
    """The section; nothing where neither was counted nor timed."""
    parts: list[str] = []
    if results.has("timing") and not timed(results).is_empty():
        parts += [_time_figure(results), numbers("Seconds of every configuration", times_table(results))]
    if results.has("budget"):
        parts.append(note(f"<b>{text.escape(flops_finding(results))}.</b> {_FLOPS}"))
        parts.append(numbers("FLOPs by module", flops_table(results)))
    return section(KEY, HEADING, *parts) if parts else ""
