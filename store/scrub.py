"""Keeps secrets out of what people see, and names out of folders that they must not reach.

In: a URL, a file name or a text that a library or a server wrote. Out: the URL taken apart, once it holds no
credentials; the name, once it stays in its folder; the text without anything that looks like a key, a token,
a signature or a password. Cost: some regular expressions.

Error messages of the project are written from scratch and do not quote servers: an S3 server that refuses a
signature echoes the access key. `scrub` is the second line, for the few words of a library that are quoted.
"""

import os
import re
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from .errors import UsageError

HIDDEN = "***"
_SECRET_WORD = r"(?:key|token|secret|signature|sig|password|passwd|pwd|credential|authorization|cookie)"
_USERINFO = re.compile(r"(?<=://)[^/\s\"'<>]*@")
_QUERY = re.compile(r"(://[^\s?\"'<>]*)\?[^\s\"'<>]*")
_FIELD = re.compile(
    rf"([\w.-]*{_SECRET_WORD}[\w-]*[\"']?\s*[:=>]+\s*[\"']?)(?:Bearer\s+|Basic\s+)?[^\s,;&<>\"']+", re.I
)
_BEARER = re.compile(r"\b(Bearer|Basic|Signature=|Credential=)\s*[^\s,;&<>\"']+", re.I)
_SHAPES = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{8,}|A(?:KI|SI|GP|RO)A[A-Z0-9]{12,}|ya29\.[\w-]{8,}|eyJ[\w-]{8,}\.[\w.-]+)"
)
_SECRET_NAME = re.compile(rf"{_SECRET_WORD}", re.I)
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
SHORTEST_SECRET = 6  # shorter values of the environment would take words out of messages


class Address(NamedTuple):
    """A URL without its secrets: `url` has no slash at its end, `prefix` none at either end."""

    scheme: str
    host: str  # with its port; the bucket, container or "datasets" of the other schemes
    prefix: str  # of http, percent-decoded; buckets take it as it stands, as their own tools do
    url: str


def address_of(url: str) -> Address:
    """Take a URL apart; one with credentials, a query or an escape from its folder is refused unseen."""
    found = urlsplit(url)
    if "@" in found.netloc or "?" in url or "#" in url:
        shown = f"{found.scheme}://{found.netloc.rpartition('@')[2]}{scrub(found.path)}"
        raise UsageError(
            f"{shown}: a place is named without user, password, query or fragment; credentials come from the "
            "environment or the provider's own configuration"
        )
    if not found.netloc:
        raise UsageError(f"{scrub(url)}: names no bucket or host; write {found.scheme}://NAME/folder")
    prefix = (unquote(found.path) if found.scheme in ("http", "https") else found.path).strip("/")
    if prefix:
        check_name(prefix, f"{found.scheme}://{found.netloc}")
    shown = f"{found.scheme}://{found.netloc}" + (f"/{found.path.strip('/')}" if prefix else "")
    return Address(found.scheme, found.netloc, prefix, shown)


def check_name(name: str, where: str) -> str:
    """The name of a file below `where`: relative, with "/", never out of its folder."""
    parts = name.split("/")
    if not name or any(part in ("", ".", "..") for part in parts) or "\\" in name or _CONTROL.search(name):
        raise UsageError(f"{where}: {name!r} is not the name of a file inside a store")
    return name


def scrub(text: str) -> str:
    """`text` without what looks like a secret, and without the secrets of this environment."""
    text = _QUERY.sub(rf"\1?{HIDDEN}", _USERINFO.sub("", text))
    text = _BEARER.sub(rf"\1 {HIDDEN}", _FIELD.sub(rf"\1{HIDDEN}", text))
    text = _SHAPES.sub(HIDDEN, text)
    for name, value in os.environ.items():
        if len(value) >= SHORTEST_SECRET and _SECRET_NAME.search(name):
            text = text.replace(value, HIDDEN)
    return text
