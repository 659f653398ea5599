"""Values of weights that accelerate keeps elsewhere between forward passes: in main memory, or on a disk.

In: a model, dispatched by accelerate or not. Out: for each weight that is not in place, a call that reads it;
nothing is moved, the model stays as it is. Cost: a look at the hooks; each call reads one tensor.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn


def offloaded_tensors(model: nn.Module) -> dict[str, Callable[[], Tensor]]:
    """By its name in the state dict: how to read each weight that the model brings in only while it runs."""
    found: dict[str, Callable[[], Tensor]] = {}
    for path, module in model.named_modules():
        for hook in _hooks(getattr(module, "_hf_hook", None)):
            if not getattr(hook, "offload", False) or getattr(hook, "weights_map", None) is None:
                continue
            for name, tensor in module.state_dict(keep_vars=True).items():
                # A hook speaks for its module, and for those below only where it places them too.
                own = "." not in name or getattr(hook, "place_submodules", False)
                if own and isinstance(tensor, Tensor) and tensor.is_meta:
                    key = f"{path}.{name}" if path else name
                    found[key] = partial(hook.weights_map.__getitem__, name)
    return found


def _hooks(hook: Any) -> list[Any]:
    """The hooks of a module, where accelerate has chained several."""
    if hook is None:
        return []
    return [one for part in hook.hooks for one in _hooks(part)] if hasattr(hook, "hooks") else [hook]
