"""Parquet tables with a fixed form: the same table gives the same bytes.

In: an Arrow table. Out: a Parquet file without free metadata, zstd-compressed, durably written; and back,
with its columns checked where the format prescribes them. Cost: one encoding in memory.
"""

import io
from pathlib import Path

import pyarrow as pa

from . import durable
from .errors import FormatError, IncompleteError, UsageError

DOCUMENTS = pa.schema(
    [
        ("document", pa.int32()),
        ("key", pa.string()),
        ("content_hash", pa.string()),
        ("group", pa.int32()),
        ("split", pa.string()),
        ("n_tokens", pa.int32()),
        ("n_dropped", pa.int32()),
    ]
)
VOCABULARY = pa.schema(
    [("token_id", pa.int32()), ("bytes", pa.binary()), ("text", pa.string()), ("count", pa.int64())]
)


def conform(table: pa.Table, schema: pa.Schema, name: str) -> pa.Table:
    """The columns of `schema`, in its order and types; UsageError names what does not fit."""
    if missing := [column for column in schema.names if column not in table.column_names]:
        raise UsageError(f"{name}: column {missing[0]!r} is missing; needed: {', '.join(schema.names)}")
    try:
        found = table.select(schema.names).cast(schema)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise UsageError(f"{name}: {error}") from None
    return found.replace_schema_metadata(None)


def table_bytes(table: pa.Table) -> bytes:
    """Parquet bytes, the same for the same values and types."""
    import pyarrow.parquet as pq  # costs 0.15 s to import, which `import nearline.store` need not pay

    sink = io.BytesIO()
    plain = table.replace_schema_metadata(None).combine_chunks()
    pq.write_table(plain, sink, compression="zstd", row_group_size=1 << 20, store_schema=True)
    return sink.getvalue()


def write_table(path: Path, table: pa.Table) -> bytes:
    """Write durably; returns the bytes written, for a digest."""
    content = table_bytes(table)
    durable.write_file(path, content)
    return content


def read_table(path: Path, schema: pa.Schema | None = None) -> pa.Table:
    """Read a table; with `schema`, refuse one of another form."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise IncompleteError(f"{path} does not exist") from None
    return parse_table(content, schema, str(path))


def parse_table(content: bytes, schema: pa.Schema | None, where: str) -> pa.Table:
    """A table from the bytes of a Parquet file; with `schema`, refuse one of another form."""
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(pa.BufferReader(content))
    except (pa.ArrowInvalid, OSError) as error:
        raise FormatError(f"{where}: not a readable Parquet file ({error})") from None
    if schema is not None and not table.schema.remove_metadata().equals(schema):
        raise FormatError(f"{where}: columns {table.schema.names} are not {schema.names} of the format")
    return table
