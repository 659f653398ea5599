"""How long a request over the network is tried, and what its failure is called.

In: an exception of obstore or huggingface_hub. Out: whether a later try may help, the wait before it, and in
the end an error of ours in words of our own: what a library or a server says may hold a key or a signed URL,
so neither its text nor the exception itself is kept. Cost: nothing until something fails.
"""

import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from .errors import EnvironmentFault, UsageError
from .scrub import scrub


@dataclass(frozen=True)
class Patience:
    """How long to keep trying, in all and at each step."""

    retries: int = 6  # of one request, by obstore
    again: int = 3  # of one operation, here
    first_wait_s: float = 0.2
    longest_wait_s: float = 15.0
    silence_s: float = 120.0  # no byte for so long: the connection is given up
    in_all_s: float = 180.0
    sleep: Callable[[float], None] = time.sleep

    def wait(self, attempt: int) -> None:
        """Full jitter: many workers that fail together do not come back together."""
        ceiling = min(self.longest_wait_s, self.first_wait_s * 2**attempt)
        self.sleep(random.uniform(0, ceiling))


PATIENCE = Patience()


def fail(where: str, error: Exception) -> NoReturn:
    """The error of a library as one of ours; its own text may hold secrets and is not kept."""
    if isinstance(error, (EnvironmentFault, UsageError, FileNotFoundError)):
        raise error
    cause = cause_of(error)
    kind = type(error).__name__
    if kind == "UnauthenticatedError" or "HTTP 401" in cause:
        text = (
            f"the server wants other credentials ({cause}); they come from the environment or the provider's "
            "own configuration"
        )
    elif kind == "PermissionDeniedError" or "HTTP 403" in cause:
        text = (
            f"the server refuses access ({cause}): wrong or missing permission, or no such file where the "
            "credentials may not list (a server may answer 403 for 404)"
        )
    elif is_passing(error):
        text = f"no success after bounded retries ({cause}); repeat the command when the server is back"
    else:
        text = f"this cannot be done ({cause})"
    raise EnvironmentFault(f"{where}: {text}") from None


def is_passing(error: Exception) -> bool:
    """Whether a later try may succeed."""
    kind, cause = type(error).__name__, cause_of(error)
    if isinstance(error, (EnvironmentFault, UsageError, FileNotFoundError, ValueError)):
        return False
    return kind not in (
        "UnauthenticatedError",
        "PermissionDeniedError",
        "OfflineModeIsEnabled",
        "InvalidPathError",
        "NotSupportedError",
    ) and (not re.match(r"HTTP (?:3|4(?!08|09|29))", cause))


def cause_of(error: Exception) -> str:
    """The cause in words that we know: a status and a code, or what happened to the connection."""
    inner = error.__cause__
    if type(error) is RuntimeError and isinstance(inner, Exception):  # huggingface_hub wraps what went wrong
        return cause_of(inner)
    text = str(error)
    if answered := status_of(error):
        return f"HTTP {answered}"
    if status := re.search(r"status code: (\d{3})(?: [A-Z][A-Za-z ]*)?", text):
        code = re.search(r"<Code>([A-Za-z]{3,40})</Code>", text)
        return f"HTTP {status[1]}" + (f" {scrub(code[1])}" if code else "")
    for pattern, words in _CONNECTION:
        if re.search(pattern, text):
            return words
    kind = type(error).__name__
    for part, words in _KINDS:
        if part in kind:
            return words
    return f"{kind}: {scrub(text.splitlines()[0])[:160]}" if text else kind


def status_of(error: Exception) -> int | None:
    """The HTTP status that huggingface_hub's errors carry."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


_CONNECTION = (
    (r"TimedOut|kind: Timeout|timed out", "the server was silent for too long"),
    (
        r"kind: Interrupted|IncompleteBody|IncompleteMessage|(?i:connection (reset|closed))",
        "the connection broke off",
    ),
    (r"kind: Connect|ConnectError|(?i:connection refused|dns error)", "no connection to the server"),
    (r"error sending request", "the connection broke off"),
)
_KINDS = (  # of httpx, below huggingface_hub
    ("Timeout", "the server was silent for too long"),
    ("ConnectError", "no connection to the server"),
    ("RemoteProtocolError", "the connection broke off"),
    ("ReadError", "the connection broke off"),
    ("WriteError", "the connection broke off"),
)
