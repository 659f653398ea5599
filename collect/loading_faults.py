"""Why a model did not load.

In: an exception of transformers or huggingface_hub. Out: one of our own errors, in one sentence. No message
repeats a request's address, headers or token. Cost: none.
"""

import re
import struct
from pathlib import Path

from huggingface_hub import errors as hub

from ..store.errors import EnvironmentFault, NearlineError, UsageError
from .bundled_models import BUNDLED
from .sources import Source

_SECRETS = re.compile(r"hf_\w+|api_org_\w+|(?i:bearer)\s+\S+|(?<=://)[^/\s@]+@|\?\S+")
_MAX_REASON = 300
_WHAT_A_MODEL_IS = (
    "Allowed are decoder-only causal language models with config.json and safetensors; check the folder or "
    "id, and the options given."
)


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
