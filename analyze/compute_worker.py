"""What runs inside a worker of a Dask cluster: bytes of a call in, its result out.

The value that all items share comes to each worker once, as bytes of a plugin, which workers that join
later get too; it is unpickled at its first use and kept while the plugin is there. Calls travel as bytes as
well, so that a scheduler opens no store. BLAS and OpenMP have one thread.
"""

import pickle
import secrets
import socket
import threading
from collections.abc import Callable
from typing import Any

from distributed import WorkerPlugin
from threadpoolctl import threadpool_limits

from ..store import EnvironmentFault, NearlineError

_held: dict[str, "_Held"] = {}
_held_lock = threading.Lock()


class _Held:
    """A shared value, unpickled by whichever thread needs it first."""

    def __init__(self, content: bytes) -> None:
        self.users = 0
        self._content: bytes | None = content
        self._value: Any = None
        self._lock = threading.Lock()

    def value(self) -> Any:
        with self._lock:
            if self._content is not None:
                self._value = pickle.loads(self._content)
                self._content = None
            return self._value


class SharedValue(WorkerPlugin):
    """Holds the value of one map on every worker, under the digest of its bytes. Its name is its own, so that
    two processes that compute the same on one scheduler do not take each other's away.
    """

    def __init__(self, digest: str, content: bytes) -> None:
        self.name = f"nearline-{digest}-{secrets.token_hex(4)}"
        self.digest, self._content = digest, content

    def setup(self, worker: Any) -> None:
        with _held_lock:
            _held.setdefault(self.digest, _Held(self._content)).users += 1

    def teardown(self, worker: Any) -> None:
        with _held_lock:
            held = _held[self.digest]
            held.users -= 1
            if not held.users:
                del _held[self.digest]


def call(digest: str, content: bytes, *results: Any) -> Any:
    """function(shared, argument, *results), with function and argument out of `content`."""
    function, shared, argument = _unpacked(digest, content)
    # Here and not once: unpickling may have loaded another BLAS.
    threadpool_limits(1)
    return function(shared, argument, *results)


def _unpacked(digest: str, content: bytes) -> tuple[Callable[..., Any], Any, Any]:
    try:
        function, argument = pickle.loads(content)
        return function, _held[digest].value(), argument
    except NearlineError as error:
        raise EnvironmentFault(
            f"a worker on {socket.gethostname()} cannot open what this process can ({error}): workers need "
            "the stores under the same paths"
        ) from None
