"""Single positions patched exactly, beside what the harvested gradient says of them.

In: a measurement of stores with the site `mlp_output_grad`, and the model. Out: the need `loss_single` of the
patched rows, and the table `estimate`, which says how far `loss_estimate` can be trusted. Test rows of each
store are drawn, from as many documents as possible, the same ones for all layers. A store that is done is
kept aside. Cost: see `single_patches`.
"""

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
from jaxtyping import Float32, Int64

from ..analyze.estimate_checks import (
    Patches,
    Sequences,
    estimate_rows,
    sample_patches,
    sequence_sums,
    targets_following,
    to_estimate_table,
)
from ..analyze.evidence import need_columns
from ..analyze.needs import LOSS_ESTIMATE
from ..analyze.population import TEST
from ..store import Progress
from .anatomy import Anatomy
from .measure_request import LINEAR, STEP, Request
from .measured_pieces import Pieces
from .measured_results import losses_of
from .measured_sets import Measured
from .single_patches import single_patch_losses
from .substitutes import substitutes_of

LOSS_SINGLE = "loss_single"
Single = Mapping[int, Float32[np.ndarray, "token"]]  # by layer; NaN where nothing was patched


def patch_positions(
    request: Request, net: Anatomy, found: Measured, pieces: Pieces, progress: Progress
) -> dict[str, Single]:
    """`loss_single` of every store, at every layer."""
    chosen = {store: _sample(request, store) for store in request.stores}
    done = 0

    def tick(n_tokens: int) -> None:
        nonlocal done
        done += n_tokens
        progress("patch", done, max(done, 1), "tokens")

    single: dict[str, Single] = {}
    for store, rows in chosen.items():
        reader = request.evidence.stores[store].reader
        kept = _measured_before(request, found, store, rows) or pieces.read_patches(store)
        if kept is None or not np.array_equal(kept["row"], rows):
            replaced = substitutes_of(request.study, LINEAR, request.layers, net.dtype, anatomy=net)
            limit = request.settings.memory_limit_bytes
            losses = single_patch_losses(net, reader, replaced, rows, memory_limit=limit, tick=tick)
            kept = {"row": rows} | {str(layer): values.astype(np.float32) for layer, values in losses.items()}
            pieces.write_patches(store, kept)
        single[store] = {
            layer: _spread(kept["row"], kept[str(layer)], reader.n_tokens) for layer in request.layers
        }
    return single


def estimate_table(request: Request, found: Measured, single: Mapping[str, Single]) -> pa.Table:
    """The table `estimate`."""
    rows = []
    for store, of_layers in single.items():
        population = request.evidence.stores[store].population
        following = targets_following(population.sequence, population.target_id)
        patches: dict[int, Patches] = {}
        sequences: dict[int, Sequences] = {}
        for index, layer in enumerate(request.layers):
            estimate = _estimate(request, store, layer)
            at = np.flatnonzero(np.isfinite(of_layers[layer]))
            patches[layer] = Patches(estimate[at], of_layers[layer][at], population.group[at], following[at])
            loss = losses_of(request, found, store, index)["loss"]
            sequences[layer] = sequence_sums(
                estimate, loss, population.sequence, population.group, population.target_id
            )
        rows += estimate_rows(store, patches, sequences, request.settings.seed)
    return to_estimate_table(rows)


def _sample(request: Request, store: str) -> Int64[np.ndarray, "patch"]:
    """Rows that have an estimate at every layer, of those that are scored."""
    rows = np.flatnonzero(request.scored(store, TEST))
    for layer in request.layers:
        rows = rows[np.isfinite(_estimate(request, store, layer)[rows])]
    population, settings = request.evidence.stores[store].population, request.settings
    first = _estimate(request, store, request.layers[0])
    return sample_patches(rows, first, population.group, settings.patches, settings.seed)


def _estimate(request: Request, store: str, layer: int) -> Float32[np.ndarray, "token"]:
    return need_columns(request.study, layer, store, [LOSS_ESTIMATE])[LOSS_ESTIMATE]


def _measured_before(
    request: Request, found: Measured, store: str, rows: Int64[np.ndarray, "patch"]
) -> dict[str, np.ndarray] | None:
    """What an earlier measurement with the same model and surrogates patched."""
    kept = {"row": rows}
    for layer in request.layers:
        if (store, layer) not in found.kept:
            return None
        if LOSS_SINGLE not in request.study.need_names(layer, store, step=STEP):
            return None
        values = request.study.need(layer, store, step=STEP)[LOSS_SINGLE].to_numpy()
        if not np.array_equal(np.flatnonzero(np.isfinite(values)), rows):
            return None
        kept[str(layer)] = values[rows]
    return kept


def _spread(
    row: Int64[np.ndarray, "patch"], values: Float32[np.ndarray, "patch"], n_rows: int
) -> Float32[np.ndarray, "token"]:
    found = np.full(n_rows, np.nan, np.float32)
    found[row] = values
    return found
