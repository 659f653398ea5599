"""Reading one chunk object, with every check that needs no second read.

In: a place, the object's name, the array's specification, and where the rows go. Out: the rows in place; or
MissingChunk or DamageError with the words that the caller gives for the spot. Cost: one read straight into
the result, and a crc32c taken piece by piece while the bytes are still in the cache; the GIL is free
meanwhile. A remote object is one request.
"""

from typing import Any, cast

import google_crc32c
import numpy as np

from .errors import DamageError, MissingChunk, NearlineError
from .metadata import ArraySpec, decompress, largest_object
from .places import OpenFile, Place, refused
from .records import ChunkRecord

PIECE_BYTES = 2**19  # read and checksummed together: stays in a core's cache


def read_chunk(
    place: Place,
    name: str,
    spec: ArraySpec,
    compressor: str | None,
    out: np.ndarray,
    spot: str,
    record: ChunkRecord | None = None,
) -> None:
    """Read one chunk object into `out` (C-contiguous; the rows without padding), checking size and checksum.

    With a record, size and checksum are compared with it too: another chunk's bytes under this key are found.
    """
    try:
        file = place.open(name)
    except FileNotFoundError as error:
        if isinstance(error, NearlineError):
            raise
        raise MissingChunk(
            f"{spot}: the chunk object is missing; fetch it or collect its block again"
        ) from None
    try:
        expected = spec.chunk_bytes + 4 if compressor is None else (record.size if record else file.size)
        if file.size != expected or not 4 <= file.size <= largest_object(spec):
            raise DamageError(f"{spot}: the chunk object has {file.size} bytes, {expected} expected")
        if record and record.size != expected:
            raise DamageError(f"{spot}: {expected} bytes, the block record says {record.size}")
        flat = out.reshape(-1).view(np.uint8)
        if compressor is None:
            trailer = _read_plain(file, spec, flat, spot)
        else:
            trailer = _read_packed(file, spec, flat, spot)
    finally:
        file.close()
    if record and trailer.hex() != record.crc32c:
        raise DamageError(f"{spot}: the chunk object is whole but not the one that was committed here")


def _read_plain(file: OpenFile, spec: ArraySpec, flat: np.ndarray, spot: str) -> bytes:
    """Read straight into the result; the padding of the last block goes to a buffer of its own."""
    if flat.nbytes > spec.chunk_bytes:
        raise DamageError(f"{spot}: the chunk is smaller than its rows")
    padding, trailer = np.empty(spec.chunk_bytes - flat.nbytes, dtype=np.uint8), np.empty(4, dtype=np.uint8)
    crc = _read_exactly(file, padding, spot, _read_exactly(file, flat, spot))
    _read_exactly(file, trailer, spot)
    if crc != int.from_bytes(trailer.tobytes(), "little"):
        raise DamageError(f"{spot}: the checksum of the chunk object does not match its content")
    return trailer.tobytes()


def _read_packed(file: OpenFile, spec: ArraySpec, flat: np.ndarray, spot: str) -> bytes:
    packed = np.empty(file.size, dtype=np.uint8)
    _read_exactly(file, packed, spot)
    crc: Any = google_crc32c.value(packed[:-4])  # pyright: ignore[reportArgumentType]
    if crc != int.from_bytes(packed[-4:].tobytes(), "little"):
        raise DamageError(f"{spot}: the checksum of the chunk object does not match its content")
    whole = np.empty(spec.chunk_bytes, dtype=np.uint8)
    if (found := decompress(packed[:-4], whole)) != spec.chunk_bytes:
        raise DamageError(f"{spot}: the chunk unpacks to {found} bytes, {spec.chunk_bytes} expected")
    flat[...] = whole[: flat.nbytes]
    return packed[-4:].tobytes()


def _read_exactly(file: OpenFile, target: np.ndarray, spot: str, crc: int = 0) -> int:
    """Fill `target` (uint8) and return its crc32c, taken piece by piece while the bytes are in the cache."""
    for start in range(0, target.nbytes, PIECE_BYTES):
        piece = target[start : start + PIECE_BYTES]
        view = memoryview(cast("bytes", piece))
        while len(view):
            try:
                n_read = file.readinto(view)
            except OSError as error:
                if isinstance(error, NearlineError):
                    raise
                raise refused(spot, "read", error) from error
            if n_read == 0:
                raise DamageError(f"{spot}: the chunk object ended early")
            view = view[n_read:]
        crc = google_crc32c.extend(crc, piece)  # pyright: ignore[reportArgumentType]
    return crc
