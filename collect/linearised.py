"""A model with MLPs replaced for good: what `load_linearised` installs, and takes away again on request.

In: an `Anatomy`, a `Substitute` for each layer, the ids of special tokens. Out: the same model object, whose
MLPs of these layers give way to their surrogates token by token, in any forward pass that is given token ids:
`generate` with a KV cache, left padding, prompts in pieces. Where a token stands is read from `position_ids`;
else from a 2-D attention mask (the first real token is at 0); else from the length of the cache. The rows
that the fit left out keep the MLP.

The surrogate's weights are a submodule `nearline` of the module where the MLP's span ends, so that they move
and are cast with the model, and `copy.deepcopy` copies them; the model's own weights keep their names and
values. Cost: as in substitution.py; two look-ups of rows a forward pass.
"""

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import torch
from jaxtyping import Float, Float32
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..store.errors import ProofFailed, UsageError
from .anatomy import Anatomy, LayerAnatomy, unwrapped
from .capture import first_tensor
from .exported_folder import Exported, ExportedModel, map_of, tensors_of
from .gate_routing import GateRouter, LiveRows
from .linearised_rows import Rows, copied
from .residence import runs_on
from .substituted_span import Division, Span, is_replaced
from .substitutes import Substitute
from .substitution import divides_of

SUBMODULE: Final = "nearline"
_HANDLE: Final = "_nearline_linearised"


