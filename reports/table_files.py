"""`nearline report STUDY --tables DIR`: every table of the page as a file, for spreadsheets, scripts, papers.

In: the tables of a page as `gathered` kept them, all rows. Out: one file a table, named after its id, and
`captions.txt`. CSV and Parquet hold the values as they are stored, an interval in two columns, where the page
rounds; LaTeX (booktabs, longtable) holds the cells as the page shows them. Cost: milliseconds a table.
"""

import csv
import html
import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import polars as pl
import pyarrow.parquet as pq

from ..store import UsageError
from .gathered import Gathered, Shown
from .replaced import CAPTIONS
from .tables import Column

FORMATS: Final = ("csv", "parquet", "latex")
PART = "part"
"""The column of what heads runs of rows on the page: mostly the corpus."""
_SUFFIX = {"csv": "csv", "parquet": "parquet", "latex": "tex"}
_TAG = re.compile(r"<[^>]*>")
# What pdfTeX's fonts lack; XeTeX and LuaTeX take these as well.
_SIGNS = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{",
    "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}",
    ">": r"\textgreater{}", "|": r"\textbar{}", "\N{NO-BREAK SPACE}": "~", "−": "$-$", "–": "--",
    "…": r"\dots{}",
    "×": r"$\times$", "∞": r"$\infty$", "√": r"$\sqrt{}$", "‖": r"$\Vert$", "≤": r"$\leq$", "≥": r"$\geq$",
    "→": r"$\rightarrow$", "†": r"$\dagger$", "Δ": r"$\Delta$", "δ": r"$\delta$", "ρ": r"$\rho$",
    "λ": r"$\lambda$", "ε": r"$\varepsilon$", "β": r"$\beta$", "Σ": r"$\Sigma$", "ŷ": r"$\hat{y}$",
    "ȳ": r"$\bar{y}$", "²": r"$^2$", "●": r"$\bullet$", "○": r"$\circ$", "◐": r"$\odot$", "·": r"$\cdot$",
    "≠": r"$\neq$", "␣": r"\textvisiblespace{}", "↵": r"$\hookleftarrow$", "⇥": r"$\mapsto$", "“": "``",
    "”": "''",
}  # fmt: skip
_POWER = re.compile(r"[⁻⁰¹²³⁴⁵⁶⁷⁸⁹]{2,}|[⁻⁰¹³⁴⁵⁶⁷⁸⁹]")
_DIGITS = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")


def drawn(pages: Sequence[Gathered], folder: Path, form: str) -> dict[Path, bytes]:
    """The tables of these pages as files below `folder`; of several studies, each in a folder of its own."""
    if form not in FORMATS:
        raise UsageError(f"format {form!r}: tables are written as {', '.join(FORMATS)}")
    files: dict[Path, bytes] = {}
    for page in pages:
        place = folder / page.tag if page.tag else folder
        lines = [f"{_name(one)}: {one.caption}" for one in page.tables]
        files[place / CAPTIONS] = "".join(f"{line}\n" for line in lines).encode()
        for one in page.tables:
            files[place / f"{_name(one)}.{_SUFFIX[form]}"] = _WRITERS[form](one)
    return files


def stored(table: Shown) -> dict[str, list[Any]]:
    """Columns of values by name; headings that say nothing by themselves stand behind the one above them."""
    found: dict[str, list[Any]] = {} if table.parts is None else {PART: list(table.parts)}
    for column in table.columns:
        values = [_values(column, row) for row in table.rows]
        for end in dict.fromkeys(end for one in values for end in one):
            name = _free(f"{heading(column)}{end}", found)
            found[name] = [_plain(one.get(end)) for one in values]
    return found


def heading(column: Column) -> str:
    """The heading of a column as plain text, behind the one above it."""
    return ": ".join(one for one in (_text(column.spanner or ""), _text(column.heading)) if one) or "name"


def _values(column: Column, row: Mapping[str, Any]) -> Mapping[str, Any]:
    take: Callable[[Mapping[str, Any]], dict[str, Any]] | None = getattr(column.write, "stored", None)
    return {"": _shown(column, row)} if take is None else take(row)


