"""Two digests that say which model this is: of its configuration and of its weights.

In: a transformers config, a module. Out: BLAKE3 hex digests that do not depend on paths, library versions,
the load dtype of the config, the order of modules, or where the weights lie (one device, several, a disk).
Equal digests mean equal values: PEFT adapters count as far as they act, packed weights as they are packed.
Buffers that no checkpoint holds follow from the config, and count only where a cast rounded them.
Cost: the weights are read once, tensor by tensor; a tensor that two names share is read once.
"""

import json
from collections.abc import Mapping
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor, nn

from ..store.errors import UsageError
from .offloaded import offloaded_tensors
from .packed import flattened, refuse_repacked
from .peft_state import acting

# What the loading wrote into the config rather than the model's author; the compute dtype is recorded by
# itself.
_VOLATILE = frozenset({"transformers_version", "dtype", "torch_dtype", "architectures"})
_HASH_THREADS = 2


def config_hash(config: Any) -> str:
    """Digest of the canonical JSON of a config, without what varies between machines and versions."""
    values = config.to_dict()
    # Of a GGUF file transformers notes whether it was to be unpacked, unless the caller did; what the weights
    # are then is for their own digest to say.
    packing = values.get("quantization_config")
    method = packing.get("quant_method") if isinstance(packing, Mapping) else None
    if getattr(method, "value", method) == "gguf":
        del values["quantization_config"]
    return blake3(_canonical(_stable(values))).hexdigest()


def weights_hash(model: nn.Module) -> str:
    """Digest over the names, dtypes, shapes and bytes of the weights that a forward pass uses, in the order
    of names; of buffers that no checkpoint holds, over the names of those that a cast rounded."""
    refuse_repacked(model)
    state, elsewhere = model.state_dict(), offloaded_tensors(model)
    casts = _cast_buffers(model, state)
    acts = acting(model, [*state, *casts])
    hasher = blake3(_canonical({"adapters": _stable(acts.facts)}))
    seen: dict[tuple[Any, ...], str] = {}
    for name, key in sorted(acts.names.items()):
        if key in casts:
            hasher.update(_canonical({"name": name, "dtype": casts[key]}))
            continue
        tensor = state[key]
        if key in elsewhere:
            tensor = elsewhere[key]().to(tensor.dtype)  # as its forward pass casts it
        for part, (plain, meaning) in flattened(tensor, key).items():
            _refuse_absent(key, plain)
            # A tensor made just now may lie where one before it lay, so its place says nothing.
            identity = (key, part) if part or key in elsewhere else _identity(plain)
            if identity not in seen:
                seen[identity] = blake3(_bytes(plain, key), max_threads=_HASH_THREADS).hexdigest()
            head = {"name": name, "dtype": str(plain.dtype), "shape": list(plain.shape)}
            packing = {"part": part, "packing": meaning} if part else {}
            hasher.update(_canonical({**head, **packing, "digest": seen[identity]}))
    return hasher.hexdigest()


def _cast_buffers(model: nn.Module, state: dict[str, Any]) -> dict[str, str]:
    """Dtypes of buffers outside the state dict that are not float32. Their values follow from the config
    (rotary frequencies), unless the whole model was cast, `model.to(torch.bfloat16)`, which rounds them too:
    such a model computes something else than one loaded in bfloat16."""
    return {
        name: str(buffer.dtype)
        for name, buffer in model.named_buffers()
        if name not in state and buffer.is_floating_point() and buffer.dtype is not torch.float32
    }


def _stable(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            str(key): _stable(part)
            for key, part in value.items()
            if str(key) not in _VOLATILE and not str(key).startswith("_") and not _is_path(part)
        }
    if isinstance(value, list | tuple):
        return [_stable(part) for part in value]
    if isinstance(value, set | frozenset):
        return sorted(str(_stable(part)) for part in value)
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
        return (tensor.dtype, tuple(tensor.shape))
    return (tensor.data_ptr(), tensor.device, tensor.dtype, tuple(tensor.shape), tensor.stride())


def _refuse_absent(name: str, tensor: Tensor) -> None:
    if tensor.is_meta:
        raise UsageError(
            f"weight {name!r} is not in memory, and nothing says from where it would be loaded (a model "
            "without weights), so the model cannot be identified. Load the model with its weights."
        )


def _bytes(tensor: Tensor, name: str) -> Any:
    try:
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        return flat.view(torch.uint8).numpy().data
    except (RuntimeError, NotImplementedError, TypeError):
        raise UsageError(
            f"the bytes of weight {name!r} ({type(tensor).__name__}, {tensor.dtype}) cannot be read, so the "
            "model cannot be identified. Load the model in bfloat16, float16 or float32."
        ) from None
