"""What a report knows: the tables of a study as polars frames, and what provenance says of their making.

In: a study folder with the tables that `nearline fit`, `nearline analyze` and `nearline measure` write. Out:
one frozen `Results`; every frame has the columns this folder reads, in a fixed order of rows. A table of the
fit that is missing, empty or lacks a column stops here, with the command that makes it; a table of an
analysis or of a measurement may be missing. No array, model or store is opened. Cost: the tables (kilobytes
to a few megabytes).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl

from ..store import DamageError, IncompleteError, Study, UsageError
from ..store.names import typed
from ..store.whole import digest_of
from .columns import (
    ANALYSIS_TABLES,
    COLUMNS,
    FINETUNE,
    MAY_BE_EMPTY,
    MEASURE,
    OPTIONAL,
    ORDER,
    step_of,
)
from .cost_columns import OF_THE_MODEL

CLAIM_AT = 0.9
"""The R² from which an MLP is called nearly linear, where the settings do not name one."""

FIRST_NEED = "error"
"""The need that is drawn where the settings of an analysis do not name one."""


@dataclass(frozen=True, slots=True)
class Results:
    """The tables of a study, each with a column `series`: the number of its store in the harvest's order.

    `tables` holds the optional ones that are there (pairs of stores have `series_a` and `series_b`),
    `analyses` the settings of each analysis and of the measurement that was run.
    """

    study: str
    harvest: pl.DataFrame
    surrogates: pl.DataFrame
    needs: pl.DataFrame
    histogram: pl.DataFrame
    examples: pl.DataFrame
    settings: Mapping[str, object]
    versions: Mapping[str, str]
    tables: Mapping[str, pl.DataFrame] = field(default_factory=dict)
    analyses: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def stores(self) -> list[str]:
        return self.harvest["store"].to_list()

    @property
    def models(self) -> list[str]:
        return self.harvest["model"].unique(maintain_order=True).to_list()

    @property
    def claim_at(self) -> float:
        """The R² from which an MLP is called nearly linear."""
        return _float(self.settings.get("linear_at"), CLAIM_AT)

    def errors(self, population: str = "body") -> pl.DataFrame:
        """The need `error` of test rows, one row a store and layer."""
        wanted = (
            (pl.col("need") == "error") & (pl.col("split") == "test") & (pl.col("population") == population)
        )
        return self.needs.filter(wanted)

    def has(self, *names: str) -> bool:
        """Whether these optional tables are there and say something."""
        return all(name in self.tables and not self.tables[name].is_empty() for name in names)

    def needs_of(self, table: str) -> list[str]:
        """The needs in a table of an analysis, those that its settings name first in their order."""
        named = self.analyses.get(step_of(table), {}).get("need")
        asked = named if isinstance(named, list) else [FIRST_NEED]
        there = self.tables[table]["need"].unique(maintain_order=True).to_list()
        return [need for need in asked if need in there] + [need for need in there if need not in asked]

    def first(self, table: str) -> tuple[str, pl.DataFrame]:
        """The need of a table that is drawn, and its rows."""
        need = self.needs_of(table)[0]
        return need, self.tables[table].filter(pl.col("need") == need)

    @property
    def missing(self) -> list[str]:
        """The analyses that were not run."""
        return [name for name, tables in ANALYSIS_TABLES.items() if not set(tables) & self.tables.keys()]


def _float(value: object, otherwise: float) -> float:
    return float(value) if isinstance(value, int | float) else otherwise


def _command(study: Path, table: str) -> str:
    """What writes a table, as a person types it."""
    step = step_of(table)
    commands = {
        "fit": f"`nearline fit {typed(study)} STORE…`",
        MEASURE: f"`nearline measure {typed(study)}`",
        FINETUNE: f"`nearline finetune {typed(study)}`",
    }
    return commands.get(step, f"`nearline analyze {typed(study)} --only {step}`")


def _frame(study: Study, folder: str, table: str) -> pl.DataFrame:
    command = _command(study.path, table)
    remedy = f"run {command} first; it writes the tables a report is made of"
    if not study.has_table(table):
        raise IncompleteError(f"study {folder}: no table `{table}` (tables/{table}.parquet): {remedy}")
    frame = pl.DataFrame(study.table(table))
    wanted = COLUMNS[table] if table in COLUMNS else OPTIONAL[table]
    missing = [column for column in wanted if column not in frame.columns]
    if missing:
        raise UsageError(
            f"study {folder}: table `{table}` lacks {', '.join(missing)}; it has "
            f"{', '.join(frame.columns)}. Another version of nearline wrote it: run {command} again"
        )
    if table in COLUMNS and frame.is_empty() and table not in MAY_BE_EMPTY:
        raise IncompleteError(f"study {folder}: table `{table}` is empty: {remedy}")
    return frame


def _numbered(frame: pl.DataFrame, stores: list[str], order: Sequence[str]) -> pl.DataFrame:
    """The frame with its stores' numbers, rows in the order of stores, then of `order`."""
    keys = {"store": "series", "store_a": "series_a", "store_b": "series_b"}
    here = {key: name for key, name in keys.items() if key in frame.columns}
    for key, name in here.items():
        numbers = pl.DataFrame(
            {key: stores, name: list(range(len(stores)))}, schema={key: pl.String, name: pl.Int64}
        )
        frame = frame.join(numbers, on=key, how="inner", maintain_order="left")
    return frame.sort([*here.values(), *order], maintain_order=True)


