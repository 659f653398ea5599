"""`nearline report STUDY --figures DIR`: every figure of the page as SVG, PNG and PDF, for slides and papers.

In: the figures of a page as `gathered` kept them. Out: three files a figure, named after its id, and
`captions.txt` with what each shows and how to read it. The drawing is the page's, in its wide form and its
light colours, with the key of colours above it: nothing of the page is needed to read it. No network, no
browser. Cost: about half a second a figure.
"""

import html
import re
from collections.abc import Sequence
from pathlib import Path

import vl_convert

from . import svg, text
from .chart_style import WIDE, colour_of, shape_of
from .figure import SYMBOLS
from .gathered import Drawn, Gathered
from .replaced import CAPTIONS

SCALE = 2.0
"""Pixels of a PNG for one of the page."""
_LINE, _MARGIN = 20, 10
_VARIABLE = re.compile(r"var\(--[\w-]+,\s*(#[0-9a-fA-F]{3,8})\)")
_STREAM = re.compile(rb"(\nstream\r?\n.*?\nendstream)", re.DOTALL)
_RESOURCE = re.compile(rb"\n +/[a-z]+\d+ \d+ 0 R")
_RESOURCES = re.compile(rb"(?:\n +/[a-z]+\d+ \d+ 0 R){2,}")
_FONT = "Helvetica Neue, Liberation Sans, DejaVu Sans, Arial, sans-serif"


def drawn(pages: Sequence[Gathered], folder: Path) -> dict[Path, bytes]:
    """The figures of these pages as files below `folder`; of several studies, each in a folder of its own."""
    files: dict[Path, bytes] = {}
    for page in pages:
        place = folder / page.tag if page.tag else folder
        lines = [f"{one.key}: {one.finding}. {_words(one.how)}" for one in page.figures]
        files[place / CAPTIONS] = "".join(f"{line}\n" for line in lines).encode()
        for one in page.figures:
            picture = alone(one)
            files[place / f"{one.key}.svg"] = picture.encode()
            files[place / f"{one.key}.png"] = vl_convert.svg_to_png(picture, scale=SCALE)
            files[place / f"{one.key}.pdf"] = _settled(vl_convert.svg_to_pdf(picture))
    return files


def alone(figure: Drawn) -> str:
    """The drawing as a file of its own: white below, colours for the page's variables, its key above."""
    width, height, body = svg.drawn(figure.draw(WIDE))
    labels = figure.labels if len(figure.labels) > 1 else ()
    above = _MARGIN + _LINE * len(labels)
    key = "".join(_entry(at, label) for at, label in enumerate(labels))
    wide, high = width + 2 * _MARGIN, height + above + _MARGIN
    whole = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide:g}" height="{high:g}" '
        f'viewBox="0 0 {wide:g} {high:g}" font-family="{_FONT}"><title>{text.escape(figure.finding)}</title>'
        f'<rect width="100%" height="100%" fill="#ffffff"/>{key}'
        f'<g transform="translate({_MARGIN},{above})">{body}</g></svg>\n'
    )
    return _VARIABLE.sub(r"\1", whole)


def _settled(pdf: bytes) -> bytes:
    """The same document in the same bytes each time: names of a page's resources come in the order of a hash
    table. Each run of them is sorted where it stands, so that no offset moves; streams are left alone.
    """
    parts = _STREAM.split(pdf)
    parts[::2] = [_RESOURCES.sub(_sorted, part) for part in parts[::2]]
    return b"".join(parts)


def _sorted(run: re.Match[bytes]) -> bytes:
    return b"".join(sorted(_RESOURCE.findall(run[0])))


def _entry(at: int, label: str) -> str:
    y = _MARGIN + _LINE * at
    return (
        f'<g transform="translate({_MARGIN},{y})" fill="{colour_of(at)}">{SYMBOLS[shape_of(at)]}'
        f'<text x="20" y="11" font-size="13" fill="var(--ink,#1f2328)">{text.escape(label)}</text></g>'
    )


def _words(markup: str) -> str:
    return html.unescape(re.sub(r"<[^>]*>", "", markup))
