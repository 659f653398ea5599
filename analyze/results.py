"""The tables a fit writes: rows as plain mappings in, Arrow tables with fixed columns, types and order out.

A row that lacks a column or brings one more is refused, so that no value is lost without a word.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import pyarrow as pa

_TEXT, _INT, _REAL, _FLAG = pa.string(), pa.int64(), pa.float64(), pa.bool_()


def _schema(**columns: pa.DataType) -> pa.Schema:
    return pa.schema(list(columns.items()))


def _reals(names: str) -> dict[str, pa.DataType]:
    return dict.fromkeys(names.split(), _REAL)


SCHEMAS: Final = {
    "harvest": _schema(
        **dict.fromkeys("store model model_type revision weights_hash corpus".split(), _TEXT),
        **dict.fromkeys(
            "n_tokens n_fit n_gate n_test n_documents n_groups n_groups_fit n_groups_test".split(), _INT
        ),
        **dict.fromkeys("n_layers d_model".split(), _INT),
        **dict.fromkeys("storage_dtype compute_dtype attention".split(), _TEXT),
        **dict.fromkeys("sequence_length block".split(), _INT),
        bos=_TEXT,
        passages=_FLAG,
        n_targets=_INT,
        **_reals("ppl ppl_test ppl_test_lo ppl_test_hi"),
        **dict.fromkeys("sample digest proof".split(), _TEXT),
    ),
    "surrogates": _schema(
        store=_TEXT,
        layer=_INT,
        fit_on=_TEXT,
        **_reals("alpha r2_fit r2_cv r2_test r2_lo r2_hi r2_sim_lo r2_sim_hi r2_contribution"),
        **dict.fromkeys("n_tokens n_groups n_test_tokens n_test_groups".split(), _INT),
        **_reals("tokens_per_feature condition r2_sink"),
        n_sink=_INT,
        verdict=_TEXT,
    ),
    "alphas": _schema(store=_TEXT, layer=_INT, alpha=_REAL, r2_cv=_REAL, chosen=_FLAG),
    "needs": _schema(
        store=_TEXT,
        layer=_INT,
        need=_TEXT,
        split=_TEXT,
        population=_TEXT,
        n_tokens=_INT,
        n_groups=_INT,
        **_reals("mean mean_lo mean_hi sd skew q01 q05 q10 q25 q50 q75 q90 q95 q99 max"),
        **_reals("share_below_half share_below_half_lo share_below_half_hi"),
        **_reals("share_below_one share_below_one_lo share_below_one_hi top5_share"),
    ),
    "need_histogram": _schema(store=_TEXT, layer=_INT, need=_TEXT, bin_lo=_REAL, bin_hi=_REAL, count=_INT),
    "examples": _schema(
        store=_TEXT,
        layer=_INT,
        need=_TEXT,
        kind=_TEXT,
        rank=_INT,
        value=_REAL,
        **dict.fromkeys("before token after document_key".split(), _TEXT),
        position=_INT,
    ),
}


def to_table(name: str, rows: Iterable[Mapping[str, Any]]) -> pa.Table:
    """The table `name` with these rows, in their order."""
    schema = SCHEMAS[name]
    columns: dict[str, list[Any]] = {column: [] for column in schema.names}
    for row in rows:
        if row.keys() != columns.keys():
            raise ValueError(f"table {name}: row and columns differ in {sorted(row.keys() ^ columns.keys())}")
        for column, value in row.items():
            columns[column].append(value)
    arrays = [pa.array(columns[field.name], field.type) for field in schema]
    return pa.table(arrays, schema=schema)
