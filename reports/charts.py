"""Pure functions from a frame to an Altair chart: what the page draws, as values that a test can read.

In: small polars frames (one row a store and layer, or a histogram's bins) whose column `series` numbers the
stores. Out: charts without titles, legends or names of stores: the page sets those as text, where they wrap,
can be selected and are escaped once. Cost: milliseconds; drawing is `svg`.
"""

import math
from collections.abc import Sequence

import altair as alt
import polars as pl

from .chart_style import (
    WIDE,
    Size,
    colour,
    house,
    largest,
    layer_axis,
    line_at,
    offset,
    shape,
    span,
    value_axis,
)

FLOOR = -0.25
"""Lowest R² an axis shows: a failed fit of −300 would press every other layer against the top."""


def floor_of(frame: pl.DataFrame, claim_at: float) -> float:
    """Where the axis of R² begins: below the lowest value, but never below FLOOR."""
    # An interval may have no lower end at all, and a layer whose output does not vary has no R².
    seen = pl.concat([frame["r2_sim_lo"], frame["r2_test"]]).drop_nulls().drop_nans().clip(FLOOR, 1.0)
    lowest = min([claim_at, *seen])
    return max(FLOOR, min(0.8, math.floor((lowest - 0.02) * 10) / 10))


def _label_left(frame: pl.DataFrame, claim_at: float) -> bool:
    """Whether the words at the threshold collide with fewer points at the left end than at the right one."""
    near = frame.filter(
        pl.col("r2_sim_hi").fill_null(pl.col("r2_test")).is_between(claim_at - 0.02, claim_at + 0.08)
    )
    third = largest(frame, "layer", at_least=0) / 3
    return near.filter(pl.col("layer") < third).height < near.filter(pl.col("layer") > 2 * third).height


def held_out_r2(frame: pl.DataFrame, *, claim_at: float, size: Size = WIDE) -> alt.TopLevelMixin:
    """Held-out R² of every layer: point, pointwise interval (thick) and simultaneous interval (thin).

    Values below the axis are drawn on its edge: the caption names them.
    """
    floor = floor_of(frame, claim_at)
    values = pl.col("r2_test", "r2_lo", "r2_hi", "r2_sim_lo", "r2_sim_hi")
    bounded = frame.select("series", "layer", values.clip(floor, 1.0))
    y = value_axis("r2_test", "R² on test rows [1]", (floor, 1.0))
    base = alt.Chart(bounded).encode(x=layer_axis(frame, size), xOffset=offset(frame), color=colour(frame))
    stroke = max(2.0, min(5.0, size.width / (4.0 * frame.height)))
    label = f"nearly linear from {claim_at:g}"
    return house(
        alt.layer(
            line_at(claim_at, y, size, label=label, left=_label_left(frame, claim_at)),
            base.mark_line(strokeWidth=1, opacity=0.35).encode(y=y),
            span(base, "r2_sim_lo", "r2_sim_hi", y, 1.25),
            span(base, "r2_lo", "r2_hi", y, stroke).encode(opacity=alt.value(0.55)),
            base.mark_point(filled=True, opacity=1, size=stroke * 13).encode(y=y, shape=shape(frame)),
        ).properties(width=size.width, height=300 if size is WIDE else 240),
        size,
    )


def need_quantiles(frame: pl.DataFrame, *, size: Size = WIDE) -> alt.TopLevelMixin:
    """The need `error` of every layer: median (point), middle half (thick), 5 % to 95 % of tokens (thin)."""
    y = value_axis("q50", "error of a token [1]", (0.0, largest(frame, "q95", at_least=1.1)))
    drawn = frame.select("series", "layer", "q05", "q25", "q50", "q75", "q95")
    base = alt.Chart(drawn).encode(x=layer_axis(frame, size), xOffset=offset(frame), color=colour(frame))
    stroke = max(3.0, min(9.0, size.width / (3.0 * frame.height)))
    return house(
        alt.layer(
            line_at(0.5, y, size),
            line_at(1.0, y, size),
            span(base, "q05", "q95", y, 1.25),
            span(base, "q25", "q75", y, stroke).encode(opacity=alt.value(0.45)),
            base.mark_point(filled=True, opacity=1, size=stroke * 7).encode(y=y, shape=shape(frame)),
        ).properties(width=size.width, height=280 if size is WIDE else 230),
        size,
    )


