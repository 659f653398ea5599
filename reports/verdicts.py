"""Verdicts of a family of rows (one a layer) counted, in words and in a table.

In: frames with `verdict`, and `p_holm` where there is one. Out: plain text, or HTML. A sentence claims what
the interval for all layers at once supports, and names what it leaves open; the number of layers by Holm's
p-values stands beside it in the table. Cost: nothing to speak of.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import polars as pl

from . import findings, text
from .results import Results
from .tables import Column, Row, house, value

SYMBOLS = {"supported": "●", "not supported": "○", "cannot tell": "◐", "too few documents": "·"}
NONE_GIVEN = {"chosen on test": "×", "shares differ": "≠", "below the noise floor": "~"}
"""Words in the place of a verdict, where what was measured allows none."""
HOLM = 0.05
"""Level of Holm's test: that of the intervals."""


def symbol(verdict: object) -> str:
    return (SYMBOLS | NONE_GIVEN).get(str(verdict), "?")


def cell(row: Row) -> str:
    """A verdict as a cell of a table: its sign and its words, as HTML."""
    verdict = str(row["verdict"])
    return f'<span class="verdict">{symbol(verdict)} {text.escape(text.name(verdict, 40))}</span>'


def marked(row: Row, what: str) -> str:
    """A number behind the sign of its verdict."""
    return f"{symbol(row['verdict'])} {what}"


def in_layers(rows: pl.DataFrame, where: str = "", *, again: bool = False) -> str:
    """`10 of 12 layers on docs:python (cannot tell in 2)`: supported first, then what is left open.
    `again`: the layers were named before.
    """
    found = rows["verdict"].to_list()
    counts = {verdict: found.count(verdict) for verdict in findings.VERDICTS}
    layers = "" if again else " layer" if len(found) == 1 else " layers"
    if counts["supported"] == len(found) > 1:
        many = f"all {len(found)}{layers}"
    elif counts["too few documents"] == len(found):
        many = "no layer that can be judged"  # none of twelve would be an answer
    else:
        many = f"{counts['supported'] or 'none'} of {len(found)}{layers}"
        if not counts["supported"] and counts["cannot tell"]:
            many += " for sure"
    others = (*findings.VERDICTS[1:], *NONE_GIVEN)
    rest = [f"{verdict} in {found.count(verdict)}" for verdict in others if verdict in found]
    return f"{many}{where}" + (f" ({', '.join(rest)})" if rest else "")


def families(rows: Sequence[tuple[str, pl.DataFrame]]) -> str:
    """`in 10 of 12 layers on docs:python (cannot tell in 2) and 9 of 12 on docs:stdlib`."""
    there = [(where, frame) for where, frame in rows if not frame.is_empty()]
    parts = [in_layers(frame, where, again=at > 0) for at, (where, frame) in enumerate(there)]
    return f"in {text.listing(parts)}"


def by_store(results: Results, frame: pl.DataFrame) -> str:
    """Counts of each store, joined."""
    several = len(results.stores) > 1
    return families(
        [
            (
                f" on {findings.label(results, at, 40)}" if several else "",
                frame.filter(pl.col("series") == at),
            )
            for at in range(len(results.stores))
        ]
    )


def by_holm(rows: pl.DataFrame, above: Callable[[Mapping[str, Any]], bool]) -> int:
    """Rows whose null Holm's test rejects on the side of the claim, where there are documents enough."""
    return sum(
        row["p_holm"] is not None
        and row["p_holm"] < HOLM
        and row["verdict"] != "too few documents"
        and above(row)
        for row in rows.to_dicts()
    )


def table(
    rows: Sequence[tuple[Mapping[str, str], pl.DataFrame]],
    *,
    key: str,
    caption: str,
    group: str | None = None,
    above: Callable[[Mapping[str, Any]], bool] | None = None,
) -> str:
    """How many layers have which verdict: for each family the cells that name it, and its rows. `above`: what
    Holm's test must find besides a small p."""
    heads = [head for head in rows[0][0] if head != group] if rows else []
    lines: list[dict[str, Any]] = []
    for names, frame in rows:
        found = frame["verdict"].to_list()
        counts = {verdict: found.count(verdict) for verdict in findings.VERDICTS}
        holm = {} if above is None else {"holm": by_holm(frame, above)}
        lines.append({**names, "all": len(found), **counts, **holm})
    columns = [
        *(Column(text.escape(head), value(head, str), number=False) for head in heads),
        *(Column(f"{SYMBOLS[verdict]} {verdict}", value(verdict, str)) for verdict in findings.VERDICTS),
        *([] if above is None else [Column("by Holm", value("holm", str))]),
        Column("layers", value("all", str)),
    ]
    head = None if group is None else (lambda row: row[group])
    return house(lines, columns, key=key, caption=caption, group=head) if lines else ""
