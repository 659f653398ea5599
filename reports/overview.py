"""The answer on many corpora, in one short paragraph: from where to where, what all of them share, the worst.

In: the table `surrogates` of `Results`. Out: plain text, not yet escaped. What `findings.summary` says of
each corpus is in the tables below it. Cost: nothing to speak of.
"""

import polars as pl

from . import text
from .findings import ONE_TOKEN, extremes, foreign, label, r2_words
from .results import Results


def overview(results: Results) -> str:
    """What `summary` says of one corpus, of many: from where to where, and which layers on all of them."""
    rows = results.surrogates
    stores = range(len(results.stores))
    judged = [at for at in stores if _verdicts(rows, at) != {"too few documents"}]
    counts, n = [], rows["layer"].n_unique()
    for at in judged:
        mine = rows.filter((pl.col("series") == at) & (pl.col("verdict") == "supported"))
        counts.append((mine.height, label(results, at, 40), set(mine["layer"])))
    if counts:
        unsure = rows.filter(pl.col("series").is_in(judged) & (pl.col("verdict") == "cannot tell")).height
        open_ = f"; cannot tell in {unsure} of {n * len(judged)} pairs of layer and corpus" if unsure else ""
        opening = f"{_ends(counts, n, len(results.stores))} nearly linear{_common(counts)}{open_}"
    else:
        opening = f"there are too few documents to say which of {n} MLPs are nearly linear"
    moved = any(foreign(results, rows.filter(pl.col("series") == at)) for at in stores)
    maps = [text.name(str(one)) for one in rows["fit_on"].unique(maintain_order=True).to_list()]
    opening += f" (maps fitted on {text.listing(maps)})" if moved else ""
    silent = len(results.stores) - len(judged)
    few = (
        f" {silent} of {len(results.stores)} corpora have too few documents for a verdict." if silent else ""
    )
    ends = extremes(rows.filter(pl.col("series").is_in(judged or list(stores))), "r2_test")
    if ends is None:
        return f"{opening}. No layer has a held-out R².{few}"
    least, most = (
        f"layer {row['layer']} on {label(results, row['series'], 40)}: {r2_words(row)}" for row in ends
    )
    return f"{opening}. Most linear is {most}; least, {least}.{few if counts else ''}"


def _ends(counts: list[tuple[int, str, set[int]]], n: int, n_stores: int) -> str:
    """`on each of them 1 of 30 MLPs is`, `1 (on docs:python) to 4 (on docs:stdlib) of 30 MLPs are`."""
    low, high = (pick(counts, key=lambda one: one[0]) for pick in (min, max))
    if high[0] == 0:
        return f"no MLP of {n} is"
    if low[0] == high[0]:
        those = "them" if len(counts) == n_stores else f"the {len(counts)} with enough documents"
        where = f"on {low[1]}" if len(counts) == 1 else f"on each of {those}"
        return f"{where} {low[0]} of {n} MLPs {'is' if low[0] == 1 else 'are'}"
    return f"{low[0] or 'none'} (on {low[1]}) to {high[0]} (on {high[1]}) of {n} MLPs are"


def _common(counts: list[tuple[int, str, set[int]]]) -> str:
    """The layers that every corpus supports."""
    common = sorted(set.intersection(*(layers for *_, layers in counts)))
    return f", {text.layers(common)} everywhere" if common else ""


def _verdicts(rows: pl.DataFrame, series: int) -> set[str]:
    return set(rows.filter(pl.col("series") == series)["verdict"].to_list())


def lone_tokens(results: Results) -> str:
    """The same over many corpora: in how many cases, and the worst."""
    rows = results.surrogates.filter(pl.col("largest_row") > ONE_TOKEN).sort("largest_row", descending=True)
    if rows.is_empty():
        return ""
    worst = rows.row(0, named=True)
    return (
        "One test token carries more than half of the variance of the output, Σ‖y − ȳ‖², in "
        f"{rows.height} of {results.surrogates.height} pairs of layer and corpus, most in layer "
        f"{worst['layer']} on {label(results, worst['series'], 40)} ({text.percent(worst['largest_row'])}): "
        "there R² and error speak of that token, not of the others."
    )
