"""The loop itself: batch after batch through the model, block after block to the writer.

In: a prepared harvest, an open writer and the blocks to do. Out: these blocks committed, and how long the
model waited for the writer. Per batch one forward pass, the losses, and one look at the sizes of all values
seen; nothing else waits for the device. A block is handed over when its last row is there, and the next one
fills the other buffer meanwhile. Whatever ends the loop early, the blocks handed over are still committed.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from ..store.errors import EnvironmentFault, NotFinite, OutOfRange
from ..store.progress import Progress
from ..store.writer import StoreWriter
from . import stopping
from .buffers import SITES, BlockBuffer, Recorder, ValueRefused, make_buffers, places_of
from .capture import Capture
from .forward import final_hidden, inputs_of
from .nll import NO_TARGET, token_nll
from .pipeline import Pipeline
from .preparing import Prepared
from .rows import Batch, block_batches, block_columns
from .stopping import StopNow, Watch


class Job(NamedTuple):
    """One full block, but for the activations, which stay in its buffer."""

    number: int
    began_s: float
    columns: dict[str, np.ndarray]
    statistics: dict[str, dict[str, list[float] | list[int]]]


def run_blocks(
    prepared: Prepared,
    writer: StoreWriter,
    *,
    mask_nonfinite: bool,
    progress: Progress,
    blocks: Sequence[int] | None = None,
    watch: Watch | None = None,
) -> float:
    """Harvest and commit `blocks` (default: every block of the plan that `writer` has not committed). Returns
    the seconds that the model's thread stood still: for a free buffer, and at the end for the last commit."""
    plan, device, watch = prepared.planned.plan, prepared.anatomy.device, watch or Watch()
    if blocks is None:
        blocks = sorted(set(range(plan.n_blocks)) - writer.committed)
    if not blocks:
        return 0.0
    n_rows, done = int(plan.block_rows[list(blocks)].sum()), 0
    recorder = Recorder(prepared.shape, device, mask_nonfinite)

    def write(buffer: BlockBuffer, job: Job) -> None:
        writer.commit(job.number, job.columns, buffer.stored(len(job.columns["token_id"])), job.statistics)
        watch.block_took(stopping.now() - job.began_s)

    pipeline = Pipeline(write, make_buffers(prepared.shape, device))
    capture = Capture(prepared.anatomy, recorder, sites=SITES, layers=prepared.shape.layers)
    place = [0, 0]  # block and its first row, for the error below
    try:
        with watch.request.deferring(), pipeline, capture:
            for number in blocks:
                place = [number, plan.block_range(number)[0]]
                watch.before_block()
                buffer, began_s = pipeline.borrow(), stopping.now()
                recorder.start_block(buffer)
                columns = block_columns(plan, number, prepared.tokens.ids, prepared.tokens.special_ids)
                columns["nll"] = np.full(len(columns["token_id"]), np.nan, np.float32)
                for batch in block_batches(plan, number, columns["token_id"]):
                    pipeline.check()
                    watch.before_batch()
                    harvest_batch(prepared, recorder, capture, batch, columns)
                    progress("collect", done + batch.row1, n_rows, "tokens")
                pipeline.submit(buffer, Job(number, began_s, columns, recorder.statistics()))
                watch.block_took(stopping.now() - began_s)
                done += len(columns["token_id"])
        watch.after_blocks()
    except ValueRefused as refused:
        raise _explained(refused, prepared, place, len(writer.committed)) from None
    except StopNow as stop:
        raise stop.explained(len(writer.committed), plan.n_blocks) from None
    except EnvironmentFault as fault:
        safe = f"{len(writer.committed)} of {plan.n_blocks} blocks are committed"
        raise EnvironmentFault(f"{fault}. {safe}; once that is done, {stopping.CONTINUES}") from fault
    return pipeline.waited_s


def harvest_batch(
    prepared: Prepared, recorder: Recorder, capture: Capture, batch: Batch, columns: dict[str, np.ndarray]
) -> None:
    """One forward pass: activations into the recorder's buffer, losses and masked rows into `columns`."""
    anatomy = prepared.anatomy
    places = places_of(batch.mask, anatomy.device)
    recorder.start_batch(batch.row0, batch.row1, places)
    hidden = final_hidden(anatomy, inputs_of(batch.ids, batch.mask, anatomy.device)).flatten(0, 1)
    capture.check_counts()
    rows = slice(batch.row0, batch.row1)
    target = torch.from_numpy(columns["target_id"][rows]).to(hidden.device)
    nll = token_nll(anatomy, hidden if places is None else hidden.index_select(0, places), target)
    masked = recorder.finish_batch()
    columns["nll"][rows] = nll.cpu().numpy()
    bad_nll = ~np.isfinite(columns["nll"][rows]) & (columns["target_id"][rows] != NO_TARGET)
    if bad_nll.any() and not recorder.mask_nonfinite:
        row = batch.row0 + int(np.flatnonzero(bad_nll)[0])
        raise ValueRefused("nll", None, row, float("nan"), float("inf"))
    columns["valid"][rows] = ~bad_nll if masked is None else ~(bad_nll | masked)


def _explained(
    refused: ValueRefused, prepared: Prepared, place: list[int], n_committed: int
) -> NotFinite | OutOfRange:
    plan = prepared.planned.plan
    number, row0 = place
    columns = block_columns(plan, number, prepared.tokens.ids, prepared.tokens.special_ids)
    token, position = int(columns["token_id"][refused.row]), int(columns["position"][refused.row])
    key = prepared.corpus.documents[int(columns["document"][refused.row])].key
    where = f"token row {row0 + refused.row:,} (token id {token}, position {position}, document {key!r})"
    safe = (
        f"The {n_committed} blocks committed before are intact." if n_committed else "Nothing was committed."
    )
    return refused.explained(prepared.shape.storage_dtype, where, safe)
