"""What an earlier measurement of the study holds that a new one need not measure again.

In: the record of the step and its table `measured`. Out: sums over groups by store, split and length of
windows, where they were made with the same stores, surrogates, model and arithmetic, and are still what was
written. Cost: a digest of the step's files, and one read of the table.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from ..store import SPLITS, Study
from ..store.whole import digest_of
from .interventions import parse_intervention
from .made_with import MadeWith, Unit, routes_of
from .measured_pieces import Piece, Sums

Place = tuple[str, int, int]  # store, split, length of windows


@dataclass(frozen=True, slots=True, eq=False)
class Before:
    """`facts` are those of the earlier record; all is empty where nothing holds."""

    pieces: Mapping[Place, Piece] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)

    def units(self, place: Place) -> Mapping[Unit, Sums]:
        piece = self.pieces.get(place)
        return {} if piece is None else piece.units


def measured_before(study: Study, step: str, made_with: MadeWith) -> Before:
    """Without the stores that are others since, and the replacements that route by something else."""
    record = study.provenance().get(step)
    before = None if record is None else MadeWith.parse(record["facts"].get("made_with"))
    if record is None or before is None or before.key != made_with.key:
        return Before()
    for output, digest in record["outputs"].items():
        if not (study.path / output).exists() or digest_of(study.path / output) != digest:
            return Before()
    changed, others = before.changed_routes(made_with), before.changed_stores(made_with)
    pieces: dict[Place, Piece] = {}
    for place, piece in _pieces(study.table("measured")).items():
        if place[0] in others:
            continue
        units = {
            unit: sums
            for unit, sums in piece.units.items()
            if not changed & set(routes_of(unit, place[0], made_with))
        }
        pieces[place] = Piece(piece.group, piece.n_tokens, piece.base, units)
    return Before(pieces, record["facts"])


def _pieces(table: pa.Table) -> dict[Place, Piece]:
    columns = {name: table[name].to_pylist() for name in ("store", "split", "sequence_length")}
    names = table["name"].to_pylist()
    layers, draws = table["layers"].to_pylist(), table["draw"].to_pylist()
    rows: dict[Place, dict[Unit, dict[int, int]]] = {}
    group = table["group"].to_numpy()
    for at, (store, split, length) in enumerate(zip(*columns.values(), strict=True)):
        name = names[at] if draws[at] < 0 else f"{names[at]}#{draws[at]}"
        numbers = tuple(sorted(int(layer) for layer in layers[at].split(",")))
        unit = Unit(parse_intervention(name), numbers)
        # A set that was chosen in two ways stands there twice, with the same numbers.
        rows.setdefault((store, SPLITS.index(split), length), {}).setdefault(unit, {})[int(group[at])] = at
    values = {
        name: table[name].to_numpy()
        for name in ("n_tokens", "base_nll", "nll", "kl", "n_linear", "n_covered")
    }
    return {place: _piece(units, values) for place, units in rows.items()}


def _piece(units: Mapping[Unit, Mapping[int, int]], values: Mapping[str, np.ndarray]) -> Piece:
    groups = np.array(sorted(next(iter(units.values()))), np.int64)
    sums: dict[Unit, Sums] = {}
    first: np.ndarray | None = None
    for unit, rows in units.items():
        at = np.array([rows[group] for group in groups.tolist()])
        first = at if first is None else first
        sums[unit] = Sums(
            values["nll"][at], values["kl"][at], values["n_linear"][at].astype(float), values["n_covered"][at]
        )
    assert first is not None
    return Piece(groups, values["n_tokens"][first], values["base_nll"][first], sums)
