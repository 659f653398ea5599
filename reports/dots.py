"""Named things down, a value across: one dot a series, with its interval; for what has no layer, such as sets
of layers and configurations.

In: a frame with `row` (0, 1, …), `name`, `series` and `value`, and `lo` and `hi` where there are intervals.
Out: one Altair chart. A name stands above its dots, where a phone has room for it. Values beyond the axis are
drawn on its edge: the caption says so. Cost: milliseconds.
"""

from typing import Any

import altair as alt
import polars as pl

from .chart_style import INK, MUTED, WIDE, Size, colour, house, shape

PAPER = "var(--bg,#ffffff)"
NAME, SERIES, GAP = 20, 13, 10
"""Pixels of a name, of each dot below it, and between a thing and the next."""


def by_name(
    rows: pl.DataFrame,
    *,
    axis: str,
    domain: tuple[float, float],
    rule: float | None = None,
    percent: bool = False,
    size: Size = WIDE,
) -> alt.TopLevelMixin:
    """A value for each name and series. `rule`: what it is held against, such as 0 or the whole. `axis`: what
    the value is, with its unit.
    """
    series = rows["series"].unique().sort().to_list()
    step = NAME + SERIES * len(series) + GAP
    height = step * (int(rows["row"].to_list()[-1]) + 1) if not rows.is_empty() else step
    place = {number: NAME + SERIES * (at + 0.5) for at, number in enumerate(series)}
    drawn = rows.select(
        "series",
        pl.col("value", "lo", "hi").clip(*domain),
        at=pl.col("row") * step + pl.col("series").replace_strict(place, return_dtype=pl.Float64),
    )
    ticks: dict[str, Any] = {"tickCount": 5} | ({"format": ".0%"} if percent else {})
    scale = alt.Scale(domain=list(domain), nice=False, zero=False)
    shown = alt.Axis(domainColor=MUTED, labelOverlap="greedy", **ticks)

    def across(column: str) -> alt.X:
        return alt.X(f"{column}:Q", title=None, scale=scale, axis=shown)

    down = alt.Scale(domain=[0, height], reverse=True, nice=False)
    y = alt.Y("at:Q", title=None, axis=None, scale=down)
    base = alt.Chart(drawn).encode(y=y, color=colour(drawn))
    marks: list[alt.Chart] = []
    if rule is not None:
        line = alt.Chart(pl.DataFrame({"rule": [float(rule)]})).mark_rule(
            color=INK, strokeDash=[5, 4], strokeWidth=1, opacity=0.7
        )
        marks.append(line.encode(x=across("rule")))
    known = base.transform_filter("isValid(datum.lo) && isValid(datum.hi)")
    marks.append(known.mark_rule(strokeWidth=2, opacity=0.5).encode(x=across("lo"), x2=alt.X2("hi")))
    marks.append(
        base.mark_point(filled=True, opacity=1, size=46).encode(x=across("value"), shape=shape(drawn))
    )
    names = rows.select("name", at=pl.col("row") * step + 2).unique("at", maintain_order=True)
    letters = alt.Chart(names).encode(x=alt.value(2), y=y, text="name:N")
    look: dict[str, Any] = {"align": "left", "baseline": "top", "fontSize": size.font, "limit": size.width}
    marks.append(letters.mark_text(**look, stroke=PAPER, strokeWidth=4))  # no line crosses a name
    marks.append(letters.mark_text(**look, color=INK))
    title = alt.TitleParams(text=axis, offset=8)
    return house(alt.layer(*marks).properties(width=size.width, height=height, title=title), size)
