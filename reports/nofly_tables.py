"""Tables of the section on other corpora: correlations, the paper's procedure, lists of tokens.

In: the tables `nofly` and `nofly_tokens`. Out: HTML tables, every number of the section's figures among them.
Cost: milliseconds a table.
"""

from collections.abc import Callable
from typing import Any

import polars as pl

from . import findings, text, verdicts
from . import nofly_findings as said
from .results import Results
from .sections import LAYER
from .tables import Column, Inner, Row, between, house, value

TOKENS_SHOWN = 15
"""Tokens of a list that the page shows."""
TOKEN = 40
"""Characters of a token that are shown."""


def _grouping(results: Results) -> Callable[[Row], str] | None:
    names = [said.pair_label(results, pair) for pair in said.pairs(results)]
    return None if len(names) == 1 else lambda row: names[row["series"]]


def verdict_table(results: Results) -> str:
    """Counts for every surrogate and key of the need that is drawn."""
    rows = said.numbered(results, results.first("nofly")[1])
    kinds = rows.select("surrogate", "key").unique(maintain_order=True).to_dicts()
    families = [
        (
            {
                "corpora": said.pair_label(results, pair),
                "surrogate": surrogate(results, kind["surrogate"]),
                "tokens by": text.name(kind["key"], 20),
            },
            chosen,
        )
        for at, pair in enumerate(said.pairs(results))
        for kind in kinds
        if not (
            chosen := rows.filter(
                (pl.col("series") == at)
                & (pl.col("surrogate") == kind["surrogate"])
                & (pl.col("key") == kind["key"])
            )
        ).is_empty()
    ]
    return verdicts.table(
        families,
        key="table-nofly-verdicts",
        caption="Layers in which needs of tokens carry over",
        group="corpora" if len(said.pairs(results)) > 1 else None,
        above=lambda row: row["r"] is not None and row["r"] > 0,
    )


def surrogate(results: Results, name: str) -> str:
    """A surrogate by the corpus it was fitted on."""
    if name in results.stores:
        return f"of {findings.label(results, results.stores.index(name), 40)}"
    return text.name(name, 40)


def correlations(results: Results) -> str:
    """What is drawn, in full."""
    columns = [
        LAYER,
        Column("verdict", verdicts.cell, number=False, markup=True),
        Column("", value("r"), spanner="r of token means"),
        Column("95 % interval", between("r_lo", "r_hi"), spanner="r of token means"),
        Column("Spearman", value("spearman"), spanner="r of token means"),
        Column("A", value("reliability_a"), spanner="reliability"),
        Column("B", value("reliability_b"), spanner="reliability"),
        Column("ceiling", value("ceiling")),
        Column("", value("r_disattenuated"), spanner="r, disattenuated"),
        Column(
            "95 % interval",
            between("r_disattenuated_lo", "r_disattenuated_hi"),
            spanner="r, disattenuated",
        ),
        Column(
            "simultaneous",
            between("r_disattenuated_sim_lo", "r_disattenuated_sim_hi"),
            spanner="r, disattenuated",
        ),
        Column("shuffled", value("p_permutation", text.p_value), spanner="p"),
        Column("Holm", value("p_holm", text.p_value), spanner="p"),
        Column("types", value("n_types", text.count)),
        Column("A", value("n_tokens_a", text.count), spanner="tokens"),
        Column("B", value("n_tokens_b", text.count), spanner="tokens"),
        Column("A", value("n_groups_a", text.count), spanner="groups"),
        Column("B", value("n_groups_b", text.count), spanner="groups"),
    ]
    rows = said.drawn(results)[3].to_dicts()
    return house(
        rows, columns, key="table-nofly", caption=said.correlation(results), group=_grouping(results)
    )


