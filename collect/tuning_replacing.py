"""What a course has in the place of the chosen MLPs, put there.

In: the live model with a `Tuned`, a run, layers. Out: these layers replaced. Surrogates and mean outputs are
those of the study, or, where a schedule asks for it, fitted anew in the model as it is. Cost: the weights of
the surrogates; with a refit see tuning_refit.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .anatomy import Anatomy
from .substitutes import LinearMap, substitutes_of
from .tuned_layers import Tuned
from .tuning_arms import REFITTED, Course
from .tuning_data import Windows
from .tuning_refit import refitted
from .tuning_request import TuningRequest
from .tuning_run import Run


def replace_layers(
    tuned: Tuned,
    net: Anatomy,
    request: TuningRequest,
    windows: Windows | None,
    run: Run,
    layers: Sequence[int],
) -> None:
    """Put what the course has in the place of these layers' MLPs. `windows`: to fit it anew on, if that is
    asked for; None: weights are put in afterwards.
    """
    settings, course = request.settings, run.course
    maps = _surrogates(request, course, layers)
    anew = settings.refit and settings.schedule != "at_once" and course.body in REFITTED
    if anew and windows is not None:
        maps = refitted(net, request, windows, layers, course.body)
    # What has no linear path starts near the MLP it had.
    start = 1.0 - settings.gate_start if course.body == "scaled" else settings.gate_start
    for layer, surrogate in maps.items():
        tuned.replace(layer, course.body, surrogate, gate=settings.gate, start=start, seed=run.seed)


def chosen_modules(net: Anatomy, request: TuningRequest) -> list[nn.Module]:
    """The MLPs that are replaced sooner or later: in no arm but `control` do they learn."""
    parts = [net.layers[layer] for layer in request.layers]
    return [module for one in parts for module in (one.mlp_first, one.mlp_last)]


def _surrogates(request: TuningRequest, course: Course, layers: Sequence[int]) -> Mapping[int, LinearMap]:
    made = substitutes_of(request.study, "linear", layers, torch.float32)
    maps: dict[int, Any] = {layer: one.replacement for layer, one in made.items()}
    if course.body not in ("mean", "zero"):
        return maps
    values = substitutes_of(request.study, course.body, layers, torch.float32)
    constant: dict[int, Any] = {layer: one.replacement for layer, one in values.items()}
    return {layer: LinearMap(one.weight, constant[layer].value) for layer, one in maps.items()}
