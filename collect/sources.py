"""What a model's name means (bundled, a local folder, an id on the Hugging Face hub), why it did not load.

In: the string a user typed, or an exception of transformers or huggingface_hub. Out: a `Source`, or one of
our own errors in one sentence. Cost: a look at the folder, for a hub id one name look-up. No message repeats
a request's address, headers or token.
"""

import difflib
import os
import re
import socket
import struct
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from huggingface_hub import constants
from huggingface_hub import errors as hub

from ..store.errors import EnvironmentFault, NearlineError, UsageError
from .bundled_models import BUNDLED, bundled_path

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_SECRETS = re.compile(r"hf_\w+|api_org_\w+|(?i:bearer)\s+\S+|(?<=://)[^/\s@]+@|\?\S+")
_MAX_REASON = 300
_WHAT_A_MODEL_IS = (
    "Allowed are decoder-only causal language models with config.json and safetensors; check the folder or "
    "id, and the options given."
)


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


def explain(
    error: BaseException, source: Source, what: str = "model", allowed: str = _WHAT_A_MODEL_IS
) -> NearlineError:
    """Our own error for whatever a loader raised."""
    chain, named = _chain(error), f"{what} {source.name!r}"
    if any(isinstance(link, MemoryError) or "out of memory" in str(link).lower() for link in chain):
        return EnvironmentFault(
            f"{named} does not fit into memory. Choose a smaller dtype (bfloat16), another device, a "
            "device_map, or a smaller model."
        )
    answered = None if source.local else _answer_of_the_hub(chain, named, what)
    if answered is not None:
        return answered
    known = _known_fault(chain, source)
    if known is not None:
        return UsageError(f"{named} {known}")
    reason = _reason(error).replace(source.where, source.name)  # which may be a folder of this machine
    if any(isinstance(link, ImportError) for link in chain):
        return UsageError(f"{named} needs a package that is not here: {reason}")
    return UsageError(f"{named} could not be loaded: {reason} {allowed}")


_UNKNOWN_FAMILY = re.compile(r"model type `(.+?)` but Transformers does not recognize")
_NOT_WHOLE = ("magic bytes", "cannot reshape array", "mmap length", "buffer is smaller")


def _known_fault(chain: list[BaseException], source: Source) -> str | None:
    """What is wrong, where transformers says it in many words, or in those of its insides."""
    said = " ".join(str(link) for link in chain)
    if "custom code" in said and "execute" in said:
        return (
            "brings code of its own, which is run only if you trust it. Read that code, then set "
            "trust_remote_code (--trust-remote-code), or choose a model whose code is in transformers."
        )
    family = _UNKNOWN_FAMILY.search(said)
    if family is not None:
        return (
            f"is of a family, {family[1]!r}, that the installed transformers does not know. Check model_type "
            "in its config.json, or install a newer transformers."
        )
    if "ignore_mismatched_sizes" in said:
        return (
            "has weights of other shapes than its config.json says. Give the config and the weights of one "
            "checkpoint."
        )
    if source.gguf_file is not None and (
        any(isinstance(link, struct.error) for link in chain) or any(word in said for word in _NOT_WHOLE)
    ):
        path = Path(source.where) / source.gguf_file
        size = f" ({path.stat().st_size:,} bytes)" if path.is_file() else ""
        return f"cannot be read: {path.name} is no whole GGUF file{size}. Download it again."
    return None


_HUB_ERRORS: tuple[tuple[type[BaseException], str], ...] = (
    (
        hub.GatedRepoError,
        "is gated on the hub. Accept its conditions on its page, then log in with `hf auth login`, or set "
        "the variable HF_TOKEN to a token that may read it.",
    ),
    (
        hub.RepositoryNotFoundError,
        "is neither a folder here nor on the hub (or it is private). Check the spelling, or log in with "
        "`hf auth login`, or set the variable HF_TOKEN.",
    ),
    (
        hub.RevisionNotFoundError,
        "has no such revision on the hub. Give a branch, a tag or a commit that its page lists.",
    ),
    (
        hub.RemoteEntryNotFoundError,
        "lacks a needed file on the hub (config.json, or weights as safetensors). Choose a model with "
        "safetensors, or name its GGUF file; an adapter alone is named as adapter, its base as the model.",
    ),
)
_NO_ANSWER = (hub.OfflineModeIsEnabled, hub.LocalEntryNotFoundError, ConnectionError, TimeoutError)


def _answer_of_the_hub(chain: list[BaseException], named: str, what: str) -> NearlineError | None:
    for kind, words in _HUB_ERRORS:
        if any(isinstance(link, kind) for link in chain):
            return UsageError(f"{named} {words}")
    for link in chain:
        if isinstance(link, hub.HfHubHTTPError):
            return EnvironmentFault(
                f"{named}: the hub answered with an error (HTTP {link.response.status_code}). Try again "
                "later, or give a local folder."
            )
    if any(isinstance(link, _NO_ANSWER) or _is_transport(link) for link in chain):
        folder = f"a local folder or a bundled model ({', '.join(BUNDLED)})"
        return EnvironmentFault(
            f"{named} is no folder here and not in the local cache, and the hub cannot be reached. Give "
            f"{folder if what == 'model' else f'the folder of the {what}'}, or try again with network."
        )
    if any("Should have a `model_type` key" in str(link) for link in chain):
        return UsageError(
            f"{named} has no config.json of a model on the hub. An adapter is named as adapter, and its base "
            "as the model; of a GGUF repository name a file too."
        )
    if any("`use_safetensors=True`" in str(link) for link in chain):
        return UsageError(
            f"{named} has no safetensors on the hub (perhaps pickles, which can run code). Choose a model "
            "with safetensors, name its GGUF file, or set allow_pickle (--allow-pickle) if you trust its "
            "origin."
        )
    return None


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
    """The first line of what was said; with the second where the first only announces it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    line = " ".join(lines[: 2 if lines[0].endswith(":") else 1])
    if isinstance(error, KeyError):
        line = f"KeyError: {line}"
    line = _SECRETS.sub("…", line)[:_MAX_REASON].rstrip(".!?: ")
    return f"{line}."
