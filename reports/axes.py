"""Axes of quantities without natural ends, such as costs: long enough for most of the values, and for zero.

In: panels. Out: the ends of their axis, and a sentence on what lies beyond them. One layer that costs ten
thousand times what the others cost must not press them onto the zero line. Cost: none.
"""

import math
from collections.abc import Callable, Sequence

import polars as pl

from . import text
from .multiples import Panel

SPREAD = 4.0
"""How many times a large value (the upper quartile) may be exceeded before the axis is cut."""
LEAST = 1e-4
"""Length of the shortest axis: what is smaller than that is drawn as nothing, and is."""


def step_of(length: float) -> float:
    """About an eighth of a length: 1, 2 or 5 of some power of ten."""
    rough = length / 8
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * digit for digit in (1, 2, 5, 10) if power * digit >= rough * 0.999)


def ends_of(panels: Sequence[Panel], show: Sequence[float] = (0.0,)) -> tuple[float, float]:
    """The vertical axis of panels in whole steps: as long as their values and intervals where these are
    alike, cut at SPREAD times the upper quartile of their size where a few are far beyond the others.
    """
    values = _finite(panels, ("value",))
    bounds = [*values, *_finite(panels, ("lo", "hi")), *show]
    sizes = sorted(abs(value) for value in values)
    typical = sizes[(3 * len(sizes)) // 4] if sizes else 0.0
    reach = max(SPREAD * typical, LEAST, *(abs(one) for one in show))
    low, high = max(-reach, min(bounds)), min(reach, max(bounds))
    step = step_of(max(high - low, LEAST))
    room = 0.02 * (high - low)  # a mark on the very edge would stand out of its panel
    bottom, top = (math.floor((low - room) / step), math.ceil((high + room) / step))
    bottom = 0 if low >= 0.0 else bottom
    return step * bottom, step * max(top, bottom + 1)


def beyond(
    panels: Sequence[Panel],
    domain: tuple[float, float],
    show: Callable[[float], str],
    labels: Sequence[str] = (),
) -> str:
    """Which values lie beyond the axis, the farthest first; empty where none does. `labels`: names of
    series, where there are several.
    """
    low, high = domain
    parts = []
    for one in panels:
        outside = one.frame.filter(~pl.col("value").is_between(low - 1e-9, high + 1e-9))
        named = [
            f"layer {row['layer']}{_on(labels, row['series'])} ({show(row['value'])})"
            for row in outside.sort(pl.col("value").abs(), descending=True, maintain_order=True).to_dicts()
        ]
        if named:
            parts.append(f"{one.title}: {text.some(named)}" if len(panels) > 1 else text.some(named))
    return f"Beyond the axis and drawn on its edge: {'; '.join(parts)}." if parts else ""


def _on(labels: Sequence[str], series: int) -> str:
    return f" on {labels[series]}" if len(labels) > 1 else ""


def _finite(panels: Sequence[Panel], columns: Sequence[str]) -> list[float]:
    return [
        value
        for one in panels
        for column in columns
        for value in one.frame[column].drop_nulls().drop_nans().to_list()
        if abs(value) != float("inf")
    ]
