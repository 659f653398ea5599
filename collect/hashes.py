"""Two digests that say which model this is: of its configuration and of its weights.

In: a transformers config, a module. Out: BLAKE3 hex digests that do not depend on paths, library versions,
the load dtype of the config, or the order of modules. Cost: the weights are read once, tensor by tensor; a
tensor that two names share is read once.
"""

import json
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor, nn

from ..store.errors import UsageError

# What the loading wrote into the config rather than the model's author; the compute dtype is recorded by
# itself.
_VOLATILE = frozenset({"transformers_version", "dtype", "torch_dtype", "architectures"})
_HASH_THREADS = 2


def config_hash(config: Any) -> str:
    """Digest of the canonical JSON of a config, without what varies between machines and versions."""
    return blake3(_canonical(_stable(config.to_dict()))).hexdigest()


def weights_hash(model: nn.Module) -> str:
    """Digest over the names, dtypes, shapes and bytes of the state dict, in the order of names."""
    hasher = blake3(max_threads=_HASH_THREADS)
    first_names: dict[tuple[Any, ...], str] = {}
    for name, tensor in sorted(model.state_dict().items()):
        if not isinstance(tensor, Tensor):
            continue
        _refuse_absent(name, tensor)
        alias_of = first_names.setdefault(_identity(tensor), name)
        head = {"name": name, "dtype": str(tensor.dtype), "shape": list(tensor.shape), "same_as": alias_of}
        hasher.update(_canonical(head))
        if alias_of == name:
            hasher.update(_bytes(tensor))
    return hasher.hexdigest()


def _stable(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            str(key): _stable(part)
            for key, part in value.items()
            if str(key) not in _VOLATILE and not str(key).startswith("_") and not _is_path(part)
        }
    if isinstance(value, list | tuple):
        return [_stable(part) for part in value]
    if isinstance(value, str | int | float | bool) or value is None:
        return value
    return str(value)


def _is_path(value: Any) -> bool:
    return isinstance(value, str) and value.startswith(("/", "./", "../", "~", "\\\\"))


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    """Equal for two names of the same memory. An empty tensor has no memory, so it is only itself."""
    if tensor.numel() == 0:
        return (id(tensor),)
    return (tensor.data_ptr(), tensor.device, tensor.dtype, tuple(tensor.shape), tensor.stride())


def _refuse_absent(name: str, tensor: Tensor) -> None:
    if tensor.is_meta:
        raise UsageError(
            f"weight {name!r} is not in memory (offloaded, or a model without weights), so the model "
            "cannot be identified. Load the model whole, on one device."
        )


def _bytes(tensor: Tensor) -> Any:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data
