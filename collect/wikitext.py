"""Rows of WikiText joined back into the articles that they were cut from.

In: rows that are lines of articles, in order, as WikiText is published: ` = Title = ` opens an article,
` = = Section = = ` does not, every title stands between two empty rows. Out: one row per article, under the
key of its title; lines before the first title are the tail of an article and stay together. Why: documents
are the unit of split, and an article whose lines were documents would lie in fit and in test at once, which
is a leak. Cost: one pass; memory: one article, and for `auto` the first 1,000 rows.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice

from ..store.errors import UsageError
from .documents import Row

SAMPLE_ROWS = 1000
EMPTY_SHARE = 0.2  # WikiText has 35 %
_TITLE = re.compile(r"= (?!=( |$))\S.*(?<! =) =")  # one level: what follows the first mark is no second one
_EXACT = re.compile(r" = [^\n]* = \n?")


def articles(rows: Iterable[Row], join: str, policies: dict[str, str]) -> Iterator[Row]:
    """The articles, noted in `policies`; or the rows as they are. `join`: `wikitext` and `never` decide,
    `auto` looks at the first rows."""
    rows = iter(rows)
    head = _sample(rows) if join == "auto" else []
    rest = chain(head, rows)
    if join == "wikitext" or (join == "auto" and looks_like_wikitext([row.value for row in head])):
        policies["join"] = "wikitext"
        rest = _joined(rest)
    yield from rest


def articles_in_texts(texts: Iterable[Row], join: str, policies: dict[str, str]) -> Iterator[Row]:
    """The articles in texts whose lines are such rows; or the texts as they are."""
    for key, text, place in texts:
        head = [*str(text).split("\n", SAMPLE_ROWS)][:SAMPLE_ROWS]
        if join == "wikitext" or (join == "auto" and looks_like_wikitext(head)):
            policies["join"] = "wikitext"
            lines = enumerate(str(text).split("\n"), start=1)
            yield from _joined(Row(f"{key}:{n}", line, f"{place}, line {n}") for n, line in lines)
        else:
            yield Row(key, text, place)


def _sample(rows: Iterator[Row]) -> list[Row]:
    """The first rows, no more than are needed to see that they are no lines."""
    head: list[Row] = []
    for row in islice(rows, SAMPLE_ROWS):
        head.append(row)
        if not _is_line(row.value):
            break
    return head


def looks_like_wikitext(values: Sequence[object]) -> bool:
    """Whether all values are single lines or nothing, a fifth of them empty, and one is a title to the
    letter (one space outside of its marks) between two empty ones."""
    if not all(map(_is_line, values)):
        return False
    lines = [str(value or "") for value in values]
    n_empty = sum(not line.strip() for line in lines)
    if n_empty < EMPTY_SHARE * max(len(lines), 1):
        return False
    around = zip(["", *lines], lines, [*lines[1:], ""], strict=False)
    return any(_EXACT.fullmatch(line) and _opens(before, line, after) for before, line, after in around)


def _is_line(value: object) -> bool:
    return value is None or (isinstance(value, str) and "\n" not in value.rstrip("\n"))


def _joined(rows: Iterator[Row]) -> Iterator[Row]:
    opening: Row | None = None
    lines: list[str] = []
    before, n_titles = "", 0
    for row, following in _with_next(rows):
        line = _line_of(row)
        if _opens(before, line, _line_of(following) if following else ""):
            n_titles += 1
            yield from _article(opening, lines)
            opening, lines = row, []
        opening, before = opening or row, line
        lines.append(line)
    if not n_titles:
        raise UsageError(
            "join=wikitext: no row is a title, ` = Title = ` between two empty rows; use join=never for rows "
            "that are documents themselves."
        )
    yield from _article(opening, lines)


def _article(opening: Row | None, lines: list[str]) -> Iterator[Row]:
    text = "\n".join(lines).strip("\n")
    if opening is not None and text:
        yield opening._replace(value=text)


def _opens(before: str, line: str, after: str) -> bool:
    """Whether a line opens an article. A formula inside an article may look like a title, but no line of
    text has empty ones around it."""
    return not before.strip() and not after.strip() and _TITLE.fullmatch(line.strip()) is not None


def _line_of(row: Row) -> str:
    """The line without its end; one of blanks only is empty, since some copies of WikiText keep the blank."""
    if row.value is not None and not isinstance(row.value, str):
        raise UsageError(f"{row.place} holds a {type(row.value).__name__}; only rows of text can be joined.")
    line = (row.value or "").rstrip("\r\n")
    return line if line.strip() else ""


def _with_next(rows: Iterator[Row]) -> Iterator[tuple[Row, Row | None]]:
    current = next(rows, None)
    while current is not None:
        following = next(rows, None)
        yield current, following
        current = following
