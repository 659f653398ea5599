"""What a measurement shows of single layers, in sentences, and which of its rows a sentence is about.

In: the tables `interventions`, `routers`, `sinks`, `context_lengths` and `paper_selection`. Out: plain text,
frames. A sentence says no more than the verdicts of its rows. Cost: nothing to speak of.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from . import findings, text, verdicts
from .results import Results

ONE = "one"
"""Of `chosen`: a layer by itself."""
LINEAR, GATE, EVERYWHERE = "linear", "gated@input", "@all"
CHEAP = 1.0
"""Percent of perplexity below which a replacement counts as cheap: the paper's bound."""
WENT_LINEAR = "went linear, of tokens that may"
"""Heading of a share among the tokens that a replacement reaches: where sinks keep the MLP, of the others."""

_KINDS = {
    "linear": "the linear map at every token that the fit covers",
    "linear@all": "the same at position 0 and special tokens too",
    "mean": "the mean output of the rows fitted, whatever the token",
    "zero": "nothing",
    "none": "the MLP itself, by the same machinery",
}
_ROUTED = {
    "gated": "tokens go linear where the gate on these features says so",
    "soft": "MLP and map mixed by the gate's own probability: both are computed, nothing is saved",
    "random": "tokens drawn at random",
    "token_list": "tokens whose type has the lowest mean need",
    "oracle": "tokens of lowest need, which nobody knows in time; no upper bound either",
    "low_rank": "the map cut to this rank, at every token",
}


@dataclass(frozen=True, slots=True)
class Router:
    """A router of the table: the gate `gated@input:0.5` at a share of 0.5, say."""

    family: str
    share: float | None


def router(name: str) -> Router:
    """What a name routes by, and the share that it was given; None where the gates step chose one."""
    kind, _, argument = name.partition("@")
    word, colon, share = argument.rpartition(":")
    if kind in ("random", "token_list", "oracle", "gated") and (colon or kind in ("random", "token_list")):
        try:
            value = float(share)
        except ValueError:
            return Router(name, None)
        return Router(f"{kind}@{word}" if colon else kind, value)
    return Router(name, None)


def harvested(results: Results, table: str) -> pl.DataFrame:
    """Rows of windows as they were harvested; of a store without any, those of its longest windows."""
    frame = results.tables[table]
    if frame.is_empty():
        return frame
    own = results.harvest.select("series", own="sequence_length")
    longest = pl.col("sequence_length").max().over("series")
    there = (pl.col("sequence_length") == pl.col("own")).any().over("series")
    joined = frame.join(own, on="series", how="left", maintain_order="left")
    wanted = pl.when(there).then(pl.col("own")).otherwise(longest)
    return joined.filter(pl.col("sequence_length") == wanted).drop("own")


def changed(row: Mapping[str, Any]) -> str:
    """`+7.99 [6.64, 9.35] %`: a change of perplexity and its interval, the unit once, behind both."""
    return text.estimate(text.change, row["ppl_pct"], row["ppl_lo"], row["ppl_hi"])


def singles(results: Results) -> pl.DataFrame:
    """Interventions on one layer by itself, under harvested windows."""
    frame = harvested(results, "interventions")
    return frame.filter(pl.col("chosen") == ONE)


def of_name(results: Results, name: str) -> pl.DataFrame:
    return singles(results).filter(pl.col("name") == name)


def names(results: Results) -> list[str]:
    return singles(results)["name"].unique(maintain_order=True).to_list()


def main_gate(results: Results) -> str | None:
    """The gate that the sentences are about: on the MLP's input at its own threshold, else the first one."""
    gates = [name for name in names(results) if name.startswith("gated@")]
    return GATE if GATE in gates else next(iter(gates), None)


def meaning(name: str) -> str:
    """What an intervention does, where its name is known."""
    return _KINDS.get(name) or _ROUTED.get(name.partition("@")[0], "")


def cheap(results: Results, rows: pl.DataFrame) -> str:
    """In how many layers the whole interval lies below CHEAP."""
    parts = []
    for at in range(len(results.stores)):
        mine = rows.filter(pl.col("series") == at)
        judged = mine.filter(pl.col("verdict") != "too few documents")
        if judged.is_empty():
            continue
        sure = judged.filter(pl.col("ppl_sim_hi") < CHEAP).height
        name = findings.label(results, at, 40) if len(results.stores) > 1 else ""
        parts.append((sure / mine.height, text.out_of(sure, mine.height), name))
    return findings.over_stores(parts) if parts else ""


def claim(results: Results, name: str = LINEAR) -> str:
    """In how many layers a replacement costs more than nothing."""
    rows = of_name(results, name)
    return f"{_what(name)} costs more than nothing {verdicts.by_store(results, rows)}"


def _what(name: str) -> str:
    if name == LINEAR:
        return "Replacing one MLP by its linear map"
    if name.startswith("gated@"):
        return f"Gating one MLP ({text.name(name, 28)})"
    return f"Replacing one MLP ({text.name(name, 28)})"


def cost(results: Results, name: str = LINEAR) -> str:
    """The claim on a replacement, and by how much perplexity changes."""
    rows = of_name(results, name)
    ends = findings.ranges(results, rows, "ppl_pct", text.change, ("ppl_sim_lo", "ppl_sim_hi"))
    return claim(results, name) + (f"; perplexity changes by {ends}" if ends else "")


