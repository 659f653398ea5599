"""The pass of a harvest that stores no rows: which sum each row belongs to, and each block through the model.

In: a prepared harvest and its recorder. Out: the sums in the recorder, of the rows that a harvest with these
settings would store, in the folds that `fit` would give their documents. Only blocks of `fit` and `test` go
through the model; whatever ends the pass early leaves sums that nobody takes. Cost: the forward passes and
4·d² flops a row and layer.
"""

import dataclasses

import numpy as np

from ..analyze.population import FIT, GATE, TEST, UNSEEN, spread_documents
from ..store.attributes import Attributes
from ..store.plan import Plan
from ..store.progress import Progress
from . import stopping
from .batch_budget import device_full, is_full
from .buffers import BlockBuffer
from .capture import Capture
from .describing import norms_of
from .flight import Flight, OpenBlock
from .forward import final_hidden, inputs_of
from .moments_recorder import MomentsRecorder
from .needs import largest_batch, working_device
from .preparing import Prepared
from .recorder import Filling
from .refused_values import ValueRefused
from .rows import block_batches, block_columns
from .settings import HarvestSettings
from .stopping import Interrupted, StopNow, TimeIsUp, Watch

STARTS_OVER = "sums are written at the end, so nothing was kept; the same command starts over"


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class RowSums:
    """Where the rows of each document go."""

    folds: dict[str, int]  # by content hash
    n_fit: np.ndarray  # rows to fit of each document
    fold: np.ndarray  # of each document
    n_folds: int

    @classmethod
    def of(cls, prepared: Prepared, settings: HarvestSettings) -> "RowSums":
        plan, hashes = prepared.planned.plan, prepared.content_hashes
        n_fit = np.zeros(len(hashes), np.int64)
        for number in np.flatnonzero(plan.block_split == FIT).tolist():
            columns = _columns(prepared, number)
            n_fit += np.bincount(columns["document"][is_body(columns)], minlength=len(hashes))
        n_stored = int(np.unique(prepared.groups[np.unique(plan.document)]).size)
        folds = spread_documents(hashes, prepared.groups, n_fit, settings.folds, settings.fold_seed, n_stored)
        fold = np.array([folds.get(content_hash, UNSEEN) for content_hash in hashes])
        return cls(folds, n_fit, fold, settings.folds)

    def keys(self, columns: dict[str, np.ndarray]) -> np.ndarray:
        """The sum each row of a block belongs to: its fold; `n_folds` for test; of sink rows, one more for
        fit, two more for test; −1 for none. As a fit has them of stored rows."""
        body, fold, n_folds = is_body(columns), self.fold[columns["document"]], self.n_folds
        fit = np.where(body | (fold < 0), fold, n_folds + 1)
        test = np.where(body, n_folds, n_folds + 2)
        return np.select([columns["split"] == FIT, columns["split"] == TEST], [fit, test], -1)


def is_body(columns: dict[str, np.ndarray]) -> np.ndarray:
    """Rows that enter fits; no row is masked here."""
    return ~columns["special"] & (columns["position"] != 0)


def _columns(prepared: Prepared, number: int) -> dict[str, np.ndarray]:
    return block_columns(prepared.planned.plan, number, prepared.tokens.ids, prepared.tokens.special_ids)


def summed_blocks(plan: Plan) -> list[int]:
    """The blocks whose rows are summed."""
    return np.flatnonzero(plan.block_split != GATE).tolist()


def first_recorder(prepared: Prepared, attributes: Attributes, settings: HarvestSettings) -> MomentsRecorder:
    """A recorder that is ready for the batches of the first block."""
    recorder = recorder_of(prepared, attributes, settings.folds)
    recorder.keys = RowSums.of(prepared, settings).keys(_columns(prepared, 0))
    return recorder


def recorder_of(prepared: Prepared, attributes: Attributes, n_folds: int) -> MomentsRecorder:
    norms, post_norms = norms_of(prepared)
    on_cpu = working_device(prepared.anatomy).type == "cpu"
    return MomentsRecorder(
        prepared.shape,
        most_rows=largest_batch(prepared.planned.plan)[0],
        ahead=0 if on_cpu else 1,
        n_folds=n_folds,
        norms=norms,
        post_norms=post_norms,
        multipliers=attributes.norm.multipliers,
    )


def sum_rows(
    prepared: Prepared, recorder: MomentsRecorder, rows: RowSums, progress: Progress, watch: Watch
) -> tuple[int, Flight]:
    """Every block that is fitted or tested through the model; how many rows these were."""
    plan, shape, net = prepared.planned.plan, prepared.shape, prepared.anatomy
    blocks = summed_blocks(plan)
    n_rows, done = int(plan.block_rows[blocks].sum()), 0
    buffer = BlockBuffer(dataclasses.replace(shape, block=1), pinned=False)  # no row goes there
    capture = Capture(net, recorder, sites=shape.sites, layers=shape.layers)
    flight = Flight(net, recorder, capture, lambda _: None)
    try:
        with watch.request.deferring(), capture:
            for number in blocks:
                watch.before_block()
                block = OpenBlock(number, stopping.now(), _columns(prepared, number), Filling(buffer, shape))
                recorder.keys = rows.keys(block.columns)
                for batch in block_batches(plan, number, block.columns["token_id"]):
                    watch.before_batch()
                    flight.launch(block, batch)
                    progress("collect", done + batch.row1, n_rows, "tokens")
                done += block.n_rows
                watch.block_took(stopping.now() - block.began_s)
            flight.land()
        watch.after_blocks()
    except ValueRefused as refused:
        _find_row(prepared, refused)
        raise refused.explained(prepared, 0) from None
    except StopNow as stop:
        if stop.by_signal:
            raise Interrupted(f"interrupted: {STARTS_OVER}") from None
        raise TimeIsUp(f"stopped after --max-time: {STARTS_OVER}, so give it more time") from None
    except RuntimeError as error:
        if not is_full(error):
            raise
        raise device_full(error, plan, 0) from None
    return n_rows, flight


def _find_row(prepared: Prepared, refused: ValueRefused) -> None:
    """Which row of the pass it was: the pass once more, looking at that site alone."""
    plan, net, found = prepared.planned.plan, prepared.anatomy, []
    if refused.site == "nll":
        return
    token_id = _columns(prepared, refused.block)["token_id"]
    batch = next(b for b in block_batches(plan, refused.block, token_id) if b.row0 == refused.row)

    def look(site: str, layer: int, tensor: object) -> None:
        if (site, layer) == (refused.site, refused.layer):
            bad = ~(tensor.detach().float().abs() <= refused.limit).all(dim=-1)  # type: ignore[attr-defined]
            found.append(np.flatnonzero(bad.cpu().numpy()[batch.mask]))

    layers = [refused.layer] if refused.layer is not None else []
    with Capture(net, look, sites=[refused.site], layers=layers):
        final_hidden(net, inputs_of(batch.ids, batch.mask, net.device))
    if found and found[0].size:
        refused.row = batch.row0 + int(found[0][0])
