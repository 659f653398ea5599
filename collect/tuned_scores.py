"""How well a model in training predicts held-out text: sums of losses over groups of documents.

In: an anatomy (with whatever stands in for its MLPs at the moment) and the rows to score. Out: nats summed
over the scored rows of each group, in float64. Dropout is off meanwhile; gradients are not kept. Cost: a
forward pass over the scored windows, and one head product a scored row.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float64
from torch import nn

from .anatomy import Anatomy
from .forward import final_hidden, inputs_of
from .nll import token_nll
from .tuned_layers import Tuned
from .tuning_data import ScoredRows


@dataclass(frozen=True, slots=True, eq=False)
class Score:
    """Sums over the groups of `rows`. `gates`: of each layer the mean of g over covered rows, and the share
    of rows with g < 0.5.
    """

    rows: ScoredRows
    nll: Float64[np.ndarray, "group"]
    gates: dict[int, tuple[float, float]]


def score(
    anatomy: Anatomy, rows: Sequence[ScoredRows], dtype: torch.dtype, tuned: Tuned | None
) -> list[Score]:
    """The losses of the model as it is, with products in `dtype`."""
    device = anatomy.device
    with quiet(anatomy.model), torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
        return [_score(anatomy, one, tuned) for one in rows]


def _score(anatomy: Anatomy, rows: ScoredRows, tuned: Tuned | None) -> Score:
    nll = np.zeros(rows.groups.size)
    sums: dict[int, np.ndarray] = {}
    for one in rows.batches:
        inputs = inputs_of(one.batch.ids, one.batch.mask, anatomy.device)
        hidden = final_hidden(anatomy, inputs)
        where = torch.from_numpy(np.flatnonzero(one.batch.mask)[one.place]).to(hidden.device)
        chosen = hidden.reshape(-1, hidden.shape[-1]).index_select(0, where)
        found = token_nll(anatomy, chosen, torch.from_numpy(one.batch.target_id[one.place]))
        values = found.double().cpu().numpy()
        nll += np.bincount(one.group, weights=values, minlength=rows.groups.size)
        for layer, g in (tuned.gates() if tuned is not None else {}).items():
            gate = g.double()
            seen = np.array([float(gate.sum()), float((gate < 0.5).sum()), gate.numel()])
            sums[layer] = sums.get(layer, np.zeros(3)) + seen
    gates = {layer: (float(total / n), float(below / n)) for layer, (total, below, n) in sums.items() if n}
    return Score(rows, nll, gates)


@contextmanager
def quiet(model: nn.Module) -> Generator[None]:
    """Dropout off and no gradients, for a while; inference mode would leave tensors that enter no graph."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)
