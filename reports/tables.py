"""Tables in the house style: great_tables draws the rows, the page's style sheet dresses them.

In: rows and columns that say how a value is written. Out: one HTML table with a fixed id in a box that
scrolls by itself, so that a phone shows it whole. great_tables' own style block is dropped: its colours
would ignore dark mode, and it is 8 kB a table. Every cell is escaped here, whatever the version of
great_tables does. Cost: about 10 ms a table.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import great_tables
import polars as pl

from . import text

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its heading (HTML of ours), how a row's value is written, and whether as HTML."""

    heading: str
    write: Callable[[Row], str]
    number: bool = True
    markup: bool = False
    spanner: str | None = None


def value(key: str, show: Callable[[Any], str] = text.number) -> Callable[[Row], str]:
    """Write one field of a row."""
    return lambda row: show(row[key])


def between(low: str, high: str, show: Callable[[Any, Any], str] = text.interval) -> Callable[[Row], str]:
    """Write an interval from two fields of a row."""
    return lambda row: show(row[low], row[high])


_STYLE = re.compile(r"<style>.*?</style>", re.DOTALL)
# Names of stores enter great_tables' ids, where two may collide: scope= says the same to a screen reader.
_IDS = re.compile(r'(<t[hd])((?: [a-z]+="[^"]*")*?) (?:id|headers)="[^"]*"')
_BOX = re.compile(r'(<div id="[^"]*") style="[^"]*">')


def house(
    rows: Sequence[Row],
    columns: Sequence[Column],
    *,
    key: str,
    caption: str,
    group: Callable[[Row], str] | None = None,
) -> str:
    """The table as HTML; `key` is its id, `caption` its name when read out, `group` heads runs of rows."""
    names = [f"c{position}" for position in range(len(columns))]
    cells: dict[str, list[str]] = {
        name: [column.write(row) if column.markup else text.escape(column.write(row)) for row in rows]
        for name, column in zip(names, columns, strict=True)
    }
    heads = [] if group is None else list(dict.fromkeys(group(row) for row in rows))
    if group is not None:
        cells["group"] = [_head(key, heads.index(group(row))) for row in rows]
    frame = pl.DataFrame(cells, schema=dict.fromkeys(cells, pl.String))
    table = great_tables.GT(frame, id=key, groupname_col=None if group is None else "group")
    # A formatted cell is taken as finished HTML by every version of great_tables; a bare one only by some.
    table = table.fmt(lambda cell: cell, columns=names).cols_label(
        {name: great_tables.html(column.heading) for name, column in zip(names, columns, strict=True)}
    )
    for side in (True, False):
        chosen = [name for name, column in zip(names, columns, strict=True) if column.number is side]
        table = table.cols_align("right" if side else "left", columns=chosen) if chosen else table
    for spanner in dict.fromkeys(column.spanner for column in columns if column.spanner):
        under = [name for name, column in zip(names, columns, strict=True) if column.spanner == spanner]
        table = table.tab_spanner(great_tables.html(spanner), columns=under, id=f"{key}-{under[0]}")
    drawn = _dressed(table.as_raw_html(), caption)
    for number, head in enumerate(heads):
        drawn = drawn.replace(f">{_head(key, number)}<", f">{text.escape(head)}<")
    return drawn


def _head(key: str, number: int) -> str:
    """Stands for a heading until great_tables is done: its versions differ in what they escape."""
    return f"{key}-rows-{number}"


def _dressed(drawn: str, caption: str) -> str:
    """great_tables' HTML without its styles and ids, in our scrolling box, with a caption."""
    bare = _BOX.sub(r'\1 class="table" tabindex="0">', _STYLE.sub("", drawn), count=1)
    bare = re.sub(r' data-quarto-[a-z-]+="[^"]*"', "", bare)
    # Most cells are numbers: the style sheet aligns cells to the right, and the few others say so.
    bare = bare.replace('<td class="gt_row gt_right">', "<td>").replace("gt_row gt_left", "gt_left")
    while True:
        bare, changed = _IDS.subn(r"\1\2", bare)
        if not changed:
            break
    bare = re.sub(r"\n\s*", "\n", bare).replace("\n\n", "\n").strip()
    opened = f'<table class="gt_table"><caption class="unseen">{text.escape(caption)}</caption>'
    return bare.replace('<table class="gt_table">', opened, 1)
