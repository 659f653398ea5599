"""huggingface_hub's client, made to keep quiet: no secrets in its logs, no bars of its own.

In: the environment (HF_ENDPOINT, HF_TOKEN or the stored token, HF_HUB_OFFLINE). Out: an HfApi, and what its
errors mean. Cost: the import of huggingface_hub, about 0.3 s.
"""

import logging
import os
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, NoReturn
from urllib.parse import urlsplit

from .errors import EnvironmentFault, UsageError
from .patience import fail
from .scrub import scrub

LOGGERS = ("huggingface_hub.utils._http", "httpx", "httpx2")


def hub_api(url: str) -> Any:
    """The client for what `url` names."""
    try:
        from huggingface_hub import HfApi, constants
    except ImportError:
        raise UsageError(f'{url}: the Hub needs huggingface_hub: pip install "nearline[share]"') from None
    endpoint = os.environ.get("HF_ENDPOINT") or constants.ENDPOINT
    if "@" in urlsplit(endpoint).netloc:
        raise UsageError(
            "HF_ENDPOINT holds a user or a password; the token has a variable of its own, HF_TOKEN"
        )
    for name in LOGGERS:
        logging.getLogger(name).addFilter(_scrub_record)
    return HfApi(endpoint=endpoint.rstrip("/"), library_name="nearline")


def token_headers() -> dict[str, str]:
    """What authorises a plain request to the Hub; for a client in memory, never to be kept."""
    from huggingface_hub.utils import build_hf_headers

    headers = {name.lower(): value for name, value in build_hf_headers().items()}
    return {name: value for name, value in headers.items() if name != "user-agent"}


@contextmanager
def quietly() -> Generator[None, None, None]:
    """No bars on the terminal (ours is `progress`), no warning about how it calls a library of its own."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    were_off = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Use 'content=", DeprecationWarning)
            yield
    finally:
        if not were_off:
            enable_progress_bars()


def is_absent(error: Exception) -> bool:
    """No such repository, revision or file. (So the Hub speaks, without a token, of private ones too.)"""
    names = {kind.__name__ for kind in type(error).__mro__}
    absent = {"RepositoryNotFoundError", "RevisionNotFoundError", "RemoteEntryNotFoundError"}
    return bool(names & absent) and "GatedRepoError" not in names


def refuse(where: str, error: Exception) -> NoReturn:
    """What the client raised, as one of our errors."""
    if type(error).__name__ == "OfflineModeIsEnabled":
        raise EnvironmentFault(
            f"{where}: the Hub is not asked, because offline mode is enabled. Unset the variable "
            "HF_HUB_OFFLINE, or give a local folder."
        ) from None
    fail(where, error)


def is_file(entry: Any) -> bool:
    """Of a listing: a file, no folder."""
    return type(entry).__name__ == "RepoFile"


def _scrub_record(record: logging.LogRecord) -> bool:
    """These loggers name the URLs that they ask, signed ones too."""
    record.msg, record.args = scrub(record.getMessage()), ()
    return True
