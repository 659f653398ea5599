"""The answer to "which MLPs of this model are nearly linear?": from the corpus that the maps were fitted on.

In: the table `surrogates` of `Results`. Out: plain text, not yet escaped. Test documents of the fitted corpus
say how linear an MLP is. On any other corpus the same map is scored away from home: a low R² there may be the
map's and not the MLP's, so that a sentence of its own says whether the maps transfer, and no layer is called
more or less linear by it. Cost: nothing to speak of.
"""

import polars as pl

from . import text, verdicts
from .findings import ONE_TOKEN, VERDICTS, at_home, extremes, label, moved, n_layers, r2_words
from .results import Results

SIGN = "R²\N{NO-BREAK SPACE}"


def paragraphs(results: Results) -> list[tuple[str, str]]:
    """How each paragraph of the answer opens, and the rest of it."""
    away, found = moved(results), []
    for at in at_home(results):
        where = f"On {label(results, at)}{', where the maps were fitted' if away else ''},"
        found.append((where, f"{summary(results, at)} {single_tokens(results, at)}".strip()))
    if away:
        many = f"{len(away)} {'other ' if found else ''}corpora" if len(away) > 1 else label(results, away[0])
        found.append((f"Moved to {many},", f"{transfer(results)} {lone_tokens(results)}".strip()))
    return found


def summary(results: Results, series: int) -> str:
    """Which MLPs are nearly linear on one store: count, what is open, the two extremes, verdicts."""
    rows = results.surrogates.filter(pl.col("series") == series)
    opening, ends = _opening(results, rows, series), extremes(rows, "r2_test")
    if ends is None:
        return f"{opening}: no layer has a held-out R²."
    low, high = ends
    least = f"layer {low['layer']} is the least linear{_by_point(rows, low)}: {r2_words(low)}"
    if rows.height == 1:
        found = f": layer {high['layer']} has {r2_words(high)}"
    elif opening.endswith(f"; layer {high['layer']} may be"):
        found = f": {r2_words(high)}; {least}"
    else:
        most = f"Layer {high['layer']} is the most linear{_by_point(rows, high)}: {r2_words(high)}"
        found = f". {most}; {least}"
    return f"{opening}{found}. Verdicts: {', '.join(_by_verdict(rows))}."


def _opening(results: Results, rows: pl.DataFrame, series: int) -> str:
    """`2 of 4 MLPs looked at (of 30) are nearly linear`: what the intervals support. What they leave open is
    neither granted nor denied.
    """
    n, there = rows.height, n_layers(results, series)
    looked_at = f" looked at (of {there})" if n < there else ""
    found = rows["verdict"].to_list()
    sure = found.count("supported")
    left = rows.filter(~pl.col("verdict").is_in(["supported", "not supported"]))["layer"].to_list()
    if n == 1:
        mlp = f"the one MLP{looked_at} is"
        if left:
            return f"whether {mlp} nearly linear cannot be told"
        return f"{mlp} nearly linear" if sure else f"{mlp} not nearly linear"
    if found.count("too few documents") == n:
        return f"there are too few documents to say which of {n} MLPs{looked_at} are nearly linear"
    if sure:
        more = f", and of {len(left)} it cannot be told" if left else ""
        many = text.every(n) if sure == n else f"{sure} of {n}"
        return f"{many} MLPs{looked_at} {'is' if sure == 1 else 'are'} nearly linear{more}"
    none = f"none of the {n} MLPs{looked_at} is nearly linear"
    return f"{none} for sure; {text.layers(left)} may be" if left else none


def _by_point(rows: pl.DataFrame, end: dict) -> str:
    """Says so where the interval of an extreme meets another layer's: the order may then be chance."""
    low, high = end["r2_sim_lo"], end["r2_sim_hi"]
    others = rows.filter(pl.col("layer") != end["layer"])
    if low is None or high is None or others["r2_sim_lo"].null_count() or others["r2_sim_hi"].null_count():
        return " by point estimate"
    meets = (pl.col("r2_sim_lo") <= high) & (pl.col("r2_sim_hi") >= low)
    return "" if others.filter(meets).is_empty() else " by point estimate"


