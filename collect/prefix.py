"""Run the upper blocks of a model alone: the lower ones give again what they gave in a pass before.

In: the inputs of one forward pass, and room for block outputs. Out: final hidden states of the unchanged
model, and of the model as it stands with the blocks below a layer left out. What a block gave is kept whole,
in its own form (a tensor, or a tuple that begins with one), and copied on the way in and out, because a model
may write into what it passes on. Only the last block that is left out has to give its numbers; those before
it pass on what comes in. Hooks still fire. Masks, alibi and rotary tables are made anew by the backbone.

Where the outputs of all blocks do not fit, those of a few consecutive ones are kept, and the blocks above
them run once more when a higher layer is asked for: one forward pass in all, if layers come in ascending
order. So a batch stays as it was harvested, whatever the memory. Cost: a copy of each block's output in the
first pass, and of one in each later pass.
"""

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from .anatomy import Anatomy
from .capture import first_tensor
from .forward import final_hidden

# How far two passes over the same blocks may differ, of the model's own difference from one pass to the next:
# experts on a GPU add their rows in any order.
UNSTEADY = 4.0


class Prefix:
    """One batch: `base()`, then for each layer `reach(layer)` and, with another MLP in place, `above(layer)`.

    `room_bytes` bounds what is kept: at least one block's output, and two while blocks run once more. None:
    nothing is kept and nothing left out.
    """

    def __init__(self, anatomy: Anatomy, inputs: dict[str, Tensor | None], room_bytes: int | None) -> None:
        self._anatomy, self._inputs, self._room = anatomy, inputs, room_bytes
        self._kept: dict[int, Any] = {}

    @property
    def kept_blocks(self) -> tuple[int, ...]:
        """Blocks whose output is at hand, in order."""
        return tuple(self._kept)

    @property
    def kept_bytes(self) -> int:
        return sum(map(n_bytes, self._kept.values()))

    def release(self) -> None:
        """Keep nothing any more, and leave nothing out."""
        self._kept = {}

    def base(self) -> Float[Tensor, "sequence position feature"]:
        """What the head reads in the unchanged model, all blocks run."""
        if self._room is None:
            return final_hidden(self._anatomy, self._inputs)
        with _keeping(self._anatomy, 0, self._room) as self._kept:
            return final_hidden(self._anatomy, self._inputs)

    def reach(self, layer: int) -> None:
        """Have at hand what enters block `layer`, while the model is unchanged."""
        if self._kept and layer > 0 and layer - 1 not in self._kept:
            start = self._highest(layer) + 1
            each = max(n_bytes(output) for output in self._kept.values())
            output = self._kept[start - 1] if start else next(iter(self._kept.values()))
            self._kept = {start - 1: output} if start else {}
            room = (self._room or 0) - self.kept_bytes
            last = min(layer - 1 + max(room // max(each, 1), 1), self._anatomy.n_layers) - 1
            with reused(self._anatomy, output, start, last), _keeping(self._anatomy, layer - 1, room) as kept:
                final_hidden(self._anatomy, self._inputs)
            self._kept = {block: given for block, given in kept.items() if block <= last}

    def above(self, layer: int) -> Float[Tensor, "sequence position feature"]:
        """What the head reads in the model as it stands, which is unchanged below block `layer`. Without a
        `reach` before, more blocks run than have to."""
        highest = self._highest(layer)
        if highest < 0:
            return final_hidden(self._anatomy, self._inputs)
        with reused(self._anatomy, self._kept[highest], highest + 1):
            return final_hidden(self._anatomy, self._inputs)

    def holds(self, hidden: Float[Tensor, "sequence position feature"]) -> bool:
        """Whether the unchanged model gives the bits of `hidden`, which `base()` gave, when its lower half is
        left out, also when another pass came between. Not where blocks also speak to one another past the
        stream. A model that gives other bits each time has to come as near as its own passes do."""
        if not self._kept:
            return True
        layer = max(self._anatomy.n_layers // 2, 1)
        self.reach(layer)
        another = {name: None if value is None else value[-1:, :1] for name, value in self._inputs.items()}
        final_hidden(self._anatomy, another)
        gap = _gap(self.above(layer), hidden)
        if gap == 0.0:
            return True
        return gap <= UNSTEADY * _gap(final_hidden(self._anatomy, self._inputs), hidden)

    def _highest(self, layer: int) -> int:
        """The highest block below `layer` that is at hand; -1: none."""
        return max((block for block in self._kept if block < layer), default=-1)


@contextmanager
def reused(anatomy: Anatomy, output: Any, below: int, last: int | None = None) -> Generator[None]:
    """No block before block `below` runs: the one in front of it gives a copy of `output`. Nor does any
    behind block `last`, where that is given: then the final hidden states mean nothing."""
    end = anatomy.n_layers if last is None else last + 1

    def passed(*args: Any, **kwargs: Any) -> Any:
        return _with_tensor(output, first_tensor(args or tuple(kwargs.values())))

    def given(*_: Any, **__: Any) -> Any:
        return _copied(output)

    with ExitStack() as stack:
        for layer in anatomy.layers:
            if not below <= layer.index < end:
                stack.enter_context(_runs(layer.block, given if layer.index == below - 1 else passed))
        yield


@contextmanager
def _keeping(anatomy: Anatomy, first: int, room: int) -> Generator[dict[int, Any]]:
    """The outputs of block `first` and, while they fit, those behind it, filled in by the next pass."""
    kept: dict[int, Any] = {}
    left = room

    def hook(index: int) -> Callable[..., None]:
        def keep(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
            nonlocal left
            size = n_bytes(output)
            if index == first or (index - 1 in kept and size <= left):
                kept[index] = _copied(output)
                left -= size

        return keep

    with ExitStack() as stack:
        for layer in anatomy.layers[first:]:
            stack.callback(layer.block.register_forward_hook(hook(layer.index)).remove)
        yield kept


@contextmanager
def _runs(module: nn.Module, forward: Callable[..., Any]) -> Generator[None]:
    """The module runs `forward`; afterwards it is as it was, also where it had a `forward` of its own (a
    model spread over devices)."""
    own = vars(module)
    before = own.get("forward")
    own["forward"] = forward
    try:
        yield
    finally:
        if before is None:
            own.pop("forward", None)
        else:
            own["forward"] = before


def _copied(output: Any) -> Any:
    if isinstance(output, Tensor):
        return output.clone()
    return type(output)(map(_copied, output)) if type(output) in (tuple, list) else output


def _with_tensor(output: Any, hidden: Tensor) -> Any:
    """The same form around other hidden states."""
    if isinstance(output, Tensor):
        return hidden
    place = next(index for index, part in enumerate(output) if isinstance(part, Tensor))
    return type(output)([hidden if index == place else part for index, part in enumerate(output)])


def n_bytes(output: Any) -> int:
    """Of all tensors in what a block gave."""
    if isinstance(output, Tensor):
        return output.nbytes
    return sum(map(n_bytes, output)) if isinstance(output, tuple | list) else 0


def _gap(one: Tensor, other: Tensor) -> float:
    if torch.equal(one, other):
        return 0.0
    return float((one.float() - other.float()).abs().max())
