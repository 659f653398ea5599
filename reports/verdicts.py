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


def _words(verdict: object) -> str:
    return f"{symbol(verdict)} {text.escape(text.name(str(verdict), 40))}"


cell = value("verdict", _words)
"""A verdict as a cell of a table: its sign and its words, as HTML."""


def heading(verdict: str) -> str:
    """The heading of a column of counts, as HTML: on a phone its sign alone, which `LEGEND` explains."""
    return f'{SYMBOLS[verdict]}<span class="word"> {verdict}</span>'


_SIGNS = ", ".join(f"{symbol}\N{NO-BREAK SPACE}{verdict}" for verdict, symbol in SYMBOLS.items())
LEGEND = f'<p class="note legend">{_SIGNS}</p>'
"""What the signs mean, below a table of counts; shown where the screen is too narrow for words in it."""


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
        many = text.every(len(found), layers.strip())
    elif counts["too few documents"] == len(found):
        many = f"an unknown number of {len(found)}{layers}"  # none of twelve would be an answer
    else:
        many = f"{counts['supported'] or 'none'} of {len(found)}{layers}"
        if not counts["supported"] and counts["cannot tell"]:
            many += " for sure"
    others = (*findings.VERDICTS[1:], *NONE_GIVEN)
    rest = [f"{verdict} in {found.count(verdict)}" for verdict in others if verdict in found]
    return f"{many}{where}" + (f" ({', '.join(rest)})" if rest else "")


def families(rows: Sequence[tuple[str, pl.DataFrame]], what: str = "corpora") -> str:
    """`in 10 of 12 layers on docs:python (cannot tell in 2) and 9 of 12 on docs:stdlib`; of more than a few
    families (`what` they are) the ends.
    """
    there = [(where, frame) for where, frame in rows if not frame.is_empty()]
    if len(there) > findings.CLAUSES:
        return f"in {_spread(there, what)}"
    if len(there) > 2 and len({in_layers(frame) for _, frame in there}) == 1:
        return f"in {in_layers(there[0][1], f' on each of {len(there)} {what}')}"
    silent = [where.removeprefix(" ") for where, frame in there if _is_silent(frame)]
    if 0 < len(silent) < len(there):
        judged = [(where, frame) for where, frame in there if not _is_silent(frame)]
        return f"{families(judged, what)}, too few documents {text.listing(silent)}"
    parts = [in_layers(frame, where, again=at > 0) for at, (where, frame) in enumerate(there)]
    return f"in {text.listing(parts)}"


def _is_silent(rows: pl.DataFrame) -> bool:
    return set(rows["verdict"]) == {"too few documents"}


def _spread(rows: Sequence[tuple[str, pl.DataFrame]], what: str) -> str:
    """`7 of 30 layers on docs:stdlib to 14 of 30 on docs:python (of 90 cases, cannot tell in 12)`."""
    judged = [(where, frame) for where, frame in rows if not _is_silent(frame)]
    if not judged:
        return f"an unknown number of layers on {len(rows)} {what} (too few documents)"
    found = [verdict for _, frame in judged for verdict in frame["verdict"].to_list()]
    counts = [(frame["verdict"].to_list().count("supported"), frame.height, where) for where, frame in judged]
    low, high = min(counts, key=_share), max(counts, key=_share)
    others = (*findings.VERDICTS[1:], *NONE_GIVEN)
    rest = [f"{verdict} in {found.count(verdict)}" for verdict in others if verdict in found]
    said = [f"of {len(found)} cases, {', '.join(rest)}"] if rest else []
    silent = len(rows) - len(judged)
    said += [f"too few documents on {silent} of {len(rows)} {what}"] if silent else []
    if high[0] == 0:
        sure = " for sure" if "cannot tell" in found else ""
        many = f"none of {high[1]} layers{sure}" + (
            low[2] if len(judged) == 1 else f" on any of {len(judged)} {what}"
        )
    elif len(judged) == 1:
        many = f"{text.out_of(low[0], low[1], 'layers')}{low[2]}"
    elif low[:2] == high[:2]:
        many = f"{text.out_of(low[0], low[1], 'layers')} on each of {len(judged)} {what}"
    else:
        many = f"{low[0] or 'none'} of {low[1]} layers{low[2]} to {high[0]} of {high[1]}{high[2]}"
    return many + (f" ({'; '.join(said)})" if said else "")


def _share(count: tuple[int, int, str]) -> float:
    return count[0] / count[1]


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
        *(Column(heading(verdict), value(verdict, str)) for verdict in findings.VERDICTS),
        *([] if above is None else [Column("by Holm", value("holm", str))]),
        Column("layers", value("all", str)),
    ]
    head = None if group is None else (lambda row: row[group])
    return house(lines, columns, key=key, caption=caption, group=head) + LEGEND if lines else ""
