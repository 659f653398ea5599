"""Pieces of the page that every section is made of: the section itself, folded tables, paragraphs.

In: HTML of ours. Out: HTML. Cost: none.
"""

import re

import polars as pl

from . import findings, text
from .results import Results

MOST_PRINTED_ROWS = 70  # a page of A4


def section(key: str, heading: str, *parts: str) -> str:
    """A section of the page under its heading; empty parts are left out."""
    body = "\n".join(part for part in parts if part)
    return f'<section id="{key}">\n<h2>{heading}</h2>\n{body}\n</section>'


_SECTION = re.compile(r'<section id="([a-z]+)">\n<h2>([^<]*)</h2>\n(.*)\n</section>', re.DOTALL)


def parted(whole: str) -> tuple[str, str, str] | None:
    """Key, heading and body of a section; None for what is none."""
    found = _SECTION.fullmatch(whole)
    return None if found is None else (found[1], found[2], found[3])


def numbers(label: str, table: str, *, opened: bool = False) -> str:
    """A table that a reader unfolds; nothing where there is no table. On paper it is unfolded, unless it is
    long: thirty layers on five corpora would be eighty pages of tables."""
    if not table:
        return ""
    n_rows = table.count("<tr")
    kind = "numbers long" if n_rows > MOST_PRINTED_ROWS else "numbers"
    return f'<details class="{kind}"{" open" if opened else ""}><summary>{label}</summary>{table}</details>'


def paragraph(sentence: str) -> str:
    """A plain sentence, not yet escaped."""
    return f"<p>{text.escape(sentence)}.</p>" if sentence else ""


def note(words: str) -> str:
    """An explanation of ours, as HTML."""
    return f'<p class="note">{words}</p>' if words else ""


def layer_titles(layers: list[int], words: dict[int, str] | None = None) -> dict[int, str]:
    """Titles of panels of single layers."""
    return {layer: f"layer {layer}{(words or {}).get(layer, '')}" for layer in layers}


def store_head(results: Results, series: int) -> str:
    """What heads the rows of a store."""
    return findings.label(results, series)


def of_layer(frame: pl.DataFrame, layer: int) -> pl.DataFrame:
    return frame.filter(pl.col("layer") == layer)
