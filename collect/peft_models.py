"""PEFT adapters on disk: what a folder holds, which base it names, and putting it on a loaded model.

In: a folder that `save_pretrained` of a PEFT model wrote, or a hub id of such files. Out: its place and name,
or the model with the adapter's modules inside. Cost: reading the adapter's weights, which are safetensors
unless pickles are allowed. What the adapter lacks for this base is an error, never a random number.
"""

import importlib.util
import json
import warnings
from pathlib import Path
from typing import Any

from huggingface_hub import errors as hub
from huggingface_hub import snapshot_download
from torch import nn

from ..store.errors import UsageError
from .anatomy import unwrapped
from .loading_faults import explain
from .offloaded import offloaded_tensors
from .peft_state import refuse_unfaithful
from .sources import HUB_ID, Source, hub_unreachable

CONFIG, WEIGHTS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
_WHAT_IT_HOLDS = f"Give a folder that save_pretrained of a PEFT model wrote ({CONFIG}, {WEIGHTS})."
_ELSEWHERE = ("./", "../", ".\\", "..\\", "~")


def holds_adapter(model: str) -> bool:
    """Whether the folder `model` is an adapter and no model: it has no weights but the adapter's."""
    path = Path(model).expanduser()
    if not (path / CONFIG).is_file():
        return False
    weights = {file.name for kind in ("*.safetensors", "*.bin") for file in path.glob(kind)}
    return not weights - {WEIGHTS, PICKLE}


def adapter_name(adapter: str) -> str:
    """What is recorded of an adapter: its folder's name, or its hub id."""
    path = Path(adapter).expanduser()
    return path.resolve().name if path.is_dir() else adapter


def find_adapter(adapter: str) -> Source:
    """The folder of an adapter, of a hub id a copy in the cache."""
    require_peft(adapter)
    path = Path(adapter).expanduser()
    if path.is_dir():
        if not (path / CONFIG).is_file():
            raise UsageError(f"adapter folder {path} has no {CONFIG}. {_WHAT_IT_HOLDS}")
        return Source(str(path), adapter_name(adapter), local=True, gguf_file=None)
    if path.is_file():
        raise UsageError(f"adapter {path} is a file; an adapter is a folder. {_WHAT_IT_HOLDS}")
    if not HUB_ID.fullmatch(adapter):
        raise UsageError(
            f"adapter {adapter!r}: there is no such folder, and it is not a hub id (OWNER/NAME). "
            f"{_WHAT_IT_HOLDS}"
        )
    return _downloaded(Source(adapter, adapter, local=False, gguf_file=None))


def base_of(adapter: Source) -> str:
    """The base model that an adapter names: a bundled name, a folder or a hub id, to be looked up here."""
    base = _config(adapter).get("base_model_name_or_path")
    which = "Name the base as the model, and this folder as its adapter (model=BASE adapter=FOLDER)."
    if not isinstance(base, str) or not base:
        raise UsageError(f"adapter {adapter.name!r} does not say of which model it is. {which}")
    if base.startswith(_ELSEWHERE):
        raise UsageError(
            f"adapter {adapter.name!r} names its base by a relative path, {base!r}, and does not say from "
            f"where. {which}"
        )
    if Path(base).is_absolute() and not Path(base).is_dir():
        raise UsageError(f"adapter {adapter.name!r}: its base {base} is not on this machine. {which}")
    return base


def put_on(net: nn.Module, adapter: Source, *, allow_pickle: bool) -> nn.Module:
    """`net` with the adapter's modules inside, in evaluation mode."""
    folder = Path(adapter.where)
    if not (folder / WEIGHTS).is_file():
        if not (folder / PICKLE).is_file():
            raise UsageError(f"adapter {adapter.name!r} holds no weights. {_WHAT_IT_HOLDS}")
        if not allow_pickle:
            raise UsageError(
                f"adapter {adapter.name!r} holds its weights only as a pickle ({PICKLE}), which can run "
                "code. Convert it to safetensors, or allow it with allow_pickle (--allow-pickle) if you "
                "trust its origin."
            )
    from peft import PeftModel

    _config(adapter)
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            wrapped: Any = PeftModel.from_pretrained(net, adapter.where, is_trainable=False)
    except Exception as error:
        # peft's exceptions have no common type. `from None`: the original's text may quote a request.
        raise explain(error, adapter, "adapter", _WHAT_IT_HOLDS) from None
    missing = [str(one.message) for one in said if "missing adapter keys" in str(one.message)]
    if missing:
        raise UsageError(
            f"adapter {adapter.name!r} lacks weights that its {CONFIG} asks for on this model. Give the "
            "whole adapter, and the base model that it was trained on."
        )
    inner = unwrapped(wrapped)
    refuse_unfaithful(inner)
    return inner.eval().requires_grad_(False)


def refuse_offloaded(net: nn.Module, adapter: Source) -> None:
    """peft cannot put an adapter on weights that lie elsewhere between forward passes."""
    if offloaded_tensors(net):
        raise UsageError(
            f"adapter {adapter.name!r} cannot be put on a model that is partly in main memory or on disk "
            "(device_map). Give a max_memory that holds it on devices, or merge the adapter first."
        )


def require_peft(adapter: str) -> None:
    if importlib.util.find_spec("peft") is None:
        raise UsageError(
            f"adapter {adapter!r} needs the package peft, which is not installed: pip install "
            '"nearline[collect]"'
        )


def _config(adapter: Source) -> dict[str, Any]:
    path = Path(adapter.where) / CONFIG
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = None
    if not isinstance(found, dict) or "peft_type" not in found:
        raise UsageError(f"adapter {adapter.name!r}: its {CONFIG} is not a PEFT config. {_WHAT_IT_HOLDS}")
    return found


def _downloaded(source: Source) -> Source:
    try:
        folder = snapshot_download(
            source.where, allow_patterns=[CONFIG, WEIGHTS, PICKLE], local_files_only=hub_unreachable()
        )
    except (hub.HfHubHTTPError, OSError, ValueError) as error:
        raise explain(error, source, "adapter", _WHAT_IT_HOLDS) from None
    if not (Path(folder) / CONFIG).is_file():
        raise UsageError(f"adapter {source.name!r} has no {CONFIG} on the hub. {_WHAT_IT_HOLDS}")
    return Source(folder, source.name, local=False, gguf_file=None)
