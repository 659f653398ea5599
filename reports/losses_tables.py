"""Tables of the section on losses: δ, KL, agreement of needs, the estimate, rounding.

In: the tables of a measurement. Out: HTML tables, every number of the section's figures among them. Cost:
milliseconds a table.
"""

from typing import Any

import polars as pl

from . import findings, text, verdicts
from . import losses_findings as said
from .results import Results
from .sections import LAYER, grouping
from .tables import Column, Inner, Row, between, house, value

_NATS, _ENDS = text.nats, text.nats_interval
_RHO = {
    "": "spearman",
    " low": "lo",
    " high": "hi",
    " simultaneous low": "sim_lo",
    " simultaneous high": "sim_hi",
    " p (Holm)": "p_holm",
    " verdict": "verdict",
    " tokens": "n_tokens",
    " groups": "n_groups",
}
"""What stands behind a cell of the table of agreement."""
SMALL = 0.05
"""Nats up to which δ counts as small: the paper's bound."""
QUANTILES = {
    "q05": "5 %",
    "q25": "25 %",
    "q50": "median",
    "q75": "75 %",
    "q95": "95 %",
    "q99": "99 %",
    "max": "max",
}


def losses(results: Results) -> str:
    """The distribution of δ and of KL over test tokens."""
    columns = [
        LAYER,
        Column("", _need, number=False),
        Column("mean", value("mean", _NATS), spanner="nats a token"),
        Column("95 % interval", between("mean_lo", "mean_hi", _ENDS), spanner="nats a token"),
        Column("sd", value("sd", _NATS), spanner="nats a token"),
        *(Column(words, value(name), spanner="quantiles [nats]") for name, words in QUANTILES.items()),
        Column("median of |δ|", value("median_abs")),
        Column("below 0", value("share_negative", text.percent), spanner="tokens"),
        Column(
            "95 % interval",
            between("share_negative_lo", "share_negative_hi", text.percent_interval),
            spanner="tokens",
        ),
        Column(f"|δ| &lt; {SMALL:g}", value("share_small", text.percent), spanner="tokens"),
        Column("sum in top 5 %", value("top5_share", text.percent)),
        Column("tokens", value("n_tokens", text.count), spanner="test"),
        Column("groups", value("n_groups", text.count), spanner="test"),
    ]
    # A KL is never negative: a share of zero, with an interval above it, would read as a finding.
    below = [
        pl.when(pl.col("need") != "kl").then(pl.col(f"share_negative{end}")).alias(f"share_negative{end}")
        for end in ("", "_lo", "_hi")
    ]
    frame = results.tables["losses"].sort("series", "layer", maintain_order=True).with_columns(below)
    rows = frame.to_dicts()
    return house(
        rows, columns, key="table-losses", caption=said.loss_finding(results), group=grouping(results)
    )


def _need(row: Row) -> str:
    return {"loss": "δ", "kl": "KL"}.get(row["need"], findings.need_name(row["need"]))


def noise(results: Results) -> str:
    """How much of δ is rounding."""
    columns = [
        LAYER,
        Column("usable", lambda row: "yes" if row["labels_usable"] else "no", number=False),
        Column("median |δ|", value("median_abs_loss", _NATS), spanner="nats"),
        Column("median change", value("floor", _NATS), spanner="nats"),
        Column("95 % quantile", value("floor_q95", _NATS), spanner="nats"),
        Column("of the base alone", value("base_floor", _NATS), spanner="nats"),
        Column("mean change", value("mean_difference", _NATS), spanner="nats"),
        Column("95 % interval", between("mean_lo", "mean_hi", _ENDS), spanner="nats"),
        Column("ρ", value("spearman")),
        Column("change sides of the median", value("labels_changed", text.percent)),
        Column("tokens", value("n_tokens", text.count)),
        Column("dtypes", _dtypes, number=False),
    ]
    rows = results.tables["noise_floor"].sort("series", "layer", maintain_order=True).to_dicts()
    return house(
        rows, columns, key="table-noise", caption=said.noise_finding(results), group=grouping(results)
    )


def _dtypes(row: Row) -> str:
    return f"{text.name(row['dtype'], 16)} against {text.name(row['finer_dtype'], 16)}"


