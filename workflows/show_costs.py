"""What the commands that visit the model again print on standard output.

In: a measured or fine-tuned study, or the folder of an export. Out: a few aligned lines for a person, or one
JSON document with `--json`. Cost: one table of the study.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

from ..store import Study
from ..store.names import typed
from .headlines import VERDICTS
from .show import print_json, print_table

ONE: Final = "one"
Row = Mapping[str, Any]


def costs(study: Study, as_json: bool) -> None:
    """Of each intervention on single layers the median change of perplexity and the layers it costs something
    in; of each set of layers what it costs. Two tables: numbers of one are over layers, of the other over
    documents, and the headings say so.
    """
    rows = study.table("interventions").to_pylist()
    if as_json:
        return print_json({"study": study.path, "interventions": [_without_nan(row) for row in rows]})
    for lines in (_singles(rows), [_set(row) for row in rows if row["chosen"] != ONE]):
        if lines:
            print_table(lines, list(lines[0]))
            print()
    print(f"study: {study.path}\nnext: nearline report {typed(study.path)}")
    return None


def _singles(rows: Sequence[Row]) -> list[dict[str, str]]:
    """A line for each store, length of window and intervention: over its layers."""
    families: dict[tuple[str, int, str], list[Row]] = {}
    for row in rows:
        if row["chosen"] == ONE:
            families.setdefault((row["store"], row["sequence_length"], row["name"]), []).append(row)
    return [_line(key, found) for key, found in families.items()]


def _line(key: tuple[str, int, str], rows: Sequence[Row]) -> dict[str, str]:
    store, length, name = key
    counts = Counter(row["verdict"] for row in rows)
    found = [f"{counts[one]} {one}" for one in dict.fromkeys([*VERDICTS, *counts]) if counts[one]]
    changes = sorted(row["ppl_pct"] for row in rows if row["ppl_pct"] == row["ppl_pct"])
    shown = "" if not changes else f"{median(changes):+.2f} % ({changes[0]:+.2f} to {changes[-1]:+.2f})"
    return {
        "store": store,
        "window": str(length),
        "replaced": name,
        "layers": "one at a time",
        "went linear: median": _share([row["linear_share"] for row in rows]),
        "perplexity: median (range) over layers": shown,
        "costs something": ", ".join(found),
    }


def _set(row: Row) -> dict[str, str]:
    low, high = row["ppl_lo"], row["ppl_hi"]
    ends = f" [{low:+.2f}, {high:+.2f}]" if low == low and high == high else ""
    return {
        "store": row["store"],
        "window": str(row["sequence_length"]),
        "replaced": row["name"],
        "layers": row["layers"].replace(",", "+"),
        "went linear": _share([row["linear_share"]]),
        "perplexity [95 % interval]": f"{row['ppl_pct']:+.2f} %{ends}",
        "costs something": row["verdict"],
    }


def _share(shares: Sequence[float]) -> str:
    known = [share for share in shares if share == share]
    return f"{100 * median(known):.0f} %" if known else ""


def _without_nan(row: Row) -> dict[str, Any]:
    """NaN is no JSON: what is not known is null."""
    return {name: None if value != value else value for name, value in row.items()}


def tuned(study: Study, as_json: bool) -> None:
    """Of each arm and what it is compared with the excess after all steps, a column a store."""
    rows = [row for row in study.table("finetune_summary").to_pylist() if row["last"]]
    if as_json:
        return print_json({"study": study.path, "finetune": [_without_nan(row) for row in rows]})
    lines: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        pair = (row["arm"], row["against"])
        line = lines.setdefault(
            pair, {"arm": pair[0], "against": pair[1], "tokens": f"{row['tokens_seen']:,}"}
        )
        of_seeds = [
            one for one in rows if (one["arm"], one["against"], one["store"]) == (*pair, row["store"])
        ]
        mean = sum(one["excess_pct"] for one in of_seeds) / len(of_seeds)
        shown = f"{mean:+.2f} %" if mean == mean else "diverged"
        line[f"perplexity, {row['store']}"] = f"{shown} ({row['verdict']})"
    if lines:
        print_table(list(lines.values()), list(next(iter(lines.values()))))
    print(f"study: {study.path}\nnext: nearline report {typed(study.path)}")
    return None


def exported(folder: Path, as_json: bool) -> None:
    """Where the export is, and how it goes into a model."""
    if as_json:
        return print_json({"export": folder})
    print(f"export: {folder}\nnext: nearline.collect.load_linearised(model, {str(folder)!r})")
    return None
