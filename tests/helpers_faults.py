"""A proxy that fails on command, for tests of everything that goes over the network.

In: the address of a real HTTP server (moto, a file server, a fake hub) and faults, each with the requests
that it strikes and how often. Out: an address that clients use instead; requests without a fault go through
unchanged (the Host header too, so that S3 signatures hold). Cost: one thread per connection; nothing sleeps.

    with FaultProxy(moto_endpoint) as proxy:          # proxy.url stands in for the endpoint
        proxy.add(Fault("status", status=503, times=2))               # the next two requests of any kind
        proxy.add(Fault("drop_reply", method="PUT", path="SEALED$"))  # taken by the server, reply lost
        proxy.add(Fault("cut", n_bytes=1000, method="GET"))           # body ends after 1000 bytes: reset
        proxy.add(Fault("short", n_bytes=10))                         # well-formed answer, 10 bytes missing
        proxy.add(Fault("page"))                                      # 200 with an HTML login page
        proxy.add(Fault("stall"))                                     # no answer until proxy.release()
        proxy.add(Fault("cut_upload", n_bytes=1000, method="PUT"))    # request cut: the server sees nothing
        proxy.die_after(50_000)                     # a cable pulled after so many body bytes, both ways
        proxy.revive()                              # ... and put back
    FaultProxy(endpoint, strip=("If-None-Match",))  # a store that ignores conditional writes

`proxy.requests` lists (method, path) of all requests, faulty ones too; `proxy.struck` counts what struck.
"""

import http.client
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Literal, Self
from urllib.parse import urlsplit

PAGE = b"<!DOCTYPE html><html><body>Please log in to continue</body></html>"
HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "te", "upgrade"}

Kind = Literal["status", "drop_reply", "cut", "short", "page", "stall", "cut_upload"]


@dataclass(frozen=True)
class Fault:
    """What goes wrong, for which requests (regular expressions on method and path with query), how often."""

    kind: Kind
    method: str = ".*"
    path: str = ""
    times: int | None = 1  # None: always
    status: int = 503
    after: int = 0  # so many matching requests go through first
    n_bytes: int = 0
    body: bytes | None = None  # of "status"; default: an S3-like error document
    headers: tuple[tuple[str, str], ...] = ()

    def strikes(self, method: str, path: str) -> bool:
        return bool(re.fullmatch(self.method, method) and re.search(self.path, path))


class Server:
    """An HTTP/1.1 server on a free port of 127.0.0.1, in threads, as a context manager."""

    handler: type[BaseHTTPRequestHandler]

    def __init__(self) -> None:
        self._http = _Quiet(("127.0.0.1", 0), self.handler)
        self._http.owner = self
        self.port: int = self._http.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


class _Quiet(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # a client may keep its connection open for ever
    request_queue_size = 64
    owner: Server

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that hang up are the point of these tests."""


class Handler(BaseHTTPRequestHandler):
    """What all our servers share: whole request bodies, plain answers, no log."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else each answer waits 40 ms for the client's acknowledgement
    server: _Quiet  # pyright: ignore[reportIncompatibleVariableOverride]

    def log_message(self, format: str, *args: object) -> None:
        pass

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        content = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            content += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return content

    def answer(
        self,
        status: int,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        size: int | None = None,
    ) -> None:
        """`size` is the Content-Length that is claimed; the body itself is left out for HEAD."""
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) if size is None else size))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_range(self, content: bytes, headers: Mapping[str, str] | None = None) -> None:
        """A file, or the part of it that was asked for."""
        asked = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if asked is None:
            return self.answer(200, content, {"Accept-Ranges": "bytes", **(headers or {})})
        first, last = asked.groups()
        start = int(first) if first else max(len(content) - int(last), 0)
        stop = min(int(last) + 1, len(content)) if first and last else len(content)
        if start >= len(content):
            return self.answer(416, headers={"Content-Range": f"bytes */{len(content)}"})
        place = {"Content-Range": f"bytes {start}-{stop - 1}/{len(content)}"}
        self.answer(206, content[start:stop], {**place, **(headers or {})})

    def hang_up(self) -> None:
        self.close_connection = True


