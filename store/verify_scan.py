"""One pass over one chunk object: digest, checksum, and the magnitudes of its values.

In: an open file. Out: what was found, to be compared by the caller. Each piece of 512 KiB is read into a
buffer that is used again, and hashed, checksummed and searched for non-finite values while it is in a
core's cache. Magnitudes are compared as integers: without the sign bit, floats of one width are ordered as
their bits are, and everything from the bits of infinity on is not finite. Cost: one read; no copy of a chunk
that is not compressed; the GIL is free nearly all of the time.
"""

import threading
from dataclasses import dataclass
from typing import Any, cast

import google_crc32c
import numpy as np
from blake3 import blake3

from .dtypes import encode
from .errors import OutOfRange
from .metadata import decompress
from .places import OpenFile

PIECE_BYTES = 2**19
CRC_BYTES = 4
# of the stored bits: unsigned type, mask of the magnitude, bits of infinity
_BITS: dict[str, tuple[np.dtype[Any], int, int]] = {
    "float32": (np.dtype("<u4"), 0x7FFFFFFF, 0x7F800000),
    "float16": (np.dtype("<u2"), 0x7FFF, 0x7C00),
    "bfloat16": (np.dtype("<u2"), 0x7FFF, 0x7F80),
}
_buffers = threading.local()


class EndedEarly(Exception):
    """The file gave fewer bytes than its size."""


@dataclass(frozen=True, slots=True)
class Scan:
    """What a chunk object is."""

    size: int
    digest: str  # BLAKE3
    trailer: bytes  # its last four bytes
    crc32c: bytes  # of the bytes before them

    @property
    def sound(self) -> bool:
        """The object's own checksum fits."""
        return self.trailer == self.crc32c


class Magnitudes:
    """Of the first `n_rows` rows of a chunk: the largest finite magnitude, and what is not finite."""

    def __init__(self, storage_dtype: str, n_rows: int, width: int) -> None:
        self.storage_dtype = storage_dtype
        self.largest = 0  # as bits
        self.n_nonfinite = 0
        self.bad_rows = np.zeros(0, np.int64)  # rows with a value that is not finite
        self._dtype, self._mask, self._infinity = _BITS[storage_dtype]
        self._n_values, self._width, self._seen = n_rows * width, width, 0

    def add(self, piece: np.ndarray) -> None:
        """The next bytes of the chunk, whole values."""
        bits = piece.view(self._dtype)[: self._n_values - self._seen]
        if not bits.size:
            return
        magnitude = np.bitwise_and(bits, self._dtype.type(self._mask), out=_scratch(bits))
        if int(magnitude.max()) >= self._infinity:
            bad = magnitude >= self._infinity
            places = (self._seen + np.flatnonzero(bad)) // self._width
            self.n_nonfinite += places.size
            self.bad_rows = np.union1d(self.bad_rows, places)
            magnitude[bad] = 0
        self.largest = max(self.largest, int(magnitude.max()))
        self._seen += bits.size

    def is_largest(self, value: float) -> bool:
        """The largest magnitude is the stored form of `value`."""
        try:
            with np.errstate(over="ignore"):
                stored = encode(np.abs(np.array([value], np.float32)), self.storage_dtype)
        except OutOfRange:
            return False
        return int(stored.view(self._dtype)[0]) == self.largest

    def shown(self) -> float:
        """The largest magnitude as a number."""
        bits = np.array([self.largest], self._dtype)
        if self.storage_dtype == "bfloat16":
            return float((bits.astype("<u4") << 16).view("<f4")[0])
        return float(bits.view("<f4" if self.storage_dtype == "float32" else "<f2")[0])


def scan(file: OpenFile, magnitudes: Magnitudes | None = None, out: np.ndarray | None = None) -> Scan:
    """Read an object once. Its body is kept in `out` (uint8, of the body's size) where that is given."""
    n_body = max(0, file.size - CRC_BYTES)
    digest, crc = blake3(), 0
    for start in range(0, n_body, PIECE_BYTES):
        n_bytes = min(PIECE_BYTES, n_body - start)
        piece = _buffer()[:n_bytes] if out is None else out[start : start + n_bytes]
        _fill(file, piece)
        digest.update(cast("bytes", piece))
        crc = google_crc32c.extend(crc, piece)  # pyright: ignore[reportArgumentType]
        if magnitudes is not None:
            magnitudes.add(piece)
    trailer = np.empty(file.size - n_body, np.uint8)
    _fill(file, trailer)
    digest.update(cast("bytes", trailer))
    return Scan(file.size, digest.hexdigest(), trailer.tobytes(), int(crc).to_bytes(4, "little"))


def unpack(body: np.ndarray, n_bytes: int) -> np.ndarray | None:
    """A zstd body unpacked; None when it does not unpack to `n_bytes`."""
    out = np.empty(n_bytes, np.uint8)
    return out if decompress(body, out) == n_bytes else None


def _fill(file: OpenFile, target: np.ndarray) -> None:
    view = memoryview(cast("bytes", target))
    while len(view):
        n_read = file.readinto(view)
        if n_read == 0:
            raise EndedEarly
        view = view[n_read:]


def _buffer() -> np.ndarray:
    if not hasattr(_buffers, "piece"):
        _buffers.piece, _buffers.scratch = np.empty(PIECE_BYTES, np.uint8), np.empty(PIECE_BYTES, np.uint8)
    return _buffers.piece


def _scratch(bits: np.ndarray) -> np.ndarray:
    _buffer()
    return _buffers.scratch[: bits.nbytes].view(bits.dtype)
