"""Small multiples: one panel a quantity over layers, or a layer over some share; one colour a series.

In: panels, each a title and a frame with `series` and either `layer` (`by_layer`) or `x` (`curves`),
`value` and, where there are intervals, `lo` and `hi`. Out: one Altair chart; all panels share the vertical
axis. Where strokes would touch, intervals become bands. Values beyond the axis are drawn on its edge: the
caption says so. Cost: milliseconds, and about 20 ms a panel to draw.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import altair as alt
import polars as pl

from .chart_style import INK, MUTED, WIDE, Size, colour, house, layer_axis, offset, shape, span

GAP, ROOM = 22, 34
"""Pixels between two panels, and those that the labels of an axis take."""
LETTER = 0.6
"""Width of a digit, as a share of the size of letters."""
STROKE_ROOM = 5.0
"""Pixels that an interval needs to be drawn as a stroke."""
MOST_WITH_POINTS = 6
"""Panels that still have points: more of them would be seen less than they weigh."""


@dataclass(frozen=True, slots=True)
class Panel:
    """What one panel shows. `faint`: a quantity that nobody can know in time, drawn in broken lines."""

    title: str
    frame: pl.DataFrame
    faint: bool = False


def panel(
    title: str, frame: pl.DataFrame, value: str, ends: tuple[str, str] | None = None, *, x: str = "layer"
) -> Panel:
    """A panel of these columns of a frame that has `series`."""
    low, high = (pl.col(end) for end in ends) if ends else (pl.lit(None, pl.Float64),) * 2
    position = pl.col(x) if x == "layer" else pl.col(x).cast(pl.Float64).alias("x")
    chosen = frame.select("series", position, value=pl.col(value), lo=low, hi=high)
    return Panel(title, chosen)


def domain_of(
    panels: Sequence[Panel], within: tuple[float, float], *, show: Sequence[float] = (), step: float = 0.1
) -> tuple[float, float]:
    """The vertical axis: from the lowest to the highest value or bound, in whole steps, never beyond
    `within`.
    """
    low, high = within
    seen = [
        min(max(float(value), low), high)
        for one in panels
        for column in ("value", "lo", "hi")
        for value in one.frame[column].drop_nulls().drop_nans().to_list()
    ]
    known = [*show, *seen] or [low, high]
    # A mark on the very edge would stand out of its panel.
    room = 0.02 * (max(known) - min(known)) if seen else 0.0
    known += [min(value + room, high) for value in seen] + [max(value - room, low) for value in seen]
    bottom, top = math.floor(min(known) / step + 1e-9) * step, math.ceil(max(known) / step - 1e-9) * step
    top = max(top, bottom + step)
    return round(max(low, bottom), 6), round(min(high, top), 6)


def cut(panels: Sequence[Panel], domain: tuple[float, float]) -> bool:
    """Whether some point lies beyond the axis."""
    low, high = domain
    return any(
        not one.frame.filter(~pl.col("value").is_between(low - 1e-9, high + 1e-9)).is_empty()
        for one in panels
    )


def grid(size: Size, wide: int, narrow: int, n_panels: int) -> tuple[int, Size]:
    """How many panels stand side by side, and how large each is."""
    columns = max(1, min(n_panels, wide if size is WIDE else narrow))
    width = (size.width - (GAP + ROOM) * (columns - 1)) // columns
    return columns, Size(width=width, font=size.font if size is WIDE else size.font - 1)


def _together(panels: Sequence[Panel], domain: tuple[float, float] | None) -> pl.DataFrame:
    """The rows of all panels with their panel's number and title, bounded by the axis; panels with axes of
    their own show whatever is finite.
    """
    titles: list[str] = []
    for one in panels:
        # Titles tell panels apart: two names that were cut to the same one must not share a panel.
        again = titles.count(one.title)
        titles.append(f"{one.title} ({again + 1})" if again else one.title)
    frames = [
        one.frame.with_columns(
            panel=pl.lit(number),
            title=pl.lit(title.replace("+", "\n+ ", 1)),
            dash=pl.lit("late" if one.faint else "in time"),
        )
        for number, (one, title) in enumerate(zip(panels, titles, strict=True))
    ]
    rows, columns = pl.concat(frames), ("value", "lo", "hi")
    if domain is not None:
        return rows.with_columns(pl.col(columns).clip(*domain))
    return rows.with_columns(pl.when(pl.col(one).is_finite()).then(pl.col(one)).alias(one) for one in columns)


def _facet(layered: alt.LayerChart | alt.FacetChart, across: int, what: str) -> alt.FacetChart:
    """One panel each, in their order, under its own title. Titles are data: an expression never holds one."""
    header = alt.Header(
        labelExpr="split(datum.value, '\\n')", labelAnchor="start", labelPadding=4, title=None
    )
    sort = alt.EncodingSortField(field="panel", op="min", order="ascending")
    facet = alt.Facet("title:N", sort=sort, header=header, title=None)
    heading = alt.TitleParams(text=what, offset=6)
    assert isinstance(layered, alt.LayerChart)
    chart = layered.facet(facet=facet, columns=across, spacing={"row": 14, "column": GAP}, title=heading)
    return chart.resolve_axis(x="independent", y="independent")


def _value(column: str, domain: tuple[float, float] | None, percent: bool = False) -> alt.Y:
    scale = (
        alt.Scale(zero=False) if domain is None else alt.Scale(domain=list(domain), nice=False, zero=False)
    )
    axis = alt.Axis(tickCount=4, format=".0%") if percent else alt.Axis(tickCount=4)
    return alt.Y(f"{column}:Q", title=None, scale=scale, axis=axis)


def _rule(base: alt.Chart, at: float, domain: tuple[float, float] | None, percent: bool) -> alt.Chart:
    """A broken line across every panel."""
    once = base.transform_aggregate(n="count()", groupby=["panel", "title"]).transform_calculate(
        value=repr(at)
    )
    line = once.mark_rule(color=INK, strokeDash=[5, 4], strokeWidth=1, opacity=0.7)
    return line.encode(y=_value("value", domain, percent))


def _interval(base: alt.Chart, y: alt.Y, stroke: float) -> alt.Chart:
    """Strokes, or a band where these would touch."""
    if stroke >= 1.0:
        return span(base, "lo", "hi", y, min(stroke, 4.0)).encode(opacity=alt.value(0.5))
    known = base.transform_filter("isValid(datum.lo) && isValid(datum.hi)")
    low = alt.Y("lo:Q", title=None, scale=y["scale"], axis=y["axis"])
    return known.mark_area(opacity=0.2).encode(y=low, y2=alt.Y2("hi"))


def by_layer(
    panels: Sequence[Panel],
    *,
    axis: str,
    domain: tuple[float, float],
    rule: float | None = None,
    columns: tuple[int, int] = (5, 2),
    percent: bool = False,
    size: Size = WIDE,
) -> alt.TopLevelMixin:
    """One value a layer, with its interval, a panel a quantity; `rule`: chance, a threshold or zero. `axis`:
    what the value is, with its unit.
    """
    rows = _together(panels, domain)
    across, room = grid(size, *columns, len(panels))
    n_series, n_layers = rows["series"].n_unique(), rows["layer"].n_unique()
    stroke = room.width / (n_layers * n_series * STROKE_ROOM)
    fine = stroke >= 1.0
    x = layer_axis(rows, room, title=None)
    y = _value("value", domain, percent)
    bare = alt.Chart(rows)
    base = bare.encode(x=x, color=colour(rows))
    placed = base.encode(xOffset=offset(rows)) if fine else base
    dash = alt.StrokeDash(
        "dash:N", legend=None, scale=alt.Scale(domain=["in time", "late"], range=[[1, 0], [3, 2]])
    )
    marks: list[alt.Chart] = [] if rule is None else [_rule(bare, rule, domain, percent)]
    marks.append(_interval(placed, y, stroke))
    marks.append(placed.mark_line(strokeWidth=1, opacity=0.6).encode(y=y, strokeDash=dash))
    if (fine and len(panels) <= MOST_WITH_POINTS) or n_layers == 1:
        dot = placed.mark_point(filled=True, opacity=1, size=min(40.0, 12.0 * stroke + 6))
        marks.append(dot.encode(y=y, shape=shape(rows)))
    layered = alt.layer(*marks).properties(width=room.width, height=_height(across))
    return house(_facet(layered, across, f"{axis} by layer [index]"), size)


def _height(across: int) -> int:
    return 220 if across == 1 else 150 if across < 4 else 110


def _labelled(values: Sequence[float], size: Size) -> list[float]:
    """Values of a logarithmic axis whose labels have room: from the last one back, as it is how far the axis
    goes; where two would touch, the lower one is left out.
    """
    known = [value for value in values if value > 0]
    if not known:
        return []
    low, high = math.log(known[0]), math.log(known[-1])
    kept, edge = list[float](), math.inf
    for value in reversed(known):
        at = size.width * (math.log(value) - low) / (high - low or 1.0)
        half = LETTER * size.font * len(f"{value:,.0f}") / 2
        if at + half + size.font / 3 <= edge:
            kept.append(value)
            edge = at - half
    return kept[::-1]


def curves(
    panels: Sequence[Panel],
    *,
    axes: tuple[str, str],
    domain: tuple[float, float] | None,
    across: tuple[float, float] | None = None,
    diagonal: bool = False,
    logarithmic: bool = False,
    percent: bool | tuple[bool, bool] = False,
    points: bool = True,
    rule: float | None = None,
    columns: tuple[int, int] = (3, 1),
    size: Size = WIDE,
) -> alt.TopLevelMixin:
    """A value against some quantity `x`, a panel a layer. `axes`: what x and the value are, with units;
    `percent`: which of the two are shares; `rule`: what the value is held against; without a `domain`, each
    panel has a vertical axis of its own.
    """
    shares = (percent, percent) if isinstance(percent, bool) else percent
    rows = _together(panels, domain)
    n_across, room = grid(size, *columns, len(panels))
    scale = alt.Scale(type="log", nice=False) if logarithmic else alt.Scale(nice=False, zero=False)
    if across is None:
        scale["padding"] = 8  # pixels: on the axis, the first point would hide a label
    else:
        scale["domain"] = list(across)
    ticks = {"grid": False, "domainColor": MUTED, "labelOverlap": "greedy"}
    if logarithmic:
        ticks |= {"values": _labelled(rows["x"].unique().sort().to_list(), room), "format": ","}
    else:
        ticks |= {"values": [0.0, 0.25, 0.5, 0.75, 1.0], "format": ".0%"} if shares[0] else {"tickCount": 4}
    x = alt.X("x:Q", title=None, scale=scale, axis=alt.Axis(**ticks))
    y = _value("value", domain, shares[1])
    bare = alt.Chart(rows)
    base = bare.encode(x=x, color=colour(rows))
    marks: list[alt.Chart] = [] if rule is None else [_rule(bare, rule, domain, shares[1])]
    if diagonal:
        # Two ends in every panel.
        once = bare.transform_aggregate(n="count()", groupby=["panel", "title"])
        ends = once.transform_calculate(both="[0, 1]").transform_flatten(["both"])
        same = ends.transform_calculate(x="datum.both", value="datum.both")
        line = same.mark_line(color=INK, strokeDash=[5, 4], strokeWidth=1, opacity=0.7)
        marks.append(line.encode(x=x, y=y))
    marks.append(span(base, "lo", "hi", y, 2.0).encode(opacity=alt.value(0.5)))
    marks.append(base.mark_line(strokeWidth=1.25, opacity=0.8).encode(y=y))
    if points:
        dot = base.mark_point(filled=True, opacity=1, size=26)
        marks.append(dot.encode(y=y, shape=shape(rows)))
    layered = alt.layer(*marks).properties(width=room.width, height=170)
    chart = _facet(layered, n_across, f"{axes[1]} by {axes[0]}")
    return house(chart.resolve_scale(y="independent") if domain is None else chart, size)