def assemble(
    study: str,
    frames: Mapping[str, pl.DataFrame],
    settings: Mapping[str, object],
    versions: Mapping[str, str],
    analyses: Mapping[str, Mapping[str, Any]] | None = None,
) -> Results:
    """Results from whole tables: stores numbered, rows in order."""
    stores = frames["harvest"]["store"].to_list()
    # NaN (a statistic of no rows) and null mean the same here; one of them is enough to look for.
    known = {name: frame.fill_nan(None) for name, frame in frames.items()}
    ordered = {
        name: frame if name in OF_THE_MODEL else _numbered(frame, stores, ORDER.get(name, ("layer",)))
        for name, frame in known.items()
    }
    return Results(
        study=study,
        harvest=ordered["harvest"],
        surrogates=ordered["surrogates"],
        needs=ordered["needs"],
        histogram=ordered["need_histogram"],
        examples=ordered["examples"],
        settings=settings,
        versions=versions,
        tables={name: frame for name, frame in ordered.items() if name in OPTIONAL},
        analyses=analyses or {},
    )


def _check(study: Study, shown: str, step: Mapping[str, Any], table: str) -> None:
    """DamageError unless the table is, byte for byte, what its step recorded."""
    output = f"tables/{table}.parquet"
    if step["outputs"].get(output) != digest_of(study.path / output):
        writer = step_of(table)
        raise DamageError(
            f"study {shown}: {output} is not what the last finished {writer} wrote (a {writer} was "
            f"interrupted, or the file was changed): run {_command(study.path, table)} again"
        )


def _optional(
    study: Study, shown: str, steps: Mapping[str, Any]
) -> tuple[dict[str, pl.DataFrame], dict[str, Mapping[str, Any]]]:
    """The optional tables that a finished step recorded, and the settings of the analyses behind them.

    A table that no step recorded is left by one that did not finish: it is not shown.
    """
    frames: dict[str, pl.DataFrame] = {}
    analyses: dict[str, Mapping[str, Any]] = {}
    for table in OPTIONAL:
        written = [step for step in steps.values() if f"tables/{table}.parquet" in step["outputs"]]
        if not written:
            continue
        if not study.has_table(table):
            raise DamageError(
                f"study {shown}: tables/{table}.parquet was written and is there no longer: run "
                f"{_command(study.path, table)} again"
            )
        frames[table] = _frame(study, shown, table)
        _check(study, shown, written[-1], table)
        if (step := step_of(table)) != "fit":
            analyses.setdefault(step, written[-1]["settings"])
    return frames, analyses


def read(path: str | Path) -> Results:
    """The results of the study at `path`; IncompleteError names what to run when it was not fitted yet."""
    folder = Path(path)
    study = Study.open(folder)
    shown, command = folder.resolve().name, _command(folder, "surrogates")
    steps = study.provenance()
    step = steps.get("fit")
    if step is None:
        raise IncompleteError(
            f"study {shown} has not been fitted (provenance.json records no finished fit): "
            f"run {command} first"
        )
    frames = {table: _frame(study, shown, table) for table in COLUMNS}
    for table in COLUMNS:
        _check(study, shown, step, table)
    optional, analyses = _optional(study, shown, steps)
    versions = step["facts"].get("versions")
    return assemble(
        shown, frames | optional, step["settings"], versions if isinstance(versions, dict) else {}, analyses
    )
