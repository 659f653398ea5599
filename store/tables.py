"""Parquet tables with a fixed form: the same table gives the same bytes.

In: an Arrow table. Out: a Parquet file without free metadata, zstd-compressed, durably written; and back,
with its columns checked where the format prescribes them. A file from elsewhere is asked for its columns,
rows and sizes before any of it is unpacked: flat columns of plain types only, and no more cells or text than
its bytes can honestly hold. Cost: one encoding in memory; one decoding, text by way of its dictionary.
"""

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
import pyarrow.types as types

from . import durable
from .errors import FormatError, IncompleteError, UsageError
from .names import printable
from .places import LocalPlace

if TYPE_CHECKING:
    import pyarrow.parquet as pq

MAX_TABLE_BYTES = 2**33
MAX_COLUMNS = 512
UNPACKED_PER_BYTE = 256  # cells, and bytes of text, for each byte of the file; real tables stay below 50
UNPACKED_FREE = 2**24
_THRIFT_LIMIT = 2**24

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
        content = LocalPlace(path.parent).read(path.name, limit=MAX_TABLE_BYTES)
    except FileNotFoundError:
        raise IncompleteError(f"{path} does not exist") from None
    return parse_table(content, schema, str(path))


def table_form(path: Path) -> pa.Schema:
    """The columns of a table and their types, without unpacking it."""
    try:
        content = LocalPlace(path.parent).read(path.name, limit=MAX_TABLE_BYTES)
    except FileNotFoundError:
        raise IncompleteError(f"{path} does not exist") from None
    try:
        form = _open(content, []).schema_arrow.remove_metadata()
    except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
        raise FormatError(f"{path}: not a readable Parquet file ({printable(str(error))[:200]})") from None
    _check_columns(form, None, str(path))
    return form


def column_names(path: Path) -> list[str]:
    """The columns of a table, without unpacking it."""
    return table_form(path).names


def parse_table(
    content: bytes,
    schema: pa.Schema | None,
    where: str,
    *,
    n_rows: int | None = None,
    most_rows: int | None = None,
) -> pa.Table:
    """A table from the bytes of a Parquet file; with `schema`, refuse one of another form, or with a cell
    that is null; with `n_rows` or `most_rows`, one of other length. All refused before a row is unpacked."""
    try:
        found = _open(content, [])
        form = found.schema_arrow.remove_metadata()
        _check_columns(form, schema, where)
        _check_counts(found.metadata, len(content), where, n_rows, most_rows)
        texts = [name for name, kind in zip(form.names, form.types, strict=True) if _is_text(kind)]
        # Not by Arrow's threads: one that lets go of `content` late, while Python ends, aborts the process.
        packed = _open(content, texts).read(use_threads=False)
        table = _unpack_text(packed, form, len(content), where)
        table.validate(full=True)
    except FormatError:
        raise
    except (pa.ArrowException, OSError, ValueError, KeyError, OverflowError, MemoryError) as error:
        reason = printable(str(error))[:200]
        raise FormatError(f"{where}: not a readable Parquet file ({reason})") from None
    if schema is not None and (empty := [name for name in form.names if table[name].null_count]):
        raise FormatError(f"{where}: column {empty[0]!r} has empty cells")
    return table


def _open(content: bytes, texts: list[str]) -> "pq.ParquetFile":
    """The file, its text columns as dictionaries: a word that stands in a million rows is unpacked once."""
    import pyarrow.parquet as pq

    return pq.ParquetFile(
        pa.BufferReader(content),
        read_dictionary=texts,
        arrow_extensions_enabled=False,
        thrift_string_size_limit=_THRIFT_LIMIT,
        thrift_container_size_limit=_THRIFT_LIMIT,
    )


def _is_text(kind: pa.DataType) -> bool:
    return (
        types.is_string(kind)
        or types.is_large_string(kind)
        or types.is_binary(kind)
        or types.is_large_binary(kind)
    )


def _check_columns(form: pa.Schema, schema: pa.Schema | None, where: str) -> None:
    names = [printable(name)[:80] for name in form.names[:MAX_COLUMNS]]
    if schema is not None and not form.equals(schema):
        raise FormatError(f"{where}: columns {names[:20]} are not {schema.names} of the format")
    if len(form.names) > MAX_COLUMNS or len(set(form.names)) < len(form.names):
        raise FormatError(f"{where}: more than {MAX_COLUMNS} columns, or two of one name")
    for name, kind in zip(names, form.types, strict=True):
        if not (
            _is_text(kind) or types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind)
        ):
            raise FormatError(
                f"{where}: column {name!r} is {str(kind)[:80]}; allowed: numbers, bool and text"
            )


def _check_counts(
    metadata: "pq.FileMetaData", n_bytes: int, where: str, n_rows: int | None, most_rows: int | None
) -> None:
    found = metadata.num_rows
    groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    if n_rows is not None and found != n_rows:
        raise FormatError(f"{where}: {found} rows, {n_rows} expected")
    if most_rows is not None and found > most_rows:
        raise FormatError(f"{where}: {found} rows, at most {most_rows} are possible")
    if found < 0 or min([group.num_rows for group in groups], default=0) < 0:
        raise FormatError(f"{where}: a negative number of rows")
    if sum(group.num_rows for group in groups) != found:
        raise FormatError(f"{where}: its row groups do not hold the {found} rows that it states")
    unpacked = sum(
        group.total_byte_size for group in groups
    )  # asked by column, pyarrow may abort the process
    most = UNPACKED_FREE + UNPACKED_PER_BYTE * n_bytes
    if found * metadata.num_columns > most or unpacked > most:
        raise FormatError(
            f"{where}: {n_bytes} bytes that are to unpack to {found} rows of {metadata.num_columns} columns, "
            f"{unpacked} bytes: no table of ours is packed like that"
        )


def _unpack_text(table: pa.Table, form: pa.Schema, n_bytes: int, where: str) -> pa.Table:
    """Dictionaries as plain text, once it is known how much that is."""
    left = UNPACKED_FREE + UNPACKED_PER_BYTE * n_bytes
    columns: list[pa.ChunkedArray] = []
    for name, kind in zip(form.names, form.types, strict=True):
        column = table[name]
        if types.is_dictionary(column.type):
            for chunk in column.chunks:
                left -= _text_bytes(cast("pa.DictionaryArray", chunk))
            if left < 0:
                raise FormatError(
                    f"{where}: column {printable(name)[:80]!r} holds more text than the file can"
                )
            column = column.cast(column.type.value_type).cast(kind)
        columns.append(column)
    return pa.table(columns, schema=form)


def _text_bytes(chunk: "pa.DictionaryArray[Any, Any]") -> int:
    """Bytes of the text that a column's chunk stands for; its indices are checked first."""
    import pyarrow.compute

    compute: Any = pyarrow.compute
    chunk.validate(full=True)
    return compute.sum(compute.take(compute.binary_length(chunk.dictionary), chunk.indices)).as_py() or 0
