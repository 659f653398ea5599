"""Rows of Arrow tables, and Parquet files as corpora.

In: a Parquet file or a folder of them, and the name of a column. Out: rows in the order of the files' names
and of the rows in them, under the keys FILE:ROW, counted from 0. Only this column is read, a thousand rows at
a time. Cost: decoding it; memory: about one row group of it beside the texts.
"""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ..store.errors import DamageError, UsageError
from .documents import Row
from .local_texts import files_below, readable

ROWS_AT_ONCE = 1024


def read_parquet(path: Path, column: str) -> Generator[Row]:
    """The rows of a Parquet file, or of a folder's files (in folders below it too)."""
    if not path.is_dir():
        yield from _file_rows(path, path.name, column)
        return
    files = files_below(path, ".parquet")
    if not files:
        raise UsageError(f"parquet:{path}: the folder holds no .parquet file.")
    for file in files:
        yield from _file_rows(file, file.relative_to(path).as_posix(), column)


def values_of(column: pa.Array | pa.ChunkedArray) -> Iterator[object]:
    """What a column holds, row by row, as Python values; lists of integers as arrays."""
    for chunk in column.chunks if isinstance(column, pa.ChunkedArray) else [column]:
        if _holds_integers(chunk):
            yield from _integers_of(chunk)
        else:
            yield from chunk.to_pylist()


def require_column(name: str, columns: list[str], place: str, form: str) -> None:
    """Refuse a column that is not there, or there twice."""
    if columns.count(name) != 1:
        found = ", ".join(map(repr, columns)) or "none"
        wrong = f"no column {name!r}" if name not in columns else f"two columns {name!r}"
        raise UsageError(f"{place}: {wrong}; its columns are {found}. Name one: {form}.")


def _file_rows(path: Path, key: str, column: str) -> Iterator[Row]:
    number = 0
    with readable(path), _parquet_file(path) as file:
        require_column(column, file.schema_arrow.names, f"{path}", "parquet:PATH:COLUMN")
        with whole(f"{path}, column {column!r}"):
            for batch in file.iter_batches(ROWS_AT_ONCE, columns=[column]):
                for value in values_of(batch.column(column)):
                    yield Row(f"{key}:{number}", value, f"{path}, row {number}: column {column!r}")
                    number += 1


@contextmanager
def whole(place: str) -> Generator[None]:
    """What Arrow says of bytes that are not what was written, in a sentence."""
    try:
        yield
    except (pa.ArrowException, UnicodeDecodeError, OSError) as error:
        if isinstance(error, OSError) and (type(error) is not OSError or error.errno is not None):
            raise  # not Arrow's: of the network, the system, or ours
        line = str(error).partition("\n")[0].rstrip(". ")
        raise DamageError(f"{place}: damaged ({line}); fetch or write the file again.") from None


def _parquet_file(path: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path, page_checksum_verification=True)
    except pa.ArrowInvalid:
        raise UsageError(f"{path}: not a Parquet file, or the end of it is missing.") from None


def _holds_integers(chunk: Any) -> bool:
    kind = chunk.type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return False
    return pa.types.is_integer(kind.value_type) and chunk.values.null_count == 0


def _integers_of(chunk: Any) -> Iterator[np.ndarray | None]:
    values, offsets = chunk.values.to_numpy(zero_copy_only=False), chunk.offsets.to_numpy()
    for row, whole in enumerate(chunk.is_valid().to_pylist()):
        yield values[offsets[row] : offsets[row + 1]] if whole else None