def _by_verdict(rows: pl.DataFrame) -> list[str]:
    """`supported for layers 0–3`: each verdict that occurs, with its layers."""
    parts = []
    for verdict in VERDICTS:
        layers = rows.filter(pl.col("verdict") == verdict)["layer"].to_list()
        if layers:
            parts.append(f"{verdict} for {text.layers(layers)}")
    return parts


def maps_of(results: Results) -> str:
    """The name of the corpus that the maps were fitted on; of the store, where that is not in the study."""
    names = results.surrogates["fit_on"].unique(maintain_order=True).to_list()
    stores = results.stores
    return text.listing(
        [label(results, stores.index(one), 40) if one in stores else text.name(str(one)) for one in names]
    )


def transfer(results: Results) -> str:
    """Whether the maps hold on the corpora that they were not fitted on."""
    away = moved(results)
    rows = results.surrogates.filter(pl.col("series").is_in(away))
    each = [(at, rows.filter(pl.col("series") == at)) for at in away]
    named = [(f" on {label(results, at, 40)}" if len(away) > 1 else "", frame) for at, frame in each]
    kept = f"R² ≥ {results.claim_at:g} is kept {verdicts.families(named)}{_common(each)}"
    judged = rows.filter(pl.col("verdict") != "too few documents")
    ends = extremes(rows if judged.is_empty() else judged, "r2_test")
    reach = ""
    if ends is not None:
        where = dict(zip(away, (where for where, _ in named), strict=True))
        least, most = (
            f"{r2_words(row).removeprefix(SIGN)} (layer\N{NO-BREAK SPACE}{row['layer']}"
            f"{where[row['series']]})"
            for row in ends
        )
        reach = f" By point estimate {SIGN}goes from {least} to {most}."
    return (
        f"the same maps of {maps_of(results)} are scored again: {kept}.{reach} This asks whether a map "
        "transfers, not how linear the MLP is there."
    )


def _common(each: list[tuple[int, pl.DataFrame]]) -> str:
    """The layers whose map keeps its R² on every corpus that has a verdict."""
    judged = [frame for _, frame in each if set(frame["verdict"]) != {"too few documents"}]
    kept = [set(frame.filter(pl.col("verdict") == "supported")["layer"]) for frame in judged]
    common = sorted(set.intersection(*kept)) if kept else []
    every = " on every one with enough documents" if len(judged) > 1 else ""
    keep = "keeps" if len(common) == 1 else "keep"
    return f"; {text.layers(common)} {keep} it{every}" if common else ""


def single_tokens(results: Results, series: int) -> str:
    """Says so where R² and `error` of a layer are about one token; empty where no token is that large."""
    rows = results.surrogates.filter((pl.col("series") == series) & (pl.col("largest_row") > ONE_TOKEN))
    if rows.is_empty():
        return ""
    each = [f"layer {row['layer']} ({text.percent(row['largest_row'])})" for row in rows.to_dicts()]
    return (
        "One test token carries more than half of the variance of the output, Σ‖y − ȳ‖², in "
        f"{text.listing(each)}: there R² and error speak of that token, not of the others."
    )


def lone_tokens(results: Results) -> str:
    """The same over the corpora that the maps moved to: in how many cases, and the worst."""
    rows = results.surrogates.filter(pl.col("series").is_in(moved(results)))
    large = rows.filter(pl.col("largest_row") > ONE_TOKEN).sort("largest_row", descending=True)
    if large.is_empty():
        return ""
    worst = large.row(0, named=True)
    return (
        "One test token carries more than half of the variance of the output, Σ‖y − ȳ‖², in "
        f"{large.height} of {rows.height} pairs of layer and corpus, most in layer "
        f"{worst['layer']} on {label(results, worst['series'], 40)} ({text.percent(worst['largest_row'])}): "
        "there R² and error speak of that token, not of the others."
    )
