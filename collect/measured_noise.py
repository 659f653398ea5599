"""How much of a loss is rounding: some sequences once more in a finer dtype.

In: a measurement that is done, and its model. Out: rows of the table `noise_floor`. float32 is the finer
dtype of bfloat16 and float16; of float32 it is float64 (where a family's norms and the loss itself stay in
float32, so that this is a lower bound). The surrogate takes part: rounding its weights is noise too. Cost:
for about `TOKENS` test tokens of each store a base pass, and the blocks above for each layer; a model that is
somebody else's is copied first.
"""

import copy
import logging
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
import torch

from ..analyze.noise_floor import noise_floor_row
from ..analyze.population import TEST
from ..store import Reader
from .anatomy import Anatomy, anatomy
from .batch_budget import is_full
from .forward import evaluating
from .live_models import config_of, unwrapped
from .measure_request import LINEAR, Request
from .measured_results import losses_of
from .measured_sets import Measured
from .measured_windows import Cut, WindowBatch, block_windows, some_sequences
from .models import LoadedModel
from .packed import quantisation_of
from .passes import Visit
from .substitutes import substitutes_of
from .substitution import Substitution

TOKENS: Final = 1024  # of each store
_FINER: Final = {
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.float32: torch.float64,
}
_LOG = logging.getLogger("nearline")


def noise_rows(request: Request, loaded: LoadedModel, found: Measured, *, ours: bool) -> list[dict[str, Any]]:
    """Rows of `noise_floor`. `ours`: the model was loaded for this measurement, which ends with this: it may
    be changed. None where a finer pass is not possible: weights are packed or spread over devices.
    """
    coarse = anatomy(loaded.model).dtype
    finer = _FINER.get(coarse)
    packing = quantisation_of(config_of(unwrapped(loaded.model)), loaded.model)  # what was unpacked is plain
    if finer is None or packing is not None or hasattr(loaded.model, "hf_device_map"):
        why = f"these are in {coarse}" if finer is None else "these are spread over devices"
        why = why if packing is None else f"these are packed ({packing})"
        _LOG.info("measure: the noise floor takes the weights to a finer dtype, and is left out: %s", why)
        return []
    threads = torch.get_num_threads()
    try:
        model = (loaded.model if ours else copy.deepcopy(loaded.model)).to(finer)
        with evaluating(model, threads):
            return list(_rows(request, anatomy(model), found, coarse))
    except RuntimeError as error:
        first = str(error).split("\n", 1)[0][:120]
        why = (
            "there is too little memory for it"
            if is_full(error)
            else f"the model does not run in it ({first})"
        )
        _LOG.warning("measure: the noise floor in %s is left out: %s", finer, why)
        return []


def _rows(request: Request, net: Anatomy, found: Measured, coarse: torch.dtype) -> Iterator[dict[str, Any]]:
    dtypes = tuple(str(one).removeprefix("torch.") for one in (coarse, net.dtype))
    for store in request.stores:
        rows = request.evidence.stores[store]
        scored = request.scored(store, TEST)
        row, base, losses = _finer(request, net, rows.reader, scored)
        for index, layer in enumerate(request.layers):
            own = losses_of(request, found, store, index)
            yield noise_floor_row(
                store,
                layer,
                (dtypes[0], dtypes[1]),
                own["loss"][row],
                losses[layer],
                np.asarray(rows.reader.column("nll"))[row] - base,
                rows.population.group[row],
            )


def _finer(
    request: Request, net: Anatomy, reader: Reader, scored: np.ndarray
) -> tuple[np.ndarray, np.ndarray, Mapping[int, np.ndarray]]:
    """Of the rows that are measured again: their numbers, nll of the base pass, and loss of each layer."""
    replaced = substitutes_of(request.study, LINEAR, request.layers, net.dtype, anatomy=net)
    visit = Visit(net, reader, scored, memory_limit=request.settings.memory_limit_bytes)
    row, base = [], []
    losses: dict[int, list[np.ndarray]] = {layer: [] for layer in request.layers}
    for batch in _sample(reader, scored):
        unchanged = visit.base(batch)
        row.append(unchanged.row)
        base.append(unchanged.nll.cpu().numpy())
        for layer in request.layers:
            live = Substitution(net, {layer: replaced[layer]})
            nll = visit.under(unchanged, live, [layer]).nll
            losses[layer].append((nll - unchanged.nll).cpu().numpy())
    return (
        np.concatenate(row),
        np.concatenate(base),
        {layer: np.concatenate(parts) for layer, parts in losses.items()},
    )


def _sample(reader: Reader, scored: np.ndarray) -> Iterator[WindowBatch]:
    """Every so-manieth test sequence that has a scored row, so that many documents speak."""
    blocks = np.flatnonzero(reader.plan.block_split == TEST).tolist()
    every, seen = max(1, int(scored.sum()) // TOKENS), 0
    for block in blocks:
        for batch in block_windows(reader, block, Cut()):
            sequence = np.repeat(np.arange(batch.mask.shape[0]), batch.mask.sum(axis=1))
            there = np.unique(sequence[scored[batch.row]]).tolist()
            chosen = [one for at, one in enumerate(there, seen) if at % every == 0]
            seen += len(there)
            if (part := some_sequences(batch, chosen)) is not None:
                yield part
