"""A harvest that stores no rows, only the sums that surrogates are fitted on: a moments folder.

In: a prepared harvest. Out: what `analyze.moments_file.save_moments` writes of the rows that a harvest with
these settings would store, in the folds that `fit` would give their documents. Only blocks of `fit` and
`test` go through the model. Everything is written at the end, moments.json last: a run that is stopped leaves
nothing that could be taken for whole, and the same command starts over. Cost: the forward passes and 4·d²
flops a row and layer; memory: 2·(K + 3)·8·d² bytes a layer.
"""

import dataclasses
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ..analyze.moments_file import claim_moments, open_moments, remove_moments, save_moments
from ..analyze.moments_source import MomentsSource, document_table
from ..store.attributes import Attributes
from ..store.beginning import check_same
from ..store.errors import UsageError
from ..store.folder import MOMENTS
from ..store.plan import Plan
from ..store.progress import Progress
from .claim import Claim
from .describing import documents_table
from .moments_pass import RowSums, recorder_of, sum_rows
from .moments_recorder import MomentsRecorder
from .outcome import Harvested
from .preparing import Prepared
from .ranks import Ranks, only_one
from .settings import HarvestSettings
from .stopping import Watch


@contextmanager
def claimed(path: Path, ranks: Ranks) -> Generator[Claim]:
    """Claim a folder for moments; what a failed run left goes again, unless moments stand there whole."""
    if ranks.world_size > 1:
        raise UsageError(
            f"{ranks}: moments_only sums in one process. Run it in one (device_map spreads a large model), "
            "or harvest the rows with several ranks"
        )
    existed = path.exists()
    claim = Claim(claim_moments(path), ranks=ranks)
    try:
        with only_one(path, ranks):
            try:
                yield claim
            except BaseException:
                # Under the lock: without it, parts may be those of the process that holds it.
                if not (path / MOMENTS).exists():
                    remove_moments(path)
                raise
    except BaseException:
        if not existed and path.is_dir() and not any(path.iterdir()):
            path.rmdir()
        raise


@dataclasses.dataclass(frozen=True, slots=True)
class Summed:
    """A moments folder, and how the run went."""

    path: Path
    plan: Plan
    n_rows: int  # 0: the moments were there
    seconds: float
    waited_s: float
    busy_s: float | None
    outcome: str

    def done(self, sample: str, notes: Sequence[str]) -> Harvested:
        """As a harvest says it. What is never there, is not asked of a store: blocks count as all done."""
        idle = None if self.busy_s is None else max(0.0, 1 - self.busy_s / self.seconds)
        return Harvested(
            path=self.path,
            n_tokens=self.plan.n_tokens,
            sample=sample,
            seconds=self.seconds,
            tokens_per_s=self.n_rows / self.seconds,
            waited_s=0.0,
            waited_device_s=self.waited_s,
            device_idle_share=idle,
            notes=(*notes, self.outcome),
            sealed=True,
            n_blocks=self.plan.n_blocks,
            n_committed=self.plan.n_blocks,
            n_collected=self.n_rows,
        )


def run(
    path: Path,
    prepared: Prepared,
    attributes: Attributes,
    settings: HarvestSettings,
    progress: Progress,
    watch: Watch,
) -> Summed:
    """Sum and write; nothing is done where the folder holds these moments already."""
    plan, started = prepared.planned.plan, time.perf_counter()
    if check_whole(path, attributes, settings):
        outcome = "nothing to do: these moments are there, and were made with these settings"
        return Summed(path, plan, 0, time.perf_counter() - started, 0.0, None, outcome)
    rows = RowSums.of(prepared, settings)
    recorder = recorder_of(prepared, attributes, settings.folds)
    n_rows, flight = sum_rows(prepared, recorder, rows, progress, watch)
    save_moments(path, _source(prepared, attributes, settings, rows, recorder))
    seconds = time.perf_counter() - started
    outcome = f"sums of {n_rows:,} rows in {settings.folds} folds; no rows are stored"
    return Summed(path, plan, n_rows, seconds, flight.waited_s, flight.busy_s, outcome)


def check_whole(path: Path, attributes: Attributes, settings: HarvestSettings) -> bool:
    """Whether these moments are there already; UsageError where others are."""
    if not (path / MOMENTS).exists():
        return False
    there = open_moments(path)
    check_same(path, there.attributes, attributes)
    if (there.n_folds, there.seed) != (settings.folds, settings.fold_seed):
        raise UsageError(
            f"{path}: its moments are of folds={there.n_folds} with fold_seed={there.seed}, this run has "
            f"folds={settings.folds} with fold_seed={settings.fold_seed}; name a new folder"
        )
    return True


def _source(
    prepared: Prepared,
    attributes: Attributes,
    settings: HarvestSettings,
    rows: RowSums,
    recorder: MomentsRecorder,
) -> MomentsSource:
    plan = prepared.planned.plan
    return MomentsSource(
        name=attributes.model.name,
        attributes=attributes,
        sources=({"corpus": attributes.corpus.spec, "n_tokens": plan.n_tokens, "digest": None},),
        documents=document_table(documents_table(prepared), rows.folds, rows.n_fit),
        n_folds=settings.folds,
        seed=settings.fold_seed,
        layers=prepared.shape.layers,
        load=recorder.moments,
    )
