"""The body of a remote file, read as it arrives.

In: a way to ask for the file from an offset on. Out: an OpenFile (store/places.py). A connection that breaks
off is opened again where the last byte came from, of the same object (by its ETag and size); a server without
ranges starts anew and the part that is known is skipped. A body of another length than announced is an error,
never data. Cost: one piece of memory, whatever the file's size.
"""

from collections.abc import Callable
from typing import Any

from .errors import EnvironmentFault
from .patience import Patience, fail, is_passing

PIECE_BYTES = 2**20


class NoRanges(Exception):
    """The server sends files only whole."""


class RemoteFile:
    """One pass over a body; `fetch(offset, etag)` starts it, and starts it again."""

    def __init__(self, fetch: Callable[[int, str | None], Any], where: str, patience: Patience) -> None:
        self._fetch, self._where, self._patience = fetch, where, patience
        result = fetch(0, None)
        self.size = int(result.meta["size"])
        self._etag = result.meta["e_tag"]
        self._pieces = iter(result.stream(PIECE_BYTES))
        self._piece = memoryview(b"")
        self._done = self._attempt = self._skip = 0

    def readinto(self, view: memoryview) -> int:
        if not len(view) or self._done == self.size:
            return 0
        while not len(self._piece):
            self._piece = self._next()
        n = min(len(view), len(self._piece))
        view.cast("B")[:n] = self._piece[:n]
        self._piece = self._piece[n:]
        self._done += n
        if self._done == self.size and len(self._piece):
            raise EnvironmentFault(
                f"{self._where}: the server sent more than the {self.size} bytes it announced"
            )
        return n

    def _next(self) -> memoryview:
        try:
            piece = next(self._pieces, None)
        except Exception as error:
            if self._attempt == self._patience.again or not is_passing(error):
                fail(self._where, error)
            self._patience.wait(self._attempt)
            self._attempt += 1
            self._continue()
            return memoryview(b"")
        if piece is None:
            raise EnvironmentFault(f"{self._where}: the body ended after {self._done} of {self.size} bytes")
        skipped = min(self._skip, len(piece))
        self._skip -= skipped
        return memoryview(piece).cast("B")[skipped:]

    def _continue(self) -> None:
        try:
            result = self._fetch(self._done, self._etag)
        except NoRanges:  # a plain server: from the start again
            result = self._fetch(0, self._etag)
        self._skip = self._done - result.range[0]
        if self._skip < 0 or int(result.meta["size"]) != self.size:
            raise EnvironmentFault(f"{self._where}: the file changed while it was read; repeat the command")
        self._pieces = iter(result.stream(PIECE_BYTES))

    def close(self) -> None:
        self._pieces, self._piece = iter(()), memoryview(b"")
