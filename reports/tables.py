"""Tables in the house style: rows and columns in, one HTML table out, as small as it can be said.

In: rows and columns that say how a value is written. Out: one table with a fixed id in a box that scrolls by
itself, so that a phone shows it whole. Every cell is escaped here. The style sheet aligns cells to the right,
as most of them are numbers; columns of words say so once a cell, in two letters. Long tables are cut, and say
so. Cost: about a microsecond a cell.

The same columns give the values as they are stored: `report --tables` writes those.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from . import gathered, text

Row = Mapping[str, Any]

_JOINT = re.compile(r"([_+@])(?=\w)")
"""Where a long name may be broken: behind the joints of `token_all+context_only`."""
MOST_ROWS = 600
"""Rows of a table that the page shows: four of each layer where there are five stores of thirty layers."""
MANY = 9
"""Columns above which a table is printed in smaller letters."""
SORTED_FROM = 4
"""Rows from which on sorting a table of numbers helps."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its heading (HTML of ours), how a row's value is written, and whether as HTML."""

    heading: str
    write: Callable[[Row], str]
    number: bool = True
    markup: bool = False
    spanner: str | None = None


@dataclass(frozen=True, slots=True)
class Field:
    """Writes one field of a row. `stored`: the value itself. `may_miss`: rows may lack the field."""

    key: str
    show: Callable[[Any], str]
    may_miss: bool = False

    def __call__(self, row: Row) -> str:
        return self.show(row.get(self.key) if self.may_miss else row[self.key])

    def stored(self, row: Row) -> dict[str, Any]:
        return {"": row.get(self.key)}


@dataclass(frozen=True, slots=True)
class Ends:
    """Writes an interval from two fields of a row."""

    low: str
    high: str
    show: Callable[[Any, Any], str]
    may_miss: bool = False

    def __call__(self, row: Row) -> str:
        if self.may_miss:
            return self.show(row.get(self.low), row.get(self.high))
        return self.show(row[self.low], row[self.high])

    def stored(self, row: Row) -> dict[str, Any]:
        return {" low": row.get(self.low), " high": row.get(self.high)}


@dataclass(frozen=True, slots=True)
class Inner:
    """Writes a row of the study that stands under a field of a row, or the sign for nothing where it does
    not. `fields`: what `stored` takes of it, by the end of the column's name.
    """

    key: str
    show: Callable[[Row], str]
    fields: Mapping[str, str]

    def __call__(self, row: Row) -> str:
        one = row.get(self.key)
        return text.NONE if one is None else self.show(one)

    def stored(self, row: Row) -> dict[str, Any]:
        one = row.get(self.key) or {}
        return {end: one.get(name) for end, name in self.fields.items()}


def value(key: str, show: Callable[[Any], str] = text.number, *, may_miss: bool = False) -> Field:
    """Write one field of a row."""
    return Field(key, show, may_miss)


def between(
    low: str, high: str, show: Callable[[Any, Any], str] = text.interval, *, may_miss: bool = False
) -> Ends:
    """Write an interval from two fields of a row."""
    return Ends(low, high, show, may_miss)


def nats_columns(name: str, low: str, high: str, spanner: str, words: str = "95 % interval") -> list[Column]:
    """A difference in nats and its interval, under one heading."""
    return [
        Column("Δ", value(name, text.nats), spanner=spanner),
        Column(words, between(low, high, text.nats_interval), spanner=spanner),
    ]


def house(
    rows: Sequence[Row],
    columns: Sequence[Column],
    *,
    key: str,
    caption: str,
    group: Callable[[Row], str] | None = None,
    most: int = MOST_ROWS,
) -> str:
    """The table as HTML; `key` is its id, `caption` its name when read out, `group` heads runs of rows. At
    most `most` rows are shown, as many of each run.
    """
    parts = None if group is None else [group(row) for row in rows]
    gathered.keep(gathered.Shown(key, caption, columns, rows, parts))
    runs = _runs(rows, parts)
    room = most // max(1, len(runs))
    left_out = sum(max(0, len(run) - room) for _, run in runs)
    body = "".join(
        f"{_heading(head, len(columns))}{''.join(_row(row, columns) for row in run[:room])}"
        for head, run in runs
    )
    longest = max((len(run) for _, run in runs), default=0)
    sortable = longest >= SORTED_FROM and any(column.number for column in columns)
    looks = [key, *(["sortable"] * sortable), *(["many"] * (len(columns) > MANY))]
    return (
        f'<div id="{gathered.ident(key)}" class="table {" ".join(looks)}" tabindex="0"><table>'
        f'<caption class="unseen">{text.escape(gathered.named(caption))}</caption>\n'
        f"<thead>{_head(columns)}</thead>\n<tbody>\n{body}</tbody></table></div>"
        + (_cut(len(rows) - left_out, len(rows), len(runs)) if left_out else "")
    )


def _runs(rows: Sequence[Row], parts: Sequence[str] | None) -> list[tuple[str | None, list[Row]]]:
    """Rows of one heading together, headings in the order of their first row."""
    if parts is None:
        return [(None, list(rows))]
    found: dict[str | None, list[Row]] = {}
    for part, row in zip(parts, rows, strict=True):
        found.setdefault(part, []).append(row)
    return list(found.items())


def _row(row: Row, columns: Sequence[Column]) -> str:
    cells = []
    for column in columns:
        written = column.write(row)
        opened = "<td>" if column.number else '<td class="l">'
        cells.append(f"{opened}{written if column.markup else text.escape(written)}</td>")
    return f"<tr>{''.join(cells)}</tr>\n"


def _heading(head: str | None, width: int) -> str:
    """What heads a run of rows; its words stay in sight while the table is scrolled."""
    if head is None:
        return ""
    return f'<tr><th colspan="{width}" scope="colgroup"><span>{text.escape(head)}</span></th></tr>\n'


def _head(columns: Sequence[Column]) -> str:
    """One row of headings, or two where some columns stand under a common one."""
    if not any(column.spanner for column in columns):
        return f"<tr>{''.join(_leaf(column) for column in columns)}</tr>"
    above, below = [], []
    for spanner, run in groupby(columns, key=lambda column: column.spanner):
        under = list(run)
        if spanner is None:
            above += [_leaf(column, ' rowspan="2"') for column in under]
        else:
            above.append(
                f'<th class="over" colspan="{len(under)}" scope="colgroup"><span>{spanner}</span></th>'
            )
            below += [_leaf(column) for column in under]
    return f"<tr>{''.join(above)}</tr><tr>{''.join(below)}</tr>"


def _leaf(column: Column, more: str = "") -> str:
    side = "" if column.number else ' class="l"'
    words = _JOINT.sub(r"\1<wbr>", column.heading)
    return f'<th{side}{more} scope="col">{words}</th>'


def _cut(shown: int, there: int, runs: int) -> str:
    each = " (as many under each heading)" if runs > 1 else ""
    return (
        f'<p class="note">Shown: {text.count(shown)} of {text.count(there)} rows{each}. All of them: '
        "<code>nearline report STUDY --tables DIR</code>.</p>"
    )
