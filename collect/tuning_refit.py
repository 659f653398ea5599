"""Surrogates of a model as it is in the middle of its training.

In: the live model, the windows it is trained on, and layers. Out: for each layer the ridge surrogate of its
MLP's present inputs and outputs at covered rows, with the alpha that the study's fit has chosen for it, or
their mean output. Cost: one forward pass over all windows, and a fit a layer.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..analyze.moments import MomentBuffers, MomentSums
from ..analyze.ridge import solve, spectrum
from .anatomy import Anatomy
from .capture import first_tensor
from .forward import final_hidden
from .replacements import LinearMap
from .tuned_scores import quiet
from .tuning_arms import Body
from .tuning_data import Windows, collate
from .tuning_request import TuningRequest


def refitted(
    net: Anatomy, request: TuningRequest, windows: Windows, layers: Sequence[int], body: Body
) -> dict[int, LinearMap]:
    """A map for each layer, in float32 on the host; of the body `mean` its bias counts alone."""
    alphas = request.study.surrogates()["alpha"]
    special = torch.tensor(request.evidence.fitted.reader.attributes.tokenizer.special_ids, dtype=torch.long)
    watched = {layer: _Watched(net, layer) for layer in layers}
    try:
        with quiet(net.model):
            for start in range(0, len(windows.ids), request.settings.batch_sequences):
                chosen = windows.ids[start : start + request.settings.batch_sequences]
                batch = collate([{"input_ids": torch.from_numpy(one)} for one in chosen])
                covered = batch["attention_mask"].bool() & ~torch.isin(batch["input_ids"], special)
                covered[:, 0] = False
                inputs: dict[str, Tensor | None] = {
                    name: batch[name].to(net.device) for name in ("input_ids", "attention_mask")
                }
                final_hidden(net, inputs)
                for one in watched.values():
                    one.take(covered.reshape(-1))
    finally:
        for one in watched.values():
            one.leave()
    found: dict[int, LinearMap] = {}
    for layer, one in watched.items():
        moments = one.sums.finish()
        fitted = solve(spectrum(moments), float(alphas.sel(layer=layer)))
        bias = moments.mean_y.astype(np.float32) if body == "mean" else fitted.bias
        found[layer] = LinearMap(*(torch.from_numpy(np.ascontiguousarray(v)) for v in (fitted.weight, bias)))
    return found


class _Watched:
    """The input and output of one MLP, added up."""

    def __init__(self, net: Anatomy, layer: int) -> None:
        parts = net.layers[layer]
        self.sums = MomentSums(MomentBuffers(net.d_model, net.d_model))
        self._x: Tensor | None = None
        self._y: Tensor | None = None
        self._handles = [
            parts.mlp_first.register_forward_pre_hook(self._before, with_kwargs=True),
            parts.mlp_last.register_forward_hook(self._after),
        ]

    def take(self, covered: Tensor) -> None:
        """The covered rows of the pass that was."""
        assert self._x is not None
        assert self._y is not None
        rows = covered.nonzero().flatten()
        x, y = (one.reshape(-1, one.shape[-1]).float().cpu()[rows].numpy() for one in (self._x, self._y))
        self.sums.add(x, y)

    def leave(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._x = first_tensor(args or tuple(kwargs.values())).detach().clone()

    def _after(self, _: nn.Module, args: Any, output: Any) -> None:
        self._y = first_tensor(output).detach()
