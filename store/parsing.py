"""Untrusted JSON to typed values: strict reading, and small getters that say which key is wrong.

In: bytes, or an object that `json` made of them. Out: plain Python values of the promised type, or
FormatError naming file, key, what is allowed and what was found. Canonical writing lives here too: sorted
keys, compact, no NaN.
"""

import json
from collections.abc import Iterable
from typing import Any, cast

from .errors import FormatError

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
MAX_JSON_BYTES = 2**30


def canonical(data: object) -> bytes:
    """JSON with sorted keys and no spaces: the same data gives the same bytes."""
    return json.dumps(
        data, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=True
    ).encode()


def readable(data: object) -> bytes:
    """JSON with sorted keys that a person can read; deterministic too."""
    return (json.dumps(data, sort_keys=True, indent=1, allow_nan=False, ensure_ascii=True) + "\n").encode()


def parse_json(content: bytes, where: str) -> object:
    """Strict JSON: UTF-8, no NaN or Infinity, no key twice, no absurd size or depth."""
    if len(content) > MAX_JSON_BYTES:
        raise FormatError(f"{where}: {len(content)} bytes of JSON, at most {MAX_JSON_BYTES} are read")

    def refuse_constant(name: str) -> object:
        raise FormatError(f"{where}: {name} is not a JSON number")

    def refuse_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            keys = [key for key, _ in pairs]
            raise FormatError(f"{where}: key {next(k for k in keys if keys.count(k) > 1)!r} stands twice")
        return found

    try:
        return json.loads(content, parse_constant=refuse_constant, object_pairs_hook=refuse_twice)
    except RecursionError:
        raise FormatError(f"{where}: JSON nested too deeply") from None
    except FormatError:
        raise
    except ValueError as error:  # also UnicodeDecodeError and integers of thousands of digits
        raise FormatError(f"{where}: not valid JSON ({error})") from None


def get_object(data: object, where: str, *, keys: Iterable[str] | None = None) -> dict[str, Any]:
    """`data` as an object; with `keys`, exactly these keys."""
    if not isinstance(data, dict):
        raise FormatError(f"{where}: expected an object, found {_show(data)}")
    found = cast("dict[str, Any]", data)
    if keys is not None:
        expected = set(keys)
        if missing := sorted(expected - set(found)):
            raise FormatError(f"{where}: key {missing[0]!r} is missing")
        if unknown := sorted(set(found) - expected):
            raise FormatError(f"{where}: unknown key {unknown[0]!r}; allowed: {', '.join(sorted(expected))}")
    return found


def get_int(data: dict[str, Any], key: str, where: str, low: int = 0, high: int = INT64_MAX) -> int:
    value = data.get(key)
    if type(value) is not int or not low <= value <= high:
        raise FormatError(f"{where}: `{key}` must be an integer in {low}..{high}, found {_show(value)}")
    return value


def get_optional_int(
    data: dict[str, Any], key: str, where: str, low: int = 0, high: int = INT64_MAX
) -> int | None:
    return None if data.get(key) is None else get_int(data, key, where, low, high)


def get_number(data: dict[str, Any], key: str, where: str) -> float:
    value = data.get(key)
    if type(value) not in (int, float):
        raise FormatError(f"{where}: `{key}` must be a number, found {_show(value)}")
    return float(cast("float", value))


def get_bool(data: dict[str, Any], key: str, where: str) -> bool:
    value = data.get(key)
    if type(value) is not bool:
        raise FormatError(f"{where}: `{key}` must be true or false, found {_show(value)}")
    return value


def get_str(data: dict[str, Any], key: str, where: str, allowed: Iterable[str] | None = None) -> str:
    value = data.get(key)
    if type(value) is not str:
        raise FormatError(f"{where}: `{key}` must be a string, found {_show(value)}")
    if allowed is not None and value not in (options := tuple(allowed)):
        raise FormatError(f"{where}: `{key}` must be one of {', '.join(options)}, found {_show(value)}")
    return value


def get_hex(data: dict[str, Any], key: str, where: str, n_digits: int = 64) -> str:
    value = get_str(data, key, where)
    if len(value) != n_digits or set(value) - set("0123456789abcdef"):
        raise FormatError(f"{where}: `{key}` must be {n_digits} lower-case hex digits, found {_show(value)}")
    return value


def get_list(data: dict[str, Any], key: str, where: str, kind: type | tuple[type, ...]) -> list[Any]:
    """A list whose items all have exactly one of the given types (True is no integer)."""
    value = data.get(key)
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(value, list):
        raise FormatError(f"{where}: `{key}` must be a list, found {_show(value)}")
    items = cast("list[Any]", value)
    for index, item in enumerate(items):
        if type(item) not in kinds:
            names = " or ".join(k.__name__ for k in kinds)
            raise FormatError(f"{where}: `{key}[{index}]` must be {names}, found {_show(item)}")
    return items


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
