"""What a measurement measures together: replacements as tables show them, and the sets of layers among them.

In: a request, and in which order layers are replaced. Out: entries to measure, and rows of the table
`measured` of what was found. Cost: none.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Float32

from ..analyze.cost_rows import cheapest, layer_costs
from ..analyze.cost_tables import to_cost_table
from ..store import SPLITS
from .measure_asked import Entry, bare
from .measure_request import Request
from .measured_pieces import Piece, RowLosses


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """What was measured of one store and split with windows of one length."""

    store: str
    split: int
    length: int
    entries: tuple[Entry, ...]
    piece: Piece

    def rows(self) -> Iterable[dict[str, Any]]:
        """Rows of the table `measured`."""
        piece = self.piece
        for entry in self.entries:
            one, sums = entry.intervention, piece.units[entry.unit]
            for at, group in enumerate(piece.group.tolist()):
                yield {
                    "store": self.store,
                    "split": SPLITS[self.split],
                    "sequence_length": self.length,
                    "name": replace(one, draw=None).name,
                    "kind": one.kind,
                    "layers": ",".join(map(str, entry.layers)),
                    "chosen": entry.chosen,
                    "draw": -1 if one.draw is None else one.draw,
                    "group": group,
                    "n_tokens": int(piece.n_tokens[at]),
                    "base_nll": float(piece.base[at]),
                    "nll": float(sums.nll[at]),
                    "kl": float(sums.kl[at]),
                    "n_linear": round(float(sums.n_linear[at])),
                    "n_covered": int(sums.n_covered[at]),
                }


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """All parts, the losses of rows by store, and the order in which layers were replaced."""

    parts: tuple[Part, ...]
    losses: Mapping[str, RowLosses]
    orders: Mapping[str, Sequence[int]]
    kept: Collection[tuple[str, int]]  # stores and layers whose losses of rows are in the study already
    # By store and layer: the effect of replacing single rows, NaN for rows that were not tried.
    single: Mapping[str, Mapping[int, Float32[np.ndarray, "token"]]] = field(default_factory=dict)

    def single_rows(self, store: str, layer: int) -> dict[str, Float32[np.ndarray, "token"]]:
        """The need `loss_single`, where it was measured."""
        return {"loss_single": self.single[store][layer]} if store in self.single else {}

    def facts(self) -> dict[str, Any]:
        """Layers in the order in which they are replaced, as chosen on gate rows."""
        return {"orders": {name: list(order) for name, order in self.orders.items()}}

    def table(self) -> pa.Table:
        return to_cost_table("measured", (row for part in self.parts for row in part.rows()))


def papers_sets(request: Request, part: Part) -> list[Entry]:
    """Sets of the layers that cost least on the very rows they are scored on."""
    return [
        Entry(name, one, cheapest(costs_of(part, bare(one)), n_layers))
        for one in request.joint
        for name, n_layers in request.asked.papers
    ]


def costs_of(part: Part, name: str) -> Mapping[int, float]:
    """Cost of each layer by itself, nats a token."""
    table = to_cost_table("measured", part.rows())
    return layer_costs(table, part.store, SPLITS[part.split], name, part.length)
