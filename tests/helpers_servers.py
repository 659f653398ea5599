"""Servers that the tests share: S3 (moto), plain HTTP files, a proxy with faults. PYTEST_DONT_REWRITE

A test module that wants the fixtures says, at its top level:

    pytest_plugins = ("helpers_servers",)

and then takes `moto_endpoint` (an S3 server of this session at http://127.0.0.1:PORT), `s3_bucket` (a fresh
empty bucket; the environment holds the endpoint and planted keys, for children too), `s3_proxy` (the same
bucket behind a FaultProxy: the environment's endpoint is the proxy), or makes servers itself:

    with FileServer(folder) as server:                 # server.url + "/name"; Range, HEAD, no listing
    with FaultProxy(server.url) as proxy:              # helpers_faults.py: what can go wrong

Everything listens on 127.0.0.1 only. Cost: moto takes about 2 s to start, once a session.
"""

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from helpers_faults import Fault, FaultProxy, Handler, Server

SECRET_KEY = "planted-secret-key-Zq8vXw"  # never to be seen in a message, a file or a pickle
ACCESS_KEY = "AKIAPLANTEDACCESSKEY"
_numbers = count()


class _FileHandler(Handler):
    def do_GET(self) -> None:
        server = self.server.owner
        assert isinstance(server, FileServer)
        server.requests.append((self.command, self.path, self.headers.get("Range")))
        path = server.root / unquote(urlsplit(self.path).path).lstrip("/")
        if not path.is_file():
            return self.answer(404, b"no such file")
        if server.ranges:
            return self.send_range(path.read_bytes())
        self.answer(200, path.read_bytes())

    do_HEAD = do_GET


class FileServer(Server):
    """The files under `root` over plain HTTP; `requests` lists (method, path, range)."""

    handler = _FileHandler

    def __init__(self, root: Path, *, ranges: bool = True) -> None:
        super().__init__()
        self.root, self.ranges = Path(root), ranges
        self.requests: list[tuple[str, str, str | None]] = []


@dataclass(frozen=True)
class Bucket:
    """An empty bucket: `url` for nearline, `endpoint` for clients that ask."""

    name: str
    endpoint: str

    @property
    def url(self) -> str:
        return f"s3://{self.name}"

    def client(self) -> "object":
        """A boto3 client, the twin that knows nothing of our code."""
        return s3_client(self.endpoint)


def s3_client(endpoint: str, access: str = ACCESS_KEY, secret: str = SECRET_KEY):
    import boto3
    from botocore.config import Config

    return boto3.client(
        "s3",
        endpoint_url=endpoint,
        region_name="us-east-1",
        aws_access_key_id=access,
        aws_secret_access_key=secret,
        config=Config(s3={"addressing_style": "path"}, retries={"max_attempts": 1}),
    )


def _create_one_at_a_time() -> None:
    """moto looks and then writes: now and then a race has two winners. With this a conditional write is
    exclusive, as on S3; servers that ignore the condition are tested apart."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication

    moto: Any = DomainDispatcherApplication
    answer, lock = moto.__call__, threading.Lock()

    def guarded(self: Any, environ: Any, start_response: Any) -> Any:
        if "HTTP_IF_NONE_MATCH" not in environ:
            return answer(self, environ, start_response)
        with lock:
            return answer(self, environ, start_response)

    moto.__call__ = guarded


@pytest.fixture(scope="session")
def moto_endpoint() -> Iterator[str]:
    from moto.moto_server.threaded_moto_server import MotoRequestHandler
    from moto.server import ThreadedMotoServer

    _create_one_at_a_time()
    MotoRequestHandler.disable_nagle_algorithm = True  # else each answer waits 40 ms
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


def use_s3(
    monkeypatch: pytest.MonkeyPatch, endpoint: str, access: str = ACCESS_KEY, secret: str = SECRET_KEY
):
    """Point the environment at an S3 server, as a user would."""
    for name in (
        "AWS_PROFILE",
        "AWS_SESSION_TOKEN",
        "AWS_REGION",
        "AWS_DEFAULT_REGION",
        "AWS_ENDPOINT_URL_S3",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", access)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def s3_bucket(moto_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    bucket = Bucket(f"bucket{next(_numbers)}", moto_endpoint)
    s3_client(moto_endpoint).create_bucket(Bucket=bucket.name)
    use_s3(monkeypatch, moto_endpoint)
    return bucket


@pytest.fixture
def s3_proxy(s3_bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    with FaultProxy(s3_bucket.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        yield proxy


__all__ = [
    "ACCESS_KEY",
    "SECRET_KEY",
    "Bucket",
    "Fault",
    "FaultProxy",
    "FileServer",
    "Server",
    "s3_client",
    "use_s3",
]
