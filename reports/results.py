"""What a report knows: the tables of a study as polars frames, and what provenance says of their making.

In: a study folder with the tables that `nearline fit` writes. Out: one frozen `Results`; every frame has
the columns this folder reads, in a fixed order of rows. A table that is missing, empty or lacks a column
stops here, with the command that makes it. No array, model or store is opened. Cost: the tables
(kilobytes).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from ..store import DamageError, IncompleteError, Study, UsageError
from ..store.names import typed
from ..store.whole import digest_of

CLAIM_AT = 0.9
"""The R² from which an MLP is called nearly linear, where the settings do not name one."""

QUANTILES = ("q01", "q05", "q10", "q25", "q50", "q75", "q90", "q95", "q99")

# Every column that the report reads, by table.
_COLUMNS = {
    "harvest": """
        store model model_type revision weights_hash corpus n_tokens n_fit n_gate n_test n_documents n_groups
        n_groups_fit n_groups_test n_layers d_model storage_dtype compute_dtype attention sequence_length
        bos passages n_targets ppl ppl_test ppl_test_lo ppl_test_hi sample digest proof
    """,
    "surrogates": """
        store layer fit_on alpha r2_fit r2_cv r2_test r2_lo r2_hi r2_sim_lo r2_sim_hi r2_contribution r2_sink
        condition tokens_per_feature n_test_tokens n_sink verdict
    """,
    "needs": f"""
        store layer need split population n_tokens n_groups mean mean_lo mean_hi sd skew max top5_share
        share_below_half share_below_half_lo share_below_half_hi
        share_below_one share_below_one_lo share_below_one_hi {" ".join(QUANTILES)}
    """,
    "need_histogram": "store layer need bin_lo bin_hi count",
    "examples": "store layer need kind rank value before token after document_key position",
}
COLUMNS: Mapping[str, tuple[str, ...]] = {table: tuple(names.split()) for table, names in _COLUMNS.items()}

_ORDER = {
    "harvest": [],
    "surrogates": ["layer"],
    "needs": ["layer", "need", "split", "population"],
    "need_histogram": ["layer", "need", "bin_lo"],
    "examples": ["layer", "need", "kind", "rank"],
}
_MAY_BE_EMPTY = frozenset({"examples"})


@dataclass(frozen=True, slots=True)
class Results:
    """The tables of a study, each with a column `series`: the number of its store in the harvest's order."""

    study: str
    harvest: pl.DataFrame
    surrogates: pl.DataFrame
    needs: pl.DataFrame
    histogram: pl.DataFrame
    examples: pl.DataFrame
    settings: Mapping[str, object]
    versions: Mapping[str, str]

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


def _float(value: object, otherwise: float) -> float:
    return float(value) if isinstance(value, int | float) else otherwise


def _frame(study: Study, folder: str, table: str) -> pl.DataFrame:
    remedy = f"run `nearline fit {typed(study.path)} STORE…` first; it writes the tables a report is made of"
    if not study.has_table(table):
        raise IncompleteError(f"study {folder}: no table `{table}` (tables/{table}.parquet): {remedy}")
    frame = pl.DataFrame(study.table(table))
    missing = [column for column in COLUMNS[table] if column not in frame.columns]
    if missing:
        raise UsageError(
            f"study {folder}: table `{table}` lacks {', '.join(missing)}; it has "
            f"{', '.join(frame.columns)}. Another version of nearline wrote it: run `nearline fit "
            f"{typed(study.path)} STORE…` again"
        )
    if frame.is_empty() and table not in _MAY_BE_EMPTY:
        raise IncompleteError(f"study {folder}: table `{table}` is empty: {remedy}")
    return frame


def _numbered(frame: pl.DataFrame, stores: list[str], order: list[str]) -> pl.DataFrame:
    """The frame with its store's number, rows in the order of stores, then of `order`."""
    schema = {"store": pl.String, "series": pl.Int64}
    numbers = pl.DataFrame({"store": stores, "series": list(range(len(stores)))}, schema=schema)
    return frame.join(numbers, on="store", how="inner").sort(["series", *order], maintain_order=True)


def assemble(
    study: str,
    frames: Mapping[str, pl.DataFrame],
    settings: Mapping[str, object],
    versions: Mapping[str, str],
) -> Results:
    """Results from whole tables: stores numbered, rows in order."""
    stores = frames["harvest"]["store"].to_list()
    # NaN (a statistic of no rows) and null mean the same here; one of them is enough to look for.
    ordered = {name: _numbered(frame.fill_nan(None), stores, _ORDER[name]) for name, frame in frames.items()}
    return Results(
        study=study,
        harvest=ordered["harvest"],
        surrogates=ordered["surrogates"],
        needs=ordered["needs"],
        histogram=ordered["need_histogram"],
        examples=ordered["examples"],
        settings=settings,
        versions=versions,
    )


def read(path: str | Path) -> Results:
    """The results of the study at `path`; IncompleteError names what to run when it was not fitted yet."""
    folder = Path(path)
    study = Study.open(folder)
    shown, command = folder.resolve().name, f"`nearline fit {typed(folder)} STORE…`"
    step = study.provenance().get("fit")
    if step is None:
        raise IncompleteError(
            f"study {shown} has not been fitted (provenance.json records no finished fit): "
            f"run {command} first"
        )
    frames = {table: _frame(study, shown, table) for table in COLUMNS}
    for table in COLUMNS:
        output = f"tables/{table}.parquet"
        if step["outputs"].get(output) != digest_of(folder / output):
            raise DamageError(
                f"study {shown}: {output} is not what the last finished fit wrote (a fit was interrupted, or "
                f"the file was changed): run {command} again"
            )
    versions = step["facts"].get("versions")
    return assemble(shown, frames, step["settings"], versions if isinstance(versions, dict) else {})
