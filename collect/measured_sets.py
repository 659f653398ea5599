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
from .interventions import Intervention
from .made_with import Unit
from .measure_request import Request
from .measure_settings import chosen_set, layers_of_set
from .measured_pieces import Piece, RowLosses


@dataclass(frozen=True, slots=True)
class Entry:
    """A replacement as a table shows it: `chosen` says how its layers came about, `layers` in which order."""

    chosen: str
    intervention: Intervention
    layers: tuple[int, ...]

    @property
    def unit(self) -> Unit:
        return Unit(self.intervention, tuple(sorted(self.layers)))


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


def singles(request: Request, interventions: Sequence[Intervention]) -> list[Entry]:
    """Each layer by itself."""
    return [Entry("one", one, (layer,)) for one in interventions for layer in request.layers]


def sets(request: Request, orders: Mapping[str, Sequence[int]]) -> list[Entry]:
    """Sets of layers that are known before test rows are seen, and the steps of the progressive curve."""
    settings = request.settings
    found: list[Entry] = []
    for one in request.joint:
        for name in settings.compound:
            chosen, layers = chosen_set(name), layers_of_set(name)
            if chosen is None:
                label = "all" if layers is None else "given"
                found.append(Entry(label, one, tuple(layers or request.layers)))
            elif chosen[0] == "cheapest":
                found.append(Entry(name, one, tuple(orders[bare(one)][: chosen[1]])))
        if settings.progressive != "none":
            greedy = settings.progressive == "greedy"
            order = orders[greedily(bare(one)) if greedy else bare(one)]
            steps = range(1, 1 + min(len(order), settings.progressive_steps or len(order)))
            found += [Entry(settings.progressive, one, tuple(order[:step])) for step in steps]
    return list(dict.fromkeys(found))


def papers_sets(request: Request, part: Part) -> list[Entry]:
    """Sets of the layers that cost least on the very rows they are scored on."""
    named = [(name, chosen_set(name)) for name in request.settings.compound]
    wanted = [(name, found[1]) for name, found in named if found is not None and found[0] == "paper"]
    return [
        Entry(name, one, cheapest(costs_of(part, bare(one)), n_layers))
        for one in request.joint
        for name, n_layers in wanted
    ]


def bare(one: Intervention) -> str:
    """Its name without a draw: draws have their layers together."""
    return replace(one, draw=None).name


def greedily(name: str) -> str:
    """What the order of a greedy curve is called, beside that of the layers by themselves."""
    return f"{name}, greedy"


def costs_of(part: Part, name: str) -> Mapping[int, float]:
    """Cost of each layer by itself, nats a token."""
    table = to_cost_table("measured", part.rows())
    return layer_costs(table, part.store, SPLITS[part.split], name, part.length)