def _shown(column: Column, row: Mapping[str, Any]) -> str:
    written = column.write(row)
    return _text(written) if column.markup else written


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and math.isnan(value) else value


def _free(name: str, taken: Mapping[str, Any]) -> str:
    return (
        name if name not in taken else next(n for at in range(2, 99) if (n := f"{name} ({at})") not in taken)
    )


def _text(markup: str) -> str:
    return html.unescape(_TAG.sub("", markup))


def _name(table: Shown) -> str:
    return table.key.removeprefix("table-")


def _csv(table: Shown) -> bytes:
    columns = stored(table)
    sheet = io.StringIO()
    writer = csv.writer(sheet, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([_guarded(cell) for cell in row] for row in zip(*columns.values(), strict=True))
    return sheet.getvalue().encode("utf-8", errors="replace")


def _guarded(cell: Any) -> Any:
    """Stored words that a spreadsheet would run as a formula get a blank in front."""
    return f" {cell}" if isinstance(cell, str) and cell.startswith(("=", "+", "-", "@", "\t", "\r")) else cell


def _parquet(table: Shown) -> bytes:
    columns = {name: _of_one_kind(values) for name, values in stored(table).items()}
    sink = io.BytesIO()
    pq.write_table(pl.DataFrame(columns, strict=False).to_arrow(), sink, compression="zstd")
    return sink.getvalue()


def _of_one_kind(values: list[Any]) -> list[Any]:
    kinds = {type(value) for value in values if value is not None}
    if len(kinds) <= 1 or kinds == {int, float}:
        return [
            value.encode(errors="replace").decode() if isinstance(value, str) else value for value in values
        ]
    return [None if value is None else str(value) for value in values]


def _latex(table: Shown) -> bytes:
    columns, n = table.columns, len(table.columns)
    sides = "".join("r" if column.number else "l" for column in columns)
    lines = ["% \\usepackage{booktabs,longtable}", f"\\begin{{longtable}}{{{sides}}}"]
    lines += [
        f"\\caption{{{latex(table.caption)}}}\\\\",
        "\\toprule",
        *_latex_head(columns),
        "\\midrule",
        "\\endhead",
    ]
    last: str | None = None
    for at, row in enumerate(table.rows):
        if table.parts is not None and table.parts[at] != last:
            last = table.parts[at]
            lines.append(f"\\addlinespace\\multicolumn{{{n}}}{{l}}{{{latex(last)}}}\\\\")
        lines.append(" & ".join(latex(_shown(column, row)) for column in columns) + "\\\\")
    return "\n".join([*lines, "\\bottomrule", "\\end{longtable}", ""]).encode("utf-8", errors="replace")


def _latex_head(columns: Sequence[Column]) -> list[str]:
    below = " & ".join(latex(_text(column.heading)) for column in columns) + "\\\\"
    if not any(column.spanner for column in columns):
        return [below]
    above, rules, at = [], [], 1
    while at <= len(columns):
        spanner, width = columns[at - 1].spanner, 1
        while spanner and at + width <= len(columns) and columns[at + width - 1].spanner == spanner:
            width += 1
        above.append(f"\\multicolumn{{{width}}}{{c}}{{{latex(_text(spanner))}}}" if spanner else "")
        rules += [f"\\cmidrule(lr){{{at}-{at + width - 1}}}"] if spanner else []
        at += width
    return [" & ".join(above) + "\\\\", "".join(rules), below]


def latex(words: str) -> str:
    """Words as LaTeX sets them; a line end is a blank."""
    flat = " ".join(words.split("\n"))
    parts, at = [], 0
    for power in _POWER.finditer(flat):
        parts += [_signs(flat[at : power.start()]), f"$^{{{power[0].translate(_DIGITS)}}}$"]
        at = power.end()
    return "".join([*parts, _signs(flat[at:])])


def _signs(words: str) -> str:
    return "".join(_SIGNS.get(character, character) for character in words)


_WRITERS: Mapping[str, Callable[[Shown], bytes]] = {"csv": _csv, "parquet": _parquet, "latex": _latex}
