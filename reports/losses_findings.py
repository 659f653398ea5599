"""What the losses of a measurement show, in sentences, and pairs of needs in the order shown.

In: the tables `losses`, `kl_loss`, `need_agreement`, `estimate` and `noise_floor`. Out: plain text, frames. A
sentence says no more than the verdicts of its rows. Cost: nothing to speak of.
"""

from collections.abc import Sequence

import polars as pl

from . import findings, text, verdicts
from .multiples import Panel, domain_of
from .results import Results

MOST_KNOWN = 0.5
"""R² of δ on KL below which most of δ is what nobody expects."""

_SIMULTANEOUS = ("sim_lo", "sim_hi")

NOISE = (
    "The same layers were measured in a finer dtype too. Where half of the tokens move by more than the "
    "median |δ| from rounding alone, δ cannot say which tokens are easy, and verdicts on such labels are "
    "refused."
)


def loss_finding(results: Results) -> str:
    """How often linearising helps, and how few tokens carry the cost."""
    rows = results.tables["losses"].filter(pl.col("need") == "loss")
    better = findings.ranges(
        results, rows, "share_negative", text.percent, ("share_negative_lo", "share_negative_hi")
    )
    if not better:
        return "δ of test tokens"
    return f"The linear map predicts better than the MLP on a part of the tokens: {better}"


def kl_finding(results: Results) -> str:
    """Where targets cost more than the model expects, and how much of δ could be known without the target."""
    rows = results.tables["kl_loss"]
    said = f"δ is on average above what the model itself expects {verdicts.by_store(results, rows)}"
    return said + known(results, rows)


def known(results: Results, rows: pl.DataFrame) -> str:
    """How much of δ goes with KL, where the interval of R² lies on one side of MOST_KNOWN, and where it does
    not: an interval of [0, 0.93] says neither that δ is luck nor that it is known.
    """
    there = rows.filter(pl.col("r2").is_not_null() & pl.col("r2_lo").is_not_null())
    holds = (pl.col("r2_lo") < MOST_KNOWN) & (pl.col("r2_hi") >= MOST_KNOWN)
    told, wide = there.filter(~holds), there.filter(holds)
    ends = findings.ranges(results, told, "r2", text.number, ("r2_lo", "r2_hi"))
    if wide.is_empty():
        return f"; R² of δ on KL is {ends}" if ends else ""
    cases = "layers" if len(results.stores) == 1 else "pairs of layer and store"
    open_ = f"cannot tell in {text.out_of(wide.height, there.height, cases)}{_widest(results, wide)}"
    return f"; R² of δ on KL is {ends}; {open_}" if ends else f"; R² of δ on KL: {open_}"


def _widest(results: Results, rows: pl.DataFrame) -> str:
    """` (layer 3: [0.000, 0.928])`: the interval that says least."""
    width = pl.col("r2_hi") - pl.col("r2_lo")
    row = rows.sort(width, descending=True, maintain_order=True).row(0, named=True)
    where = f" on {findings.label(results, row['series'], 40)}" if len(results.stores) > 1 else ""
    most, ends = "widest in " if rows.height > 1 else "", text.interval(row["r2_lo"], row["r2_hi"])
    return f" ({most}layer\N{NO-BREAK SPACE}{row['layer']}{where}: {ends})"


def pairs(results: Results) -> list[tuple[str, str, pl.DataFrame]]:
    """Pairs of needs with their rows: those with δ first."""
    frame = results.tables["need_agreement"]
    named = frame.select("need_a", "need_b").unique(maintain_order=True).rows()
    ranked = sorted(named, key=lambda pair: ("loss" not in pair, "error" not in pair))
    return [
        (one, other, frame.filter((pl.col("need_a") == one) & (pl.col("need_b") == other)))
        for one, other in ranked
    ]


def opening(results: Results) -> str:
    """Whether the need that costs no second visit orders tokens as the loss does."""
    for one, other, rows in pairs(results):
        if {one, other} == {"error", "loss"}:
            ends = findings.ranges(results, rows, "spearman", text.number, _SIMULTANEOUS)
            said = f"The rank correlation of error and loss (δ) is above 0 {verdicts.by_store(results, rows)}"
            return said + (f"; it is {ends}" if ends else "")
    return ""


def agreement_finding(results: Results) -> str:
    """The opening's sentence, or that of the first pair."""
    if said := opening(results):
        return said
    one, other, rows = pairs(results)[0]
    ends = findings.ranges(results, rows, "spearman", text.number, _SIMULTANEOUS)
    named = f"{findings.need_name(one)} and {findings.need_name(other)}"
    said = f"The rank correlation of {named} is above 0 {verdicts.by_store(results, rows)}"
    return said + (f"; it is {ends}" if ends else "")


def estimate_finding(results: Results) -> str:
    rows = results.tables["estimate"]
    ends = findings.ranges(results, rows, "spearman", text.number, ("spearman_sim_lo", "spearman_sim_hi"))
    found = verdicts.by_store(results, rows)
    said = f"The rank correlation of loss_estimate and exact patches is above 0 {found}"
    return said + (f"; it is {ends}" if ends else "")


def noise_finding(results: Results) -> str:
    """In how many layers rounding leaves the labels usable."""
    rows = results.tables["noise_floor"]
    usable, n = rows.filter(pl.col("labels_usable")).height, rows.height
    cases = "layers" if len(results.stores) == 1 else "pairs of layer and store"
    coarse = text.listing([text.name(one, 16) for one in rows["dtype"].unique(maintain_order=True).to_list()])
    return f"Computed in {coarse}, δ stands above its rounding in {text.out_of(usable, n, cases)}"


def correlations(panels: Sequence[Panel]) -> tuple[float, float]:
    return domain_of(panels, (-1.0, 1.0), show=(0.0, 0.5), step=0.25)
