"""Fine-tune linearised models against matched controls, on the stores of a study.

In: a fitted study, and the model that its stores name (or a live one, which is left as it was). Out: the
step `finetune` of the study: table `finetune_scores` (sums of losses over groups at every point of every arm)
and the tables that follow from it. Trained on windows of the fit split, learning rates chosen on gate rows,
scored on test rows. Everything that can be refused is refused before the model is loaded. What is done is
kept aside course by course, point by point: an experiment that was stopped goes on to the same bytes. Seconds
that are asked for later are taken alone (tuned_timing.py). Cost: per course, seed and learning rate its steps
and points; two copies of the weights, gradients and the optimiser's state.
"""

import logging
from collections.abc import Generator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import torch
from torch import Tensor, nn

from ..analyze.currency import drop_stale
from ..analyze.finetune_tables import write_finetune_tables
from ..store import Progress, Study, UsageError, silent
from ..store.disk import claimed
from ..store.staging import StagedStudy
from . import study_model
from .anatomy import Anatomy, anatomy
from .live_settings import LiveModelSettings
from .measure_settings import MeasureSettings
from .measured_budget import flops_of
from .models import LoadedModel
from .offloaded import offloaded_tensors
from .study_model import compute_of
from .tuned_timing import kept_ways, timed_alone, tuning_timing
from .tuned_weights import put_weights
from .tuned_work import work_rows
from .tuning_arms import ARMS, controls_among
from .tuning_data import Windows, require_unseen, training_windows
from .tuning_experiment import Experiment
from .tuning_pieces import LOCK, TuningPieces
from .tuning_processes import Processes, processes_of
from .tuning_request import STEP, TIMING, TuningRequest, tuning_request
from .tuning_rows import Found
from .tuning_settings import FinetuneSettings

COMPUTED_WITH: Final = ("nearline", "torch", "transformers", "accelerate", "numpy", "pyarrow")
_LOG = logging.getLogger("nearline")


def finetune(
    study_path: str | Path,
    settings: FinetuneSettings | None = None,
    progress: Progress = silent,
    *,
    model: nn.Module | None = None,
) -> Study:
    """Train and score all arms into the study; nothing is done where they are current. Where only seconds are
    missing, these are taken.

    `model`: the model itself, in float32, where it is alive already. By default it is loaded from where the
    settings say, or the harvest had it.
    """
    study = Study.open(study_path)
    request = tuning_request(study, settings or FinetuneSettings())
    if request.is_current():
        _LOG.info("finetune: %s is current for these settings; nothing to do", study.path)
        return study
    stores = request.evidence.stores
    readers = {name: rows.reader for name, rows in stores.items()}
    windows = training_windows(readers[request.train_on])
    require_unseen(request.train_on, windows, readers, request.scored_documents())
    processes = processes_of(request.settings)
    with claimed(study.path / LOCK) if processes.leads else nullcontext(True) as mine:
        if mine is False:
            raise UsageError(f"another process is fine-tuning {study.path}; let it finish first")
        how = _how_to_load(request)
        if model is None:
            loaded = study_model.load_for(how, readers)
        else:
            loaded = study_model.described(model, readers)
        threads = compute_of(how, request.evidence.fitted.reader).torch_threads
        net = _trainable(loaded, processes)
        with _lent(loaded.model, threads) as original:
            told = progress if processes.leads else silent
            visit = _Visit(loaded, net, original, windows, processes, told)
            if request.is_scored():
                _seconds_alone(request, visit)
            else:
                _experiment(request, visit)
            processes.wait()
    return study


@dataclass(frozen=True, slots=True, eq=False)
class _Visit:
    """The live model, lent; its weights as they were, what it learns from, and who shares the work."""

    loaded: LoadedModel
    net: Anatomy
    original: Mapping[str, Tensor]
    windows: Windows
    processes: Processes
    progress: Progress

    def key(self, request: TuningRequest) -> dict[str, Any]:
        """What pieces of an experiment depend on."""
        return {
            "inputs": dict(request.inputs),
            "settings": request.resolved,
            "weights": self.loaded.weights_hash,
            "device": self.net.device.type,
            "attention": self.loaded.attention,
            "threads": torch.get_num_threads(),
            "processes": self.processes.n,
        }

    def pieces(self, request: TuningRequest) -> TuningPieces:
        return TuningPieces.open(request.study.path, self.key(request), self.processes)

    def experiment(self, request: TuningRequest, pieces: TuningPieces) -> Experiment:
        return Experiment(request, self.net, self.original, self.windows, pieces, self.progress)


