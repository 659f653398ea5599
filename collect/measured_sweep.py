"""The sweep itself: which replacements each block of each store needs, in which order, and what is there
already.

In: a request, the model, and the pieces of earlier runs. Out: for each store, split and length of windows the
sums of everything that was asked for. Gate rows first; sets of layers are chosen on those of the store that
gates are learned on; then test rows, where a batch passes the model once unchanged and once for each
replacement. Only the paper's sets, chosen on the very test rows they are scored on, need these a second time.
Cost: see `passes`; what pieces or an earlier measurement hold is not measured again.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..analyze.cost_rows import cheapest
from ..analyze.population import GATE, TEST, UNSEEN
from ..store import Progress
from .anatomy import Anatomy
from .made_with import Unit
from .measure_asked import LINEAR, Entry, bare, greedily
from .measure_request import Request
from .measured_before import Before
from .measured_blocks import ScoredRows, measure_block
from .measured_pieces import Piece, Pieces, RowLosses, added
from .measured_sets import Measured, Part, costs_of, papers_sets
from .measured_windows import Cut, own_length
from .passes import Visit
from .replaced_layers import ReplacedLayers


class Sweep:
    """`run()` measures everything that a request asks for."""

    def __init__(
        self, request: Request, net: Anatomy, pieces: Pieces, before: Before, progress: Progress
    ) -> None:
        self._request, self._net, self._pieces, self._before = request, net, pieces, before
        self._progress = progress
        self._replaced = ReplacedLayers(request, net)
        self._losses: dict[str, RowLosses] = {}
        self._visits: dict[tuple[str, int], Visit] = {}
        self._done = self._total = 0

    def run(self) -> Measured:
        request, asked = self._request, self._request.asked
        self._plan()
        parts: list[Part] = []
        orders: dict[str, list[int]] = {}
        for store in request.touched:
            self._replaced.of_store(store)
            for length in request.windows(store):
                if length is None or "gate" in request.settings.splits:
                    parts.append(self._part(store, GATE, length, asked.each(asked.on_gate)))
            if store == request.evidence.fit_on and request.chooses:
                orders = self._orders(parts[0])
        for store in request.stores:
            self._replaced.of_store(store)
            paper: list[Entry] = []
            for length in request.windows(store):
                entries = [*asked.each(asked.on_test), *asked.sets(orders)]
                part = self._part(store, TEST, length, entries)
                if length is None:
                    paper = papers_sets(request, part)
                parts.append(self._part(store, TEST, length, [*entries, *paper]) if paper else part)
        kept = [
            (store, layer)
            for store in request.stores
            for layer in request.layers
            if self._keeps(store, layer)
        ]
        for store in request.stores:
            if any((store, layer) not in kept for layer in request.layers):
                self._losses_of(store)  # all of it may have been aside
        return Measured(tuple(parts), self._losses, orders, kept)

    # What to measure

    def _orders(self, gate: Part) -> dict[str, list[int]]:
        """Layers as each joint intervention replaces them, chosen on gate rows."""
        found: dict[str, list[int]] = {}
        for name in dict.fromkeys(map(bare, self._request.joint)):
            order = list(cheapest(costs_of(gate, name), len(self._request.layers)))
            found[name] = order
            if self._request.settings.progressive == "greedy":
                found[greedily(name)] = self._greedy(gate, name, order)
        return found

    def _greedy(self, gate: Part, name: str, order: Sequence[int]) -> list[int]:
        """Each time the layer that costs least on gate rows beside those before it."""
        asked = self._request.asked
        n_steps = asked.n_steps(order)
        before: list[int] = self._before.facts.get("orders", {}).get(greedily(name), [])
        if len(before) >= n_steps and set(before) <= set(order):
            return before
        chosen = list(order[:1])
        while len(chosen) < n_steps:
            left = [layer for layer in order if layer not in chosen]
            entries = asked.greedy_step(name, chosen, left)
            part = self._part(gate.store, GATE, None, entries)
            cost = {
                layer: sum(
                    float(part.piece.units[entry.unit].nll.sum())
                    for entry in entries
                    if entry.layers[-1] == layer
                )
                for layer in left
            }
            chosen.append(min(left, key=lambda layer: (np.isnan(cost[layer]), cost[layer], layer)))
        return chosen

    # Measuring

    def _part(self, store: str, split: int, length: int | None, entries: Sequence[Entry]) -> Part:
        """Measure what is not there yet, block by block."""
        request, reader = self._request, self._request.evidence.stores[store].reader
        called = own_length(reader) if length is None else length
        units = list(dict.fromkeys(entry.unit for entry in entries))
        there = self._before.units((store, split, called))
        wanted = [unit for unit in units if unit not in there]
        if there and not wanted:
            self._tick(len(units) * self._n_rows(store, split))
            return Part(store, split, called, tuple(entries), self._before.pieces[store, split, called])
        cut = Cut(length, request.settings.batch_tokens)
        found = [
            self._block(store, split, block, cut, wanted)
            for block in np.flatnonzero(reader.plan.block_split == split).tolist()
        ]
        piece = added(found, wanted).joined({unit: there[unit] for unit in units if unit in there})
        return Part(store, split, called, tuple(entries), piece)

    def _block(self, store: str, split: int, block: int, cut: Cut, units: Sequence[Unit]) -> Piece:
        """A block with all of these units, those that an earlier run has not left aside measured now."""
        reader = self._request.evidence.stores[store].reader
        called = own_length(reader) if cut.length is None else cut.length
        piece = self._pieces.read(store, called, block)
        missing = [unit for unit in units if piece is None or unit not in piece.units]
        self._tick(int(reader.plan.block_rows[block]) * (len(units) - len(missing)))
        if piece is not None and not missing:
            return piece
        visit = self._visit(store, split)
        new = measure_block(
            visit,
            list(visit.batches([block], cut)),
            self._rows(store, split),
            missing,
            self._replaced,
            self._keeper(store, keeps=cut.length is None),
            self._tick,
        )
        piece = new if piece is None else piece.joined(new.units)
        if store in self._losses:
            self._losses[store].flush()
        self._pieces.write(store, called, block, piece)
        return piece

    def _keeps(self, store: str, layer: int) -> bool:
        """Whether the losses of a layer's rows are those of an earlier measurement."""
        own, unit = own_length(self._request.evidence.stores[store].reader), Unit(LINEAR, (layer,))
        return all(unit in self._before.units((store, split, own)) for split in (GATE, TEST))

    def _n_rows(self, store: str, split: int) -> int:
        plan = self._request.evidence.stores[store].reader.plan
        return int(plan.block_rows[plan.block_split == split].sum())

    def _rows(self, store: str, split: int) -> ScoredRows:
        population = self._request.evidence.stores[store].population
        return ScoredRows(self._request.scored(store, split), population.group)

    def _visit(self, store: str, split: int) -> Visit:
        """Rows of which losses are wanted: those with a target whose document no surrogate was fitted on,
        sinks among them."""
        if (store, split) not in self._visits:
            rows, limit = self._request.evidence.stores[store], self._request.settings.memory_limit_bytes
            population = rows.population
            wanted = (population.target_id >= 0) & (population.fold == UNSEEN) & (population.split == split)
            self._visits[store, split] = Visit(self._net, rows.reader, wanted, memory_limit=limit)
        return self._visits[store, split]

    def _keeper(self, store: str, *, keeps: bool) -> Any:
        """Writes the losses of rows where a layer is linearised by itself, in windows as harvested."""
        if not keeps:
            return lambda row, unit, nll, kl: None
        losses, layers = self._losses_of(store), list(self._request.layers)

        def keep(row: np.ndarray, unit: Unit | None, nll: np.ndarray, kl: np.ndarray) -> None:
            if unit is None:
                losses.base[row] = nll
            elif unit.intervention == LINEAR and len(unit.layers) == 1:
                at = layers.index(unit.layers[0])
                losses.loss(at)[row] = nll - losses.base[row]
                losses.kl(at)[row] = kl

        return keep

    def _losses_of(self, store: str) -> RowLosses:
        if store not in self._losses:
            n_rows = self._request.evidence.stores[store].reader.n_tokens
            self._losses[store] = self._pieces.losses(store, len(self._request.layers), n_rows)
        return self._losses[store]

    # Progress

    def _plan(self) -> None:
        """How many tokens will pass the model again, roughly: greedy steps and chosen sets are not known."""
        request = self._request
        n_gate = len(request.on_gate) * len(request.layers)
        n_sets = len(request.joint) * len(request.settings.compound)
        n_test = len(request.on_test) * len(request.layers) + n_sets
        for store in request.touched:
            self._total += n_gate * self._n_rows(store, GATE)
            if store in request.stores:
                self._total += n_test * self._n_rows(store, TEST) * len(request.windows(store))

    def _tick(self, n_tokens: int) -> None:
        self._done += n_tokens
        self._total = max(self._total, self._done)
        self._progress("measure", self._done, self._total, "tokens")
