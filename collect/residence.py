"""Where a module's weights are: on a device, or away until its forward pass (CPU or disk offload).

In: a module, perhaps with a hook of accelerate's on it. Out: a context in which its weights can be read, and
the device it runs on. Cost: nothing for an ordinary module; an offloaded one is brought to its device and
taken back, which is what its own forward pass does.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def at_hand(module: nn.Module) -> Generator[None]:
    """Inside, `module`'s own parameters hold values, also where they are offloaded in between."""
    hook: Any = getattr(module, "_hf_hook", None)
    if hook is None or not any(weight.is_meta for weight in module.parameters(recurse=False)):
        yield
        return
    hook.pre_forward(module)  # as accelerate.utils.align_module_device does it, for chained hooks too
    try:
        yield
    finally:
        hook.post_forward(module, None)


def runs_on(module: nn.Module) -> torch.device:
    """The device of `module`'s weights while it runs."""
    weight = next(module.parameters())
    hook: Any = getattr(module, "_hf_hook", None)
    device = getattr(hook, "execution_device", None)
    if not weight.is_meta or device is None:
        return weight.device
    # accelerate numbers GPUs with plain integers
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


def in_memory(module: nn.Module, name: str) -> Tensor:
    """A weight of `module` as it is, or of an offloaded one a copy on the CPU."""
    weight = getattr(module, name)
    if not weight.is_meta or not hasattr(module, "_hf_hook"):
        return weight
    with at_hand(module):
        return getattr(module, name).detach().cpu().clone()