def _trainable(loaded: LoadedModel, processes: Processes) -> Anatomy:
    if offloaded_tensors(loaded.model):
        raise UsageError(
            f"weights of {loaded.name} are offloaded, and what is trained has to be in memory: name its "
            "place with --model, which loads it onto one device, and one that holds it, such as --device cpu"
        )
    net = anatomy(loaded.model)
    if net.dtype != torch.float32:
        raise UsageError(f"the model is in {net.dtype}; weights are trained in float32: load it so")
    if processes.n == 1 and net.device.type == "cuda" and net.device.index:
        raise UsageError(
            f"the model is on {net.device}, and a Trainer alone moves it to the first GPU that it sees: set "
            f"CUDA_VISIBLE_DEVICES={net.device.index} and leave --device as it is by default"
        )
    return net


def _experiment(request: TuningRequest, visit: _Visit) -> None:
    pieces = visit.pieces(request)
    experiment = visit.experiment(request, pieces)
    found = experiment.run()
    if visit.processes.leads:
        _write(request, visit, experiment, found)
        if request.is_timed:
            _record_timing(request, tuning_timing(request, visit.net, experiment.timed()))
        pieces.remove()


def _seconds_alone(request: TuningRequest, visit: _Visit) -> None:
    """Of a study whose scores are there. What is timed is trained again where it was not kept."""
    alone = timed_alone(request)
    pieces = visit.pieces(alone)
    ways = kept_ways(request, visit.net)
    if ways is None:
        experiment = visit.experiment(alone, pieces)
        experiment.train()
        ways = experiment.timed()
    if visit.processes.leads:
        _record_timing(request, tuning_timing(request, visit.net, ways))
        pieces.remove()


def _write(request: TuningRequest, visit: _Visit, experiment: Experiment, found: Found) -> None:
    experiment.keep(visit.loaded, request.study)
    work = list(work_rows(request, flops_of(visit.net), found.gates))
    facts = {"versions": {name: metadata.version(name) for name in COMPUTED_WITH}, **visit.key(request)}
    with StagedStudy.writing(request.study) as study:
        before = study.provenance().get(STEP, {"outputs": {}})["outputs"]
        against = {arm: ARMS[arm].against for arm in request.arms}
        outputs = write_finetune_tables(
            study, found.scores, found.gates, work, request.train_on, against, controls_among(request.arms)
        )
        study.commit(outputs, sorted(before))
    request.study.record_step(
        STEP, inputs=request.inputs, settings=request.resolved, outputs=outputs, facts=facts
    )
    drop_stale(request.study)


def _record_timing(request: TuningRequest, table: pa.Table) -> None:
    with StagedStudy.writing(request.study) as study:
        output = study.write_table(TIMING, table)
        study.commit([output])
    request.study.record_step(
        TIMING,
        inputs=request.timing_inputs,
        settings=request.timing_settings,
        outputs=[output],
        facts={},
    )


def _how_to_load(request: TuningRequest) -> MeasureSettings:
    return MeasureSettings(
        dtype="float32", **{name: getattr(request.settings, name) for name in LiveModelSettings.model_fields}
    )


@contextmanager
def _lent(model: nn.Module, threads: int) -> Generator[Mapping[str, Tensor]]:
    """Its weights, copied. Whatever is done to the model meanwhile, it is left as it was: weights, flags,
    threads.
    """
    weights = {name: one.detach().clone() for name, one in model.named_parameters()}
    asks = {name: one.requires_grad for name, one in model.named_parameters()}
    training, before = model.training, torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield weights
    finally:
        torch.set_num_threads(before)
        put_weights(model, weights)
        for name, one in model.named_parameters():
            one.requires_grad_(asks[name])
            one.grad = None
        model.train(training)
