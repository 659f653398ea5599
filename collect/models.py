"""Load a causal language model with its tokenizer, unmodified, or describe one that is already alive.

In: a bundled name, a folder (of a model, or of a PEFT adapter, which names its base) or a hub id. Out: a
frozen `LoadedModel` with the digests that identify it. Cost: the weights are read once to load and once to
digest. Local and bundled models never cause a network request; weights come from safetensors (or GGUF) unless
pickles are allowed; remote code runs only when trusted. Every failure is one of our own errors, in one
sentence.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from ..store.errors import UsageError
from .adapters import refuse_family
from .anatomy import config_of, unwrapped
from .gguf_header import gguf_packing
from .hashes import config_hash, weights_hash
from .load_options import checked_attention, place_of, placing, refuse_packing, torch_dtype
from .packed import quantisation_of
from .peft_models import adapter_name, base_of, find_adapter, holds_adapter, put_on, refuse_offloaded
from .peft_state import adapters_of, refuse_unfaithful
from .pretrained import (
    commit_of,
    empty_model,
    first_file,
    guarded,
    read_config,
    read_tokenizer,
    read_weights,
    shared_options,
)
from .sources import HUB_ID, Source, find, require_weights


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A live model and what identifies it. `name`: a bundled name, a folder's name or hub id, with those of
    its adapters; no path. `quantization`: how its weights are packed, or were in their file."""

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
    adapter: str | None = None,
    attention: str | None = None,
    device_map: str | None = None,
    max_memory: Mapping[int | str, int] | None = None,
    offload_folder: str | None = None,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
) -> LoadedModel:
    """The model in evaluation mode, without gradients, on one device or spread by `device_map`.

    dtype "auto" is the checkpoint's own (float32 for GGUF, which is dequantised); device "auto" is CUDA where
    there is one. The family is checked from the config before any weight is read.
    """
    wanted, place = torch_dtype(dtype, gguf_file), place_of(device)
    attention = checked_attention(attention)
    source, tuned = _sources(model, revision, gguf_file, adapter)
    require_weights(source, allow_pickle=allow_pickle)
    shared = shared_options(source, revision, trust_remote_code)
    config = _config(source, shared)
    refuse_packing(config, source.name)
    first = guarded(source, lambda: first_file(source, shared))
    commit = None if source.local else commit_of(first)
    shared |= {} if commit is None else {"revision": commit}
    packing = quantisation_of(config)
    net = read_weights(
        source,
        config,
        shared,
        allow_pickle=allow_pickle,
        dtype=wanted,
        attn_implementation=attention,
        **placing(place, packing is not None, device_map, max_memory, offload_folder),
    )
    if adapters_of(net):
        raise UsageError(
            f"model {source.name!r} brings an adapter beside its config. Name its base as the model, and "
            f"{source.name!r} as the adapter."
        )
    if device_map is None and packing is None:
        net = guarded(source, lambda: net.to(place))
    if tuned is not None:
        refuse_offloaded(net, tuned)
        net = put_on(net, tuned, allow_pickle=allow_pickle)
    names = () if tuned is None else (tuned.name,)
    return LoadedModel(
        model=net.eval().requires_grad_(False),
        tokenizer=read_tokenizer(source, first.parent, shared),
        name="+".join((source.name, *names)),
        revision=commit,
        config_hash=config_hash(net.config),
        weights_hash=weights_hash(net),
        quantization=_quantisation(packing, net, first if source.gguf_file else None),
        adapters=names,
    )


def describe(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase | None = None, name: str | None = None
) -> LoadedModel:
    """A live model as it is: nothing is moved, cast or switched. It may be wrapped by PEFT, hold adapters of
    transformers' own `load_adapter`, be quantised, or be spread over devices by accelerate."""
    inner = unwrapped(model)
    config = config_of(inner)
    refuse_unfaithful(inner)
    adapters = adapters_of(inner)
    origin = _public_name(str(getattr(config, "_name_or_path", "") or "")) or config.model_type
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        name=name or "+".join((origin, *adapters)),
        revision=getattr(config, "_commit_hash", None),
        config_hash=config_hash(config),
        weights_hash=weights_hash(inner),
        quantization=quantisation_of(config, inner),
        adapters=adapters,
    )


def outline(
    model: str,
    *,
    revision: str | None = None,
    gguf_file: str | None = None,
    trust_remote_code: bool = False,
) -> nn.Module:
    """The model's modules on the meta device, from its config alone: no weight is read or allocated. Enough
    for a family with a row in adapters.py; the parts of another are found by running it."""
    source, _ = _sources(model, revision, gguf_file, None)
    config = _config(source, shared_options(source, revision, trust_remote_code))
    with torch.device("meta"):
        return empty_model(source, config, trust_remote_code)


def recorded_name(model: str, gguf_file: str | None = None, adapter: str | None = None) -> str:
    """What a store calls the model that these settings name. Looks at folders only, asks no hub."""
    if adapter is not None:
        return f"{find(model, gguf_file=gguf_file).name}+{adapter_name(adapter)}"
    source, tuned = _sources(model, None, gguf_file, None)
    return source.name if tuned is None else f"{source.name}+{tuned.name}"


def attention_implementation(model: nn.Module) -> str:
    """The name transformers gives the attention code in use, for the record."""
    config: Any = unwrapped(model).config
    return str(getattr(config, "_attn_implementation", None) or "unknown")


def _sources(
    model: str, revision: str | None, gguf_file: str | None, adapter: str | None
) -> tuple[Source, Source | None]:
    """Where the model is, and its adapter. A folder with an adapter alone stands for its base with it."""
    if adapter is None and holds_adapter(model):
        adapter, model = model, ""
    tuned = None if adapter is None else find_adapter(adapter)
    source = find(model or (base_of(tuned) if tuned else ""), gguf_file=gguf_file)
    if source.local and revision is not None:
        raise UsageError(
            f"revision {revision!r}: {source.name!r} is a local folder and has no revisions. Leave "
            "revision out, or give a hub id."
        )
    return source, tuned


def _config(source: Source, shared: dict[str, Any]) -> Any:
    config = read_config(source, shared)
    refuse_family(config)
    return config


def _quantisation(packing: str | None, net: nn.Module, gguf: Path | None) -> str | None:
    """How the weights were packed in the checkpoint, and whether they still are."""
    if gguf is not None:
        packing = None if (kind := gguf_packing(gguf)) is None else f"gguf {kind}"
    if packing is None:
        return None
    packed = quantisation_of(net.config, net)
    return packing if packed is not None else f"{packing}, dequantised"


def _public_name(origin: str) -> str:
    """A hub id stays; a path gives its last part."""
    if not origin:
        return ""
    path = Path(origin)
    if HUB_ID.fullmatch(origin) and not path.exists():
        return origin
    return PureWindowsPath(path.resolve()).name  # its separators are ours and those of Windows