def kl(results: Results) -> str:
    """δ against its expectation."""
    spanner = "mean [nats a token]"
    columns = [
        LAYER,
        Column("δ above KL", verdicts.cell, number=False, markup=True),
        Column("δ", value("mean_loss", _NATS), spanner=spanner),
        Column("KL", value("mean_kl", _NATS), spanner=spanner),
        Column("difference", value("difference", _NATS), spanner=spanner),
        Column("95 % interval", between("difference_lo", "difference_hi", _ENDS), spanner=spanner),
        Column("simultaneous", between("difference_sim_lo", "difference_sim_hi", _ENDS), spanner=spanner),
        Column("p (Holm)", value("p_holm", text.p_value)),
        Column("slope", value("slope"), spanner="δ on KL"),
        Column("95 % interval", between("slope_lo", "slope_hi"), spanner="δ on KL"),
        Column("R²", value("r2"), spanner="δ on KL"),
        Column("95 % interval", between("r2_lo", "r2_hi"), spanner="δ on KL"),
        Column("ρ", value("spearman"), spanner="ranks"),
        Column("95 % interval", between("spearman_lo", "spearman_hi"), spanner="ranks"),
        Column("tokens", value("n_tokens", text.count)),
        Column("groups", value("n_groups", text.count)),
    ]
    rows = results.tables["kl_loss"].sort("series", "layer", maintain_order=True).to_dicts()
    return house(rows, columns, key="table-kl", caption=said.kl_finding(results), group=grouping(results))


def agreement(results: Results) -> str:
    """ρ of every two needs: a row a layer, a column a pair, with the sign of its verdict and the simultaneous
    interval.
    """
    columns, found = [LAYER], dict[tuple[int, int], dict[str, Any]]()
    for at, (one, other, rows) in enumerate(said.pairs(results)):
        title = f"{findings.need_name(one)} and {findings.need_name(other)}"
        columns.append(Column(text.escape(title), Inner(f"pair {at}", _rho, _RHO)))
        for row in rows.to_dicts():
            place = {"series": row["series"], "layer": row["layer"]}
            found.setdefault((row["series"], row["layer"]), place)[f"pair {at}"] = row
    caption = said.agreement_finding(results)
    rows = [found[place] for place in sorted(found)]
    return house(rows, columns, key="table-agreement", caption=caption, group=grouping(results))


def _rho(one: Row) -> str:
    ends = text.interval(one["sim_lo"], one["sim_hi"])
    return verdicts.marked(one, text.number(one["spearman"]) + ("" if ends == text.NONE else f" {ends}"))


def estimate(results: Results) -> str:
    """`loss_estimate` against exact patches of single positions."""
    spanner = "Spearman's ρ"
    columns = [
        LAYER,
        Column("orders alike", verdicts.cell, number=False, markup=True),
        Column("", value("spearman"), spanner=spanner),
        Column("95 % interval", between("spearman_lo", "spearman_hi"), spanner=spanner),
        Column("simultaneous", between("spearman_sim_lo", "spearman_sim_hi"), spanner=spanner),
        Column("like positions", value("within_position"), spanner=spanner),
        Column("95 % interval", between("within_position_lo", "within_position_hi"), spanner=spanner),
        Column("estimate", value("mean_estimate", _NATS), spanner="mean [nats]"),
        Column("exact", value("mean_loss_single", _NATS), spanner="mean [nats]"),
        Column("bias", value("bias", _NATS), spanner="mean [nats]"),
        Column("95 % interval", between("bias_lo", "bias_hi", _ENDS), spanner="mean [nats]"),
        Column("slope", value("slope")),
        Column("ρ", value("sequence_spearman"), spanner="sums over sequences"),
        Column("slope", value("sequence_slope"), spanner="sums over sequences"),
        Column("patches", value("n_patches", text.count)),
        Column("groups", value("n_groups", text.count)),
    ]
    rows = results.tables["estimate"].sort("series", "layer", maintain_order=True).to_dicts()
    caption = said.estimate_finding(results)
    return house(rows, columns, key="table-estimate", caption=caption, group=grouping(results))
