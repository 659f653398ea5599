"""Seconds of a fine-tuned model, whenever they are asked for.

In: the live model, and what stands in for its MLPs: as it was left in training, or as it was kept in
STUDY/tuned. Out: the table `finetune_timing`. Where scores are there and seconds are not, nothing is trained
if `gated` or `gated_hard` was kept, else what is timed alone: one seed, at the learning rates that were
chosen, without controls. Cost: see `timing`; a kept model is loaded beside the live one, and digested once.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import torch

from ..store.errors import NearlineError
from .anatomy import Anatomy, unwrapped
from .budget import Configuration
from .exported_folder import read_exported
from .hashes import weights_hash
from .interventions import parse_intervention
from .measured_budget import timed_texts
from .pretrained import guarded
from .sources import Source
from .substitutes import Substitute
from .timing import TimingRules, timings
from .tuned_export import LINEARISED, MODEL, TUNED
from .tuned_weights import put_weights
from .tuning_request import TuningRequest

Ways = Sequence[Mapping[int, Substitute]]
_OF_GATES: Final = ("gated", "gated_hard")  # arms with the weights that are timed
_LOG = logging.getLogger("nearline")


def ways(substitutes: Mapping[int, Substitute]) -> Ways:
    """All that is timed of what stands in: linear, and where there are gates, behind soft and hard ones."""
    gated = all(one.router is not None for one in substitutes.values())
    return [
        {
            layer: replace(
                one,
                intervention=parse_intervention(name),
                router=None if name == "linear" else one.router,
            )
            for layer, one in substitutes.items()
        }
        for name in ("linear", *(("soft@input", "gated@input") if gated else ()))
    ]


def tuning_timing(request: TuningRequest, net: Anatomy, timed: Ways) -> pa.Table:
    """Seconds of the model as it is, and of each of the ways, in interleaved runs. Nothing stands in now."""
    reader = request.evidence.fitted.reader
    texts, rules = timed_texts(reader, TimingRules(threads=request.settings.threads))
    chosen = tuple(sorted(timed[0]))
    every = [(Configuration(next(iter(one.values())).intervention.name, chosen), one) for one in timed]
    return timings(net, every, texts, reader.attributes.tokenizer.special_ids, rules)


def kept_ways(request: TuningRequest, net: Anatomy) -> Ways | None:
    """What was kept of the arms with gates, its weights put into the live model; None where nothing was."""
    for arm in _OF_GATES:
        if arm in request.settings.keep:
            folder = request.study.path / TUNED / arm
            if (found := _put_kept(folder, net)) is not None:
                return ways(found)
            _LOG.info("finetune: %s is not what was kept there; what is timed is trained again", folder)
    return None


def timed_alone(request: TuningRequest) -> TuningRequest:
    """A request for what is timed of another one whose scores are there: the same weights, and no scores but
    those on gate rows.
    """
    rates: dict[int, float] = {}
    if "gated" in request.schedule.courses:
        for row in request.study.table("finetune").to_pylist():
            if row["arm"] == "gated" and row["chosen"]:
                rates[row["phase"]] = row["learning_rate"]
    settings = request.settings.model_copy(
        update={
            "seeds": request.settings.seeds[:1],
            "learning_rates": (rates[1],) if rates else request.settings.learning_rates[:1],
            "gate_learning_rates": (rates[2],) if rates else request.settings.gate_learning_rates[:1],
            "points": 1,
            "keep": (),
        }
    )
    arms = ("gated",) if rates else ()
    return replace(request, settings=settings, arms=arms, stores=(), goes_on=False)


def _put_kept(folder: Path, net: Anatomy) -> Mapping[int, Substitute] | None:
    model: Any = unwrapped(net.model)
    source = Source(str(folder / MODEL), folder.name, local=True, gguf_file=None)
    options = {"dtype": torch.float32, "local_files_only": True, "use_safetensors": True}
    try:
        exported = read_exported(folder / LINEARISED)
        kept = guarded(source, lambda: type(model).from_pretrained(source.where, **options))
    except NearlineError:
        return None
    if weights_hash(kept) != exported.model.weights_hash:
        return None
    put_weights(model, dict(kept.named_parameters()))
    return exported.substitutes
