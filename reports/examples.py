"""Tokens of highest and lowest need, in context, as HTML that stays in its box whatever a token holds.

In: rows of the table `examples`. Out: two lists a layer; the token is marked, whitespace and controls are
drawn, every piece stands in its own `<bdi>`, so that right-to-left text turns around inside its piece and
not across the line. Cost: linear in the rows.
"""

from collections.abc import Mapping, Set
from typing import Any

import polars as pl

from . import text

CONTEXT = 90
"""Characters shown on either side of a token."""
TOKEN = 60
"""Characters of a token that are shown; the number of further ones is said."""
MOST = 1200
"""Tokens that a page shows; where there are more, each list is cut to as many, but not below LEAST."""
LEAST = 3
HEADINGS = {"highest": "Highest need", "lowest": "Lowest need"}


def _token(token: str) -> str:
    more = f'<span class="more">… +{len(token) - TOKEN:,} characters</span>' if len(token) > TOKEN else ""
    return f"<mark><bdi>{text.markup(token[:TOKEN], spaces=True)}</bdi></mark>{more}"


def _context(before: str, after: str, token: str) -> str:
    """`…before` token `after…`, cut on the far sides."""
    left = ("…" if len(before) > CONTEXT else "") + text.markup(before[-CONTEXT:])
    right = text.markup(after[:CONTEXT]) + ("…" if len(after) > CONTEXT else "")
    return f"<bdi>{left}</bdi>{_token(token)}<bdi>{right}</bdi>"


def _item(row: dict[str, Any]) -> str:
    source = text.escape(text.name(row["document_key"], 60))
    context = _context(row["before"] or "", row["after"] or "", row["token"] or "")
    return (
        f'<li><span class="value">{text.number(row["value"])}</span>'
        f'<span class="context"><code dir="ltr">{context}</code>'
        f"<small>{source}, position {text.count(row['position'])}</small></span></li>"
    )


def each(rows: pl.DataFrame) -> int:
    """How many tokens each list of the page shows."""
    lists = rows.filter(pl.col("need") == "error").group_by("series", "layer", "kind").len()
    longest = max(lists["len"].to_list(), default=0)
    return min(longest, max(LEAST, MOST // max(1, lists.height)))


def pair(rows: pl.DataFrame, most: int) -> str:
    """The two lists of one store and layer side by side."""
    lists = []
    for kind, heading in HEADINGS.items():
        chosen = rows.filter(pl.col("kind") == kind).sort("rank").head(most)
        items = "".join(_item(row) for row in chosen.to_dicts())
        if items:
            lists.append(f'<div><h4>{heading}</h4><ol class="tokens">{items}</ol></div>')
    return f'<div class="pair">{"".join(lists)}</div>'


def by_layer(rows: pl.DataFrame, titles: Mapping[int, str], *, opened: Set[int | None], most: int) -> str:
    """A folded pair of lists, of at most `most` tokens, for every layer that has examples; the layers in
    `opened` start unfolded.
    """
    parts = []
    for layer, title in titles.items():
        chosen = rows.filter((pl.col("layer") == layer) & (pl.col("need") == "error"))
        if not chosen.is_empty():
            state = " open" if layer in opened else ""
            parts.append(
                f"<details{state}><summary>{text.escape(title)}</summary>{pair(chosen, most)}</details>"
            )
    return "".join(parts)
