"""What commands print on standard output.

In: results of library functions. Out: a few aligned lines for a person, or one JSON document with `--json`.
Cost: none.
"""

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..store import Study


def _jsonable(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _jsonable({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    return value


def _print_json(value: Any) -> None:
    json.dump(_jsonable(value), sys.stdout, indent=2, ensure_ascii=False)
    print()


def _print_table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> None:
    """Columns aligned by their widest cell; the last one runs free."""
    cells = [[str(row.get(column, "")) for column in columns] for row in rows]
    widths = [max(len(line[i]) for line in [list(columns), *cells]) for i in range(len(columns))]
    for line in [list(columns), *cells]:
        print("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())


def _print_facts(facts: Mapping[str, Any], indent: str = "") -> None:
    width = max((len(str(key)) for key in facts), default=0)
    for key, value in facts.items():
        if isinstance(value, Mapping):
            print(f"{indent}{key}")
            _print_facts(value, indent + "  ")
        else:
            print(f"{indent}{str(key).ljust(width)}  {_value_text(value)}")


def _value_text(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return ", ".join(_value_text(item) for item in value) or "none"
    return str(value)


def bytes_text(n_bytes: float) -> str:
    """`1.2 GiB`."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if n_bytes < 1024:
            return f"{n_bytes:,.0f} bytes" if unit == "bytes" else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1024
    return f"{n_bytes:.1f} TiB"


def harvest(result: Any, as_json: bool) -> None:
    """What `collect` did."""
    if as_json:
        return _print_json(result)
    for note in result.notes:
        print(f"note: {note}")
    print(f"{result.n_tokens:,} tokens in {result.seconds:.1f} s ({result.tokens_per_s:,.0f} tokens/s)")
    print(f"store: {result.path}")
    return None


def sites(rows: Sequence[Mapping[str, Any]], as_json: bool) -> None:
    """The table of sites."""
    if as_json:
        return _print_json(list(rows))
    return _print_table(rows, list(rows[0]))


def info(facts: Mapping[str, Any], as_json: bool) -> None:
    """The facts of a store."""
    return _print_json(facts) if as_json else _print_facts(facts)


def study(path: Path, as_json: bool) -> None:
    """Held-out R² per layer and store, and what to do next."""
    rows = Study.open(path).table("surrogates").to_pylist()
    if as_json:
        return _print_json({"study": path, "surrogates": rows})
    lines = [
        {
            "store": row["store"],
            "layer": row["layer"],
            "alpha": f"{row['alpha']:.0e}",
            "R² test": f"{row['r2_test']:.4f}",
            "95 % (all layers at once)": f"[{row['r2_sim_lo']:.4f}, {row['r2_sim_hi']:.4f}]",
            "groups": row["n_test_groups"],
            "nearly linear": row["verdict"],
        }
        for row in rows
    ]
    _print_table(lines, list(lines[0]))
    print(f"study: {path}\nnext: nearline report {path}")
    return None


def path(name: str, where: Path | str, as_json: bool) -> None:
    """One path under its name."""
    return _print_json({name: where}) if as_json else print(f"{name}: {where}")


def quickstart(result: Any, as_json: bool) -> None:
    """What ran, what was current, and where the reports are."""
    if as_json:
        return _print_json(result)
    for step in result.steps:
        print(f"{step.name.ljust(34)} {step.state}")
    for where in result.reports:
        print(f"report: {where}")
    return None
