"""Weights that are packed: which method a model was quantised with, and the plain tensors inside it.

In: a config, a live model, a tensor. Out: a short name for the record ("bitsandbytes nf4"), or the plain
tensors of a tensor subclass (torchao's) by name. What cannot be identified truthfully is refused. Cost: a
look at the modules; no values are read.
"""

import re
from collections.abc import Mapping
from enum import Enum
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..store.errors import UsageError

# In a config, in this order: how many bits, or the name of a number format.
_BITS = ("bits", "nbits", "w_bit", "weight_bits", "num_bits")
_FORMATS = ("fmt", "format", "weights", "forward_dtype")


def flattened(tensor: Any, name: str) -> dict[str, tuple[Tensor, str]]:
    """The plain tensors that hold a weight's values, by their place inside it, each with what else decides
    those values. A plain tensor is its own only part, named ''."""
    if not isinstance(tensor, Tensor):
        raise UsageError(
            f"weight {name!r} is packed as a {type(tensor).__name__}, whose values cannot be read, so the "
            "model cannot be identified. Load the model unquantised, or quantise it with torchao or "
            "bitsandbytes."
        )
    if not is_traceable_wrapper_subclass(tensor):
        return {"": (tensor, "")}
    names, context = tensor.__tensor_flatten__()
    meaning = f"{type(tensor).__name__} {tensor.dtype} {_without_addresses(context)}"
    found: dict[str, tuple[Tensor, str]] = {}
    for part in names:
        for inner, (plain, more) in flattened(getattr(tensor, part), name).items():
            found[f"{part}.{inner}" if inner else part] = (plain, f"{meaning} {more}".strip())
    return found


def quantisation_of(config: Any, model: nn.Module | None = None) -> str | None:
    """Method and bits, where a config or the weights of a live model say that they are packed."""
    settings = _settings(config)
    if settings is not None:
        return _named(settings)
    return None if model is None else _by_weights(model)


def refuse_repacked(model: nn.Module) -> None:
    """bitsandbytes repacks 4-bit weights in the first forward pass on some CPUs, and rounds their scales.
    Its state dict would then unpack them again, wrongly: outputs moved by a quarter of their norm."""
    for name, module in model.named_modules():
        state = getattr(getattr(module, "weight", None), "quant_state", None)
        if getattr(state, "packing_format_for_cpu", False):
            raise UsageError(
                f"{name} holds 4-bit weights that bitsandbytes repacked for this CPU in a forward pass, and "
                "what they were cannot be read any more. Load the model anew and collect before any other "
                "forward pass, or use a GPU."
            )


def _settings(config: Any) -> Mapping[str, Any] | None:
    found = getattr(config, "quantization_config", None)
    if found is None:
        return None
    return found if isinstance(found, Mapping) else found.to_dict()


def _named(settings: Mapping[str, Any]) -> str:
    method = _text(settings.get("quant_method") or "unknown")
    if method == "bitsandbytes" or settings.get("load_in_8bit") or settings.get("load_in_4bit"):
        kind = "int8" if settings.get("load_in_8bit") else _text(settings.get("bnb_4bit_quant_type", "4-bit"))
        return f"bitsandbytes {kind}"
    if method == "torchao":
        return f"torchao {_torchao(settings.get('quant_type'))}"
    bits = next((settings[key] for key in _BITS if isinstance(settings.get(key), int)), None)
    bits = bits if bits is not None else _inner_bits(settings)
    form = next((settings[key] for key in _FORMATS if isinstance(settings.get(key), str)), None)
    words = [method, form, None if bits is None else f"{bits}-bit"]
    return " ".join(word for word in words if word)


def _torchao(kind: Any) -> str:
    """ "int8_weight_only" for the class, the dictionary and the string that say so."""
    if isinstance(kind, Mapping):
        inner = kind.get("default", kind)
        kind = inner.get("_type", "unknown") if isinstance(inner, Mapping) else inner
    name = kind if isinstance(kind, str) else type(kind).__name__
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.removesuffix("Config")).lower()


def _inner_bits(settings: Mapping[str, Any]) -> int | None:
    """Bits that stand deeper: config_groups of compressed-tensors, weight_quant_params of hqq."""
    for value in settings.values():
        if isinstance(value, Mapping):
            own = next((value[key] for key in _BITS if isinstance(value.get(key), int)), None)
            found = own if own is not None else _inner_bits(value)
            if found is not None:
                return found
    return None


def _by_weights(model: nn.Module) -> str | None:
    """A model that was quantised by hand has no word in its config."""
    for parameter in model.parameters():
        kind = type(parameter.data) if type(parameter) is nn.Parameter else type(parameter)
        package = kind.__module__.partition(".")[0]
        if package == "bitsandbytes":
            four = getattr(getattr(parameter, "quant_state", None), "quant_type", None)
            return f"bitsandbytes {four or 'int8'}"
        if package == "torchao":
            return f"torchao {kind.__name__}"
    return None


def _text(value: Any) -> str:
    return str(value.value if isinstance(value, Enum) else value)


def _without_addresses(context: Any) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", str(context))
