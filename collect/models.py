"""Load a causal language model with its tokenizer, unmodified, or describe one that is already alive.

In: a bundled name, a folder, or a hub id. Out: a frozen `LoadedModel` with the digests that identify it.
Cost: the weights are read once to load and once to digest. Local and bundled models never cause a network
request; weights come from safetensors (or GGUF) unless pickles are allowed; remote code runs only when
trusted. Every failure is one of our own errors, in one sentence.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from ..store.errors import EnvironmentFault, NearlineError, UsageError
from .adapters import adapter_for
from .anatomy import unwrapped
from .hashes import config_hash, weights_hash
from .sources import Source, explain, find, hub_unreachable, require_weights

DTYPES = ("auto", "float32", "bfloat16", "float16")
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A live model and what identifies it. `name`: a bundled name, a folder's name or hub id; no path."""

    model: nn.Module
    tokenizer: PreTrainedTokenizerBase | None
    name: str
    revision: str | None
    config_hash: str
    weights_hash: str
    quantization: str | None = None
    adapters: tuple[str, ...] = ()

    @property
    def attention(self) -> str:
        """The attention implementation that the forward pass uses."""
        return attention_implementation(self.model)


def load(
    model: str,
    *,
    revision: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    gguf_file: str | None = None,
    attention: str | None = None,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
) -> LoadedModel:
    """The model in evaluation mode, without gradients, on one device.

    dtype "auto" is the checkpoint's own (float32 for GGUF, which is dequantised); device "auto" is CUDA where
    there is one. The family is checked from the config before any weight is read.
    """
    torch_dtype = _torch_dtype(dtype, gguf_file)
    place = _place(device)
    source = _checked_source(model, revision, gguf_file)
    require_weights(source, allow_pickle=allow_pickle)
    shared = _shared_options(source, revision, trust_remote_code)
    config = _config(source, shared)
    loaded: Any = _guarded(
        source,
        lambda: AutoModelForCausalLM.from_pretrained(
            source.where,
            dtype=torch_dtype,
            attn_implementation=attention,
            use_safetensors=None if allow_pickle or source.gguf_file else True,
            # Plain weights: packed ones would compute in float32 whatever dtype was asked for.
            **({} if source.gguf_file is None else {"quantization_config": GgufConfig(dequantize=True)}),
            output_loading_info=True,
            **shared,
        ),
    )
    net, report = loaded
    _refuse_invented_weights(source, report)
    net = _guarded(source, lambda: net.to(place)).eval().requires_grad_(False)
    tokenizer = _guarded(source, lambda: AutoTokenizer.from_pretrained(source.where, **shared))
    return LoadedModel(
        model=net,
        tokenizer=tokenizer,
        name=source.name,
        revision=None if source.local else getattr(config, "_commit_hash", None),
        config_hash=config_hash(net.config),
        weights_hash=weights_hash(net),
    )


def describe(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase | None = None, name: str | None = None
) -> LoadedModel:
    """A live model (PEFT-wrapped too) as it is: nothing is moved, cast or switched."""
    inner = unwrapped(model)
    config: Any = inner.config
    origin = str(getattr(config, "_name_or_path", "") or "")
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        name=name or _public_name(origin) or config.model_type,
        revision=getattr(config, "_commit_hash", None),
        config_hash=config_hash(config),
        weights_hash=weights_hash(inner),
    )


def outline(
    model: str,
    *,
    revision: str | None = None,
    gguf_file: str | None = None,
    trust_remote_code: bool = False,
) -> nn.Module:
    """The model's modules on the meta device, from its config alone: no weight is read or allocated."""
    source = _checked_source(model, revision, gguf_file)
    config = _config(source, _shared_options(source, revision, trust_remote_code))
    with torch.device("meta"):
        return _guarded(
            source, lambda: AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
        )


def attention_implementation(model: nn.Module) -> str:
    """The name transformers gives the attention code in use, for the record."""
    config: Any = unwrapped(model).config
    return str(getattr(config, "_attn_implementation", None) or "unknown")


def _checked_source(model: str, revision: str | None, gguf_file: str | None) -> Source:
    source = find(model, gguf_file=gguf_file)
    if source.local and revision is not None:
        raise UsageError(
            f"revision {revision!r}: {source.name!r} is a local folder and has no revisions. Leave "
            "revision out, or give a hub id."
        )
    return source


def _shared_options(source: Source, revision: str | None, trust_remote_code: bool) -> dict[str, Any]:
    cached_only = source.local or hub_unreachable()
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "local_files_only": cached_only}
    if revision is not None:
        options["revision"] = revision
    if source.gguf_file is not None:
        options["gguf_file"] = source.gguf_file
    return options


def _config(source: Source, shared: dict[str, Any]) -> Any:
    config = _guarded(source, lambda: AutoConfig.from_pretrained(source.where, **shared))
    adapter_for(config.model_type)
    return config


def _refuse_invented_weights(source: Source, report: Any) -> None:
    """transformers fills in random numbers for weights that a checkpoint lacks, and only warns."""
    missing = sorted(report["missing_keys"])
    if missing:
        raise UsageError(
            f"model {source.name!r}: its files lack {len(missing)} of the weights that its config asks "
            f"for, the first is {missing[0]!r}. Give a complete checkpoint of a causal language model."
        )


def _guarded(source: Source, action: Callable[[], _Result]) -> _Result:
    """Run one call of transformers; whatever it raises becomes an error of ours."""
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # progress is the caller's to show
    try:
        return action()
    except NearlineError:
        raise
    except Exception as error:
        # Only library calls pass here, and their exceptions have no common type. `from None`: the original's
        # text may quote a request.
        raise explain(error, source) from None
    finally:
        if bars:
            transformers_logging.enable_progress_bar()


def _torch_dtype(dtype: str, gguf_file: str | None) -> Any:
    if dtype not in DTYPES:
        raise UsageError(f"dtype {dtype!r} is not known. Allowed: {', '.join(DTYPES)}.")
    if dtype == "auto":
        return "auto" if gguf_file is None else torch.float32
    return getattr(torch, dtype)


def _place(device: str) -> torch.device:
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


def _public_name(origin: str) -> str:
    """A hub id stays; a path gives its last part."""
    if not origin:
        return ""
    path = Path(origin)
    return path.resolve().name if path.is_absolute() or path.exists() else origin
