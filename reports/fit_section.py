"""Section "How much more text, how low a rank": learning curves, rank paths and other ways to fit.

In: the tables `learning_curve`, `ranks` and `variants` of the fit, each optional. Out: HTML, empty without
any of them. Cost: two figures and three tables.
"""

from typing import Any

import polars as pl

from . import findings, text
from .figure import figure
from .layout import layer_titles, note, numbers, of_layer, section
from .multiples import Panel, curves, domain_of, panel
from .results import Results
from .sections import LAYER, grouping
from .tables import Column, Row, house, value

KEY, HEADING = "capacity", "How much more text, how low a rank"
ENOUGH = 0.01
"""A rank is enough where its R² is that close to the whole map's."""
FLOOR = -0.25
VARIANTS = {
    "default": "default",
    "paper": "the paper's penalty",
    "with_sinks": "with sinks",
    "paper_with_sinks": "the paper's penalty, with sinks",
}

_LEARNING = (
    "R² on test rows of maps fitted on the first folds: whole groups of documents, so that less text is also "
    "fewer documents. A curve that still rises at its right end says that more text would raise R²."
)
_RANKS = (
    "R² on test rows of the map cut to its leading directions (reduced-rank regression). Where a low rank "
    "comes close to the whole map, few directions of the MLP's input carry what is linear about it."
)
_VARIANTS = (
    "<em>With sinks</em>: position 0 and special tokens are fitted too. <em>The paper's penalty</em>: λ = "
    "0.01 on sums, whatever the scale of the inputs. R² of the body of tokens, of the sinks and of all "
    "test rows, each about the mean output of the rows fitted by default."
)


def _wide(frame: pl.DataFrame, key: str) -> list[dict[str, Any]]:
    """One row a store and layer, `r2_test` under each value of `key`."""
    rows: dict[tuple[int, int], dict[str, Any]] = {}
    for row in frame.to_dicts():
        place = {"series": row["series"], "layer": row["layer"]}
        rows.setdefault((row["series"], row["layer"]), place)[str(row[key])] = row["r2_test"]
    return list(rows.values())


def gains(results: Results) -> pl.DataFrame:
    """Per store and layer: R² of all text, of at most half of it, and the difference."""
    curve = results.tables["learning_curve"]
    half = curve.filter(pl.col("fraction") <= 0.5 + 1e-9).group_by("series", "layer", maintain_order=True)
    whole = curve.group_by("series", "layer", maintain_order=True).last()
    joined = whole.join(
        half.last().select("series", "layer", half_fraction="fraction", half_r2="r2_test"),
        on=["series", "layer"],
        maintain_order="left",
    )
    return joined.with_columns(gain=pl.col("r2_test") - pl.col("half_r2"))


def enough(results: Results) -> pl.DataFrame:
    """Per store and layer: the lowest rank from which on R² stays within ENOUGH of the whole map's."""
    path = results.tables["ranks"]
    short = pl.col("r2_test") < pl.col("r2_test").last().over("series", "layer") - ENOUGH
    # The lowest rank above every one that falls short: a path may cross the line more than once.
    below = path.with_columns(short=short.fill_null(True)).with_columns(
        after=pl.col("short").reverse().cum_max().reverse().over("series", "layer")
    )
    return below.filter(~pl.col("after")).group_by("series", "layer", maintain_order=True).first()


def learning_finding(results: Results) -> str:
    found = gains(results)
    ends = findings.ranges(results, found, "gain", lambda gain: text.number(gain))
    if not ends:
        return "R² on test rows against the text fitted"
    share = found["half_fraction"].drop_nulls().to_list()[0]
    return f"From {text.percent(share)} of the text to all of it, R² on test rows moves by {ends}"


def rank_finding(results: Results) -> str:
    ends = findings.ranges(results, enough(results), "rank", lambda rank: str(int(rank)))
    if not ends:
        return "R² on test rows against the rank of the map"
    return f"The rank from which R² stays within {ENOUGH:g} of the whole map's is {ends}"


def variants_finding(results: Results) -> str:
    """How the body of tokens fares when the sinks are fitted too."""
    frame = results.tables["variants"]
    default = frame.filter(pl.col("variant") == "default").select("series", "layer", default="r2_body")
    both = frame.filter(pl.col("variant") == "with_sinks").join(default, on=["series", "layer"])
    both = both.filter(pl.col("r2_body").is_not_null() & pl.col("default").is_not_null())
    if both.is_empty():
        return "Other ways to fit the maps"
    drops = both.with_columns(drop=pl.col("default") - pl.col("r2_body")).filter(pl.col("drop") > 0)
    cases = "layers" if both["series"].n_unique() == 1 else "pairs of layer and store"
    said = (
        "By point estimate, fitting the sinks too lowers R² of the other tokens in "
        f"{text.out_of(drops.height, both.height, cases)}"
    )
    if drops.is_empty():
        return said
    most = drops.sort("drop", "series", "layer").row(-1, named=True)
    middle = drops.select(pl.col("drop").median()).item()
    where = f"(layer\N{NO-BREAK SPACE}{most['layer']})"
    return f"{said}: by {_drop(most['drop'])} at most {where}, by {_drop(middle)} in the median"


def _drop(drop: float) -> str:
    """A small difference of R², which three digits must not round to nothing."""
    return "less than 0.001" if drop < 0.0005 else text.number(drop)


