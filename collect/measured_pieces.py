"""What a measurement has done so far, kept aside in the study, so that one that was stopped goes on.

In: sums of one block over groups for each replacement, and losses of its rows. Out: what is there already, as
long as it was made with the same stores, surrogates, gates, model and arithmetic. A block's sums are written
when the block is done, in one step; other replacements of the same block join them later. Losses of rows lie
in a plain file of float32, 8 bytes a row and layer on disk, none in memory, and are on disk before the sums
that say so. Cost: one small file a block.
"""

import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
from jaxtyping import Float32, Float64, Int64

from ..store import durable
from ..store.errors import NearlineError
from ..store.parsing import parse_json, readable
from ..store.tables import read_table, write_table
from .interventions import parse_intervention
from .made_with import MadeWith, Unit, routes_of

ASIDE: Final = ".measure.partial"
LOCK: Final = ".measure.lock"
_KEY: Final = "key.json"
_DONE: Final = "done"
_SUMS: Final = ("nll", "kl", "n_linear", "n_covered")


@dataclass(frozen=True, slots=True, eq=False)
class Sums:
    """Of one replacement over the scored rows of each group: nats, and rows that went linear."""

    nll: Float64[np.ndarray, "group"]
    kl: Float64[np.ndarray, "group"]
    n_linear: Float64[np.ndarray, "group"]  # of covered rows and replaced layers; a sum of p by a soft gate
    n_covered: Int64[np.ndarray, "group"]

    @classmethod
    def zeros(cls, n_groups: int) -> "Sums":
        nll, kl, n_linear = (np.zeros(n_groups) for _ in range(3))
        return cls(nll, kl, n_linear, np.zeros(n_groups, np.int64))


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """One block with windows of one length: the base pass, and each replacement."""

    group: Int64[np.ndarray, "group"]
    n_tokens: Int64[np.ndarray, "group"]
    base: Float64[np.ndarray, "group"]
    units: Mapping[Unit, Sums]

    def joined(self, units: Mapping[Unit, Sums]) -> "Piece":
        return Piece(self.group, self.n_tokens, self.base, {**self.units, **units})


