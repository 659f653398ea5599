"""Whether mean needs of tokens carry over to another corpus, in sentences, and which rows are drawn.

In: the tables `nofly` and `nofly_tokens`. Out: plain text, frames with `series` for the pair of stores. Cost:
nothing to speak of.
"""

import polars as pl

from . import findings, text, verdicts
from .results import Results

SURROGATES = "pooled"
"""The surrogate that is drawn where it is there: fitted on all corpora, so that none is at home."""
KEY = "input"
"""Tokens are drawn by the one that enters, where both were done."""
ARROW = "→"


def pairs(results: Results) -> list[tuple[int, int]]:
    """Pairs of stores in the order of the table: the list is made on the first, looked up on the second."""
    frame = results.tables["nofly"].select("series_a", "series_b").unique(maintain_order=True)
    return [(row["series_a"], row["series_b"]) for row in frame.to_dicts()]


def pair_label(results: Results, pair: tuple[int, int], limit: int = 40) -> str:
    return f" {ARROW} ".join(findings.label(results, at, limit) for at in pair)


def numbered(results: Results, frame: pl.DataFrame) -> pl.DataFrame:
    """The frame with the number of its pair as `series`, in the order of pairs, other rows left out."""
    found = pairs(results)
    numbers = pl.DataFrame(
        {"series_a": [a for a, _ in found], "series_b": [b for _, b in found], "series": range(len(found))},
        schema=dict.fromkeys(("series_a", "series_b", "series"), pl.Int64),
    )
    joined = frame.join(numbers, on=["series_a", "series_b"], maintain_order="left")
    return joined.sort("series", maintain_order=True)


def drawn(results: Results, table: str = "nofly") -> tuple[str, str, str, pl.DataFrame]:
    """Need, surrogate and key that are drawn, and their rows."""
    need, _ = results.first("nofly")
    whole = results.first("nofly")[1]
    surrogate = _preferred(whole["surrogate"].unique(maintain_order=True).to_list(), SURROGATES)
    key = _preferred(
        whole.filter(pl.col("surrogate") == surrogate)["key"].unique(maintain_order=True).to_list(), KEY
    )
    chosen = results.tables[table].filter(
        (pl.col("need") == need) & (pl.col("surrogate") == surrogate) & (pl.col("key") == key)
    )
    return need, surrogate, key, numbered(results, chosen)


def _preferred(there: list[str], wanted: str) -> str:
    return wanted if wanted in there else there[0]


def _by_pair(results: Results, frame: pl.DataFrame) -> str:
    found = pairs(results)
    return verdicts.families(
        [
            (
                f" for {pair_label(results, pair)}" if len(found) > 1 else "",
                frame.filter(pl.col("series") == at),
            )
            for at, pair in enumerate(found)
        ],
        "pairs of corpora",
    )


def claim(results: Results) -> str:
    """Where the needs of tokens carry over."""
    need, _, _, rows = drawn(results)
    what = f"The mean {findings.need_name(need)} of a token"
    return f"{what} carries over (r above 0) {_by_pair(results, rows)}"


def correlation(results: Results) -> str:
    """The claim, and how strongly they do once noise is taken out."""
    ends = _range(results, drawn(results)[3], "r_disattenuated")
    return claim(results) + (f"; freed from noise, r is {ends}" if ends else "")


def _range(results: Results, rows: pl.DataFrame, column: str) -> str:
    """From the lowest to the highest value over all pairs and layers."""
    there, found = rows.filter(pl.col(column).is_not_null()), pairs(results)

    def place(row: findings.Row) -> str:
        return f" for {pair_label(results, found[row['series']])}" if len(found) > 1 else ""

    if there.is_empty():
        return ""
    return findings.from_to(there, column, text.number, (f"{column}_sim_lo", f"{column}_sim_hi"), place)


def regression_to_the_mean(results: Results) -> str:
    """How the paper's list fares on occurrences that did not choose it, in its own corpus."""
    need, _, _, rows = drawn(results)
    known = rows.filter(pl.col("half_list_mean").is_not_null() & pl.col("list_mean_a_heldout").is_not_null())
    if known.is_empty():
        return "The paper's procedure found no list of tokens"
    fell = known.filter(pl.col("list_mean_a_heldout") < pl.col("half_list_mean")).height
    cases = "layers" if len(pairs(results)) == 1 else "pairs of layer and corpora"
    return (
        f"In other documents of its own corpus, the paper's list of tokens has a lower mean "
        f"{findings.need_name(need)} than where it was chosen, in {text.out_of(fell, known.height, cases)}"
    )
