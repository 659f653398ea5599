"""What a load was asked for, as transformers takes it: dtype, device or device map, attention, packing.

In: settings by name. Out: torch and transformers values, or one sentence with what is allowed here. Cost:
none; nothing is loaded.
"""

import importlib.util
from collections.abc import Mapping
from typing import Any

import torch

from ..store.errors import EnvironmentFault, UsageError
from .packed import quantisation_of

DTYPES = ("auto", "float32", "bfloat16", "float16")
ATTENTIONS = ("eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3")
_FLASH = {
    "flash_attention_2": ("flash_attn", "flash-attn"),
    "flash_attention_3": ("flash_attn_3", "flash-attn-3"),
}
# Packages without which transformers cannot read weights of a method: module, and what pip calls it.
_NEEDED = {
    "aqlm": ("aqlm", "aqlm[cpu,gpu]"),
    "auto-round": ("auto_round", "auto-round"),
    "awq": ("gptqmodel", "gptqmodel"),
    "bitsandbytes": ("bitsandbytes", "bitsandbytes"),
    "compressed-tensors": ("compressed_tensors", "compressed-tensors"),
    "eetq": ("kernels", "kernels"),
    "fbgemm_fp8": ("fbgemm_gpu", "fbgemm-gpu"),
    "fp_quant": ("fp_quant", "fp_quant"),
    "gptq": ("gptqmodel", "gptqmodel optimum"),
    "higgs": ("flute", "flute-kernel"),
    "hqq": ("hqq", "hqq"),
    "quanto": ("optimum.quanto", "optimum-quanto"),
    "quark": ("quark", "amd-quark"),
    "spqr": ("spqr_quant", "spqr_quant[gpu]"),
    "torchao": ("torchao", "torchao"),
    "vptq": ("vptq", "vptq"),
}


def torch_dtype(dtype: str, gguf_file: str | None) -> Any:
    """A torch dtype, or "auto" for the checkpoint's own (float32 for GGUF, which is dequantised)."""
    if dtype not in DTYPES:
        raise UsageError(f"dtype {dtype!r} is not known. Allowed: {', '.join(DTYPES)}.")
    if dtype == "auto":
        return "auto" if gguf_file is None else torch.float32
    return getattr(torch, dtype)


def place_of(device: str) -> torch.device:
    """The device: "auto" is CUDA where there is one."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError:
        raise UsageError(f"device {device!r} is not known. Allowed: auto, cpu, cuda, cuda:0 …") from None
    if place.type == "cuda" and not torch.cuda.is_available():
        raise EnvironmentFault(
            f"device {device!r}: torch sees no CUDA device here. Use device cpu, or install torch for your "
            "GPU."
        )
    return place


def checked_attention(attention: str | None) -> str | None:
    """The implementation asked for, where it is known and its package is here."""
    if attention is None:
        return None
    here = [name for name in ATTENTIONS if name not in _FLASH or _is_here(_FLASH[name][0])]
    if attention not in ATTENTIONS:
        raise UsageError(f"attention {attention!r} is not known. Allowed here: {', '.join(here)}.")
    if attention not in here:
        raise UsageError(
            f"attention {attention!r} needs the package {_FLASH[attention][1]} (and a CUDA GPU), which is "
            f"not installed. Allowed here: {', '.join(here)}."
        )
    return attention


def placing(
    place: torch.device,
    packed: bool,
    device_map: str | None,
    max_memory: Mapping[int | str, int] | None,
    offload_folder: str | None,
) -> dict[str, Any]:
    """Where the weights go while they are read. Packed ones are made on their device and seldom move."""
    if device_map is None:
        return {"device_map": {"": place}} if packed else {}
    options: dict[str, Any] = {"device_map": device_map}
    if max_memory is not None:
        options["max_memory"] = dict(max_memory)
    if offload_folder is not None:
        options["offload_folder"] = offload_folder
    return options


def refuse_packing(config: Any, name: str) -> None:
    """Refuse a method that transformers would leave out with a warning, or one whose package is missing."""
    packing = quantisation_of(config)
    if packing is None:
        return
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING as KNOWN

    method = packing.split()[0]
    if not any(one.split("_4bit")[0].split("_8bit")[0] == method for one in KNOWN):
        raise UsageError(
            f"model {name!r} is quantised by {method!r}, which transformers does not know. Load the "
            "unquantised model, or one quantised by bitsandbytes, torchao, gptq or awq."
        )
    module, package = _NEEDED.get(method, ("", ""))
    if module and not _is_here(module):
        raise UsageError(
            f"model {name!r} is quantised ({packing}), and the package for that is not installed: "
            f"pip install {package}. Or load the unquantised model."
        )


def _is_here(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that it would be in
        return False
