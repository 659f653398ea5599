"""How the maps do on sinks, position 0 and special tokens, in one sentence: by R², and where the mean error
says otherwise.

In: the tables `surrogates` and `needs`. Out: plain text, frames. R² of sinks has no interval, and a few of
them may have a variance of their own: it is a point estimate, and the sentence says so. Cost: nothing to
speak of.
"""

import polars as pl

from . import findings, text
from .results import Results

SAME = 1e-6
"""Spread, as a share of the mean, up to which errors are those of one vector."""


def one_vector(results: Results) -> pl.DataFrame:
    """Series and layers whose sinks all have one error: the same vector in every window, as a BOS token gives
    at position 0. Such rows are one observation, however many there are.
    """
    same = pl.col("sd").fill_null(0.0) <= SAME * pl.col("mean").abs()
    error = pl.col("mean").round_sig_figs(5).alias("sink_error")
    return results.errors("sink").filter(same).select("series", "layer", error)


def finding(results: Results) -> str:
    rows = results.surrogates.filter(pl.col("r2_sink").is_not_null() & pl.col("r2_sink").is_not_nan())
    if rows.is_empty():
        return "No sinks were harvested: no position 0 and no special token among the test rows"
    known = rows.join(one_vector(results), on=["series", "layer"], how="left", maintain_order="left")
    many = known.filter(pl.col("sink_error").is_null())
    away = pl.col("series").is_in(findings.moved(results))
    alone = known.filter(pl.col("sink_error").is_not_null()).sort(
        away, "series", "layer", maintain_order=True
    )
    once = alone.unique(["layer", "sink_error"], keep="first", maintain_order=True)
    found = pl.concat([many, once])
    worse = found.filter(pl.col("r2_sink") < pl.col("r2_test")).height
    cases = "layers" if found["layer"].n_unique() == found.height else "pairs of layer and store"
    counted = f"worse than the other tokens in {text.out_of(worse, found.height, cases)}"
    by, other = "point estimates of R², the linear map, fitted without", _otherwise(results, found)
    if many.is_empty():
        same = "All sinks are one and the same vector, and count once"
        return f"{same}: by {by} it, explains it {counted}{other}"
    note = "" if once.is_empty() else " (where all are one and the same vector, they count once)"
    return f"By {by} the sinks, explains them {counted}{note}{other}"


def _otherwise(results: Results, rows: pl.DataFrame) -> str:
    """Where the mean error of sinks and the others is in the other order than their R²."""
    body, sink = (
        results.errors(population).select("series", "layer", pl.col("mean").alias(population))
        for population in ("body", "sink")
    )
    place = ["series", "layer"]
    both = rows.join(body, on=place, maintain_order="left").join(sink, on=place, maintain_order="left")
    worse = pl.col("r2_sink") < pl.col("r2_test")
    differ = pl.when(worse).then(pl.col("sink") < pl.col("body")).otherwise(pl.col("sink") > pl.col("body"))
    there = both.filter(differ).sort("series", "layer")
    if there.is_empty():
        return ""
    named = []
    for series in there["series"].unique().sort().to_list():
        where = f" on {findings.label(results, series, 40)}" if len(results.stores) > 1 else ""
        named.append(text.layers(there.filter(pl.col("series") == series)["layer"].to_list()) + where)
    return f"; those of the mean error say otherwise in {text.some(named)}"
