"""The sentences of the page: what the tables say, in words, with numbers rounded as the tables round them.

In: frames of `Results`. Out: plain text, not yet escaped. These sentences title the figures and are their
alternative text; the answer of the page is that of `overview`. Cost: nothing to speak of.
"""

from collections.abc import Callable

import polars as pl

from . import text
from .results import Results

LEVEL = 95
"""Coverage of every interval of a study, in percent."""
MIN_GROUPS = 20
"""Groups of documents below which a study gives no verdict."""

FEW = 2
"""Corpora that a sentence takes one by one. Of more it tells the ends, and the table tells the rest."""

ONE_TOKEN = 0.5
"""Share of Σ‖y − ȳ‖² from which on one token decides a layer's R²."""

SAME = 1e-6
"""Spread, as a share of the mean, up to which errors are those of one vector."""

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


def ranges(results: Results, frame: pl.DataFrame, column: str, show: Callable[[float], str]) -> str:
    """From the lowest value (and its layer) to the highest, store by store; empty if there are none."""
    there = frame.filter(pl.col(column).is_not_null() & pl.col(column).is_not_nan())
    if there["series"].n_unique() > FEW:
        return _over_all(results, there, column, show)
    parts = []
    for series in range(len(results.stores)):
        ends = extremes(frame.filter(pl.col("series") == series), column)
        if ends is None:
            continue
        low, high = ends
        where = f" on {label(results, series, 40)}" if len(results.stores) > 1 else ""
        if low["layer"] == high["layer"]:
            parts.append(f"{show(low[column])} in layer {low['layer']}{where}")
        else:
            least, most = (f"{show(row[column])} (layer\N{NO-BREAK SPACE}{row['layer']})" for row in ends)
            parts.append(f"{least} to {most}{where}")
    return text.listing(parts) if parts else ""


def _over_all(results: Results, frame: pl.DataFrame, column: str, show: Callable[[float], str]) -> str:
    """From the lowest value of all corpora to the highest, each with where it is."""
    low, high = frame.sort(column, "layer", "series")[[0, -1]].to_dicts()
    shown = [
        f"{show(row[column])} (layer\N{NO-BREAK SPACE}{row['layer']} on {label(results, row['series'], 40)})"
        for row in (low, high)
    ]
    return f"{shown[0]} to {shown[1]}, over {frame['series'].n_unique()} corpora"


def over_stores(parts: list[tuple[float, str, str]]) -> str:
    """One value a corpus, as number, words and the corpus' name: each where they are few, else the ends."""
    if len(parts) <= FEW:
        return text.listing([f"{words}{f' on {name}' if name else ''}" for _, words, name in parts])
    low, high = min(parts), max(parts)
    if low[1] == high[1]:
        return f"{low[1]} on each of {len(parts)} corpora"
    return f"{low[1]} (on {low[2]}) to {high[1]} (on {high[2]}), over {len(parts)} corpora"


def r2(results: Results) -> str:
    away = moved(results)
    home, far = (
        ranges(results, results.surrogates.filter(series), "r2_test", text.number)
        for series in (~pl.col("series").is_in(away), pl.col("series").is_in(away))
    )
    if not home and not far:
        return "No held-out R²"
    said = "One linear map explains held-out MLP output with an R² of "
    if not far:
        return said + home
    there = f"{far}, moved to a corpus that it was not fitted on"
    return f"{said}{home}, where it was fitted; of {there}" if home else said + there


def need(results: Results) -> str:
    found = ranges(results, results.errors(), "q50", text.number)
    return f"The median token has an error of {found}" if found else "No needs of test tokens"


def shares(results: Results) -> str:
    found = ranges(results, results.errors(), "share_below_half", text.percent)
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
    return f"{tail} is there in {tailed} of {rows.height} {cases}"


def one_vector(results: Results) -> pl.DataFrame:
    """Series and layers whose sinks all have one error: the same vector in every window, as a BOS token gives
    at position 0. Such rows are one observation, however many there are.
    """
    same = pl.col("sd").fill_null(0.0) <= SAME * pl.col("mean").abs()
    error = pl.col("mean").round_sig_figs(5).alias("sink_error")
    return results.errors("sink").filter(same).select("series", "layer", error)


def sinks(results: Results) -> str:
    rows = results.surrogates.filter(pl.col("r2_sink").is_not_null() & pl.col("r2_sink").is_not_nan())
    if rows.is_empty():
        return "No sinks were harvested: no position 0 and no special token among the test rows"
    known = rows.join(one_vector(results), on=["series", "layer"], how="left", maintain_order="left")
    many = known.filter(pl.col("sink_error").is_null())
    away = pl.col("series").is_in(moved(results))
    alone = known.filter(pl.col("sink_error").is_not_null()).sort(
        away, "series", "layer", maintain_order=True
    )
    once = alone.unique(["layer", "sink_error"], keep="first", maintain_order=True)
    found = pl.concat([many, once])
    worse = found.filter(pl.col("r2_sink") < pl.col("r2_test")).height
    cases = "layers" if found["layer"].n_unique() == found.height else "pairs of layer and store"
    counted = f"worse than the other tokens in {worse} of {found.height} {cases}"
    if many.is_empty():
        return (
            "All sinks are one and the same vector, and count once: the linear map, fitted without it, "
            f"explains it {counted}"
        )
    note = "" if once.is_empty() else " (where all are one and the same vector, they count once)"
    return f"The linear map, fitted without the sinks, explains them {counted}{note}"


def representatives(frame: pl.DataFrame, column: str) -> list[int]:
    """Layers with the lowest, the middle and the highest value of the first store that has any, in the order
    of layers."""
    known = frame.filter(pl.col(column).is_not_null() & pl.col(column).is_not_nan())
    if known.is_empty():
        return []
    first = known.filter(pl.col("series") == known["series"].min()).sort(column, "layer")["layer"].to_list()
    return sorted({first[0], first[len(first) // 2], first[-1]})
