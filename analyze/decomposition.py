"""What token, position and context contribute to a layer's input and to its linear map's output.

In: the stores of a fitted study. Out: tables `decomposition` (that x = β + t + p + k holds, and how much of k
the token foretells) and `output_shares` (shares of the variance of ŷ), and the group `context` (the maps k̂).
k̂ is fitted on the fit rows of one store and scored, like the shares, on the held-out test rows of each.
Cost: a layer is one work item: a pass over the fitted rows, one over all rows and one over the test rows, and
about five d × d products of 2 flops a test row. Memory: six arrays of a block, and K + 1 sums of d × d.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float32, Float64, Int, Int32, Int64

from ..store import Reader
from .compute import Session
from .context_map import GROUP, ContextMap, TokenBasis, fit_context_map, to_arrays, token_basis
from .evidence import Evidence
from .intervals import critical_value, r_squared_bounds, ratios
from .moments import BUFFER_ROWS
from .norms import squared_norms
from .output_shares import SPLITS_BY, OutputParts, add_products, share_rows
from .parts import PartsSource, parts_source
from .population import FIT
from .results import to_table


def run(evidence: Evidence, session: Session) -> list[str]:
    """The tables of all layers and stores, and the maps k̂."""
    fitted = evidence.fitted
    population = fitted.population
    folds = np.where(population.body & (population.split == FIT), population.fold, -1).astype(np.int32)
    stores = tuple(_scored(evidence, name) for name in evidence.stores)
    # Where a store lacks what this needs, it is said before anything is computed.
    for store in stores:
        parts_source(store.reader, evidence.layers[0])
    surrogates = evidence.study.surrogates()["weight"]
    job = _Job(fitted.reader, folds, stores, _basis(session, fitted.reader, evidence.layers[0], folds))
    items = [(layer, surrogates.sel(layer=layer).to_numpy()) for layer in evidence.layers]
    limit = evidence.settings.memory_limit_bytes // working_bytes(job)
    found = session.map(_layer, job, items, _kept, "decomposition", max(1, limit))
    return _write(evidence, dict(found))


def _basis(session: Session, reader: Reader, layer: int, folds: np.ndarray) -> TokenBasis:
    def kept(_: int, basis: TokenBasis) -> TokenBasis:
        return basis

    return session.map(_first_pass, (reader, folds), [layer], kept, "decomposition: embeddings")[0]


def _first_pass(shared: tuple[Reader, np.ndarray], layer: int) -> TokenBasis:
    reader, folds = shared
    return token_basis(parts_source(reader, layer), folds)


def _kept(item: tuple[int, np.ndarray], found: "_Layer") -> "tuple[int, _Layer]":
    return item[0], found


@dataclass(frozen=True, slots=True, eq=False)
class _Scored:
    """A store and the rows of it that are scored."""

    name: str
    reader: Reader
    usable: np.ndarray  # (token): no masked value
    rows: Int64[np.ndarray, "row"]
    group: Int[np.ndarray, "row"]  # 0 … n_groups − 1
    n_groups: int

    def within(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Scored rows of a block, by their numbers in it, and their groups."""
        start, stop = self.reader.block_range(block)
        low, high = np.searchsorted(self.rows, (start, stop))
        return self.rows[low:high] - start, self.group[low:high]


def _scored(evidence: Evidence, name: str) -> _Scored:
    store, rows = evidence.stores[name], evidence.test_rows(name)
    population = store.population
    groups, group = np.unique(population.group[rows], return_inverse=True)
    return _Scored(name, store.reader, population.body | population.sink, rows, group, groups.size)


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    """What all layers share."""

    fitted: Reader
    folds: Int32[np.ndarray, "token"]  # of the fitted store's rows; −1: not fitted
    stores: tuple[_Scored, ...]
    basis: TokenBasis


@dataclass(frozen=True, slots=True, eq=False)
class _Found:
    """Of one layer in one store: sums per group of scored rows."""

    identity_error: float
    unexplained: Float64[np.ndarray, "group"]  # Σ‖k − k̂‖²
    total: Float64[np.ndarray, "group"]  # Σ‖k − mean of k over the rows fitted‖²
    products: Mapping[str, Float64[np.ndarray, "group part part"]]  # Σ of products of centred parts of ŷ


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    map: ContextMap
    stores: Mapping[str, _Found]


def _layer(job: _Job, item: tuple[int, np.ndarray]) -> _Layer:
    """One work item."""
    layer, weight = item
    context_map = fit_context_map(parts_source(job.fitted, layer), job.folds, job.basis)
    found = {
        store.name: _score(parts_source(store.reader, layer), store, weight, context_map)
        for store in job.stores
    }
    return _Layer(context_map, found)