class Pieces:
    """The folder of pieces of one study; `open` forgets those that were made from something else."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @classmethod
    def open(cls, study: Path, made_with: MadeWith) -> "Pieces":
        """Those of an earlier run that hold still; all others are removed."""
        folder = study / ASIDE
        before = _made_with(folder)
        if before is None or before.key != made_with.key:
            shutil.rmtree(folder, ignore_errors=True)
            before = MadeWith(made_with.key, {}, {})
        pieces = cls(folder)
        for store in sorted(before.changed_stores(made_with)):
            pieces._forget_store(store)
        if changed := before.changed_routes(made_with):
            pieces._forget(changed, made_with)
        durable.write_file(folder / _KEY, readable(before.and_of(made_with).plain()))
        return pieces

    def _forget_store(self, store: str) -> None:
        shutil.rmtree(self._folder / "sums" / store, ignore_errors=True)
        for path in (self._patches(store), self._rows(store)):
            path.unlink(missing_ok=True)

    def _forget(self, changed: set[str], made_with: MadeWith) -> None:
        """Drop replacements that route by something that has changed since."""
        for path in sorted((self._folder / "sums").rglob("*.parquet")):
            piece = _from_table(read_table(path))
            store = path.parent.parent.name
            kept = {
                unit: sums
                for unit, sums in piece.units.items()
                if not changed & set(routes_of(unit, store, made_with))
            }
            write_table(path, _to_table(Piece(piece.group, piece.n_tokens, piece.base, kept)))

    def finish(self) -> None:
        """All results are in place: whatever stops this run now, the pieces are not needed any more."""
        durable.write_file(self._folder / _DONE)

    def remove(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def read(self, store: str, length: int, block: int) -> Piece | None:
        """What is there of a block; None where nothing whole is."""
        path = self._path(store, length, block)
        if not path.exists():
            return None
        try:
            return _from_table(read_table(path))
        except (NearlineError, KeyError, IndexError, ValueError):
            path.unlink()  # cut short by a machine that went down
            return None

    def write(self, store: str, length: int, block: int, piece: Piece) -> None:
        write_table(self._path(store, length, block), _to_table(piece))

    def read_patches(self, store: str) -> dict[str, np.ndarray] | None:
        """Rows that were patched one by one, and the effect at each layer."""
        path = self._patches(store)
        if not path.exists():
            return None
        table = read_table(path)
        row, layer, value = (table[name].to_numpy() for name in ("row", "layer", "value"))
        found = {str(one): value[layer == one] for one in np.unique(layer).tolist()}
        return {"row": row[layer == layer[0]], **found} if layer.size else None

    def write_patches(self, store: str, found: Mapping[str, np.ndarray]) -> None:
        layers = [name for name in found if name != "row"]
        table = {
            "row": np.tile(found["row"], len(layers)),
            "layer": np.repeat(np.array([int(name) for name in layers], np.int64), found["row"].size),
            "value": np.concatenate([found[name] for name in layers]),
        }
        write_table(self._patches(store), pa.table(table))

    def losses(self, store: str, n_layers: int, n_rows: int) -> "RowLosses":
        return RowLosses(self._rows(store), n_layers, n_rows)

    def _patches(self, store: str) -> Path:
        return self._folder / "patches" / f"{store}.parquet"

    def _rows(self, store: str) -> Path:
        return self._folder / "rows" / f"{store}.f32"

    def _path(self, store: str, length: int, block: int) -> Path:
        return self._folder / "sums" / store / f"{length}" / f"{block:06d}.parquet"


class RowLosses:
    """nll of the base pass, and loss and kl of each layer replaced by itself, of the rows of a store."""

    def __init__(self, path: Path, n_layers: int, n_rows: int) -> None:
        shape = (1 + 2 * n_layers, n_rows)
        durable.make_folder(path.parent)
        new = not path.exists() or path.stat().st_size != 4 * shape[0] * shape[1]
        self._values = np.memmap(path, np.float32, "w+" if new else "r+", shape=shape)
        self._n_layers = n_layers

    @property
    def base(self) -> Float32[np.ndarray, "token"]:
        return self._values[0]

    def loss(self, index: int) -> Float32[np.ndarray, "token"]:
        """Of the layer that comes at place `index` of those measured."""
        return self._values[1 + index]

    def kl(self, index: int) -> Float32[np.ndarray, "token"]:
        return self._values[1 + self._n_layers + index]

    def flush(self) -> None:
        self._values.flush()


def remove_finished(study: Path) -> None:
    """Remove pieces of a run that stopped after its results were in place."""
    if (study / ASIDE / _DONE).exists():
        shutil.rmtree(study / ASIDE)


def _made_with(folder: Path) -> MadeWith | None:
    """What the pieces of an earlier run were made with; None where there are none that can be told."""
    try:
        return MadeWith.parse(parse_json((folder / _KEY).read_bytes(), str(folder / _KEY)))
    except (OSError, NearlineError):
        return None


def _to_table(piece: Piece) -> pa.Table:
    """The base first, then each replacement, its rows by group."""
    n_units, n_groups = len(piece.units), piece.group.size
    columns: dict[str, Any] = {
        "name": ["", *(unit.intervention.name for unit in piece.units)],
        "layers": ["", *(unit.spelled for unit in piece.units)],
    }
    table: dict[str, Any] = {
        name: pa.array(values).take(pa.array(np.repeat(np.arange(n_units + 1), n_groups)))
        for name, values in columns.items()
    }
    table["group"] = np.tile(piece.group, n_units + 1)
    table["n_tokens"] = np.tile(piece.n_tokens, n_units + 1)
    blank = np.zeros(n_groups)
    first = {"nll": piece.base, "kl": blank, "n_linear": blank, "n_covered": blank.astype(np.int64)}
    for name in _SUMS:
        table[name] = np.concatenate(
            [first[name], *(np.asarray(getattr(sums, name)) for sums in piece.units.values())]
        )
    return pa.table(table)


def _from_table(table: pa.Table) -> Piece:
    names, layers = table["name"].to_pylist(), table["layers"].to_pylist()
    n_groups = names.count("")
    values = {name: table[name].to_numpy() for name in (*_SUMS, "group", "n_tokens")}
    units = {}
    for start in range(n_groups, len(names), max(1, n_groups)):
        of = slice(start, start + n_groups)
        unit = Unit(parse_intervention(names[start]), tuple(int(one) for one in layers[start].split(",")))
        units[unit] = Sums(*(values[name][of] for name in _SUMS))
    first = slice(0, n_groups)
    return Piece(values["group"][first], values["n_tokens"][first], values["nll"][first], units)


def by_group(
    values: Float64[np.ndarray, "row"], index: Int64[np.ndarray, "row"], n_groups: int
) -> Float64[np.ndarray, "group"]:
    """Sums of the rows of each group, in row order."""
    return np.bincount(index, weights=values, minlength=n_groups)


def added(pieces: Iterable[Piece], units: Sequence[Unit]) -> Piece:
    """The blocks of a split together: group by group, blocks in their order."""
    found = list(pieces)
    groups = np.unique(np.concatenate([piece.group for piece in found])) if found else np.zeros(0, np.int64)
    n_tokens, base = np.zeros(groups.size, np.int64), np.zeros(groups.size)
    sums = {unit: Sums.zeros(groups.size) for unit in units}
    for piece in found:
        at = np.searchsorted(groups, piece.group)
        n_tokens[at] += piece.n_tokens
        base[at] += piece.base
        for unit, total in sums.items():
            for name in _SUMS:
                getattr(total, name)[at] += getattr(piece.units[unit], name)
    return Piece(groups, n_tokens, base, sums)
