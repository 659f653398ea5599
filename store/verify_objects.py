"""One chunk object: is its content what the record says, and do its values keep their promises?

In: a job (which object, whose record, which rows are valid). Out: problems. Called for many objects at once,
on threads. Cost: one read; memory: one piece of 512 KiB, and the whole chunk where it is compressed or a
token column.
"""

import errno
from dataclasses import dataclass, replace

import numpy as np

from .errors import DamageError
from .folder import GROUP
from .layout import CRC_BYTES
from .metadata import ArraySpec
from .places import OpenFile, Place
from .records import ChunkRecord, record_name
from .verify_findings import Findings, fault, reason
from .verify_ground import Ground
from .verify_scan import PIECE_BYTES, EndedEarly, Magnitudes, Scan, scan, unpack

# What a disk says of one file that it has lost; any other error says nothing about the file.
LOST = (errno.EIO, errno.EISDIR, errno.EBADMSG)


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """One chunk object of a block."""

    block: int
    key: str  # under activations.zarr/
    name: str  # of the site or column; of the array where the definition is damaged
    index: int | None  # of the layer
    layer: int | None  # the model's number
    rows: tuple[int, int] | None
    spec: ArraySpec | None
    chunk: ChunkRecord | None  # None: the record cannot be relied on
    statistics: dict[str, float | int | None]
    again: str  # what brings the object back
    invalid: np.ndarray | None = None  # rows of the block where `valid` is false; None: not known

    @property
    def file(self) -> str:
        return f"{GROUP}/{self.key}"

    def with_valid(self, valid: np.ndarray | None) -> "Job":
        return self if valid is None else replace(self, invalid=np.flatnonzero(~valid))

    def add(self, findings: Findings, kind: str, text: str, tokens: tuple[int, int] | None = None) -> None:
        """A problem of this object, of all its tokens or some."""
        findings.add(kind, self.file, text, array=self.name, layer=self.layer, tokens=tokens or self.rows)


def read_values(place: Place, ground: Ground, findings: Findings, job: Job) -> None:
    """Check an object of a site: content, finite values, statistics."""
    attributes, plan = ground.attributes, ground.plan
    if attributes is None or plan is None or job.spec is None:
        _read(place, findings, job)
        return
    magnitudes = Magnitudes(
        attributes.storage.dtype, int(plan.block_rows[job.block]), attributes.model.d_model
    )
    if attributes.storage.compressor is None:
        whole, _ = _read(place, findings, job, magnitudes)
    else:
        body = read_body(place, ground, findings, job)
        whole = body is not None
        for start in range(0, 0 if body is None else body.size, PIECE_BYTES):
            magnitudes.add(body[start : start + PIECE_BYTES])  # pyright: ignore[reportOptionalSubscript]
    if whole:
        _check_finite(findings, job, magnitudes)
        _check_statistics(findings, job, magnitudes)


def read_body(place: Place, ground: Ground, findings: Findings, job: Job) -> np.ndarray | None:
    """The bytes of a chunk, unpacked, if its content is what was committed."""
    whole, body = _read(place, findings, job, keep=True)
    if not whole or body is None or job.spec is None:
        return None
    plain = ground.attributes is None or ground.attributes.storage.compressor is None
    found = body if plain else unpack(body, job.spec.chunk_bytes)
    if found is None or found.size != job.spec.chunk_bytes:
        job.add(findings, "size", f"the chunk object does not hold {job.spec.chunk_bytes} bytes of values")
        return None
    return found


def _read(
    place: Place, findings: Findings, job: Job, magnitudes: Magnitudes | None = None, keep: bool = False
) -> tuple[bool, np.ndarray | None]:
    """Whether the object is what was committed, and its body if that is to be kept."""
    file = _open(place, findings, job)
    if file is None:
        return False, None
    try:
        body = np.empty(max(0, file.size - CRC_BYTES), np.uint8) if keep else None
        found = scan(file, magnitudes, body)
    except EndedEarly:
        job.add(findings, "size", "the chunk object ended before its size was read")
        return False, None
    except OSError as error:
        if error.errno not in LOST:
            raise fault(place, job.file, error) from error
        job.add(findings, "unreadable", f"the chunk object cannot be read ({error.strerror})")
        return False, None
    finally:
        file.close()
    findings.count(objects_read=1, bytes_read=found.size)
    return _agrees(findings, job, found), body


def _open(place: Place, findings: Findings, job: Job) -> OpenFile | None:
    try:
        return place.open(job.file)
    except FileNotFoundError:
        job.add(findings, "missing", f"the chunk object is missing; {job.again}")
    except DamageError as error:
        job.add(findings, "unreadable", reason(error, place.where(job.file)))
    except OSError as error:
        raise fault(place, job.file, error) from error
    return None


def _agrees(findings: Findings, job: Job, found: Scan) -> bool:
    """The object is the one that was committed; a problem otherwise."""
    chunk = job.chunk
    if chunk is None:
        if not found.sound:
            job.add(findings, "content", "the checksum of the chunk object does not match its content")
        return found.sound
    if found.size != chunk.size:
        job.add(findings, "size", f"the chunk object has {found.size} bytes, {chunk.size} were recorded")
    elif found.digest != chunk.digest:
        text = (
            "the chunk object is whole but not the one that was committed here"
            if found.sound
            else "the content is not what was committed: its checksum does not match"
        )
        job.add(findings, "content", f"{text}; {job.again}")
    elif found.trailer.hex() != chunk.crc32c or not found.sound:
        text = f"checksum of {job.key}: recorded {chunk.crc32c}, computed {found.crc32c.hex()}"
        findings.add("metadata", record_name(job.block), text, tokens=job.rows)
    else:
        return True
    return False


def _check_finite(findings: Findings, job: Job, magnitudes: Magnitudes) -> None:
    """Every value is finite in the rows that are valid."""
    if job.invalid is None or not magnitudes.n_nonfinite:
        return
    wrong = np.setdiff1d(magnitudes.bad_rows, job.invalid)
    if wrong.size:
        row0 = job.rows[0] if job.rows else 0
        first, last = row0 + int(wrong[0]), row0 + int(wrong[-1])
        text = f"token {first}: a value is not finite, but `valid` is true ({wrong.size} rows in all)"
        job.add(findings, "values", text, (first, last + 1))


def _check_statistics(findings: Findings, job: Job, magnitudes: Magnitudes) -> None:
    """Largest magnitude and number of non-finite values are those of the record, where it has them."""
    largest, count = job.statistics.get("max_abs"), job.statistics.get("n_nonfinite")
    if largest is not None and not magnitudes.is_largest(largest):
        text = f"the largest |value| is {magnitudes.shown():.6g}, the block record says {largest:.6g}"
        job.add(findings, "values", text)
    if count is not None and count != magnitudes.n_nonfinite:
        text = f"{magnitudes.n_nonfinite} values are not finite, the block record counts {count}"
        job.add(findings, "values", text)
