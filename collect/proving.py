"""All that a harvest proves of its model before it begins, and what of it the store needs to know.

In: a prepared harvest; where the store was begun before, its attributes. Out: the proof's errors, and the
exponents that gradients are stored with: those of the store that was begun, whatever this machine would
choose, so that all runs and ranks write the same. Cost: that of the proof, which is run on the plan's first
batch whichever blocks a run takes.
"""

from dataclasses import dataclass

import numpy as np

from ..store.attributes import Attributes
from ..store.dtypes import GRADIENT
from .gradient_proof import gradient_exponents, prove_gradient
from .preparing import Prepared
from .proof import prove
from .rows import block_batches, block_columns


@dataclass(frozen=True, slots=True)
class Proved:
    """Errors and tolerances by name; of each stored layer the exponent of its gradient (empty: 0)."""

    errors: dict[str, float]
    exponents: tuple[int, ...] = ()


def proved(prepared: Prepared, begun: Attributes | None = None) -> Proved:
    """Prove the model of this harvest, or raise. `begun`: of the store that it continues or stands in for."""
    net, shape, sequences = prepared.anatomy, prepared.shape, first_batch(prepared)
    errors = prove(net, sequences)
    if GRADIENT not in shape.sites:
        return Proved(errors)
    errors |= prove_gradient(net, sequences, shape.layers)
    if (
        begun is not None
        and begun.storage.layers == shape.layers
        and begun.storage.dtype == shape.storage_dtype
    ):
        return Proved(errors, begun.storage.gradient_exponents)
    columns = _columns(prepared)
    batch = next(block_batches(prepared.planned.plan, 0, columns["token_id"]))
    target = columns["target_id"][batch.row0 : batch.row1]
    return Proved(errors, gradient_exponents(net, shape, batch, target))


def first_batch(prepared: Prepared) -> list[np.ndarray]:
    """Token ids of the sequences of the first forward pass, BOS included."""
    plan = prepared.planned.plan
    token_id, n_sequences = _columns(prepared)["token_id"], len(plan.batches_of(0)[0])
    return np.split(token_id[: plan.row_offsets[n_sequences]], plan.row_offsets[1:n_sequences])


def _columns(prepared: Prepared) -> dict[str, np.ndarray]:
    tokens = prepared.tokens
    return block_columns(prepared.planned.plan, 0, tokens.ids, tokens.special_ids)
