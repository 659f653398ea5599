"""The loop itself: batch after batch through the model, block after block to the writer.

In: a prepared harvest, an open writer and the blocks to do. Out: these blocks committed, and how long one
side waited for the other. A block is handed over when its last row is there and found good, and the next one
fills the other buffer meanwhile. Whatever ends the loop early, the blocks handed over are still committed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ..store.errors import EnvironmentFault
from ..store.progress import Progress
from ..store.writer import StoreWriter
from . import stopping
from .batch_budget import device_full, is_full
from .buffers import BlockBuffer, make_buffers
from .capture import Capture
from .flight import Flight, OpenBlock
from .needs import largest_batch, working_device
from .pipeline import Pipeline
from .preparing import Prepared
from .recorder import Filling, Recorder
from .refused_values import ValueRefused
from .rows import block_batches, block_columns
from .stopping import StopNow, Watch


@dataclass(frozen=True, slots=True)
class Waits:
    """Seconds in which the model's thread stood still: for the writer (a free buffer, and at the end the last
    commit), and for a GPU. `busy_s`: seconds in which that one was at work; None on a CPU."""

    disk_s: float = 0.0
    device_s: float = 0.0
    busy_s: float | None = None


def run_blocks(
    prepared: Prepared,
    writer: StoreWriter,
    *,
    mask_nonfinite: bool,
    progress: Progress,
    blocks: Sequence[int] | None = None,
    watch: Watch | None = None,
    ahead: int | None = None,
) -> Waits:
    """Harvest and commit `blocks` (default: every block of the plan that `writer` has not committed).
    `ahead`: forward passes in flight beside the one that is judged; default: 1 on a GPU, 0 on a CPU."""
    plan, watch = prepared.planned.plan, watch or Watch()
    if blocks is None:
        blocks = sorted(set(range(plan.n_blocks)) - writer.committed)
    if not blocks:
        return Waits()
    n_rows, done = int(plan.block_rows[list(blocks)].sum()), 0
    exponents = writer.attributes.storage.gradient_exponents
    recorder = recorder_of(prepared, mask_nonfinite=mask_nonfinite, ahead=ahead, exponents=exponents)

    def write(buffer: BlockBuffer, block: OpenBlock) -> None:
        statistics = block.filling.statistics()
        writer.commit(block.number, block.columns, buffer.stored(block.n_rows), statistics)
        watch.block_took(stopping.now() - block.began_s)

    def hand_over(block: OpenBlock) -> None:
        pipeline.submit(block.filling.buffer, block)
        watch.block_took(stopping.now() - block.began_s)

    pipeline = Pipeline(write, make_buffers(prepared.shape, working_device(prepared.anatomy)))
    capture = Capture(prepared.anatomy, recorder, sites=prepared.shape.sites, layers=prepared.shape.layers)
    flight = Flight(prepared.anatomy, recorder, capture, hand_over)
    try:
        with watch.request.deferring(), pipeline, capture:
            try:
                for number in blocks:
                    watch.before_block()
                    block = _open_block(prepared, number, pipeline, flight)
                    for batch in block_batches(plan, number, block.columns["token_id"]):
                        pipeline.check()
                        watch.before_batch()
                        flight.launch(block, batch)
                        progress("collect", done + batch.row1, n_rows, "tokens")
                    done += block.n_rows
                flight.land()
            except (StopNow, RuntimeError) as error:
                if isinstance(error, StopNow) or is_full(error):
                    flight.land()  # the block before the one in hand may be whole already
                raise
        watch.after_blocks()
    except ValueRefused as refused:
        raise refused.explained(prepared, len(writer.committed)) from None
    except StopNow as stop:
        raise stop.explained(len(writer.committed), plan.n_blocks) from None
    except RuntimeError as error:
        if not is_full(error):
            raise
        raise device_full(error, plan, len(writer.committed)) from None
    except EnvironmentFault as fault:
        safe = f"{len(writer.committed)} of {plan.n_blocks} blocks are committed"
        raise EnvironmentFault(f"{fault}. {safe}; once that is done, {stopping.CONTINUES}") from fault
    return Waits(pipeline.waited_s, flight.waited_s, flight.busy_s)


def recorder_of(
    prepared: Prepared, *, mask_nonfinite: bool, ahead: int | None = None, exponents: Sequence[int] = ()
) -> Recorder:
    """A recorder for the batches of this plan. `exponents`: those that the store keeps gradients with."""
    if ahead is None:
        ahead = 0 if working_device(prepared.anatomy).type == "cpu" else 1
    most_rows = largest_batch(prepared.planned.plan)[0]
    return Recorder(
        prepared.shape,
        most_rows=most_rows,
        mask_nonfinite=mask_nonfinite,
        ahead=ahead,
        exponents=exponents,
    )


def _open_block(
    prepared: Prepared, number: int, pipeline: Pipeline[BlockBuffer, OpenBlock], flight: Flight
) -> OpenBlock:
    """A block in an empty buffer. Where the model has to wait for one, the writer first gets all there is."""
    if not pipeline.has_free:
        flight.land()
    buffer, began_s = pipeline.borrow(), stopping.now()
    columns = block_columns(prepared.planned.plan, number, prepared.tokens.ids, prepared.tokens.special_ids)
    return OpenBlock(number, began_s, columns, Filling(buffer, prepared.shape))
