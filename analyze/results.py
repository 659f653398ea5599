"""The tables of a fit, and how every table is made: rows as plain mappings in, Arrow tables with fixed
columns, types and order out.

A row that lacks a column or brings one more is refused, so that no value is lost without a word.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import pyarrow as pa

from .analysis_tables import ANALYSIS_SCHEMAS
from .schemas import FLAG, INT, REAL, TEXT, reals, schema

SCHEMAS: Final = {
    "harvest": schema(
        **dict.fromkeys("store model model_type revision weights_hash corpus".split(), TEXT),
        **dict.fromkeys(
            "n_tokens n_fit n_gate n_test n_documents n_groups n_groups_fit n_groups_test".split(), INT
        ),
        **dict.fromkeys("n_layers d_model".split(), INT),
        **dict.fromkeys("storage_dtype compute_dtype attention".split(), TEXT),
        **dict.fromkeys("sequence_length block".split(), INT),
        bos=TEXT,
        passages=FLAG,
        n_targets=INT,
        **reals("ppl ppl_test ppl_test_lo ppl_test_hi"),
        **dict.fromkeys("sample digest proof".split(), TEXT),
    ),
    "surrogates": schema(
        store=TEXT,
        layer=INT,
        fit_on=TEXT,
        **reals("alpha r2_fit r2_cv r2_test r2_lo r2_hi r2_sim_lo r2_sim_hi r2_contribution largest_row"),
        **dict.fromkeys("n_tokens n_groups n_test_tokens n_test_groups".split(), INT),
        **reals("tokens_per_feature condition r2_sink"),
        n_sink=INT,
        verdict=TEXT,
    ),
    "alphas": schema(store=TEXT, layer=INT, alpha=REAL, r2_cv=REAL, chosen=FLAG),
    "learning_curve": schema(
        store=TEXT,
        layer=INT,
        fraction=REAL,
        n_tokens=INT,
        n_groups=INT,
        **reals("alpha r2_fit r2_test"),
    ),
    "ranks": schema(store=TEXT, layer=INT, rank=INT, r2_test=REAL),
    "variants": schema(
        store=TEXT,
        layer=INT,
        variant=TEXT,
        n_tokens=INT,
        **reals("alpha penalty condition r2_body r2_sink r2_all"),
    ),
    "needs": schema(
        store=TEXT,
        layer=INT,
        need=TEXT,
        split=TEXT,
        population=TEXT,
        n_tokens=INT,
        n_groups=INT,
        **reals("mean mean_lo mean_hi sd skew q01 q05 q10 q25 q50 q75 q90 q95 q99 max"),
        **reals("share_below_half share_below_half_lo share_below_half_hi"),
        **reals("share_below_one share_below_one_lo share_below_one_hi top5_share"),
    ),
    "need_histogram": schema(store=TEXT, layer=INT, need=TEXT, bin_lo=REAL, bin_hi=REAL, count=INT),
    "examples": schema(
        store=TEXT,
        layer=INT,
        need=TEXT,
        kind=TEXT,
        rank=INT,
        value=REAL,
        **dict.fromkeys("before token after document_key".split(), TEXT),
        position=INT,
    ),
}


def to_table(name: str, rows: Iterable[Mapping[str, Any]]) -> pa.Table:
    """The table `name` with these rows, in their order."""
    schema = SCHEMAS[name] if name in SCHEMAS else ANALYSIS_SCHEMAS[name]
    columns: dict[str, list[Any]] = {column: [] for column in schema.names}
    for row in rows:
        if row.keys() != columns.keys():
            raise ValueError(f"table {name}: row and columns differ in {sorted(row.keys() ^ columns.keys())}")
        for column, value in row.items():
            columns[column].append(value)
    arrays = [pa.array(columns[field.name], field.type) for field in schema]
    return pa.table(arrays, schema=schema)
