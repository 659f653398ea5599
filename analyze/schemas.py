"""Words for the schemas of tables: kinds of columns, and how a schema is put together from them."""

import pyarrow as pa

TEXT, INT, REAL, FLAG = pa.string(), pa.int64(), pa.float64(), pa.bool_()


def schema(**columns: pa.DataType) -> pa.Schema:
    return pa.schema(list(columns.items()))


def reals(names: str) -> dict[str, pa.DataType]:
    return dict.fromkeys(names.split(), REAL)
