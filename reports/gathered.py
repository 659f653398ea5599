"""What a page is made of, kept as values while it is written: for `report --tables` and `--figures`, and for
pages of several studies, where ids must stay apart and captions name the model.

In: the tables and figures that `tables.house` and `figure.figure` draw inside `gathering`. Out: lists of
them, in the order of the page. Outside of it nothing is kept. Cost: references.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import altair as alt

from .chart_style import Size


@dataclass(frozen=True, slots=True)
class Shown:
    """A table: its columns (of `tables.Column`) and all of its rows; `parts` heads runs of them."""

    key: str
    caption: str
    columns: Sequence[Any]
    rows: Sequence[Mapping[str, Any]]
    parts: Sequence[str] | None


@dataclass(frozen=True, slots=True)
class Drawn:
    """A figure: what it shows, how to read it (HTML of ours), its series, and the chart in any size."""

    key: str
    finding: str
    how: str
    labels: Sequence[str]
    draw: Callable[[Size], alt.TopLevelMixin]


@dataclass(slots=True)
class Gathered:
    """`tag` tells ids of one study from those of another on the same page, `model` heads its captions; both
    are empty where a page has one study.
    """

    tag: str = ""
    model: str = ""
    tables: list[Shown] = field(default_factory=list)
    figures: list[Drawn] = field(default_factory=list)


_current: ContextVar[Gathered | None] = ContextVar("gathered", default=None)


@contextmanager
def gathering(tag: str = "", model: str = "") -> Generator[Gathered]:
    """Keep what is drawn meanwhile."""
    found = Gathered(tag, model)
    token = _current.set(found)
    try:
        yield found
    finally:
        _current.reset(token)


def keep(one: Shown | Drawn) -> None:
    """Add a table or a figure to the page that is being written, if somebody wants to know."""
    if (page := _current.get()) is not None:
        page.tables.append(one) if isinstance(one, Shown) else page.figures.append(one)


def ident(key: str) -> str:
    """An id of the page, apart from those of its other studies."""
    page = _current.get()
    return f"{page.tag}-{key}" if page is not None and page.tag else key


def named(sentence: str) -> str:
    """A caption, behind the name of its model where the page has several."""
    page = _current.get()
    return f"{page.model}: {sentence}" if page is not None and page.model else sentence