class LinearisedLayer(nn.Module):
    """The weights that stand in for one MLP, and who is sent to them. `weight`: how much of each row of the
    last pass was replaced; `p`: what its gate said."""

    def __init__(self, substitute: Substitute, rows: Rows) -> None:
        super().__init__()
        self._kind, tensors = tensors_of(substitute)
        kept = {name: nn.Parameter(one.clone(), requires_grad=False) for name, one in tensors.items()}
        self.tensors = nn.ParameterDict(kept)
        self._substitute, self._rows = substitute, rows
        self._residual: Float32[Tensor, "row feature"] | None = None
        self.weight: Float32[Tensor, "row"] | None = None
        self.p: Float32[Tensor, "row"] | None = None

    @property
    def substitute(self) -> Substitute:
        """With the weights as they are now."""
        one = self._substitute
        replacement = map_of(self._kind, dict(self.tensors.items()))
        return Substitute(one.intervention, one.layer, replacement, one.router)

    @property
    def wants_parts(self) -> bool:
        router = self._substitute.router
        return isinstance(router, GateRouter) and router.wants_parts

    def keep_residual(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """What enters the norm in front of the MLP."""
        self._residual = copied(first_tensor(args or tuple(kwargs.values())))

    def replacement(self, x: Float[Tensor, "*row feature"]) -> Float[Tensor, "*row feature"]:
        return map_of(self._kind, dict(self.tensors.items()))(x)

    def divide(self, x: Float[Tensor, "*row feature"]) -> Division:
        """Where the rows of this call go."""
        division = self._division(x)
        self.weight, self._residual = division.weight, None
        return division

    def _division(self, x: Tensor) -> Division:
        n_rows, rows = x.numel() // x.shape[-1], self._rows
        if self._substitute.intervention.everywhere:
            return Division(torch.ones(n_rows, device=x.device), "replaced")
        if rows.token_id.numel() != n_rows:
            raise ProofFailed(
                f"layer {self._substitute.layer}: its MLP was given {n_rows} rows in a pass over "
                f"{rows.token_id.numel()} tokens. The model was run in parts, or cuts rows here; give its "
                "tokens to the whole model."
            )
        if self._substitute.router is not None:
            return self._by_gate(x)
        replaced, others = rows.split(x.device)
        weight = rows.covered.to(x.device).float()
        if not replaced.numel() or not others.numel():
            return Division(weight, "replaced" if replaced.numel() else "mlp")
        return Division(weight, "divided", replaced, others)

    def _by_gate(self, x: Tensor) -> Division:
        rows, gate = self._rows, self._substitute.router
        assert isinstance(gate, GateRouter)
        if gate.types.device != x.device:
            self._substitute = self._substitute.on(x.device)
            return self._by_gate(x)
        flat = x.reshape(-1, x.shape[-1]).float()
        residual = flat if self._residual is None else self._residual
        stream = None if rows.stream is None else rows.stream.to(x.device)
        where = rows.token_id.to(x.device), rows.position.to(x.device)
        self.p = gate.probability(LiveRows(flat, residual, stream, *where))
        covered = rows.covered.to(x.device)
        if self._substitute.mixes:
            return Division(torch.where(covered, self.p.nan_to_num(0.0), 0.0), "mixed")
        mask = covered & (self.p > gate.threshold)
        replaced = mask.nonzero().flatten()
        if replaced.numel() in (0, mask.numel()):
            return Division(mask.float(), "replaced" if replaced.numel() else "mlp")
        return Division(mask.float(), "divided", replaced, (~mask).nonzero().flatten())


class Linearised:
    """The layers replaced in one model, and how to put it back."""

    def __init__(
        self,
        anatomy: Anatomy,
        substitutes: Mapping[int, Substitute],
        special_ids: tuple[int, ...],
        origin: ExportedModel | None = None,
    ) -> None:
        if any(is_replaced(one.mlp_first) or is_replaced(one.mlp_last) for one in anatomy.layers):
            raise UsageError("MLPs of this model are replaced already: load the model anew")
        known = tuple(inspect.signature(anatomy.backbone.forward).parameters)
        self._rows = Rows(special_ids, known)
        self._model, self._origin, self._special_ids = anatomy.model, origin, special_ids
        self._handles: list[RemovableHandle] = []
        self._spans: list[Span] = []
        self._holders: list[nn.Module] = []
        self.layers: dict[int, LinearisedLayer] = {}
        try:
            self._install(anatomy, substitutes)
        except BaseException:
            self.remove()
            raise

    def _install(self, anatomy: Anatomy, substitutes: Mapping[int, Substitute]) -> None:
        before, divisible = {"with_kwargs": True}, divides_of(anatomy)
        for index, one in sorted(substitutes.items()):
            parts = anatomy.layers[index]
            layer = LinearisedLayer(_placed(one, anatomy, parts), self._rows)
            parts.mlp_last.add_module(SUBMODULE, layer)
            self._holders.append(parts.mlp_last)
            self.layers[index] = layer
            if layer.wants_parts and parts.norm is not None:
                self._handles.append(parts.norm.register_forward_pre_hook(layer.keep_residual, **before))
            span = Span(parts.mlp_first, parts.mlp_last, layer, divides=divisible(parts))
            self._spans.append(span)
            span.enter()
        hooked = anatomy.backbone
        self._handles.append(hooked.register_forward_pre_hook(self._rows.begin, **before))
        self._handles.append(hooked.register_forward_hook(self._rows.end))
        if any(layer.wants_parts for layer in self.layers.values()):
            first = anatomy.layers[0].block
            self._handles.append(first.register_forward_pre_hook(self._rows.keep_stream, **before))
        setattr(self._model, _HANDLE, self)

    def remove(self) -> None:
        """Leave the model as it was."""
        for span in self._spans:
            span.leave()
        for handle in self._handles:
            handle.remove()
        for holder in self._holders:
            holder._modules.pop(SUBMODULE, None)
        for kept in (self._spans, self._handles, self._holders):
            kept.clear()
        if getattr(self._model, _HANDLE, None) is self:
            delattr(self._model, _HANDLE)

    def share(self) -> float:
        """Of the rows of the last forward pass, those that were replaced: the mean over the layers. Waits for
        the device."""
        weights = [layer.weight for layer in self.layers.values() if layer.weight is not None]
        means = [float(weight.mean(dtype=torch.float64)) for weight in weights]
        return sum(means) / max(1, len(means))

    @property
    def exported(self) -> Exported:
        """As it can be written: the weights as they are now."""
        if self._origin is None:
            raise UsageError("this model was not loaded from an export, so its origin is not known")
        substitutes = {index: layer.substitute for index, layer in self.layers.items()}
        return Exported(self._origin, self._special_ids, substitutes)


def linearised_of(model: Any) -> Linearised:
    """What is replaced in a model; UsageError where nothing is."""
    found = getattr(unwrapped(model), _HANDLE, None)
    if not isinstance(found, Linearised):
        raise UsageError("no MLP of this model is replaced: `load_linearised(model, FOLDER)` does that")
    return found


def _placed(one: Substitute, anatomy: Anatomy, parts: LayerAnatomy) -> Substitute:
    """The substitute in the dtype and on the device of its layer, with the model's table of positions."""
    kind, tensors = tensors_of(one)
    device = runs_on(parts.mlp_first)
    replacement = map_of(kind, {name: value.to(device, anatomy.dtype) for name, value in tensors.items()})
    router = one.router
    if isinstance(router, GateRouter):
        router = router.on(device)
        if router.wants_parts and anatomy.positions is not None:
            router = replace(router, positions=anatomy.positions.float().to(device))
    return Substitute(one.intervention, one.layer, replacement, router)
