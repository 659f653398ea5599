"""What commands on studies print on standard output.

In: results of library functions. Out: a few aligned lines for a person, or one JSON document with `--json`.
Cost: a table or two of the study.
"""

from pathlib import Path
from typing import Any

from ..store import Study
from .headlines import headlines
from .show import jsonable, print_json, print_table


def study(path: Path, as_json: bool) -> None:
    """Held-out R² per layer and store, and what to do next."""
    rows = Study.open(path).table("surrogates").to_pylist()
    if as_json:
        return print_json({"study": path, "surrogates": rows})
    moved = any(row["store"] != row["fit_on"] for row in rows)
    lines = [
        {
            "store": row["store"],
            # Maps of another store say whether they transfer, not how linear an MLP is there.
            **({"maps": "fitted here" if row["store"] == row["fit_on"] else "moved here"} if moved else {}),
            "layer": row["layer"],
            "alpha": f"{row['alpha']:.0e}",
            "R² test": f"{row['r2_test']:.4f}",
            "95 % (all layers at once)": f"[{row['r2_sim_lo']:.4f}, {row['r2_sim_hi']:.4f}]",
            "groups": row["n_test_groups"],
            "nearly linear": row["verdict"],
        }
        for row in rows
    ]
    print_table(lines, list(lines[0]))
    print(f"study: {path}\nnext: nearline analyze {path}")
    return None


def analyses(result: Any, as_json: bool) -> None:
    """Of each analysis whether it ran, and what it found."""
    found = {one.analysis: one for one in headlines(result.study, list(result.states))}
    if as_json:
        facts = [{"analysis": name, "state": state} for name, state in result.states.items()]
        listed = [fact | jsonable(found[fact["analysis"]]) for fact in facts]
        return print_json({"study": result.study.path, "analyses": listed})
    lines = [
        {"analysis": name, "state": state, "found": found[name].text} for name, state in result.states.items()
    ]
    print_table(lines, list(lines[0]))
    print(f"study: {result.study.path}\nnext: nearline report {result.study.path}")
    return None


def path(name: str, where: Path | str, as_json: bool) -> None:
    """One path under its name."""
    return print_json({name: where}) if as_json else print(f"{name}: {where}")


def report(written: Any, as_json: bool) -> None:
    """The page, and how many files its tables and figures became."""
    if as_json:
        found = {"report": written.page, "tables": written.tables, "figures": written.figures}
        return print_json({name: value for name, value in found.items() if value})
    print(f"report: {written.page}")
    for name, files in (("tables", written.tables), ("figures", written.figures)):
        if files:
            folder = min((path.parent for path in files), key=lambda path: len(path.parts))
            print(f"{name}: {len(files)} files in {folder}")
    return None
