"""What the gates of a study show, in sentences, and which of their rows a sentence is about.

In: the tables of the analysis `gates`. Out: plain text, frames. A sentence says no more than the verdicts
of its rows. Cost: nothing to speak of.
"""

from collections.abc import Sequence

import polars as pl

from . import comparisons, features, findings, text, verdicts
from .context_findings import NESTED
from .results import Results

CURVES = ("input", "token_type", "norm", "random", "oracle")
"""Feature sets whose share-versus-need curves are drawn, in the order of colours."""
LINEAR = "linear"
SHARES_SHOWN = 11
"""Shares of tokens that the table of curves shows at most."""


def linear(frame: pl.DataFrame) -> pl.DataFrame:
    """Rows of gates on the features themselves, not on their principal components; where a study has none, of
    the first size that it has.
    """
    sizes = frame["size"].unique(maintain_order=True).to_list()
    wanted = LINEAR if LINEAR in sizes or not sizes else sizes[0]
    return frame.filter(pl.col("size") == wanted)


def main_of(frame: pl.DataFrame) -> str:
    """The feature set that the sentences are about: the MLP's input where it is there."""
    return features.order(frame["features"].unique().to_list())[0]


def main_rows(results: Results) -> pl.DataFrame:
    """The main gate on the need that is drawn, one row a store and layer."""
    rows = linear(results.first("gates")[1])
    return rows.filter(pl.col("features") == main_of(rows))


def _gate(results: Results) -> str:
    name = main_of(linear(results.first("gates")[1]))
    return f"gate on {features.MEANINGS.get(name, text.name(name, 28))}"


def claim(results: Results) -> str:
    """In how many layers the main gate beats chance."""
    need, _ = results.first("gates")
    return (
        f"A {_gate(results)} tells tokens of low {findings.need_name(need)} from the others better than "
        f"chance {verdicts.by_store(results, main_rows(results))}"
    )


def auc(results: Results) -> str:
    """The claim, and by how much."""
    ends = findings.ranges(results, main_rows(results), "auc", text.number, ("auc_sim_lo", "auc_sim_hi"))
    return claim(results) + (f"; its AUC is {ends}" if ends else "")


def beaten(results: Results) -> list[tuple[str, pl.DataFrame]]:
    """Comparisons of the main gate with simpler ones: all that are not about token and context."""
    if not results.has("gate_differences"):
        return []
    return [(claim, rows) for claim, rows in comparisons.of(results) if claim not in NESTED]


def beats(results: Results) -> str:
    """What the main gate has over simpler ones."""
    parts = [f"{text.name(claim, 60)} {verdicts.by_store(results, rows)}" for claim, rows in beaten(results)]
    return f"By AUC, {'; '.join(parts)}"


def curve_layers(results: Results, table: str) -> list[int]:
    """Layers where the main gate ranks worst, in the middle and best."""
    there = results.tables[table]["layer"].unique().to_list()
    return findings.representatives(main_rows(results).filter(pl.col("layer").is_in(there)), "auc")


def thinned(shares: Sequence[float]) -> list[float]:
    """At most SHARES_SHOWN of the shares, the ends among them."""
    step = max(1, -(-(len(shares) - 1) // (SHARES_SHOWN - 1)))
    return [*shares[:-1:step], shares[-1]] if len(shares) > 1 else list(shares)


def curves(results: Results) -> str:
    """What the easier half of tokens carries, in the layers that are drawn."""
    need, rows = results.first("gate_curves")
    chosen = linear(rows).filter(
        (pl.col("features") == main_of(linear(results.first("gates")[1])))
        & pl.col("layer").is_in(curve_layers(results, "gate_curves"))
    )
    shares = thinned(chosen["share"].unique().sort().to_list())
    if not shares:
        return "Need carried by the tokens that go linear"
    half = min(shares, key=lambda share: abs(share - 0.5))
    ends = findings.ranges(results, chosen.filter(pl.col("share") == half), "need_share", text.percent)
    if not ends:
        return "Need carried by the tokens that go linear"
    return (
        f"Of all {findings.need_name(need)}, the {text.percent(half)} of tokens that the {_gate(results)} "
        f"finds easiest carry, in the layers shown, {ends}"
    )


def calibration_rows(results: Results) -> pl.DataFrame:
    """Bins of the main gate."""
    rows = linear(results.first("gate_calibration")[1])
    return rows.filter(pl.col("features") == main_of(linear(results.first("gates")[1])))


def calibration(results: Results) -> str:
    ends = findings.ranges(results, main_rows(results), "calibration_slope", text.number)
    if not ends:
        return "Predicted against observed shares of easy tokens"
    return (
        f"The calibration slope of the {_gate(results)}, where 1 is neither too sure nor too timid, is {ends}"
    )
