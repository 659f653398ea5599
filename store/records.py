"""Block records: one small JSON file per committed block, written after all its chunk objects are durable.

In: the digests, sizes and checksums of a block's chunk objects and statistics of its values. Out:
blocks/000012.json, canonical bytes; and back, checked. A chunk that no record names is not data.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import FormatError
from .names import is_file_name, text_problem
from .parsing import INT64_MAX, check_plain, get_hex, get_int, get_ints, get_list, get_object, readable

FOLDER = "blocks"
LOCKED = ".lock"
MAX_KEY = 512
MAX_LAYERS = 4096
Number = int | float | None
_HEX = re.compile("[0-9a-f]+")
_KEYS = re.compile("(?:[a-z_]+(?:/[a-z0-9]+)+(?:\n|\\Z))+")  # of the arrays that we write
# `n_underflow`, of `mlp_output_grad` alone: values that were not zero, and are as they are stored
_STATISTICS = ("max_abs", "mean_square", "n_nonfinite", "n_out_of_range", "n_underflow")


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """What identifies one chunk object: size, BLAKE3, and its last four bytes (the crc32c of the rest)."""

    size: int
    digest: str
    crc32c: str


@dataclass(frozen=True, slots=True)
class BlockRecord:
    block: int
    row0: int
    row1: int
    plan: str  # digest of the plan it belongs to
    chunks: dict[str, ChunkRecord]  # by key under activations.zarr/
    statistics: dict[str, dict[str, list[Number]]]  # per site, then per layer; null where not finite

    def to_bytes(self) -> bytes:
        chunks = {key: [c.size, c.digest, c.crc32c] for key, c in self.chunks.items()}
        data = {"schema": 1, "block": self.block, "rows": [self.row0, self.row1], "plan": self.plan}
        return readable(data | {"chunks": chunks, "statistics": self.statistics})


def record_name(block: int) -> str:
    return f"{FOLDER}/{block:06d}.json"


def lock_name(block: int) -> str:
    """The file on which whoever commits a block holds a lock meanwhile; no part of the store."""
    return f"{FOLDER}/{block:06d}{LOCKED}"


def parse_record(data: object, where: str) -> BlockRecord:
    """A checked BlockRecord from untrusted JSON."""
    found = get_object(data, where, keys=("schema", "block", "rows", "plan", "chunks", "statistics"))
    get_int(found, "schema", where, 1, 1)
    rows = get_ints(found, "rows", where)
    if len(rows) != 2 or not 0 <= rows[0] < rows[1]:
        raise FormatError(f"{where}: `rows` must be two increasing numbers, found {rows}")
    chunks = get_object(found["chunks"], f"{where}: `chunks`")
    return BlockRecord(
        block=get_int(found, "block", where),
        row0=rows[0],
        row1=rows[1],
        plan=get_hex(found, "plan", where),
        chunks=_chunks(chunks, where),
        statistics=_parse_statistics(found["statistics"], where),
    )


def check_key(key: str, where: str) -> str:
    """A relative path of plain names, or FormatError: no key may leave the folder it belongs to."""
    if len(key) > MAX_KEY or not all(map(is_file_name, key.split("/"))):
        raise FormatError(f"{where}: {key[:80]!r} is not a path inside the folder")
    return key


def clean_statistics(statistics: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, list[Number]]]:
    """Statistics as plain JSON numbers; infinities and NaN become null."""

    def number(value: Any) -> Number:
        plain = value.item() if hasattr(value, "item") else value
        return plain if isinstance(plain, int) or math.isfinite(plain) else None

    return {
        site: {name: [number(value) for value in values] for name, values in found.items()}
        for site, found in statistics.items()
    }


def _chunks(chunks: dict[str, Any], where: str) -> dict[str, ChunkRecord]:
    """All chunks at once where they are as we write them; else one by one, to say which is not."""
    if _all_plain(chunks):
        return {key: ChunkRecord(*entry) for key, entry in chunks.items()}
    return {check_key(key, where): _chunk(chunks, key, where) for key in chunks}


def _all_plain(chunks: dict[str, Any]) -> bool:
    """What the checks of single chunks accept, and no more; a store may have a million of them."""
    entries: list[Any] = list(chunks.values())
    if not entries or set(map(type, entries)) != {list} or set(map(len, entries)) != {3}:
        return False
    sizes, digests, crcs = zip(*entries, strict=True)
    if set(map(type, sizes)) != {int} or set(map(type, (*digests, *crcs))) != {str}:
        return False
    right = min(sizes) >= 1 and max(sizes) <= INT64_MAX and max(map(len, chunks)) <= 512
    right = right and set(map(len, digests)) == {64} and set(map(len, crcs)) == {8}
    right = right and _HEX.fullmatch("".join((*digests, *crcs))) is not None
    names = "\n".join(chunks)
    return right and names.count("\n") == len(chunks) - 1 and _KEYS.fullmatch(names) is not None


def _chunk(chunks: dict[str, Any], key: str, where: str) -> ChunkRecord:
    values = get_list(chunks, key, where, (int, str))
    if len(values) != 3:
        raise FormatError(
            f"{where}: chunk {key!r} needs size, BLAKE3 and crc32c, it has {len(values)} entries"
        )
    found: dict[str, Any] = dict(zip(("size", "digest", "crc32c"), values, strict=True))
    spot = f"{where}: chunk {key!r}"
    return ChunkRecord(
        get_int(found, "size", spot, 1), get_hex(found, "digest", spot), get_hex(found, "crc32c", spot, 8)
    )


def _parse_statistics(data: object, where: str) -> dict[str, dict[str, list[Number]]]:
    sites = get_object(data, f"{where}: `statistics`")
    found: dict[str, dict[str, list[Number]]] = {}
    for site, values in sites.items():
        if text_problem(site):
            raise FormatError(f"{where}: `statistics` of {site[:80]!r}, which is no site")
        named = get_object(values, f"{where}: `statistics.{site}`")
        if unknown := sorted(set(named) - set(_STATISTICS)):
            raise FormatError(
                f"{where}: statistic {unknown[0][:80]!r} is unknown; allowed: {', '.join(_STATISTICS)}"
            )
        found[site] = {name: _statistic(named, name, f"{where}: `statistics.{site}`") for name in named}
    return found


def _statistic(named: dict[str, Any], name: str, where: str) -> list[Number]:
    """Counts, or sizes that are null where they were not finite; none is negative."""
    if name.startswith("n_"):
        return list(get_ints(named, name, where, most=MAX_LAYERS))
    values = get_list(named, name, where, (int, float, type(None)), MAX_LAYERS)
    check_plain(values, f"{where}.{name}")
    if any(value is not None and value < 0 for value in values):
        raise FormatError(f"{where}: `{name}` holds a negative number")
    return values
