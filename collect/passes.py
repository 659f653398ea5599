"""The forward passes of a measurement on one store: each batch in the unchanged model, then under one
replacement after the other.

In: an anatomy, the windows of a store, and which of its rows are scored. Out, per batch and replacement: NLL
and KL(unchanged ‖ replaced) of the scored rows in nats, on the device. All passes of a batch have the same
ids, mask and positions; blocks below the first replaced one are not run again (prefix.py), after the first
batch has shown that this changes no bit. Cost: a whole pass per batch, then the upper blocks and the head per
replacement. Memory beside the model and one pass: `memory_limit` bytes of log-probabilities and block
outputs, but room for two block outputs in any case.

    visit = Visit(anatomy, reader, scored, memory_limit=4 * 2**30)
    with evaluating(anatomy.model, threads):
        for batch in visit.batches(blocks):
            base = visit.base(batch)
            for layer in layers:  # ascending: what is kept moves up
                scores = visit.under(base, Substitution(anatomy, {layer: substitute}), [layer])
"""

import logging
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float32, Int64
from torch import Tensor

from ..store import Reader
from .anatomy import Anatomy
from .batch_rows import BatchRows
from .forward import inputs_of
from .lanes import moved
from .losses import BaseScores, base_scores, loss_and_kl
from .measured_windows import ADDED, Cut, WindowBatch, block_windows
from .nll import LIMIT_BYTES
from .prefix import Prefix
from .substitution import Substitution

logger = logging.getLogger("nearline")


@dataclass(frozen=True, slots=True, eq=False)
class RowScores:
    """Of the scored rows of one batch, in the order of `Base.row`, on the device."""

    nll: Float32[Tensor, "row"]  # nats; NaN without a target
    kl: Float32[Tensor, "row"]  # nats


@dataclass(frozen=True, slots=True, eq=False)
class Base:
    """A batch in the unchanged model, and what its further passes take from there."""

    batch: WindowBatch
    rows: BatchRows
    place: Int64[np.ndarray, "row"]  # of the scored rows in `batch.row`
    row: Int64[np.ndarray, "row"]  # their numbers in the store
    where: Int64[Tensor, "row"]  # their places in the flattened, padded batch
    scores: BaseScores
    prefix: Prefix

    @property
    def nll(self) -> Float32[Tensor, "row"]:
        """Of the scored rows, in nats; NaN without a target."""
        return self.scores.nll

    def release(self) -> None:
        """Free what is kept; further passes give the same numbers and take longer."""
        self.prefix.release()
        self.scores.release()


class Visit:
    """Named steps: `batches`; for each one `base`; then `under` per replacement, those that begin low first.
    The caller holds `forward.evaluating` around all of it. A new base frees what the one before has kept.

    `scored`: a flag for each row of the store. `logits_bytes` bounds the logits that are made at once.
    """

    def __init__(
        self,
        anatomy: Anatomy,
        reader: Reader,
        scored: Bool[np.ndarray, "token"],
        *,
        memory_limit: int,
        logits_bytes: int = LIMIT_BYTES,
    ) -> None:
        self.anatomy, self.reader, self.scored = anatomy, reader, scored
        self._limit, self._logits_bytes = memory_limit, logits_bytes
        self._reuses: bool | None = None
        self._last: Base | None = None

    @property
    def reuses_prefix(self) -> bool | None:
        """Whether lower blocks are left out; None before the first batch has shown it."""
        return self._reuses

    def batches(self, blocks: Iterable[int], cut: Cut | None = None) -> Iterator[WindowBatch]:
        """Batches of these blocks that hold a scored row, as harvested or cut anew."""
        for block in blocks:
            for batch in block_windows(self.reader, block, cut or Cut()):
                if self._places(batch).size:
                    yield batch

    def base(self, batch: WindowBatch) -> Base:
        """The pass of the unchanged model."""
        if self._last is not None:
            self._last.release()
        place = self._places(batch)
        inputs = inputs_of(batch.ids, batch.mask, self.anatomy.device)
        where = moved(torch.from_numpy(np.flatnonzero(batch.mask)[place]), self.anatomy.device)
        room, log_p_bytes = self._shares(batch.ids.size, place.size)
        prefix = Prefix(self.anatomy, inputs, None if self._reuses is False else room)
        hidden = prefix.base()
        if self._reuses is None and not self._proven(prefix, hidden):
            prefix = Prefix(self.anatomy, inputs, None)
        scores = base_scores(
            self.anatomy,
            _chosen(hidden, where),
            torch.from_numpy(batch.target_id[place]),
            keep_bytes=log_p_bytes,
            limit_bytes=self._logits_bytes,
        )
        self._last = Base(batch, batch_rows(batch), place, batch.row[place], where, scores, prefix)
        return self._last

    def under(
        self,
        base: Base,
        replacement: Substitution,
        layers: Collection[int],
        rows: BatchRows | None = None,
    ) -> RowScores:
        """The batch again with `replacement` in place, whose layers these are. `rows` instead of the batch's
        own where others are to be covered: one position of a sequence, say."""
        first = min(layers)
        base.prefix.reach(first)
        with replacement as live:
            live.rows = base.rows if rows is None else rows
            hidden = base.prefix.above(first)
        return RowScores(*loss_and_kl(self.anatomy, _chosen(hidden, base.where), base.scores))

    def _places(self, batch: WindowBatch) -> Int64[np.ndarray, "row"]:
        """Of the scored rows in `batch.row`."""
        return np.flatnonzero((batch.row != ADDED) & self.scored[np.maximum(batch.row, 0)])

    def _proven(self, prefix: Prefix, hidden: Tensor) -> bool:
        """Whether lower blocks can be left out, by half a pass of the first batch."""
        try:
            self._reuses = prefix.holds(hidden)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError, ValueError, LookupError, AttributeError):
            self._reuses = False  # a block that waits for what another one leaves behind
        if not self._reuses:
            logger.warning(
                "leaving out lower blocks changes what this model computes, so every replacement runs the "
                "whole model: the same results in about twice the time"
            )
        return self._reuses

    def _shares(self, n_padded: int, n_scored: int) -> tuple[int, int]:
        """Bytes for block outputs, and for log-probabilities. These save a head product per replacement and
        come first; block outputs that do not fit cost one more pass over the batch in all."""
        two_blocks = 2 * n_padded * self.anatomy.d_model * self.anatomy.dtype.itemsize
        log_p = min(4 * n_scored * self.anatomy.vocab_size, max(self._limit - two_blocks, 0))
        return max(self._limit - log_p, two_blocks), log_p


def batch_rows(batch: WindowBatch) -> BatchRows:
    """The rows of a batch as substitutes want them: in their places, padding included."""

    def spread(values: np.ndarray, fill: Any) -> np.ndarray:
        out = np.full(batch.mask.shape, fill, values.dtype)
        out[batch.mask] = values
        return out

    return BatchRows(
        token_id=spread(batch.token_id, 0),
        position=spread(batch.position, 0),
        covered=spread(batch.covered, fill=False),
        row=spread(batch.row, ADDED),
    )


def _chosen(hidden: Tensor, where: Int64[Tensor, "row"]) -> Tensor:
    return hidden.reshape(-1, hidden.shape[-1]).index_select(0, where.to(hidden.device))
