"""The sentences of the page: what the tables say, in words, with numbers rounded as the tables round them.

In: frames of `Results`. Out: plain text, not yet escaped. These sentences title the figures and are their
alternative text; the answer of the page is that of `overview`. Cost: nothing to speak of.
"""

from collections.abc import Callable
from typing import Any

import polars as pl

from . import text
from .results import Results

Row = dict[str, Any]

LEVEL = 95
"""Coverage of every interval of a study, in percent."""
MIN_GROUPS = 20
"""Groups of documents below which a study gives no verdict."""

FEW = 2
"""Corpora whose values a sentence gives one by one. Of more it tells the ends, and the table the rest."""

CLAUSES = 3
"""Corpora that have a clause each where a clause is short: a count, a cost."""

ONE_TOKEN = 0.5
"""Share of Σ‖y − ȳ‖² from which on one token decides a layer's R²."""

LONG_TAIL = 1
"""Skewness above which a distribution counts as highly skewed (Bulmer, Principles of Statistics, 1979)."""

VERDICTS = ("supported", "not supported", "cannot tell", "too few documents")

MEANING = {
    "supported": "the whole interval lies at or above the threshold",
    "not supported": "the whole interval lies below the threshold",
    "cannot tell": "the interval holds the threshold: more documents would be needed",
    "too few documents": f"fewer than {MIN_GROUPS} independent groups of documents: shown without a verdict",
}


def label(results: Results, series: int, limit: int = 60) -> str:
    """The name by which the page calls a store: its corpus, and the store's own name where corpora repeat."""
    corpora = results.harvest["corpus"].to_list()
    corpus, store = corpora[series], results.stores[series]
    return text.name(corpus if corpora.count(corpus) == 1 else f"{corpus} ({store})", limit)


def labels(results: Results, limit: int = 40) -> list[str]:
    """The names of all stores, in their order."""
    return [label(results, series, limit) for series in range(len(results.stores))]


def model(results: Results) -> str:
    return text.listing([text.name(name, 60) for name in results.models])


def claim(results: Results) -> str:
    """What "nearly linear" means here, in one sentence."""
    said = (
        "An MLP counts as nearly linear when one linear map, fitted on other documents of the same corpus, "
        f"explains at least {100 * results.claim_at:g}{text.PERCENT} of the variance of its output (R² ≥ "
        f"{results.claim_at:g}), and the {LEVEL}{text.PERCENT} interval that covers all layers at once lies "
        "wholly above that."
    )
    away = (
        " On a corpus that the maps were not fitted on, the same count says whether they transfer: a map "
        "fitted there may do better."
    )
    return said + (away if moved(results) else "")


def at_home(results: Results) -> list[int]:
    """Stores that the maps were fitted on: there R² says how linear an MLP is."""
    fitted = results.surrogates.group_by("series").agg((pl.col("store") == pl.col("fit_on")).all())
    return sorted(fitted.filter(pl.col("store"))["series"].to_list())


def moved(results: Results) -> list[int]:
    """Stores on which maps of another store are scored: there R² says whether a map transfers."""
    there = results.surrogates["series"].unique().to_list()
    return sorted(set(there) - set(at_home(results)))


def n_layers(results: Results, series: int) -> int:
    """Layers that the model of a store has: a study may have looked at some of them."""
    return int(results.harvest["n_layers"].to_list()[series])


def r2_words(row: dict) -> str:
    """`R² 0.931 [0.912, 0.948]`: the value, not broken off its name, and its simultaneous interval."""
    ends = text.interval(row["r2_sim_lo"], row["r2_sim_hi"])
    return f"R²\N{NO-BREAK SPACE}{text.number(row['r2_test'])}" + ("" if ends == text.NONE else f" {ends}")


def need_name(need: str) -> str:
    """A need as a sentence names it."""
    return text.name(need, 24)


def extremes(frame: pl.DataFrame, column: str) -> tuple[dict, dict] | None:
    """The rows with the lowest and the highest value of a column; None where it has no values."""
    known = frame.filter(pl.col(column).is_not_null() & pl.col(column).is_not_nan()).sort(column, "layer")
    return None if known.is_empty() else (known.row(0, named=True), known.row(-1, named=True))


def ranges(
    results: Results,
    frame: pl.DataFrame,
    column: str,
    show: Callable[[float], str],
    ends: tuple[str, str] | None = None,
) -> str:
    """From the lowest value (and its layer) to the highest, store by store; empty if there are none. `ends`:
    the columns of their intervals. Whatever a sentence says of all values stands before them: over many
    corpora they close with a clause of their own.
    """
    there = frame.filter(pl.col(column).is_not_null() & pl.col(column).is_not_nan())
    several, n_stores = len(results.stores) > 1, there["series"].n_unique()

    def place(row: Row) -> str:
        return f" on {label(results, row['series'], 40)}" if several else ""

    if n_stores > FEW:
        return f"{from_to(there, column, show, ends, place)}, over {n_stores} corpora"
    parts = []
    for series in there["series"].unique().sort().to_list():
        mine = there.filter(pl.col("series") == series)
        parts.append(from_to(mine, column, show, ends) + place(mine.row(0, named=True)))
    return text.listing(parts) if parts else ""


