"""The per-token tables of a study as one polars LazyFrame.

In: a study, and which layers and stores of it. Out: a LazyFrame, one row a store, layer and token row: what
the row is (`tokens/rows`) and its needs (`tokens/need`, those that `measure` and others brought included).
A file is read, checked as every table of a study is, when the query gets to it; where a filter speaks of
`store` and `layer` only, the others are left alone. Cost: one store and layer in memory at a time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import polars as pl
from polars.io.plugins import register_io_source

from ..store import DamageError, IncompleteError, Study, UsageError
from ..store.names import printable, typed
from ..store.settings import layers_as_text, parse_layers
from ..store.tables import table_form

KEYS = {"store": pl.String(), "layer": pl.Int32()}


@dataclass(frozen=True, slots=True)
class _Part:
    store: str
    layer: int
    steps: tuple[str | None, ...]  # whose columns are there; None: the fit's


def tokens(
    study: Study,
    layers: int | str | Sequence[int] | None = None,
    stores: str | Sequence[str] | None = None,
) -> pl.LazyFrame:
    """All rows, or those of some layers and stores."""
    parts = _parts(study, layers, stores)
    schema: dict[str, pl.DataType] = {}
    # Files of all layers that the same steps wrote have the same columns: one of them is looked at.
    examples: dict[tuple[str, tuple[str | None, ...]], _Part] = {}
    for part in parts:
        examples.setdefault((part.store, part.steps), part)
    for part in examples.values():
        schema |= {name: kind for name, kind in _schema(study, part).items() if name not in schema}

    def read(
        with_columns: list[str] | None,
        predicate: pl.Expr | None,
        n_rows: int | None,
        batch_size: int | None,
    ) -> Iterator[pl.DataFrame]:
        left = n_rows
        for part in parts:
            if left == 0:
                return
            if predicate is None or _may_hold(predicate, part):
                frame = _frame(study, part, schema)
                frame = frame if predicate is None else frame.filter(predicate)
                frame = frame if left is None else frame.head(left)
                left = None if left is None else left - frame.height
                yield frame if with_columns is None else frame.select(with_columns)

    return register_io_source(read, schema=pl.Schema(schema))


def _parts(
    study: Study, layers: int | str | Sequence[int] | None, stores: str | Sequence[str] | None
) -> list[_Part]:
    record = study.provenance().get("fit")
    if record is None:
        raise IncompleteError(
            f"{study.path} is not fitted yet: run `nearline fit {typed(study.path)} STORE…` first"
        )
    there = [name for name in study.stores() if study.rows_path(name).exists()]
    chosen = there if stores is None else [stores] if isinstance(stores, str) else list(stores)
    for name in chosen:
        if name not in there:
            raise UsageError(
                f"{study.path} has no tokens of a store {printable(str(name))!r}; it has {', '.join(there)}"
            )
    fitted = [int(layer) for layer in record["settings"]["layers"]]
    text = None if layers is None else str(layers_as_text(layers))
    numbers = fitted if text in (None, "all") else parse_layers(text)
    if missing := sorted(set(numbers) - set(fitted)):
        known = ", ".join(map(str, fitted))
        raise UsageError(f"layer {missing[0]} was not fitted in {study.path}, which has {known}")
    return [
        _Part(store, layer, (None, *study.need_steps(layer, store))) for store in chosen for layer in numbers
    ]


def _schema(study: Study, part: _Part) -> dict[str, pl.DataType]:
    """Columns and their types, by files that are read without their rows."""
    found: dict[str, pl.DataType] = dict(KEYS)
    needs = [study.need_path(part.layer, part.store, step=step) for step in part.steps]
    for path in (study.rows_path(part.store), *needs):
        found |= dict(pl.DataFrame(table_form(path).empty_table()).schema)
    return found


def _frame(study: Study, part: _Part, schema: dict[str, pl.DataType]) -> pl.DataFrame:
    rows = pl.DataFrame(study.rows(part.store))
    found = rows.select(
        pl.lit(part.store, KEYS["store"]).alias("store"),
        pl.lit(part.layer, KEYS["layer"]).alias("layer"),
        pl.all(),
    )
    for step in part.steps:
        need = pl.DataFrame(study.need(part.layer, part.store, step=step))
        if need.height != rows.height:
            path = study.need_path(part.layer, part.store, step=step)
            raise DamageError(f"{path}: {need.height} rows, the store has {rows.height}: make it again")
        found = found.with_columns(need.get_columns())
    missing = [pl.lit(None, kind).alias(name) for name, kind in schema.items() if name not in found.columns]
    return found.with_columns(missing).select(pl.col(name).cast(kind) for name, kind in schema.items())


def _may_hold(predicate: pl.Expr, part: _Part) -> bool:
    """Whether a filter lets anything of this store and layer through, as far as its name alone says."""
    if not set(predicate.meta.root_names()) <= set(KEYS):
        return True
    one = pl.DataFrame({"store": [part.store], "layer": [part.layer]}, schema=KEYS)
    return not one.filter(predicate).is_empty()
