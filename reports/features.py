"""Feature sets of gates as the page names them: their order, what each is, and which cannot be known in time.

In: the names in the tables of gates. Out: plain text. A name that is not known here is shown as it stands,
behind the others.
"""

from collections.abc import Sequence

import polars as pl

from . import text

MEANINGS = {
    "input": "the MLP's input x",
    "norm": "the norm of x",
    "position": "the position in the window",
    "token": "the token's own embedding, normed by itself",
    "token_scaled": "the token's exact part of x",
    "token_full": "all of x that follows linearly from the token's embedding",
    "token_type": "mean need of this token on the fit rows, shrunk",
    "token_all": "token_full and token_type together",
    "context": "what attention and earlier MLPs wrote; it holds the token as well",
    "context_only": "the same without what follows from the token",
    "token_all+context_only": "both: everything that the two sides know",
    "position_part": "the position embedding's exact part of x",
    "target_type": "mean need by the token that comes next",
    "output_norm": "the norm of the MLP's output",
    "random": "noise: what chance looks like",
    "oracle": "the need itself",
}
"""Feature sets in the order shown."""

BASELINES = ("random", "oracle")
MARK = "†"
"""Stands behind what is not available when a token has to be routed."""


def order(names: Sequence[str]) -> list[str]:
    """The names in the order shown."""
    known = [name for name in MEANINGS if name in names]
    return known + sorted(set(names) - set(known))


def late(frame: pl.DataFrame) -> set[str]:
    """Feature sets that are not available at routing time."""
    return set(frame.filter(~pl.col("available_at_routing").fill_null(True))["features"].to_list())


def title(name: str, late_ones: set[str]) -> str:
    """A name as it heads a panel or a column."""
    return text.name(name, 28) + (f" {MARK}" if name in late_ones else "")


def legend(names: Sequence[str], late_ones: set[str]) -> str:
    """What the names stand for, as HTML."""
    parts = [
        f"<b>{text.escape(title(name, late_ones))}</b> {MEANINGS[name]}" for name in names if name in MEANINGS
    ]
    return "; ".join(parts) + "." if parts else ""