def gate_cost(results: Results) -> str:
    """The claim on the main gate, how many layers it leaves cheap for sure, and what share goes linear."""
    name = main_gate(results)
    if name is None:
        return ""
    rows = of_name(results, name)
    below = cheap(results, rows)
    under = f"; below +{CHEAP:g}\N{NO-BREAK SPACE}% of perplexity for sure in {below}" if below else ""
    shares = findings.ranges(results, rows, "linear_share", text.percent)
    return (
        claim(results, name)
        + under
        + (f"; the share of tokens that goes linear is {shares}" if shares else "")
    )


def routed(results: Results) -> pl.DataFrame:
    """Comparisons of the main router at one share, one layer by itself. Where several shares were measured,
    the one nearest a half; where none was named, what the gates step chose.
    """
    frame = harvested(results, "routers").filter(pl.col("chosen") == ONE)
    mine = frame.filter(pl.col("router").str.starts_with(GATE))
    rows = mine if not mine.is_empty() else frame.filter(~pl.col("router").str.starts_with("oracle"))
    there = rows["router"].unique(maintain_order=True).to_list()
    chosen = min(there, key=_from_half, default=None)
    return rows.filter(pl.col("router") == chosen) if chosen is not None else rows


def _from_half(name: str) -> tuple[float, str]:
    share = router(name).share
    return (2.0 if share is None else abs(share - 0.5)), name


def comparisons(results: Results) -> list[tuple[str, pl.DataFrame]]:
    """What the main router is set against, and the rows: random first."""
    rows = routed(results)
    against = rows["against"].unique(maintain_order=True).to_list()
    return [(name, rows.filter(pl.col("against") == name)) for name in sorted(against, key=_random_first)]


def _random_first(name: str) -> tuple[int, str]:
    named = ("random", "token_list")
    family = router(name).family
    return (named.index(family) if family in named else len(named)), name


def against(name: str) -> str:
    """What a router is set against, as a sentence names it."""
    family = router(name).family
    return "random routing" if family == "random" else text.name(family, 28)


def beats(results: Results) -> str:
    """Whether the main router costs less at equal share than chance and than a list of tokens, or whatever
    comes first; the others are counted in the table.
    """
    found = comparisons(results)
    if not found:
        return "Routers at equal share"
    name = str(found[0][1]["router"].to_list()[0])
    parts = [f"{against(other)} {verdicts.by_store(results, rows)}" for other, rows in found[:2]]
    return f"At equal share, {text.name(name, 28)} costs less than {'; than '.join(parts)}"


def beats_random(results: Results) -> str:
    """The same against random routing alone: the sentence of the opening."""
    for other, rows in comparisons(results):
        if router(other).family == "random":
            name = text.name(str(rows["router"].to_list()[0]), 28)
            ends = findings.ranges(results, rows, "difference", text.nats, ("sim_lo", "sim_hi"))
            return (
                f"{name} costs less than random routing of as many tokens {verdicts.by_store(results, rows)}"
                + (f"; the gain in nats a token is {ends}" if ends else "")
            )
    return ""


def sinks(results: Results) -> str:
    """What it costs to replace sinks as well."""
    rows = harvested(results, "sinks").filter(pl.col("name") == LINEAR)
    ends = findings.ranges(results, rows, "all_pct", text.change)
    said = f"Replacing position 0 and special tokens too costs more {verdicts.by_store(results, rows)}"
    return said + (f"; perplexity then changes by {ends}" if ends else "")


def lengths(results: Results) -> str:
    """What longer windows do to the cost of the linear map."""
    frame = results.tables["context_lengths"].filter(pl.col("name") == LINEAR)
    parts = []
    for shorter, longer in frame.select("shorter", "longer").unique(maintain_order=True).rows():
        rows = frame.filter((pl.col("shorter") == shorter) & (pl.col("longer") == longer))
        found = verdicts.by_store(results, rows)
        parts.append(f"of {text.count(longer)} tokens than in those of {text.count(shorter)} {found}")
    if not parts:
        return "Cost by length of window"
    return f"The linear map costs more in windows {'; in windows '.join(parts)}"


def selection(results: Results) -> str:
    """What choosing the gate on the test rows makes of it."""
    rows = harvested(results, "paper_selection")
    below, n = rows.filter(pl.col("picked_below_base")).height, rows.height
    cases = "layers" if len(results.stores) == 1 else "pairs of layer and store"
    fixed = f"a gate that was fixed before costs less than nothing {verdicts.by_store(results, rows)}"
    return (
        f"Chosen on the rows that it is scored on, as in the paper, the best gate lies below the original's "
        f"perplexity in {text.out_of(below, n, cases)}; {fixed}"
    )


def order(there: Sequence[str]) -> list[str]:
    """Names of interventions as columns of a table: whole replacements, then routers by what they go by."""
    kinds = ("linear", "mean", "zero", "low_rank", "gated", "soft", "token_list", "random", "oracle", "none")
    ranked = {kind: at for at, kind in enumerate(kinds)}
    return sorted(there, key=lambda name: ranked.get(name.partition("@")[0], len(kinds)))
