"""What replacing MLPs costs: the table `measured` and the needs `loss` and `kl` in, all tables that follow
from them out, without the model.

`cost_tables` needs sums over groups alone; `need_tables` reads the needs of single rows from the study, layer
by layer, so they must be in place before. Only held-out rows count, those that `Evidence.test_rows` names.
Cost: about 0.1 s for each family of simultaneous intervals (an intervention over layers, a pair of routers),
and one read of the needs.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Int64

from ..store import Study
from .compounds import compound_rows, progressive_rows
from .cost_bounds import FlopsSaved
from .cost_comparisons import context_length_rows, sink_rows
from .cost_rows import intervention_rows
from .cost_tables import COST_SCHEMAS, to_cost_table
from .evidence import need_columns
from .loss_tables import histogram_rows, kl_loss, kl_loss_rows, loss_row
from .measured import read_measured
from .need_agreement import agreement_rows, pairs_of_needs
from .needs import LOSS_ESTIMATE, NEEDS
from .noise_floor import refused_labels
from .paper_selection import paper_selection_rows
from .pareto import pareto_rows
from .routers import router_rows

LOSSES = ("loss", "kl")


def write_cost_tables(
    study: Study,
    measured: pa.Table,
    test_rows: Mapping[str, Int64[np.ndarray, "row"]],
    layers: Sequence[int],
    *,
    noise: Sequence[Mapping[str, Any]] = (),
    flops_saved: FlopsSaved | None = None,
    seed: int = 0,
) -> list[str]:
    """Write `measured` and every table that follows from it; their paths inside the study, as `record_step`
    wants them. `test_rows`: held-out rows of each store that was measured; `layers`: those whose needs may be
    there; `noise`: rows of `noise_floor`.
    """
    tables = {"measured": measured.select(COST_SCHEMAS["measured"].names).cast(COST_SCHEMAS["measured"])}
    tables |= cost_tables(measured, seed, flops_saved)
    tables["noise_floor"] = to_cost_table("noise_floor", noise)
    tables |= need_tables(study, test_rows, layers, tables["noise_floor"], seed)
    return [study.write_table(name, tables[name]) for name in COST_SCHEMAS]


def cost_tables(
    measured: pa.Table, seed: int = 0, flops_saved: FlopsSaved | None = None
) -> dict[str, pa.Table]:
    """The tables that need no single rows, by name; one that has nothing to say is there without rows.
    `flops_saved`: what a share saves, from the shapes of the model; without it these columns are NaN.
    """
    scored = read_measured(measured)
    interventions = [row for one in scored for row in intervention_rows(one, seed, flops_saved or _unknown)]
    rows = {
        "interventions": interventions,
        "routers": [row for one in scored for row in router_rows(one, seed)],
        "pareto": pareto_rows(interventions),
        "compound": [row for one in scored for row in compound_rows(one, seed)],
        "progressive": [
            row for one in scored for row in progressive_rows(one, seed, flops_saved or _unknown)
        ],
        "sinks": [row for one in scored for row in sink_rows(one, seed)],
        "context_lengths": context_length_rows(scored, seed),
        "paper_selection": [row for one in scored for row in paper_selection_rows(one, seed)],
    }
    return {name: to_cost_table(name, found) for name, found in rows.items()}


def _unknown(name: str, layers: tuple[int, ...], share: float) -> tuple[float, float]:
    return float("nan"), float("nan")


def need_tables(
    study: Study,
    test_rows: Mapping[str, Int64[np.ndarray, "row"]],
    layers: Sequence[int],
    noise: pa.Table,
    seed: int,
) -> dict[str, pa.Table]:
    """The tables of single rows: `losses`, `loss_histogram`, `kl_loss`, `need_agreement`."""
    refused = refused_labels(noise)
    rows: dict[str, list[dict[str, Any]]] = {
        name: [] for name in ("losses", "loss_histogram", "kl_loss", "need_agreement")
    }
    for store, index in test_rows.items():
        group = study.rows(store)["group"].to_numpy()[index]
        regressed, pairs = [], []
        for layer in layers:
            needs = _needs(study, layer, store, index)
            for need in LOSSES:
                if need in needs:
                    rows["losses"].append(loss_row(store, layer, need, needs[need], group))
                    rows["loss_histogram"] += histogram_rows(store, layer, need, needs[need])
            if all(need in needs for need in LOSSES):
                regressed.append(kl_loss(store, layer, needs["loss"], needs["kl"], group))
            pairs.append(pairs_of_needs(needs, group))
        rows["kl_loss"] += kl_loss_rows(regressed, seed)
        rows["need_agreement"] += agreement_rows(store, layers, pairs, seed, refused.get(store, ()))
    return {name: to_cost_table(name, found) for name, found in rows.items()}


def _needs(study: Study, layer: int, store: str, index: np.ndarray) -> dict[str, np.ndarray]:
    """The needs that there are of these rows."""
    there = set(study.need_names(layer, store))
    for step in study.need_steps(layer, store):
        there |= set(study.need_names(layer, store, step=step))
    names = [name for name in (*NEEDS, *LOSSES, LOSS_ESTIMATE) if name in there]
    return {name: values[index] for name, values in need_columns(study, layer, store, names).items()}