def _panel(
    frame: pl.DataFrame,
    y: alt.Y,
    size: Size,
    *,
    ends: tuple[str, str] | None = None,
    named: bool = True,
    line: alt.LayerChart | alt.FacetChart | None = None,
) -> alt.LayerChart | alt.FacetChart:
    """One value a layer, with its interval if it has one; such panels stand above one another."""
    x = layer_axis(frame, size, title="MLP of layer [index]" if named else None)
    base = alt.Chart(frame).encode(x=x, xOffset=offset(frame), color=colour(frame))
    marks = [
        *([] if line is None else [line]),
        base.mark_line(strokeWidth=1, opacity=0.35).encode(y=y),
        *([] if ends is None else [span(base, *ends, y, 1.5)]),
        base.mark_point(filled=True, opacity=1, size=48 if size is WIDE else 30).encode(
            y=y, shape=shape(frame)
        ),
    ]
    return alt.layer(*marks).properties(width=size.width, height=130)


def shares_below(frame: pl.DataFrame, *, size: Size = WIDE) -> alt.TopLevelMixin:
    """Share of tokens with error below 0.5 and below 1, in percent, with intervals."""
    shares = [column for column in frame.columns if column.startswith("share_below_")]
    percent = frame.select("series", "layer", pl.col(shares) * 100)
    panels = [
        _panel(
            percent,
            value_axis(column, f"tokens with error below {word} [%]", (0.0, 100.0), ticks=4),
            size,
            ends=(f"{column}_lo", f"{column}_hi"),
            named=word == "1",
        )
        for column, word in (("share_below_half", "0.5"), ("share_below_one", "1"))
    ]
    return house(alt.vconcat(*panels, spacing=34), size)


def skew(frame: pl.DataFrame, *, size: Size = WIDE) -> alt.TopLevelMixin:
    """How unevenly need is spread: the share that the neediest 5 % of tokens carry, and the skewness."""
    percent = frame.select("series", "layer", "skew", pl.col("top5_share") * 100)
    words = "squared error carried by the neediest 5 % of tokens [%]"
    carried = value_axis(
        "top5_share", words, (0.0, 1.08 * largest(percent, "top5_share", at_least=10.0)), ticks=4
    )
    even = line_at(5.0, carried, size, label="5 %: if all tokens were alike")
    lopsided = value_axis("skew", "skewness of error [1]", ticks=4)
    panels = [_panel(percent, carried, size, named=False, line=even), _panel(percent, lopsided, size)]
    return house(alt.vconcat(*panels, spacing=34), size)


def _outline(frame: pl.DataFrame, start: float, upto: float) -> pl.DataFrame:
    """The bins from `start` to `upto` and one closing point, so that the last step has its full width."""
    inside = frame.filter((pl.col("bin_lo") < upto) & (pl.col("bin_hi") > start))
    kept = inside.select("series", pl.col("bin_lo").clip(start), "density").sort("series", "bin_lo")
    closing = kept.group_by("series", maintain_order=True).last().with_columns(bin_lo=pl.lit(upto))
    return pl.concat([kept, closing.select(kept.columns)])


def histograms(
    frame: pl.DataFrame,
    panels: Sequence[tuple[int, str]],
    *,
    upto: float,
    start: float = 0.0,
    axes: tuple[str, str] = ("error of a token [1]", "tokens per 0.1 of error [%]"),
    size: Size = WIDE,
) -> alt.TopLevelMixin:
    """Small multiples: how many of a layer's tokens have which error (or another need, as `axes` say), one
    outline a store, one panel a layer.

    `frame` has bins with the column `density`: percent of tokens per 0.1 of error. `panels` pairs layers with
    titles; bins between `start` and `upto` are drawn.
    """
    columns = len(panels) if size is WIDE else 1
    gap = 28
    room = 40 if size is WIDE else 0
    width = (size.width - (gap + room) * (columns - 1)) // columns
    top = largest(frame, "density", at_least=1e-3)
    x = alt.X(
        "bin_lo:Q",
        title=axes[0],
        scale=alt.Scale(domain=[start, upto], nice=False),
        axis=alt.Axis(grid=False, tickCount=4),
    )
    y = value_axis("density", axes[1], (0.0, top), ticks=4).stack(None)

    def one(layer: int, title: str) -> alt.LayerChart | alt.FacetChart:
        rows = _outline(frame.filter(pl.col("layer") == layer), start, upto)
        base = alt.Chart(rows).encode(x=x, y=y, color=colour(frame))
        area = base.mark_area(interpolate="step-after", opacity=0.16)
        line = base.mark_line(interpolate="step-after", strokeWidth=1.5)
        return alt.layer(area, line).properties(width=width, height=150, title=title)

    return house(alt.concat(*[one(*panel) for panel in panels], columns=columns, spacing=gap), size)
