"""What each analysis found, in a line: a study's tables in, one line an analysis out.

The line counts verdicts over layers, stores and needs; the numbers behind it stand in the tables, and every
one of them with its interval in the report. Cost: the tables, once.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

from ..store import Study

# In this order, where they occur.
VERDICTS: Final = ("supported", "not supported", "cannot tell", "too few documents")
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Headline:
    """What one analysis has found: the question, a median over rows with what it is of, verdicts by count."""

    analysis: str
    claim: str
    value: str
    median: float | None
    n_rows: int
    verdicts: Mapping[str, int]

    @property
    def text(self) -> str:
        if not self.n_rows:
            return "nothing to compare"
        shown = "" if self.median is None else f"median {self.value} {self.median:.3f}"
        counted = ", ".join(f"{count} {verdict}" for verdict, count in self.verdicts.items())
        return "; ".join(part for part in (shown, f"{self.claim}: {counted}" if counted else "") if part)


@dataclass(frozen=True, slots=True)
class _Source:
    """Which rows of which table a headline is made of."""

    table: str
    column: str
    value: str
    claim: str
    only: Mapping[str, str]


_SOURCES: Final[Mapping[str, _Source]] = {
    "decomposition": _Source(
        "decomposition", "token_in_context", "share of the token in the context", "", {}
    ),
    "identity": _Source(
        "variance", "share", "share of the token's identity", "it explains at least half", {"key": "input"}
    ),
    "gates": _Source(
        "gates",
        "auc",
        "AUC on the MLP input",
        "above chance",
        {"features": "input", "size": "linear"},
    ),
    "nofly": _Source(
        "nofly",
        "r_disattenuated",
        "disattenuated r of token means",
        "need carries over",
        {"key": "input"},
    ),
    "clusters": _Source("clusters", "auc", "AUC", "above chance", {}),
    "regression": _Source("regression", "r2_test", "held-out R²", "they explain at least a tenth", {}),
}


def headline(study: Study, analysis: str) -> Headline:
    """The line of one analysis whose tables are there."""
    source = _SOURCES[analysis]
    rows = [row for row in study.table(source.table).to_pylist() if _chosen(row, source.only)]
    values = [row[source.column] for row in rows if _finite(row[source.column])]
    counts = Counter(row["verdict"] for row in rows if "verdict" in row)
    verdicts = {verdict: counts[verdict] for verdict in VERDICTS if counts[verdict]}
    middle = median(values) if values else None
    return Headline(analysis, source.claim, source.value, middle, len(rows), verdicts)


def headlines(study: Study, analyses: Sequence[str]) -> list[Headline]:
    return [headline(study, name) for name in analyses]


def _chosen(row: Row, only: Mapping[str, str]) -> bool:
    return all(row[column] == value for column, value in only.items())


def _finite(value: float | None) -> bool:
    return value is not None and value == value
