"""The two-level manifest and the seal: what a whole store consists of.

In: a store folder whose blocks are all committed. Out: manifest.json (size and BLAKE3 of every block record
and every metadata file) and SEALED (the digest of manifest.json, and the digest of that line). Readers
fetch the manifest and then only the block records they touch. Cost of sealing: reads the small files, looks
at the size of every chunk object.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from .errors import DamageError, FormatError
from .parsing import INT64_MAX, get_hex, get_int, get_list, get_object, parse_json, readable
from .places import Place, place_of
from .plan import MAX_BLOCKS
from .records import check_key

MANIFEST = "manifest.json"
SEALED = "SEALED"
PUSHING, PULLING = "PUSHING", "PULLING"  # there while a copy is being made
SEAL_BYTES = 130  # two lines of 64 hex digits


@dataclass(frozen=True, slots=True)
class FileRecord:
    size: int
    digest: str

    @classmethod
    def of(cls, content: bytes) -> "FileRecord":
        return cls(len(content), blake3(content).hexdigest())


@dataclass(frozen=True, slots=True)
class Manifest:
    plan: str  # digest
    n_tokens: int
    n_blocks: int
    n_objects: int  # chunk objects in the block records
    chunk_bytes: int  # of those
    files: dict[str, FileRecord]  # by path inside the store

    def to_bytes(self) -> bytes:
        counts = {
            key: getattr(self, key) for key in ("plan", "n_tokens", "n_blocks", "n_objects", "chunk_bytes")
        }
        files = {name: [found.size, found.digest] for name, found in self.files.items()}
        return readable({"schema": 1, **counts, "files": files})

    def check_plan(self, digest: str, n_tokens: int, n_blocks: int, where: str) -> None:
        """The plan that was sealed is the one that the store has."""
        if (self.plan, self.n_tokens, self.n_blocks) != (digest, n_tokens, n_blocks):
            raise DamageError(f"{where}: `plan`, `n_tokens` and `n_blocks` are those of another plan")

    def check(self, name: str, content: bytes, where: str) -> bytes:
        """`content` if it is what was sealed under this name, else a DamageError that says `where` it is."""
        expected = self.files.get(name)
        if expected is None:
            raise DamageError(f"{where}: this file is not in {MANIFEST}")
        if FileRecord.of(content) != expected:
            raise DamageError(
                f"{where}: the file is not the one that was sealed "
                f"({len(content)} bytes, {expected.size} expected); fetch it again or restore it from a copy"
            )
        return content


def parse_manifest(data: object, where: str) -> Manifest:
    """A checked Manifest from untrusted JSON."""
    counts = ("n_tokens", "n_blocks", "n_objects", "chunk_bytes")
    found = get_object(data, where, keys=("schema", "plan", "files", *counts))
    get_int(found, "schema", where, 1, 1)
    files = get_object(found["files"], f"{where}: `files`")
    return Manifest(
        plan=get_hex(found, "plan", where),
        **{
            key: get_int(found, key, where, high=MAX_BLOCKS if key == "n_blocks" else INT64_MAX)
            for key in counts
        },
        files={check_key(name, where): _file(files, name, where) for name in files},
    )


def seal_bytes(manifest: bytes) -> bytes:
    """Content of SEALED."""
    digest = blake3(manifest).hexdigest()
    return f"{digest}\n{blake3(digest.encode()).hexdigest()}\n".encode()


def read_seal(place: Place) -> str | None:
    """The digest that SEALED holds; None where there is no SEALED; DamageError when it was altered."""
    try:
        sealed = place.read(SEALED, limit=SEAL_BYTES)
    except FileNotFoundError:
        return None
    except FormatError:
        sealed = b""
    digest = sealed[:64].decode("ascii", errors="replace")
    if sealed != f"{digest}\n{blake3(digest.encode()).hexdigest()}\n".encode():
        raise DamageError(
            f"{place.where(SEALED)}: the seal is damaged; fetch it again or run `nearline seal`"
        )
    return digest


def read_sealed_manifest(where: str | Path | Place) -> tuple[Manifest, str] | tuple[None, None]:
    """The manifest of a sealed store and its digest, None and None where there is no SEALED; DamageError when
    SEALED or manifest.json was altered."""
    place = place_of(where)
    if (digest := read_seal(place)) is None:
        return None, None
    try:
        content = place.read(MANIFEST)
    except FileNotFoundError as error:
        raise DamageError(
            f"{place.url}: {SEALED} is there but {MANIFEST} is not; fetch or restore the store"
        ) from error
    spot = place.where(MANIFEST)
    if blake3(content).hexdigest() != digest:
        raise DamageError(f"{spot}: the file is not the one that was sealed; fetch or restore it")
    return parse_manifest(parse_json(content, spot), spot), digest


def _file(files: dict[str, object], name: str, where: str) -> FileRecord:
    values = get_list(files, name, where, (int, str))
    if len(values) != 2:
        raise FormatError(f"{where}: file {name!r} needs size and BLAKE3, it has {len(values)} entries")
    found: dict[str, Any] = dict(zip(("size", "digest"), values, strict=True))
    return FileRecord(
        get_int(found, "size", f"{where}: {name}"), get_hex(found, "digest", f"{where}: {name}")
    )
