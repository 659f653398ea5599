"""Tables of the sections on the cost of single layers.

In: the tables of a measurement. Out: HTML tables, every number of the sections' figures among them. Cost:
milliseconds a table.
"""

from typing import Any

import polars as pl

from . import costs_findings as said
from . import findings, text, verdicts
from .results import Results
from .sections import LAYER, grouping
from .tables import Column, Inner, Row, between, house, value

_CHANGE, _CHANGES = text.change, text.change_interval
_NATS, _ENDS = text.nats, text.nats_interval


def cell(key: str) -> Inner:
    """The sign of a verdict, the change of perplexity and its simultaneous interval."""

    def show(one: Row) -> str:
        ends = _CHANGES(one["ppl_sim_lo"], one["ppl_sim_hi"])
        return verdicts.marked(one, _CHANGE(one["ppl_pct"]) + ("" if ends == text.NONE else f" {ends}"))

    fields = {"": "ppl_pct", " low": "ppl_sim_lo", " high": "ppl_sim_hi", " verdict": "verdict"}
    return Inner(key, show, fields)


def pivot(rows: pl.DataFrame, key: str) -> list[dict[str, Any]]:
    """One row a store and layer, the rows of the table under their values of `key`."""
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for row in rows.sort("series", "layer", maintain_order=True).to_dicts():
        place = {"series": row["series"], "layer": row["layer"]}
        found.setdefault((row["series"], row["layer"]), place)[f"of {row[key]}"] = row
    return list(found.values())


def every(results: Results) -> str:
    """Change of perplexity by every intervention on every layer."""
    rows = said.singles(results)
    heads = {"linear": "whole MLPs", "mean": "whole MLPs", "zero": "whole MLPs", "low_rank": "whole MLPs"}
    columns = [LAYER] + [
        Column(
            text.escape(text.name(name, 28)),
            cell(f"of {name}"),
            spanner=heads.get(name.partition("@")[0], "some tokens"),
        )
        for name in said.order(said.names(results))
    ]
    caption = "Change of perplexity by every replacement of one layer"
    return house(pivot(rows, "name"), columns, key="table-costs", caption=caption, group=grouping(results))


def detail(results: Results, name: str, key: str, caption: str) -> str:
    """One intervention in full."""
    columns = [
        LAYER,
        Column("costs", verdicts.cell, number=False, markup=True),
        Column("change", value("ppl_pct", _CHANGE), spanner="perplexity"),
        Column("95 % interval", between("ppl_lo", "ppl_hi", _CHANGES), spanner="perplexity"),
        Column("simultaneous", between("ppl_sim_lo", "ppl_sim_hi", _CHANGES), spanner="perplexity"),
        Column("before", value("base_ppl", lambda ppl: text.number(ppl, 2)), spanner="perplexity"),
        Column("after", value("ppl", lambda ppl: text.number(ppl, 2)), spanner="perplexity"),
        Column("Δ", value("delta_nats", _NATS), spanner="nats a token"),
        Column("95 % interval", between("delta_lo", "delta_hi", _ENDS), spanner="nats a token"),
        Column("KL", value("kl", _NATS), spanner="nats a token"),
        Column("p (Holm)", value("p_holm", text.p_value)),
        Column(said.WENT_LINEAR, value("linear_share", text.percent), spanner="shares"),
        Column("MLP FLOPs saved", value("mlp_flops_saved", text.percent), spanner="shares"),
        Column("FLOPs saved", value("flops_saved", text.percent), spanner="shares"),
        Column("tokens", value("n_tokens", text.count), spanner="test"),
        Column("groups", value("n_groups", text.count), spanner="test"),
    ]
    rows = said.of_name(results, name).sort("series", "layer", maintain_order=True).to_dicts()
    return house(rows, columns, key=key, caption=caption, group=grouping(results))


def verdict_table(results: Results) -> str:
    """How many layers each intervention costs something in."""
    several = len(results.stores) > 1
    families = [
        (
            {"intervention": text.name(name, 28)}
            | ({"corpus": findings.label(results, at)} if several else {}),
            rows,
        )
        for at in range(len(results.stores))
        for name in said.order(said.names(results))
        if not (rows := said.of_name(results, name).filter(pl.col("series") == at)).is_empty()
    ]
    return verdicts.table(
        families,
        key="table-costs-verdicts",
        caption="Layers in which a replacement costs more than nothing",
        group="corpus" if several else None,
        above=lambda row: row["delta_nats"] is not None and row["delta_nats"] > 0,
    )


def routers(results: Results) -> str:
    """Gains at equal share of every pair that was compared, one layer by itself."""
    rows = said.harvested(results, "routers").filter(pl.col("chosen") == said.ONE)
    columns = [
        LAYER,
        Column("compared", _compared, number=False),
        Column("verdict", verdicts.cell, number=False, markup=True),
        Column("", value("difference", _NATS), spanner="gain [nats a token]"),
        Column("95 % interval", between("lo", "hi", _ENDS), spanner="gain [nats a token]"),
        Column("simultaneous", between("sim_lo", "sim_hi", _ENDS), spanner="gain [nats a token]"),
        Column("router", value("share_router", text.percent), spanner=said.WENT_LINEAR),
        Column("other", value("share_against", text.percent), spanner=said.WENT_LINEAR),
        Column("router", value("cost_router", _NATS), spanner="cost [nats a token]"),
        Column("other", value("cost_against", _NATS), spanner="cost [nats a token]"),
        Column("p (Holm)", value("p_holm", text.p_value)),
        Column("tokens", value("n_tokens", text.count)),
        Column("groups", value("n_groups", text.count)),
    ]
    ordered = rows.sort("series", "layer", maintain_order=True).to_dicts()
    return house(ordered, columns, key="table-routers", caption=said.beats(results), group=grouping(results))


