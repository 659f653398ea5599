"""Visit the model again: what replacing its MLPs costs, on the held-out rows of the stores of a study.

In: a fitted study, and the model that its stores name (or a live one). Out: the step `measure` of the study:
table `measured` (sums over groups of every replacement), the tables that follow from it, and the needs `loss`
and `kl` of single rows. Everything that can be refused is refused before the first forward pass, and all but
the model itself before that is loaded. What is done is kept aside block by block: a measurement that was
stopped goes on where it was, and a finished one that is asked for more measures only what is new. Gate rows
come first, since sets of layers are chosen on them; then test rows. Cost: for each batch a base pass, and for
each replacement the blocks from its first layer upwards, the head and the loss.
"""

import logging
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import torch
from torch import nn

from ..analyze.currency import drop_stale
from ..store import EnvironmentFault, Progress, Study, UsageError, silent
from ..store.disk import claimed
from ..store.staging import StagedStudy
from . import study_model
from .anatomy import Anatomy, anatomy
from .batch_budget import is_full
from .forward import evaluating
from .made_with import MadeWith
from .measure_request import STEP, TIMING, Request, request_of
from .measure_request import measure_is_current as measure_is_current
from .measure_settings import MeasureSettings
from .measured_before import measured_before
from .measured_budget import budget_table, flops_of, saved_by, timing_table
from .measured_noise import noise_rows
from .measured_patches import estimate_table, patch_positions
from .measured_pieces import LOCK, Pieces, remove_finished
from .measured_results import base_facts, write_results
from .measured_sweep import Sweep
from .models import LoadedModel
from .study_model import compute_of

COMPUTED_WITH: Final = ("nearline", "torch", "transformers", "numpy", "pyarrow")
_LOG = logging.getLogger("nearline")


def measure(
    study_path: str | Path,
    settings: MeasureSettings | None = None,
    progress: Progress = silent,
    *,
    model: nn.Module | None = None,
) -> Study:
    """Measure interventions on the live model into the study; nothing is done where they are current.

    `model`: the model itself, where it is alive already; it is left as it was. By default it is loaded from
    where the settings say, or the harvest had it.
    """
    study = Study.open(study_path)
    request = request_of(study, settings or MeasureSettings())
    if request.is_current():
        _LOG.info("measure: %s is current for these settings; nothing to do", study.path)
        with _at_work(study):
            remove_finished(study.path)
        return study
    with _at_work(study):
        readers = {name: request.evidence.stores[name].reader for name in request.touched}
        if model is None:
            loaded = study_model.load_for(request.settings, readers)
        else:
            loaded = study_model.described(model, readers)
        with _explained(request):
            _measure(request, loaded, progress, ours=model is None)
    return study


def _measure(request: Request, loaded: LoadedModel, progress: Progress, *, ours: bool) -> None:
    compute = compute_of(request.settings, request.evidence.fitted.reader)
    with evaluating(loaded.model, compute.torch_threads):
        net = anatomy(loaded.model)
        _check_model(request, net)
        how = {
            "weights": loaded.weights_hash,
            "device": net.device.type,
            "dtype": str(net.dtype).removeprefix("torch."),
            "attention": loaded.attention,
            "threads": torch.get_num_threads(),
        }
        made_with = MadeWith(request.key | how, request.store_digests, request.routes)
        pieces = Pieces.open(request.study.path, made_with)
        before = measured_before(request.study, STEP, made_with)
        found = Sweep(request, net, pieces, before, progress).run()
        more: dict[str, pa.Table] = {}
        if request.settings.validate_estimate:
            found = replace(found, single=patch_positions(request, net, found, pieces, progress))
            more["estimate"] = estimate_table(request, found, found.single)
        flops = flops_of(net)
        more |= budget_table(request, found, flops)
        if request.settings.timing:
            _record_timing(request, timing_table(request, net, found))
    noise = noise_rows(request, loaded, found, ours=ours) if request.settings.noise_floor else []
    outputs = write_results(request, found, more, noise, saved_by(request, flops))
    facts = {"made_with": made_with.plain(), **found.facts(), **base_facts(request, found, before)}
    pieces.finish()
    _record(request, outputs, facts)
    pieces.remove()


def _check_model(request: Request, net: Anatomy) -> None:
    """What the digests of weights and configuration do not settle."""
    width = request.evidence.fitted.reader.d_model
    if net.d_model != width or max(request.layers) >= net.n_layers:
        raise UsageError(
            f"the model has layers 0-{net.n_layers - 1} of width {net.d_model}, the surrogates of "
            f"{request.study.path} are of layer {max(request.layers)} and width {width}"
        )


def _record(request: Request, outputs: list[str], facts: dict[str, Any]) -> None:
    study = request.study
    study.record_step(
        STEP,
        inputs=request.inputs,
        settings=request.resolved,
        outputs=outputs,
        facts=facts | {"versions": {name: metadata.version(name) for name in COMPUTED_WITH}},
    )
    drop_stale(study)


def _record_timing(request: Request, table: pa.Table) -> None:
    """A step of its own: seconds are others in every run, and nothing else depends on them."""
    with StagedStudy.writing(request.study) as study:
        output = study.write_table(TIMING, table)
        study.commit([output])
        study.record_step(
            TIMING,
            inputs=request.inputs,
            settings={"layers": list(request.layers)},
            outputs=[output],
            facts={},
        )


@contextmanager
def _at_work(study: Study) -> Generator[None]:
    """Only one process measures into a study at a time."""
    with claimed(study.path / LOCK) as mine:
        if mine is False:
            raise UsageError(f"another process is measuring {study.path}; let it finish first")
        yield


@contextmanager
def _explained(request: Request) -> Generator[None]:
    """A device without room says so in one sentence."""
    try:
        yield
    except RuntimeError as error:
        if not is_full(error):
            raise
        first = str(error).split("\n", 1)[0].split(". ", 1)[0][:120]
        limit = request.settings.memory_limit
        raise EnvironmentFault(
            f"the device ran out of memory ({first}). What is measured stays, and the same command "
            f"continues; free memory on it, or lower memory_limit={limit}, which bounds what is kept of the "
            "base pass"
        ) from None
