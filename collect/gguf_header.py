"""How the weights of a GGUF file are packed, from its header: "Q4_1", "Q4_K_M"; None for plain numbers.

In: a path. Out: the file type that the header names, or else the kind of most of its tensors. Cost: the
header is walked once (tens of milliseconds for a large vocabulary); no weight is read. The gguf package's own
reader takes seconds, because it makes an array of each token.
"""

import struct
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

_FIXED = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING, _ARRAY = 8, 9
_FILE_TYPE = "general.file_type"
_PLAIN = ("F32", "F16", "BF16", "F64")


def gguf_packing(path: Path) -> str | None:
    """The packing of the weights in a GGUF file (version 2 or 3)."""
    from gguf import GGMLQuantizationType, LlamaFileType

    try:
        file_type, kinds = _header(path)
        if file_type is not None:
            name = LlamaFileType(file_type).name.removeprefix("ALL_").removeprefix("MOSTLY_")
        else:
            name = GGMLQuantizationType(max(kinds, key=kinds.__getitem__)).name
    except (OSError, ValueError, struct.error, OverflowError):
        return "of an unknown kind"
    return None if name in _PLAIN else name


def _header(path: Path) -> tuple[int | None, Counter[int]]:
    """The file type where there is one, and elements by kind of tensor."""
    with path.open("rb") as file:
        magic, version, n_tensors, n_facts = struct.unpack("<4sIQQ", file.read(24))
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError(f"{path} is no GGUF file of version 2 or 3")
        for _ in range(n_facts):
            key = _string(file)
            value = _value(file, *struct.unpack("<I", file.read(4)))
            if key == _FILE_TYPE:
                return int(value), Counter()
        kinds: Counter[int] = Counter()
        for _ in range(n_tensors):
            _string(file)
            (n_dims,) = struct.unpack("<I", file.read(4))
            dims = struct.unpack(f"<{n_dims}Q", file.read(8 * n_dims))
            kind, _offset = struct.unpack("<IQ", file.read(12))
            kinds[kind] += prod(dims)
    return None, kinds


def _value(file: BinaryIO, kind: int) -> Any:
    """One value; an array is passed over."""
    if kind == _STRING:
        return _string(file)
    if kind == _ARRAY:
        inner, count = struct.unpack("<IQ", file.read(12))
        if inner in _FIXED:
            file.seek(struct.calcsize(_FIXED[inner]) * count, 1)
        else:
            for _ in range(count):
                _value(file, inner)
        return None
    if kind not in _FIXED:
        raise ValueError(f"GGUF knows no kind {kind} of value")
    (value,) = struct.unpack(_FIXED[kind], file.read(struct.calcsize(_FIXED[kind])))
    return value


def _string(file: BinaryIO) -> str:
    (length,) = struct.unpack("<Q", file.read(8))
    return file.read(length).decode("utf-8", errors="replace")