def from_to(
    rows: pl.DataFrame,
    column: str,
    show: Callable[[float], str],
    ends: tuple[str, str] | None = None,
    place: Callable[[Row], str] = lambda row: "",
) -> str:
    """`0.61 (layer 3) to 0.92 (layer 29)` of rows that all have a value; where both read the same, the value
    once and in how many layers. `place`: what tells rows of one layer apart.
    """
    order = [column, "layer", *(name for name in ("series",) if name in rows.columns)]
    low, high = rows.sort(order)[[0, -1]].to_dicts()

    def said(row: Row) -> str:
        return show(row[column]) if ends is None else text.estimate(show, row[column], *map(row.get, ends))

    if rows.height == 1:
        return f"{said(low)} in layer {low['layer']}{place(low)}"
    if show(low[column]) == show(high[column]):
        cases = "layers" if rows["layer"].n_unique() == rows.height else "cases"
        return f"{_widest(rows, low[column], show, ends)} in {text.every(rows.height, cases)}"
    least, most = (f"{said(row)} (layer\N{NO-BREAK SPACE}{row['layer']}{place(row)})" for row in (low, high))
    return f"{least} to {most}"


def _widest(
    rows: pl.DataFrame, value: float, show: Callable[[float], str], ends: tuple[str, str] | None
) -> str:
    """One value for all rows, and the interval that holds those of all."""
    if ends is None:
        return show(value)
    low, high = (rows[end].drop_nulls().to_list() for end in ends)
    return text.estimate(show, value, min(low, default=None), max(high, default=None))


def over_stores(parts: list[tuple[float, str, str]]) -> str:
    """One value a corpus, as number, words and the corpus' name: each where they are few, else the ends."""
    low, high = min(parts), max(parts)
    if len(parts) > 2 and low[1] == high[1]:
        return f"{low[1]} on each of {len(parts)} corpora"
    if len(parts) <= CLAUSES:
        return text.listing([f"{words}{f' on {name}' if name else ''}" for _, words, name in parts])
    return f"{low[1]} (on {low[2]}) to {high[1]} (on {high[2]}), over {len(parts)} corpora"


def r2(results: Results) -> str:
    away = moved(results)
    home, far = (
        ranges(results, results.surrogates.filter(series), "r2_test", text.number, ("r2_sim_lo", "r2_sim_hi"))
        for series in (~pl.col("series").is_in(away), pl.col("series").is_in(away))
    )
    if not home and not far:
        return "No held-out R²"
    said = "one linear map explains held-out MLP output with an R² of"
    there = "moved to a corpus that it was not fitted on"
    if not far:
        return f"O{said[1:]} {home}"
    if not home:
        return f"{there.capitalize()}, {said} {far}"
    return f"Where it was fitted, {said} {home}; {there}, of {far}"


def need(results: Results) -> str:
    found = ranges(results, results.errors(), "q50", text.number)
    return f"The median token has an error of {found}" if found else "No needs of test tokens"


def shares(results: Results) -> str:
    ends = ("share_below_half_lo", "share_below_half_hi")
    found = ranges(results, results.errors(), "share_below_half", text.percent, ends)
    return f"Tokens with an error below 0.5 make up {found}" if found else "No needs of test tokens"


def skew(results: Results) -> str:
    found = ranges(results, results.errors(), "top5_share", text.percent)
    return (
        f"Of all squared error, the neediest 5 % of tokens carry {found}"
        if found
        else "No needs of test tokens"
    )


def histogram(results: Results) -> str:
    rows = results.errors()
    tailed = rows.filter(pl.col("skew") > LONG_TAIL).height
    cases = "layers" if len(results.stores) == 1 else "pairs of layer and store"
    tail = f"A long tail of tokens that need far more than the rest (skew above {LONG_TAIL})"
    return f"{tail} is there in {text.out_of(tailed, rows.height, cases)}"


def representatives(frame: pl.DataFrame, column: str) -> list[int]:
    """Layers with the lowest, the middle and the highest value of the first store that has any, in the order
    of layers."""
    known = frame.filter(pl.col(column).is_not_null() & pl.col(column).is_not_nan())
    if known.is_empty():
        return []
    first = known.filter(pl.col("series") == known["series"].min()).sort(column, "layer")["layer"].to_list()
    return sorted({first[0], first[len(first) // 2], first[-1]})
