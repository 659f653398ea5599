"""Hooks on a model's sites: what flows past is shown to a callback at hook time, and every hook is counted.

In: an `Anatomy` and a callback `sink(site, layer, tensor)`. Out: nothing of its own; the callback must copy
what it keeps, because the model may overwrite the tensor in its next operation. Cost: one Python call per
site and layer; for gradients the graph of the layers from the lowest one on, and one backward pass. A hook
that did not fire exactly once per pass is an error, never missing data. What a module passes as one flat list
of rows (OPT) is shown to the callback as sequences again.
"""

import math
from collections import Counter
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..store.dtypes import GRADIENT
from ..store.errors import ProofFailed, UsageError
from .anatomy import Anatomy

SITES = (
    "embedding",
    "block_input",
    "attention_output",
    "residual",
    "mlp_input",
    "mlp_output",
    "block_sum",
    "block_output",
)
"""`block_sum`: what the norm behind the sum reads, in layers that have one (`LayerAnatomy.sum_norm`)."""
GRADIENTS = {GRADIENT: "mlp_output", "block_output_grad": "block_output"}
"""Sites whose tensor is shown during the backward pass, and where it is taken."""

UNDIFFERENTIABLE = (  # words of torch's errors
    "derivative",
    "require grad",
    "inplace operation",
    "Inference tensors",
    "not implemented",
    "have been used in the graph",
)


@runtime_checkable
class Sink(Protocol):
    """Receives a tensor of shape (batch, position, feature) while the model runs."""

    def __call__(self, site: str, layer: int, tensor: Tensor) -> None: ...