def others(results: Results) -> str:
    """r, disattenuated, for every need, surrogate and key: one column each."""
    rows = said.numbered(results, results.tables["nofly"])
    kinds = rows.select("need", "surrogate", "key").unique(maintain_order=True).rows()
    if len(kinds) < 2:
        return ""
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for row in rows.to_dicts():
        place = {"series": row["series"], "layer": row["layer"]}
        at = kinds.index((row["need"], row["surrogate"], row["key"]))
        found.setdefault((row["series"], row["layer"]), place)[f"kind {at}"] = row
    columns = [LAYER] + [
        Column(
            text.escape(f"by {text.name(key, 20)}"),
            _cell(f"kind {at}"),
            spanner=text.escape(f"{findings.need_name(need)}, surrogate {surrogate(results, name)}"),
        )
        for at, (need, name, key) in enumerate(kinds)
    ]
    ordered = [found[place] for place in sorted(found)]
    caption = "r, disattenuated, by need, surrogate and token"
    return house(ordered, columns, key="table-nofly-others", caption=caption, group=_grouping(results))


def _cell(kind: str) -> Inner:
    def show(one: Row) -> str:
        ends = text.interval(one["r_disattenuated_sim_lo"], one["r_disattenuated_sim_hi"])
        shown = text.number(one["r_disattenuated"]) + ("" if ends == text.NONE else f" {ends}")
        return verdicts.marked(one, shown)

    fields = {
        "": "r_disattenuated",
        " low": "r_disattenuated_sim_lo",
        " high": "r_disattenuated_sim_hi",
        " verdict": "verdict",
    }
    return Inner(kind, show, fields)


def paper(results: Results) -> str:
    """The paper's own procedure, and the same within the corpus that the list was made on."""
    whole, half = "the paper's list, in the other corpus", "the list of one half, in the other half"
    columns = [
        LAYER,
        Column("mean above", value("threshold")),
        Column("tokens", value("list_size", text.count), spanner=whole),
        Column("found", value("found", text.count), spanner=whole),
        Column("persisted", value("persisted", text.count), spanner=whole),
        Column("flipped", value("flipped", text.count), spanner=whole),
        Column("mean when chosen", value("list_mean_a"), spanner=whole),
        Column("mean there", value("list_mean_b"), spanner=whole),
        Column("r", value("paper_r"), spanner=whole),
        Column("tokens", value("half_list_size", text.count), spanner=half),
        Column("found", value("found_heldout", text.count), spanner=half),
        Column("persisted", value("persisted_heldout", text.count), spanner=half),
        Column("flipped", value("flipped_heldout", text.count), spanner=half),
        Column("mean when chosen", value("half_list_mean"), spanner=half),
        Column("mean there", value("list_mean_a_heldout"), spanner=half),
        Column("r", value("paper_r_heldout"), spanner=half),
        Column("mean in the other corpus", value("half_list_mean_b"), spanner=half),
    ]
    rows = said.drawn(results)[3].to_dicts()
    return house(
        rows,
        columns,
        key="table-paper",
        caption=said.regression_to_the_mean(results),
        group=_grouping(results),
    )


def _token(row: Row) -> str:
    shown = text.markup((row["text"] or "")[:TOKEN], spaces=True)
    more = "…" if len(row["text"] or "") > TOKEN else ""
    return f'<code dir="ltr"><bdi>{shown}</bdi>{more}</code>'


def tokens(results: Results, at: int, layer: int) -> str:
    """The tokens of highest mean need in the first store of a pair, at one layer."""
    frame = said.drawn(results, "nofly_tokens")[3]
    rows = frame.filter((pl.col("series") == at) & (pl.col("layer") == layer)).head(TOKENS_SHOWN)
    if rows.is_empty():
        return ""
    pair = said.pairs(results)[at]
    first, second = (text.escape(findings.label(results, store, 40)) for store in pair)
    columns = [
        Column("rank", value("rank", str)),
        Column("token", _token, number=False, markup=True),
        Column(first, value("mean_a"), spanner="mean need"),
        Column(second, value("mean_b"), spanner="mean need"),
        Column(first, value("n_a", text.count), spanner="occurrences"),
        Column(second, value("n_b", text.count), spanner="occurrences"),
    ]
    caption = f"Tokens of highest mean need in layer {layer}, {said.pair_label(results, pair)}"
    return house(rows.to_dicts(), columns, key=f"table-list-{at}-{layer}", caption=caption)