def _score(source: PartsSource, store: _Scored, weight: np.ndarray, context_map: ContextMap) -> _Found:
    means, identity_error = _first_look(source, store)
    outputs_of = OutputParts(weight, context_map, means)
    unexplained, total = np.zeros(store.n_groups), np.zeros(store.n_groups)
    n_parts = 2 + (source.positions is not None)
    products = {name: np.zeros((store.n_groups, n_parts, n_parts)) for name in SPLITS_BY}
    for block in range(source.reader.n_blocks):
        rows, groups = store.within(block)
        if not rows.size:
            continue
        whole = source.block(block, rows)
        for start in range(0, rows.size, BUFFER_ROWS):
            parts, group = whole.rows(start, start + BUFFER_ROWS), groups[start : start + BUFFER_ROWS]
            rest = parts.k - context_map.predict(parts.embedding)
            unexplained += np.bincount(group, squared_norms(rest), store.n_groups)
            np.subtract(parts.k, context_map.mean.astype(np.float32), out=rest)
            total += np.bincount(group, squared_norms(rest), store.n_groups)
            for name, outputs in outputs_of.split(parts).items():
                add_products(products[name], outputs, group)
    return _Found(identity_error, unexplained, total, products)


def _first_look(
    source: PartsSource, store: _Scored
) -> tuple[dict[str, Float32[np.ndarray, "feature"]], float]:
    """Means of the parts over scored rows, so that what follows is centred exactly; and the largest deviation
    of x from the sum of its parts over all rows.
    """
    sums = {name: np.zeros(source.reader.d_model) for name in ("t", "p", "k", "embedding")}
    worst = 0.0
    for block in range(source.reader.n_blocks):
        start, stop = source.reader.block_range(block)
        usable = np.flatnonzero(store.usable[start:stop])
        if not usable.size:
            continue
        parts = source.block(block, None if usable.size == stop - start else usable)
        worst = max(worst, float(parts.deviation().max()))
        scored = np.searchsorted(usable, store.within(block)[0])
        for name, total in sums.items():
            if (values := getattr(parts, name)) is not None and scored.size:
                total += values[scored].sum(axis=0, dtype=np.float64)
    n = max(1, store.rows.size)
    return {name: (total / n).astype(np.float32) for name, total in sums.items()}, worst


def working_bytes(job: _Job) -> int:
    """Peak of one work item."""
    d, n_folds = job.fitted.d_model, len(job.basis.held_in)
    block = max(store.reader.plan.block for store in job.stores)
    # Parts of a block (the rows selected are a second copy of two of them), a tile's outputs; sums of folds,
    # and what a solve has beside them.
    return 8 * block * d * 4 + 10 * BUFFER_ROWS * d * 4 + (n_folds + 8) * d * d * 8


def _write(evidence: Evidence, layers: Mapping[int, _Layer]) -> list[str]:
    study, rows, shares = evidence.study, list[dict[str, Any]](), list[dict[str, Any]]()
    for name in evidence.stores:
        n_tokens = int(evidence.test_rows(name).size)
        for number, layer in layers.items():
            found = layer.stores[name]
            key = {"store": name, "layer": number}
            size = {"n_tokens": n_tokens, "n_groups": found.total.size}
            facts = {"fit_on": evidence.fit_on, "identity_error": found.identity_error}
            rows.append(key | facts | size | {"alpha": layer.map.alpha} | _in_context(found))
            for split_by, products in found.products.items():
                shares += [
                    key | {"split_by": split_by} | size | row for row in share_rows(split_by, products)
                ]
    maps = {number: layer.map for number, layer in layers.items()}
    return [
        study.write_group(GROUP, to_arrays(maps), {"fit_on": evidence.fit_on}),
        study.write_table("decomposition", to_table("decomposition", rows)),
        study.write_table("output_shares", to_table("output_shares", shares)),
    ]


def _in_context(found: _Found) -> dict[str, float]:
    """R² of k̂ on scored rows; NaN where k does not vary (a first block that runs in parallel has none)."""
    unexplained = ratios(found.unexplained[:, None], found.total[:, None])
    low, high = r_squared_bounds(unexplained, critical_value(unexplained))
    return {
        "token_in_context": 1.0 - float(unexplained.estimate[0]),
        "token_in_context_lo": float(low[0]),
        "token_in_context_hi": float(high[0]),
    }