class Capture:
    """`with Capture(anatomy, sink, sites=…, layers=…) as capture:` then forward passes and `check_counts()`.

    `embedding` is what enters block 0 and is reported as layer 0, whatever `layers` holds. With a
    gradient among the sites, a forward pass runs inside `capture.graph()` and is followed by one `pull_back`.
    """

    def __init__(
        self,
        anatomy: Anatomy,
        sink: Sink,
        *,
        sites: Collection[str] = ("embedding", "residual", "mlp_output"),
        layers: Collection[int] | None = None,
    ) -> None:
        self._anatomy = anatomy
        self._sink = sink
        self._sites = _known_sites(sites)
        self._layers = _known_layers(anatomy, layers)
        self._handles: list[RemovableHandle] = []
        self._counts: Counter[tuple[str, int]] = Counter()
        self._expected: list[tuple[str, int]] = []
        self._shape: tuple[int, ...] = ()
        self._gradients = [site for site in GRADIENTS if site in self._sites and self._layers]
        self._leaf: Tensor | None = None

    @property
    def differentiates(self) -> bool:
        """Whether a gradient is among the sites."""
        return bool(self._gradients)

    def graph(self) -> AbstractContextManager[object]:
        """Around a forward pass whose gradients are wanted; else nothing."""
        return torch.enable_grad() if self.differentiates else nullcontext()

    def pull_back(self, ended: Tensor, slope: Tensor) -> None:
        """One backward pass: `slope` is the gradient at `ended`, which the forward pass gave. All gradient
        sites are shown on the way, the highest layer first."""
        leaf, self._leaf = self._leaf, None
        assert leaf is not None, "no forward pass was run inside graph()"
        try:
            torch.autograd.grad([ended], [leaf], [slope])
        except RuntimeError as error:
            if not any(word in str(error) for word in UNDIFFERENTIABLE):
                raise
            first = str(error).split("\n", 1)[0].split(". ", 1)[0][:120]
            raise UsageError(
                f"this model cannot be differentiated ({first}): leave {GRADIENT} out of the sites"
            ) from None

    def __enter__(self) -> "Capture":
        try:
            self._watch_shape(self._anatomy.layers[0].block)
            if "embedding" in self._sites:
                self._watch_input("embedding", 0, self._anatomy.layers[0].block)
            if self.differentiates:
                self._begin_graph(self._anatomy.layers[min(self._layers)].block)
            for layer in self._layers:
                self._watch_layer(layer)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def reset(self) -> None:
        """Forget the counts, for example after a forward pass that failed."""
        self._counts.clear()
        self._leaf = None

    def check_counts(self) -> None:
        """Raise ProofFailed unless every hook fired exactly once since the last check; count anew."""
        wrong = [(key, self._counts[key]) for key in self._expected if self._counts[key] != 1]
        self.reset()
        if wrong:
            (site, layer), n_calls = wrong[0]
            raise ProofFailed(
                f"{site} layer {layer}: its hook fired {n_calls} times in one forward pass instead of once "
                f"({len(wrong)} of {len(self._expected)} hooks are off). The model skips, repeats or hides "
                "this module; its activations cannot be collected this way."
            )

    def _watch_layer(self, index: int) -> None:
        layer = self._anatomy.layers[index]
        inputs = {
            "block_input": layer.block,
            "residual": layer.mlp_first if layer.norm is None else layer.norm,
            "mlp_input": layer.mlp_first,
        }
        if layer.sum_norm is not None:
            inputs["block_sum"] = layer.sum_norm
        outputs = {
            "attention_output": layer.attention,
            "mlp_output": layer.mlp_last,
            "block_output": layer.block,
        }
        for site, module in inputs.items():
            if site in self._sites:
                self._watch_input(site, index, module)
        for site, module in outputs.items():
            if site in self._sites:
                self._watch_output(site, index, module)
        for site in self._gradients:
            self._watch_gradient(site, index, outputs[GRADIENTS[site]])

    def _watch_input(self, site: str, layer: int, module: nn.Module) -> None:
        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._see(site, layer, first_tensor(args or tuple(kwargs.values())))

        self._expected.append((site, layer))
        self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))

    def _watch_output(self, site: str, layer: int, module: nn.Module) -> None:
        def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self._see(site, layer, first_tensor(output))

        self._expected.append((site, layer))
        self._handles.append(module.register_forward_hook(after))

    def _watch_gradient(self, site: str, layer: int, module: nn.Module) -> None:
        """A tensor's own hook is called with its whole gradient, and with that of its values now, whatever
        the model goes on to do with it in place."""

        def came_back(gradient: Tensor) -> None:
            with torch.no_grad():
                self._see(site, layer, gradient)

        def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            tensor = first_tensor(output)
            if tensor.requires_grad:  # else it is missing among the counts
                tensor.register_hook(came_back)

        self._expected.append((site, layer))
        self._handles.append(module.register_forward_hook(after))

    def _begin_graph(self, block: nn.Module) -> None:
        """The graph begins with what enters the lowest block: nothing below it is kept."""

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not torch.is_grad_enabled():
                return None
            given = first_tensor(args or tuple(kwargs.values()))
            self._leaf = given.detach().requires_grad_()
            begun = self._leaf.clone()  # a leaf must not be written to in place, which the block may do
            new_args = tuple(begun if value is given else value for value in args)
            return new_args, {name: begun if value is given else value for name, value in kwargs.items()}

        self._handles.append(block.register_forward_pre_hook(before, with_kwargs=True))

    def _watch_shape(self, block: nn.Module) -> None:
        """What enters the first block says how many sequences and positions this forward pass has."""

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._shape = first_tensor(args or tuple(kwargs.values())).shape[:-1]

        self._handles.append(block.register_forward_pre_hook(before, with_kwargs=True))

    def _see(self, site: str, layer: int, tensor: Tensor) -> None:
        self._counts[site, layer] += 1
        self._sink(site, layer, self._in_sequences(site, layer, tensor))

    def _in_sequences(self, site: str, layer: int, tensor: Tensor) -> Tensor:
        """(batch, position, feature), also where a module works on (batch · position, feature)."""
        shape = self._shape or tensor.shape[:2]  # unknown where a later block runs before the first
        if tensor.ndim == 2 and tensor.shape[0] == math.prod(shape):
            tensor = tensor.reshape(*shape, -1)
        if tensor.ndim != 3 or tensor.shape[:2] != shape:
            raise ProofFailed(
                f"{site} layer {layer}: its module passed {tuple(tensor.shape)} where the pass has "
                f"{tuple(shape)} sequences and positions. The model cuts or packs rows here; its "
                "activations cannot be told apart this way."
            )
        return tensor

    def _remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._expected.clear()


def first_tensor(value: Any) -> Tensor:
    """The hidden states in what a module takes or gives: a tensor, or the first tensor of a tuple."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, tuple | list):
        for part in value:
            if isinstance(part, Tensor):
                return part
    raise ProofFailed(f"a module passed {type(value).__name__} where hidden states were expected")


def _known_sites(sites: Collection[str]) -> frozenset[str]:
    unknown = [site for site in sites if site not in SITES and site not in GRADIENTS]
    if unknown:
        raise UsageError(f"site {unknown[0]!r} is not known. Sites: {', '.join(SITES)}.")
    return frozenset(sites)


def _known_layers(anatomy: Anatomy, layers: Collection[int] | None) -> tuple[int, ...]:
    chosen = tuple(range(anatomy.n_layers)) if layers is None else tuple(layers)
    outside = [layer for layer in chosen if not 0 <= layer < anatomy.n_layers]
    if outside:
        raise UsageError(
            f"layer {outside[0]}: this model has layers 0-{anatomy.n_layers - 1}. `nearline sites MODEL` "
            "lists what it offers."
        )
    return chosen
