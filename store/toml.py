"""Writing TOML: the standard library only reads it.

In: nested dicts of strings, numbers, booleans and lists of those. Out: bytes that `tomllib` reads back to
the same values, in the order given; None is left out, as TOML has no such value.
"""

import json
import math
from collections.abc import Mapping
from typing import Any, cast

from .errors import UsageError


def toml_bytes(data: Mapping[str, Any]) -> bytes:
    """One TOML document; sub-tables follow plain values."""
    return ("\n".join(_table(data, ())).strip() + "\n").encode()


def _table(data: Mapping[str, Any], path: tuple[str, ...]) -> list[str]:
    plain = {
        key: value for key, value in data.items() if value is not None and not isinstance(value, Mapping)
    }
    lines = [f"[{'.'.join(map(_key, path))}]"] if path else []
    lines += [f"{_key(key)} = {_value(value, key)}" for key, value in plain.items()]
    for key, value in data.items():
        if isinstance(value, Mapping):
            lines += ["", *_table(cast("Mapping[str, Any]", value), (*path, key))]
    return lines


def _key(key: str) -> str:
    return key if key and all(c.isascii() and (c.isalnum() or c in "-_") for c in key) else _string(key)


def _string(text: str) -> str:
    # JSON's escapes are TOML's too, but for DEL, which TOML wants escaped, and surrogate pairs: it has none
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any, key: str) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        if math.isnan(value) or math.isinf(value):
            return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
        return repr(value)
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_value(item, key) for item in cast("list[Any]", value)) + "]"
    raise UsageError(f"setting {key!r}: {type(value).__name__} cannot be written as TOML")
