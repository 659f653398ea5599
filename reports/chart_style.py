"""The look that all charts share: colours, shapes, axes, strokes; pieces from which `charts` builds.

Colours are CSS variables with a fallback, so that one SVG suits light, dark and print. A chart comes in two
widths: a phone gets a narrow one instead of a small one.
"""

from dataclasses import dataclass

import altair as alt
import polars as pl

INK, MUTED, GRID = "var(--ink,#1f2328)", "var(--muted,#6a7076)", "var(--grid,#e4e4e0)"
# After Okabe and Ito: safe for the colour-blind; every store has its own shape as well.
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#b2579a", "#8a6d00", "#4a5a8a")
COLOURS = tuple(f"var(--s{number},{colour})" for number, colour in enumerate(PALETTE))
SHAPES = ("circle", "diamond", "square", "triangle-up", "cross", "triangle-down")


@dataclass(frozen=True, slots=True)
class Size:
    """Width of the drawing and of its letters, in pixels."""

    width: int
    font: int


WIDE, NARROW = Size(width=880, font=13), Size(width=296, font=11)


def colour_of(series: int) -> str:
    return COLOURS[series % len(COLOURS)]


def shape_of(series: int) -> str:
    """Stores beyond the last colour reuse it with another shape."""
    return SHAPES[(series + series // len(COLOURS)) % len(SHAPES)]


def largest(frame: pl.DataFrame, column: str, *, at_least: float) -> float:
    """The largest value of a column, or `at_least` where that is more or there is none."""
    return max([at_least, *frame[column].drop_nulls().to_list()])


def _series(frame: pl.DataFrame) -> list[int]:
    return frame["series"].unique().sort().to_list()


def colour(frame: pl.DataFrame) -> alt.Color:
    numbers = _series(frame)
    scale = alt.Scale(domain=numbers, range=[colour_of(number) for number in numbers])
    return alt.Color("series:N", scale=scale, legend=None)


def shape(frame: pl.DataFrame) -> alt.Shape:
    numbers = _series(frame)
    scale = alt.Scale(domain=numbers, range=[shape_of(number) for number in numbers])
    return alt.Shape("series:N", scale=scale, legend=None)


def layer_axis(frame: pl.DataFrame, size: Size, *, title: str | None = "MLP of layer [index]") -> alt.X:
    """Layers at equal steps under their own numbers; where these would touch, every nth is named."""
    layers = frame["layer"].unique().sort().to_list()
    room = max(1, size.width // (2 * size.font))
    step = next((step for step in (1, 2, 5, 10, 20) if len(layers) <= room * step), 50)
    axis = alt.Axis(values=layers[::step], labelAngle=0, grid=False, domainColor=MUTED)
    scale = alt.Scale(type="band", paddingInner=0.35, paddingOuter=0.2)
    return alt.X("layer:O", title=title, axis=axis, scale=scale)


def offset(frame: pl.DataFrame) -> alt.XOffset:
    """Stores of one layer stand beside one another."""
    return alt.XOffset("series:N", scale=alt.Scale(domain=_series(frame)))


def line_at(
    value: float, y: alt.Y, size: Size, *, label: str = "", left: bool = False
) -> alt.LayerChart | alt.FacetChart:
    """A dashed rule across the chart, its meaning in small letters at one end."""
    rows = pl.DataFrame({"at": [float(value)], "label": [label]})
    base = alt.Chart(rows).encode(y=alt.Y("at:Q", title=y["title"], scale=y["scale"], axis=y["axis"]))
    rule = base.mark_rule(color=INK, strokeDash=[5, 4], strokeWidth=1, opacity=0.7)
    if not label:
        return alt.layer(rule)
    text = base.mark_text(
        align="left" if left else "right", baseline="bottom", dy=-3, color=MUTED, fontSize=size.font - 1
    )
    return alt.layer(rule, text.encode(x=alt.value(2 if left else size.width - 2), text="label:N"))


def span(base: alt.Chart, low: str, high: str, y: alt.Y, width: float) -> alt.Chart:
    """A vertical stroke from one column to another: an interval or a range of quantiles."""
    drawn = base.transform_filter(f"isValid(datum.{low}) && isValid(datum.{high})")
    axis = alt.Y(f"{low}:Q", title=y["title"], scale=y["scale"], axis=y["axis"])
    return drawn.mark_rule(strokeWidth=width, strokeCap="butt").encode(y=axis, y2=alt.Y2(high))


def value_axis(
    column: str, title: str, domain: tuple[float, float] | None = None, *, ticks: int = 6
) -> alt.Y:
    """A vertical axis whose title lies flat above it; all marks of a panel share this scale."""
    scale = alt.Scale(zero=True) if domain is None else alt.Scale(domain=domain, nice=False)
    return alt.Y(f"{column}:Q", title=title, scale=scale, axis=alt.Axis(tickCount=ticks))


def house(chart: alt.TopLevelMixin, size: Size) -> alt.TopLevelMixin:
    """The look that all charts share."""
    letters = {"labelFontSize": size.font, "titleFontSize": size.font, "labelColor": INK, "titleColor": MUTED}
    lines = {"gridColor": GRID, "tickColor": MUTED, "tickSize": 4, "domain": False}
    above = {"titleAngle": 0, "titleAlign": "left", "titleBaseline": "bottom", "titleY": -9, "titleX": -34}
    # One call: every further one would copy the chart and its data.
    return chart.configure(
        background="transparent",
        aria=False,
        font="system-ui, sans-serif",
        padding=4,
        view=alt.ViewConfig(stroke=None),
        axis=alt.AxisConfig(titleFontWeight="normal", titlePadding=10, **letters, **lines),
        axisY=alt.AxisConfig(ticks=False, **above),
        header=alt.HeaderConfig(labelColor=INK, labelFontSize=size.font, labelFontWeight="normal"),
        title=alt.TitleConfig(color=INK, fontSize=size.font, fontWeight="normal", anchor="start", offset=22),
    )
