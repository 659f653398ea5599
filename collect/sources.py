"""What a model's name means: bundled, a local folder, an id on the Hugging Face hub.

In: the string a user typed. Out: a `Source`, or a sentence that says what is wrong with it. Cost: a look at
the folder, for a hub id one name look-up.
"""

import difflib
import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from huggingface_hub import constants

from ..store.errors import UsageError
from .bundled_models import BUNDLED, bundled_path

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


@dataclass(frozen=True, slots=True)
class Source:
    """Where a model is read from. `name` is what gets recorded: never a path."""

    where: str
    name: str
    local: bool
    gguf_file: str | None


def find(model: str, *, gguf_file: str | None = None) -> Source:
    """Resolve a bundled name, a folder or a hub id. A folder is checked before anything is loaded from it."""
    if model in BUNDLED:
        return _folder(bundled_path(model), model, None)
    path = Path(model).expanduser()
    if path.is_dir():
        return _folder(path, path.resolve().name, gguf_file)
    if path.is_file():
        raise UsageError(_file_instead_of_folder(path))
    near = difflib.get_close_matches(model, BUNDLED, n=1, cutoff=0.8)
    if near:
        raise UsageError(
            f"model {model!r}: did you mean {near[0]!r}? Bundled models are {', '.join(BUNDLED)}; for a "
            "model on the hub give OWNER/NAME."
        )
    if not HUB_ID.fullmatch(model):
        raise UsageError(
            f"model {model!r}: there is no such folder, and it is not a hub id (OWNER/NAME). Give a folder "
            f"with config.json and safetensors, a hub id, or a bundled model: {', '.join(BUNDLED)}."
        )
    return Source(where=model, name=_named(model, gguf_file), local=False, gguf_file=gguf_file)


def require_weights(source: Source, *, allow_pickle: bool) -> None:
    """A local folder must hold weights, and as safetensors unless pickles are allowed."""
    path = Path(source.where)
    if not source.local or source.gguf_file is not None:
        return
    if (path / "adapter_config.json").is_file():
        raise UsageError(
            f"model folder {path} holds a whole model and an adapter. Move the adapter's files into a folder "
            "of their own and name it as adapter, or remove them."
        )
    if any(path.glob("*.safetensors")):
        return
    pickles = sorted(file.name for file in path.glob("*.bin"))
    if pickles and allow_pickle:
        return
    if pickles:
        raise UsageError(
            f"model folder {path} holds its weights only as a pickle ({pickles[0]}), which can run code. "
            "Convert it to safetensors, or allow it with allow_pickle (--allow-pickle) if you trust its "
            "origin."
        )
    raise UsageError(f"model folder {path} holds no weights. {_WHAT_A_FOLDER_HOLDS}")


def hub_unreachable() -> bool:
    """Whether the hub's name cannot be resolved here: then only the cache can answer.

    The hub's client would retry for twenty seconds and print each attempt. Behind a proxy the name need not
    resolve on this machine, so nothing is concluded there.
    """
    if os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy") or os.environ.get("ALL_PROXY"):
        return False
    host = urlsplit(constants.ENDPOINT).hostname
    try:
        socket.getaddrinfo(host, 443)
    except OSError:
        return True
    return False


def _folder(path: Path, name: str, gguf_file: str | None) -> Source:
    ggufs = ", ".join(sorted(file.name for file in path.glob("*.gguf")))
    if gguf_file is not None:
        if not (path / gguf_file).is_file():
            have = f"it holds {ggufs}" if ggufs else "it holds no GGUF file"
            raise UsageError(f"model folder {path}: there is no file {gguf_file!r}; {have}.")
        return Source(str(path), _named(name, gguf_file), local=True, gguf_file=gguf_file)
    if not (path / "config.json").is_file():
        hint = f"Name one of its GGUF files as gguf_file: {ggufs}." if ggufs else _WHAT_A_FOLDER_HOLDS
        if (path / "adapter_config.json").is_file():
            hint = "It is an adapter: name it as adapter, and its base as the model."
        raise UsageError(f"model folder {path} has no config.json. {hint}")
    return Source(str(path), name, local=True, gguf_file=None)


_WHAT_A_FOLDER_HOLDS = (
    "Give a folder that save_pretrained wrote (config.json, *.safetensors, tokenizer files)."
)


def _file_instead_of_folder(path: Path) -> str:
    if path.suffix == ".gguf":
        return f"model {path} is a file. Give its folder, {path.parent}, and gguf_file {path.name!r}."
    return f"model {path} is a file; a model is a folder. {_WHAT_A_FOLDER_HOLDS}"


def _named(name: str, gguf_file: str | None) -> str:
    return name if gguf_file is None else f"{name}/{Path(gguf_file).stem}"
