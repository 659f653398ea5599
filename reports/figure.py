"""A figure of the page: its finding, how to read it, which store is which, and the chart in two widths.

In: a function that draws a chart in a given size. Out: HTML. The finding is title and alternative text at
once. Cost: two drawings.
"""

from collections.abc import Callable, Sequence
from typing import Final

import altair as alt

from . import findings, gathered, svg, text
from .chart_style import NARROW, WIDE, Size, colour_of, shape_of
from .results import Results

SYMBOLS: Final = {
    "circle": '<circle cx="6" cy="6" r="5"/>',
    "diamond": '<path d="M6 0l5 6-5 6-5-6z"/>',
    "square": '<path d="M1.5 1.5h9v9h-9z"/>',
    "triangle-up": '<path d="M6 1l5.5 10H.5z"/>',
    "cross": '<path d="M4 .5h4V4h3.5v4H8v3.5H4V8H.5V4H4z"/>',
    "triangle-down": '<path d="M6 11L.5 1h11z"/>',
}


def key(labels: Sequence[str]) -> str:
    """Which colour and shape stands for which label; nothing to say where there is one."""
    if len(labels) <= 1:
        return ""
    parts = [
        f'<span><svg viewBox="0 0 12 12" aria-hidden="true" fill="{colour_of(at)}">'
        f"{SYMBOLS[shape_of(at)]}</svg>{text.escape(label)}</span>"
        for at, label in enumerate(labels)
    ]
    return f'<div class="key">{"".join(parts)}</div>'


def _stores(results: Results) -> list[str]:
    return [findings.label(results, at) for at in range(len(results.stores))]


def _draw(draw: Callable[[Size], alt.TopLevelMixin], size: Size, finding: str) -> str:
    return svg.render(draw(size), finding)


def figure(
    name: str,
    results: Results,
    finding: str,
    how: str,
    draw: Callable[[Size], alt.TopLevelMixin],
    note: str = "",
    labels: Sequence[str] | None = None,
) -> str:
    """A figure in two widths (the screen chooses), its finding above it, how to read it below that. Its
    series are the stores, or what `labels` calls them.
    """
    series = _stores(results) if labels is None else labels
    gathered.keep(gathered.Drawn(name, finding, f"{how} {text.escape(note)}".strip(), series, draw))
    finding, ident = gathered.named(finding), gathered.ident(f"figure-{name}")
    drawn = "".join(
        f'<div class="chart {width}">{_draw(draw, size, finding)}</div>'
        for width, size in (("wide", WIDE), ("narrow", NARROW))
    )
    below = f'<p class="note">{text.escape(note)}</p>' if note else ""
    return (
        f'<figure id="{ident}"><figcaption><strong>{text.escape(finding)}.</strong> '
        f"<span>{how}</span></figcaption>{key(series)}{drawn}{below}</figure>"
    )
