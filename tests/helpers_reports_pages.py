"""A page taken apart: tags that must nest, text of its tables, strings that ask to break out."""

import html
import re
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from nearline.reports import figure, page, svg, tables
from nearline.reports.chart_style import NARROW, WIDE, Size
from nearline.reports.results import read

HOSTILE = (
    "</script><img src=x onerror=alert(1)>",
    "\"><style>body{display:none}</style><a href='http://evil.example'>",
    "abc\u202edcba\u2066",
    "nul\x00and\x1bescape\ufffe",
    "X" * 10_000,
    "Z" + "\u0334" * 400 + "$title ${style} </bdi></mark>",
)
VOID = frozenset({"wbr", "meta", "br", "img", "input", "link", "hr"})


SCRIPT = f"<script>\n{Path(str(page.__file__)).with_name('page.js').read_text(encoding='utf-8')}</script>\n"
"""The one script of a page, byte for byte."""


class Structure(HTMLParser):
    """Tags and text of a page without its own script; refuses tags that do not nest."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.pieces: list[str] = []
        self.open: list[str] = []
        self.feed(document.replace(SCRIPT, "", 1))
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.pieces.append(data)


def table(document: str, key: str) -> str:
    """The text of one table."""
    found = re.search(rf'<div id="{key}".*?</table>', document, re.DOTALL)
    assert found is not None
    return html.unescape(re.sub(r"<[^>]+>", " ", found[0].replace("<wbr>", "")))


def draw_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the drawing, which takes nearly all of the time."""

    def sentence_only(draw: object, size: object, finding: str) -> str:
        return f'<svg role="img" aria-label="{html.escape(finding)}"></svg>'

    monkeypatch.setattr(figure, "_draw", sentence_only)


def draw_values(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Charts are made in one size, checked as values, collected and not drawn."""
    specs: list[dict[str, Any]] = []

    def value_only(draw: Callable[[Size], Any], size: Size, finding: str) -> str:
        if size is WIDE:
            spec = draw(size).to_dict(validate=False)
            svg._checked(spec)
            specs.append(spec)
        return f'<svg role="img" aria-label="{html.escape(finding)}"></svg>'

    monkeypatch.setattr(figure, "_draw", value_only)
    return specs


def draw_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every figure is drawn for phones, and that drawing stands for the wide one as well."""
    drawings: dict[str, str] = {}

    def narrow_only(draw: Callable[[Size], Any], size: Size, finding: str) -> str:
        if finding not in drawings:
            drawings[finding] = svg.render(draw(NARROW), finding)
        return drawings[finding]

    monkeypatch.setattr(figure, "_draw", narrow_only)


def page_and_charts(study: str) -> str:
    """The page of a study without its drawings, then one of its small multiples and one of its curves."""
    drawn: dict[str, Callable[[Size], Any]] = {}

    def kept(draw: Callable[[Size], Any], size: Size, finding: str) -> str:
        drawn[finding] = draw
        return ""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figure, "_draw", kept)
        document = page.render(read(Path(study)))
    chosen = [finding for finding in drawn if finding.startswith(("A gate on", "Of all error, the 50.0"))]
    assert len(chosen) == 2
    return "".join([document, *(svg.render(drawn[finding](NARROW), finding) for finding in chosen)])


def write_plain_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every cell is written, and no table is dressed, as on a page for a test that only reads."""

    def plain(rows: Any, columns: Any, *, key: str, caption: str, group: Any = None, **_: Any) -> str:
        heads = [html.escape(group(row)) for row in rows] if group else []
        cells = [
            column.write(row) if column.markup else html.escape(column.write(row))
            for column in columns
            for row in rows
        ]
        return f'<div id="{key}"><table>{html.escape(caption)} {" ".join([*heads, *cells])}</table></div>'

    dressed = tables.house  # charts have a look of that name too
    for name, module in list(sys.modules.items()):
        if name.startswith("nearline.reports.") and getattr(module, "house", None) is dressed:
            monkeypatch.setattr(module, "house", plain)


def figures(document: str) -> set[str]:
    """Names of the figures of a page."""
    return set(re.findall(r'<figure id="figure-([a-z0-9]+)"', document))


def plain(markup: str) -> str:
    """What a person reads of some markup."""
    return html.unescape(re.sub(r"<[^>]+>", "", markup.replace(SCRIPT, "")))
