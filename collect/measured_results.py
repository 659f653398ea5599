"""What a measurement leaves in its study: `measured`, the tables that follow from it, needs of single rows.

In: what the sweep found. Out: paths of the files, as the record of the step wants them, and facts. Tables
wait aside until all of them are there. Cost: that of the tables; needs go layer by layer.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
from jaxtyping import Float32

from ..analyze.cost_bounds import FlopsSaved
from ..analyze.costs import write_cost_tables
from ..analyze.population import FIT, TEST, UNSEEN
from ..store import Study
from ..store.staging import StagedStudy
from .measure_request import STEP, Request
from .measured_before import Before
from .measured_sets import Measured

BASE: Final = "base_against_stored_nll"


def write_results(
    request: Request,
    found: Measured,
    more: Mapping[str, pa.Table],
    noise: Sequence[Mapping[str, Any]] = (),
    flops_saved: FlopsSaved | None = None,
) -> list[str]:
    """Write everything, `more` tables by name too; the paths of all files of the step, put in place."""
    with StagedStudy.writing(request.study) as study:
        before = study.provenance().get(STEP, {"outputs": {}})["outputs"]
        needs = [path for store in request.stores for path in _write_needs(study, request, store, found)]
        study.commit(needs)  # tables are made of them, by functions that look where needs belong
        tables = write_cost_tables(
            study,
            found.table(),
            {store: request.evidence.test_rows(store) for store in request.stores},
            request.layers,
            noise=noise,
            flops_saved=flops_saved,
            seed=request.settings.seed,
        )
        tables += [study.write_table(name, table) for name, table in more.items()]
        study.commit(tables, sorted(set(before) - set(needs)))
    return [*needs, *tables]


def _write_needs(study: Study, request: Request, store: str, found: Measured) -> list[str]:
    """`loss` and `kl` of every layer, and what else was measured of single rows."""
    paths = []
    for index, layer in enumerate(request.layers):
        columns = losses_of(request, found, store, index) | found.single_rows(store, layer)
        paths.append(study.write_need(layer, store, pa.table(dict(columns)), step=STEP))
    return paths


def losses_of(
    request: Request, found: Measured, store: str, index: int
) -> dict[str, Float32[np.ndarray, "token"]]:
    """`loss` and `kl` of gate and test rows that no surrogate was fitted on, at a layer by its place among
    those measured; NaN for all others.
    """
    layer = request.layers[index]
    if (store, layer) in found.kept:
        table = request.study.need(layer, store, step=STEP)
        return {name: table[name].to_numpy() for name in ("loss", "kl")}
    population, losses = request.evidence.stores[store].population, found.losses[store]
    known = (population.split != FIT) & (population.fold == UNSEEN) & (population.target_id >= 0)
    columns = {"loss": losses.loss(index), "kl": losses.kl(index)}
    return {name: np.where(known, one, np.float32(np.nan)) for name, one in columns.items()}


def base_facts(request: Request, found: Measured, before: Before) -> dict[str, Any]:
    """How far the base pass is from the losses that the harvest stored, on scored rows, in nats."""
    facts: dict[str, Any] = {}
    for store in request.stores:
        if all((store, layer) in found.kept for layer in request.layers):
            facts[store] = before.facts[BASE][store]
            continue
        scored = request.scored(store, TEST)
        stored = np.asarray(request.evidence.stores[store].reader.column("nll"))[scored]
        change = np.abs(found.losses[store].base[scored].astype(np.float64) - stored)
        facts[store] = {"median": float(np.median(change)), "largest": float(change.max())}
    return {BASE: facts}
