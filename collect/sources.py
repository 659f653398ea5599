"""What a model's name means (bundled, a local folder, an id on the Hugging Face hub), why it did not load.

In: the string a user typed, or an exception of transformers or huggingface_hub. Out: a `Source`, or one of
our own errors in one sentence. Cost: a look at the folder, for a hub id one name look-up. No message repeats
a request's address, headers or token.
"""

import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from huggingface_hub import constants
from huggingface_hub import errors as hub

from ..store.errors import EnvironmentFault, NearlineError, UsageError
from .bundled_models import BUNDLED, bundled_path

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_SECRETS = re.compile(r"hf_\w+|api_org_\w+|(?i:bearer)\s+\S+|(?<=://)[^/\s@]+@|\?\S+")
_MAX_REASON = 300


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
    if not _HUB_ID.fullmatch(model):
        raise UsageError(
            f"model {model!r}: there is no such folder, and it is not a hub id (OWNER/NAME). Give a folder "
            f"with config.json and safetensors, a hub id, or a bundled model: {', '.join(BUNDLED)}."
        )
    return Source(where=model, name=_named(model, gguf_file), local=False, gguf_file=gguf_file)


def require_weights(source: Source, *, allow_pickle: bool) -> None:
    """A local folder must hold weights, and as safetensors unless pickles are allowed."""
    path = Path(source.where)
    if not source.local or source.gguf_file is not None or any(path.glob("*.safetensors")):
        return
    pickles = sorted(file.name for file in path.glob("*.bin"))
    if pickles and allow_pickle:
        return
    if pickles:
        raise UsageError(
            f"model folder {path} holds its weights only as a pickle ({pickles[0]}), which can run code. "
            "Convert it to safetensors, or allow it with allow_pickle if you trust its origin."
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


def explain(error: BaseException, source: Source) -> NearlineError:
    """Our own error for whatever a loader raised."""
    chain = _chain(error)
    if any(isinstance(link, MemoryError) or "out of memory" in str(link).lower() for link in chain):
        return EnvironmentFault(
            f"model {source.name!r} does not fit into memory. Choose a smaller dtype (bfloat16), another "
            "device, or a smaller model."
        )
    if not source.local:
        for kind, words in _HUB_ERRORS:
            if any(isinstance(link, kind) for link in chain):
                return _hub_error(words, source)
        for link in chain:
            if isinstance(link, hub.HfHubHTTPError):
                return EnvironmentFault(
                    f"model {source.name!r}: the hub answered with an error (HTTP "
                    f"{link.response.status_code}). Try again later, or give a local folder."
                )
        if any(isinstance(link, ConnectionError | TimeoutError) or _is_transport(link) for link in chain):
            return _hub_error(_OFFLINE, source)
    return UsageError(
        f"model {source.name!r} could not be loaded: {_reason(error)} Allowed are decoder-only causal "
        "language models with config.json and safetensors; check the folder or id, and the options given."
    )


_OFFLINE = "offline"
_HUB_ERRORS: tuple[tuple[type[BaseException], str], ...] = (
    (
        hub.GatedRepoError,
        "is gated on the hub. Accept its conditions on its page, then log in with `hf auth login`.",
    ),
    (
        hub.RepositoryNotFoundError,
        "is neither a folder here nor a model on the hub (or it is private). Check the spelling, or log "
        "in with `hf auth login`.",
    ),
    (
        hub.RevisionNotFoundError,
        "has no such revision on the hub. Give a branch, a tag or a commit that its page lists.",
    ),
    (
        hub.RemoteEntryNotFoundError,
        "lacks a needed file on the hub (config.json, or weights as safetensors). Choose a model with "
        "safetensors, or name its GGUF file.",
    ),
    (hub.OfflineModeIsEnabled, _OFFLINE),
    (hub.LocalEntryNotFoundError, _OFFLINE),
)


def _hub_error(words: str, source: Source) -> NearlineError:
    if words == _OFFLINE:
        return EnvironmentFault(
            f"model {source.name!r} is no folder here and not in the local cache, and the hub cannot be "
            f"reached. Give a local folder or a bundled model ({', '.join(BUNDLED)}), or try again with "
            "network."
        )
    return UsageError(f"model {source.name!r} {words}")


def _folder(path: Path, name: str, gguf_file: str | None) -> Source:
    ggufs = ", ".join(sorted(file.name for file in path.glob("*.gguf")))
    if gguf_file is not None:
        if not (path / gguf_file).is_file():
            have = f"it holds {ggufs}" if ggufs else "it holds no GGUF file"
            raise UsageError(f"model folder {path}: there is no file {gguf_file!r}; {have}.")
        return Source(str(path), _named(name, gguf_file), local=True, gguf_file=gguf_file)
    if not (path / "config.json").is_file():
        hint = f"Name one of its GGUF files as gguf_file: {ggufs}." if ggufs else _WHAT_A_FOLDER_HOLDS
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


def _chain(error: BaseException | None) -> list[BaseException]:
    links: list[BaseException] = []
    while error is not None and error not in links:
        links.append(error)
        error = error.__cause__ or error.__context__
    return links


def _is_transport(error: BaseException) -> bool:
    # The HTTP client is huggingface_hub's business and has changed once; its connection errors share these
    # names.
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(names & {"ConnectError", "ConnectionError", "TransportError", "TimeoutException"})


def _reason(error: BaseException) -> str:
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    line = _SECRETS.sub("…", line)[:_MAX_REASON].rstrip(". ")
    return f"{line}."
