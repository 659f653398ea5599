"""obstore's clients for S3, GCS, Azure and plain HTTP, set up from the environment.

In: an address without credentials. Out: a client. Credentials and endpoints come from the provider's own
environment variables and chains; only what they leave open is set here. Checksums stay as obstore has them
(sent when the store requires them). A missing package or a setting that cannot be is a UsageError. Cost: no
request.
"""

import os
from datetime import timedelta
from typing import Any
from urllib.parse import quote, urlsplit

from .errors import UsageError
from .patience import Patience, cause_of
from .scrub import Address

ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}


def client_of(address: Address, patience: Patience) -> Any:
    """The client for everything below an address."""
    endpoint = endpoint_of(address)
    settings: dict[str, Any] = {
        "client_options": client_options(patience, endpoint.startswith("http://")),
        "retry_config": retry_config(patience),
    }
    stores = obstore_module()
    try:
        match address.scheme:
            case "http" | "https":
                return stores.HTTPStore(endpoint, **settings)
            case "gs":
                return stores.GCSStore(address.host, prefix=address.prefix or None, **settings)
            case "az":
                return stores.AzureStore(address.host, prefix=address.prefix or None, **settings)
            case _:
                settings |= {"config": _s3_config(endpoint), **_s3_profile()}
                return stores.S3Store(address.host, prefix=address.prefix or None, **settings)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"{address.url}: not a place that can be opened ({cause_of(error)})") from None


def endpoint_of(address: Address) -> str:
    """The server's own address; of a bucket only where the environment says one."""
    if address.scheme in ("http", "https"):
        return f"{address.scheme}://{address.host}{quote('/' + address.prefix)}"
    name = next((name for name in ENDPOINTS[address.scheme] if os.environ.get(name)), "")
    endpoint = os.environ.get(name, "")
    if "@" in urlsplit(endpoint).netloc:
        raise UsageError(
            f"{name} holds a user or a password; leave them out, they have variables of their own"
        )
    return endpoint


def client_options(patience: Patience, allow_http: bool) -> dict[str, Any]:
    options: dict[str, Any] = {
        "connect_timeout": timedelta(seconds=min(15.0, patience.silence_s)),
        "read_timeout": timedelta(seconds=patience.silence_s),
        "timeout": timedelta(hours=1),  # of a whole body: `read_timeout` sees a dead connection long before
        "user_agent": "nearline",
    }
    return options | ({"allow_http": True} if allow_http else {})


def retry_config(patience: Patience) -> dict[str, Any]:
    backoff = {
        "init_backoff": timedelta(seconds=patience.first_wait_s),
        "max_backoff": timedelta(seconds=patience.longest_wait_s),
        "base": 2,
    }
    in_all = timedelta(seconds=patience.in_all_s)
    return {"max_retries": patience.retries, "backoff": backoff, "retry_timeout": in_all}


def _s3_config(endpoint: str) -> dict[str, Any]:
    """Only what the environment leaves open. Checksums stay as obstore has them: sent when required."""
    config: dict[str, Any] = {}
    if "AWS_DISABLE_BULK_DELETE" not in os.environ:
        config["disable_bulk_delete"] = True  # not every server has it, and we delete one by one
    if endpoint:
        config["endpoint"] = endpoint
        if "AWS_VIRTUAL_HOSTED_STYLE_REQUEST" not in os.environ:
            config["virtual_hosted_style_request"] = False
        if not os.environ.get("AWS_REGION") and not os.environ.get("AWS_DEFAULT_REGION"):
            config["region"] = "us-east-1"
    return config


def _s3_profile() -> dict[str, Any]:
    """obstore reads the environment and the machine's role, not ~/.aws: a named profile needs boto3."""
    profile = os.environ.get("AWS_PROFILE")
    if not profile or os.environ.get("AWS_ACCESS_KEY_ID"):
        return {}
    try:
        import boto3
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        raise UsageError("AWS_PROFILE is set: reading profiles needs boto3 (pip install boto3)") from None
    return {"credential_provider": Boto3CredentialProvider(boto3.Session(profile_name=profile))}


def obstore_module() -> Any:
    try:
        from obstore import store
    except ImportError:
        raise UsageError('places behind URLs need obstore: pip install "nearline[share]"') from None
    return store