def _curves(results: Results, table: str, x: str) -> list[Panel]:
    """Panels of the least, the middle and the most linear layer."""
    frame = results.tables[table]
    there = results.surrogates.filter(pl.col("layer").is_in(frame["layer"].unique().to_list()))
    layers = findings.representatives(there, "r2_test")
    return [
        panel(title, of_layer(frame, layer), "r2_test", x=x) for layer, title in layer_titles(layers).items()
    ]


def _figure(results: Results, name: str, table: str, x: str, title: str, words: tuple[str, str]) -> str:
    panels = _curves(results, table, x)
    if not panels:
        return ""
    domain = domain_of(panels, (FLOOR, 1.0))
    finding, how = words
    scored = results.tables[table]["series"].unique().to_list()
    # Fitted and scored on one store only, there is nothing to tell apart by colour.
    alone = len(scored) == 1 and len(results.stores) > 1
    where = f" On {text.escape(findings.label(results, scored[0]))}." if alone else ""
    return figure(
        name,
        results,
        finding,
        how + _shown(panels) + where,
        lambda size: curves(
            panels, axes=(title, "R² on test rows [1]"), domain=domain, logarithmic=True, size=size
        ),
        labels=[] if alone else None,
    )


def _shown(panels: list[Panel]) -> str:
    return " Shown: the least, the middle and the most linear layer." if len(panels) == 3 else ""


def learning_table(results: Results) -> str:
    curve = results.tables["learning_curve"].with_columns(
        point=pl.int_range(pl.len()).over("series", "layer")
    )
    gained = {(row["series"], row["layer"]): row["gain"] for row in gains(results).to_dicts()}
    rows = _wide(curve, "point")
    for row in rows:
        row["gain"] = gained.get((row["series"], row["layer"]))
    last = curve.group_by("series", "layer", maintain_order=True).last().to_dicts()
    facts = {(row["series"], row["layer"]): row for row in last}
    for row in rows:
        row |= {key: facts[row["series"], row["layer"]][key] for key in ("n_tokens", "n_groups")}
    # Layers may differ by a few rows that were left out: a column is the nth prefix, its head their middle.
    shares = curve.group_by("point").agg(pl.col("fraction").median()).sort("point")["fraction"].to_list()
    columns = [
        LAYER,
        *(
            Column(
                text.percent(share),
                value(str(point), may_miss=True),
                spanner="R² with this share of the text",
            )
            for point, share in enumerate(shares)
        ),
        Column("gain", value("gain")),
        Column("tokens", value("n_tokens", text.count), spanner="all text"),
        Column("groups", value("n_groups", text.count), spanner="all text"),
    ]
    return house(
        rows, columns, key="table-learning", caption=learning_finding(results), group=grouping(results)
    )


def rank_table(results: Results) -> str:
    path = results.tables["ranks"]
    least = {(row["series"], row["layer"]): row["rank"] for row in enough(results).to_dicts()}
    rows = _wide(path, "rank")
    for row in rows:
        row["enough"] = least.get((row["series"], row["layer"]))
    columns = [
        LAYER,
        *(Column(str(rank), value(str(rank), may_miss=True), spanner="R² at rank") for rank in _ranks(path)),
        Column(f"within {ENOUGH:g}", value("enough", text.count)),
    ]
    return house(rows, columns, key="table-ranks", caption=rank_finding(results), group=grouping(results))


def _ranks(path: pl.DataFrame) -> list[int]:
    return path["rank"].unique().sort().to_list()


def variants_table(results: Results) -> str:
    def name(row: Row) -> str:
        return VARIANTS.get(row["variant"], text.name(row["variant"], 40))

    columns = [
        LAYER,
        Column("fitted", name, number=False),
        Column("body", value("r2_body"), spanner="R² on test rows"),
        Column("sinks", value("r2_sink"), spanner="R² on test rows"),
        Column("all", value("r2_all"), spanner="R² on test rows"),
        Column("alpha", value("alpha", text.scientific)),
        Column("λ on sums", value("penalty", text.scientific)),
        Column("condition", value("condition", text.scientific)),
        Column("tokens", value("n_tokens", text.count)),
    ]
    rows = results.tables["variants"].to_dicts()
    return house(
        rows, columns, key="table-variants", caption=variants_finding(results), group=grouping(results)
    )


def render(results: Results) -> str:
    """The section; nothing where the fit wrote none of its tables."""
    parts: list[str] = []
    if results.has("learning_curve"):
        words = (learning_finding(results), _LEARNING)
        parts.append(_figure(results, "learning", "learning_curve", "n_tokens", "tokens fitted [1]", words))
        parts.append(numbers("R² against the text fitted, every layer", learning_table(results)))
    if results.has("ranks"):
        words = (rank_finding(results), _RANKS)
        parts.append(_figure(results, "ranks", "ranks", "rank", "rank of the map [1]", words))
        parts.append(numbers("R² against the rank, every layer", rank_table(results)))
    if results.has("variants"):
        parts.append(note(f"<b>{text.escape(variants_finding(results))}.</b> {_VARIANTS}"))
        parts.append(numbers("Other ways to fit, every layer", variants_table(results)))
    return section(KEY, HEADING, *parts) if parts else ""