class _ProxyHandler(Handler):
    def handle_any(self) -> None:
        proxy = self.server.owner
        assert isinstance(proxy, FaultProxy)
        if proxy.dead:
            return self.hang_up()
        fault = proxy.next_fault(self.command, self.path)
        if fault is not None and fault.kind == "cut_upload":
            self.rfile.read(min(fault.n_bytes, int(self.headers.get("Content-Length", 0))))
            return self.hang_up()
        body = self.body()
        if not proxy.count(len(body)):
            return self.hang_up()
        if fault is None:
            return self._relay(*self._forward(proxy, body), proxy)
        self._fail(fault, proxy, body)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do_PATCH = do_OPTIONS = handle_any

    def _fail(self, fault: Fault, proxy: "FaultProxy", body: bytes) -> None:
        match fault.kind:
            case "status":
                text = "<Error><Code>PlannedFault</Code><Message>planned fault</Message></Error>"
                self.answer(
                    fault.status, text.encode() if fault.body is None else fault.body, dict(fault.headers)
                )
            case "page":
                self.answer(200, PAGE, {"Content-Type": "text/html"})
            case "stall":
                proxy.released.wait(60)  # ends with the test at the latest: see __exit__
                self.hang_up()
            case "drop_reply":
                self._forward(proxy, body)
                self.hang_up()
            case "short":
                status, headers, content = self._forward(proxy, body)
                self.answer(status, content[: max(len(content) - fault.n_bytes, 0)], headers)
            case "cut":
                status, headers, content = self._forward(proxy, body)
                self.answer(status, content[: fault.n_bytes], headers, size=len(content))
                self.hang_up()
            case "cut_upload":
                raise AssertionError("handled before the body was read")

    def _forward(self, proxy: "FaultProxy", body: bytes) -> tuple[int, dict[str, str], bytes]:
        upstream = http.client.HTTPConnection(proxy.host, proxy.upstream_port)
        try:
            upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in HOP_BY_HOP and name.lower() not in proxy.strip:
                    upstream.putheader(name, value)
            upstream.putheader("Content-Length", str(len(body)))
            upstream.endheaders(body)
            reply = upstream.getresponse()
            content = reply.read()
            headers = {
                n: v for n, v in reply.getheaders() if n.lower() not in HOP_BY_HOP | {"date", "server"}
            }
            if self.command == "HEAD":
                headers["Content-Length"] = reply.getheader("Content-Length", "0")
            return reply.status, headers, content
        finally:
            upstream.close()

    def _relay(self, status: int, headers: dict[str, str], content: bytes, proxy: "FaultProxy") -> None:
        if not proxy.count(len(content)):
            size = headers.pop("Content-Length", len(content))
            self.answer(status, content[: len(content) // 2], headers, size=int(size))
            return self.hang_up()
        size = headers.pop("Content-Length", None)
        self.answer(status, content, headers, size=None if size is None else int(size))


class FaultProxy(Server):
    """See the module's docstring."""

    handler = _ProxyHandler

    def __init__(self, upstream: str, *, strip: Sequence[str] = ()) -> None:
        super().__init__()
        address = urlsplit(upstream)
        assert address.hostname is not None
        assert address.port is not None
        self.host, self.upstream_port = address.hostname, address.port
        self.strip = {name.lower() for name in strip}
        self.requests: list[tuple[str, str]] = []
        self.struck = 0
        self.released = threading.Event()
        self._lock = threading.Lock()
        self._faults: list[list] = []  # [fault, how often it still strikes or None, requests to let through]
        self._bytes_left: int | None = None

    def add(self, *faults: Fault) -> None:
        with self._lock:
            self._faults += [[fault, fault.times, fault.after] for fault in faults]

    def clear(self) -> None:
        with self._lock:
            self._faults.clear()

    def release(self) -> None:
        """Let stalled requests go: their connections are closed without an answer."""
        self.released.set()

    @property
    def dead(self) -> bool:
        return self._bytes_left is not None and self._bytes_left <= 0

    def die_after(self, n_bytes: int) -> None:
        self._bytes_left = n_bytes

    def revive(self) -> None:
        self._bytes_left = None

    def count(self, n_bytes: int) -> bool:
        """Account for body bytes; False once the cable is pulled."""
        with self._lock:
            if self._bytes_left is not None:
                self._bytes_left -= n_bytes
            return not self.dead

    def next_fault(self, method: str, path: str) -> Fault | None:
        with self._lock:
            self.requests.append((method, path))
            for entry in self._faults:
                fault, left, spared = entry
                if left == 0 or not fault.strikes(method, path):
                    continue
                if spared:
                    entry[2] -= 1
                else:
                    entry[1] = None if left is None else left - 1
                    self.struck += 1
                    return fault
            return None

    def __exit__(self, *error: object) -> None:
        self.release()
        super().__exit__(None, None, None)