def _compared(row: Row) -> str:
    return f"{text.name(row['router'], 28)} against {text.name(row['against'], 28)}"


def router_verdicts(results: Results) -> str:
    """In how many layers a router costs less than another, pair by pair."""
    frame = said.harvested(results, "routers").filter(pl.col("chosen") == said.ONE)
    pairs = frame.select("router", "against").unique(maintain_order=True).rows()
    several = len(results.stores) > 1
    families = [
        (
            {"compared": f"{text.name(one, 28)} against {text.name(other, 28)}"}
            | ({"corpus": findings.label(results, at)} if several else {}),
            rows,
        )
        for one, other in pairs
        for at in range(len(results.stores))
        if not (
            rows := frame.filter(
                (pl.col("router") == one) & (pl.col("against") == other) & (pl.col("series") == at)
            )
        ).is_empty()
    ]
    return verdicts.table(
        families,
        key="table-routers-verdicts",
        caption="Layers in which a router costs less than another at equal share",
        group="compared" if several else None,
        above=lambda row: row["difference"] is not None and row["difference"] > 0,
    )


def sinks(results: Results) -> str:
    """Cost with and without the sinks replaced."""
    columns = [
        LAYER,
        Column("costs more", verdicts.cell, number=False, markup=True),
        Column("body only", value("covered_pct", _CHANGE), spanner="perplexity"),
        Column("sinks too", value("all_pct", _CHANGE), spanner="perplexity"),
        Column("", value("difference", _NATS), spanner="difference [nats a token]"),
        Column("95 % interval", between("lo", "hi", _ENDS), spanner="difference [nats a token]"),
        Column("simultaneous", between("sim_lo", "sim_hi", _ENDS), spanner="difference [nats a token]"),
        Column("p (Holm)", value("p_holm", text.p_value)),
        Column("tokens", value("n_tokens", text.count)),
        Column("groups", value("n_groups", text.count)),
    ]
    rows = said.harvested(results, "sinks").filter(pl.col("name") == said.LINEAR)
    ordered = rows.sort("series", "layer", maintain_order=True).to_dicts()
    return house(
        ordered, columns, key="table-cost-sinks", caption=said.sinks(results), group=grouping(results)
    )


def lengths(results: Results) -> str:
    """Cost under windows of two lengths."""
    columns = [
        LAYER,
        Column("replaced", lambda row: text.name(row["name"], 28), number=False),
        Column("shorter", value("shorter", text.count), spanner="window [tokens]"),
        Column("longer", value("longer", text.count), spanner="window [tokens]"),
        Column("costs more", verdicts.cell, number=False, markup=True),
        Column("shorter", value("cost_shorter", _NATS), spanner="cost [nats a token]"),
        Column("longer", value("cost_longer", _NATS), spanner="cost [nats a token]"),
        Column("", value("difference", _NATS), spanner="difference"),
        Column("95 % interval", between("lo", "hi", _ENDS), spanner="difference"),
        Column("simultaneous", between("sim_lo", "sim_hi", _ENDS), spanner="difference"),
        Column("p (Holm)", value("p_holm", text.p_value)),
        Column("groups", value("n_groups", text.count)),
    ]
    rows = results.tables["context_lengths"].sort("series", "layer", maintain_order=True).to_dicts()
    return house(rows, columns, key="table-lengths", caption=said.lengths(results), group=grouping(results))


def selection(results: Results) -> str:
    """The gate chosen as in the paper, and the one that was fixed before."""
    spanner = "chosen on the test rows"
    columns = [
        LAYER,
        Column("gate", lambda row: text.name(row["picked"], 28), number=False, spanner=spanner),
        Column("of", value("n_candidates", text.count), spanner=spanner),
        Column("perplexity", value("picked_pct", _CHANGE), spanner=spanner),
        Column("Δ", value("picked_nats", _NATS), spanner=spanner),
        Column("Δ on groups left out", value("heldout_nats", _NATS), spanner="the same choice, held out"),
        Column(
            "95 % interval", between("heldout_lo", "heldout_hi", _ENDS), spanner="the same choice, held out"
        ),
        Column("too good by", lambda row: _NATS(_minus(row["bias"])), spanner="the same choice, held out"),
        Column("gate", lambda row: text.name(row["fixed"], 28), number=False, spanner="fixed before"),
        Column("better", verdicts.cell, number=False, markup=True, spanner="fixed before"),
        Column("perplexity", value("fixed_pct", _CHANGE), spanner="fixed before"),
        Column("Δ", value("fixed_nats", _NATS), spanner="fixed before"),
        Column("simultaneous", between("fixed_sim_lo", "fixed_sim_hi", _ENDS), spanner="fixed before"),
        Column("tokens", value("n_tokens", text.count)),
        Column("groups", value("n_groups", text.count)),
    ]
    rows = said.harvested(results, "paper_selection").sort("series", "layer", maintain_order=True).to_dicts()
    return house(
        rows, columns, key="table-selection", caption=said.selection(results), group=grouping(results)
    )


def _minus(value: float | None) -> float | None:
    return None if value is None else -value
