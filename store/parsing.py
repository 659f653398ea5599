"""Untrusted JSON to typed values: strict reading, and small getters that say which key is wrong.

In: bytes, or an object that `json` made of them. Out: plain Python values of the promised type, or
FormatError naming file, key, what is allowed and what was found. A store from elsewhere is data, not a
friend: what is too large, too deep, not finite or would steer a terminal is refused here, before a caller
sizes an array by it. Canonical writing lives here too: sorted keys, compact, no NaN. Cost: one pass of
`json`; a file of at most `limit` bytes becomes at most about thirty times as many in memory.
"""

import json
import math
import re
from collections.abc import Iterable
from itertools import chain
from typing import Any, cast

from .errors import FormatError
from .names import printable, text_problem

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
MAX_JSON_BYTES = 2**28  # a plan of five million sequences
SMALL_JSON_BYTES = 2**24  # every other file: the manifest of the most blocks has 2**20
MAX_CONTAINERS = 2**20  # objects and lists in one file: they cost most in memory
MAX_DEPTH = 24

_DIGITS = bytes(ord("0") if chr(code) in "0123456789" else ord(" ") for code in range(256))
_MANY_DIGITS = b"0" * 19  # in a translated text: found ten times faster than a pattern among hex digests
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def canonical(data: object) -> bytes:
    """JSON with sorted keys and no spaces: the same data gives the same bytes."""
    return json.dumps(
        data, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=True
    ).encode()


def readable(data: object) -> bytes:
    """JSON with sorted keys that a person can read; deterministic too."""
    return (json.dumps(data, sort_keys=True, indent=1, allow_nan=False, ensure_ascii=True) + "\n").encode()


def parse_json(content: bytes, where: str, limit: int = SMALL_JSON_BYTES) -> object:
    """Strict JSON: UTF-8, finite numbers, integers of 64 bits, no key twice, no absurd size or depth."""
    if len(content) > limit:
        raise FormatError(f"{where}: {len(content)} bytes of JSON, at most {limit} are read")
    n_containers = content.count(b"[") + content.count(b"{")
    if n_containers > MAX_CONTAINERS:
        raise FormatError(f"{where}: more than {MAX_CONTAINERS} lists and objects")
    large_integers = _MANY_DIGITS in content.translate(_DIGITS)
    try:
        found = json.loads(
            content.decode("utf-8"),
            parse_constant=lambda name: _refuse(f"{where}: {name} is not a JSON number"),
            parse_float=lambda text: _finite(text, where),
            parse_int=(lambda text: _int64(text, where)) if large_integers else None,
            object_pairs_hook=lambda pairs: _unique(pairs, where),
        )
    except RecursionError:
        raise FormatError(f"{where}: JSON nested too deeply") from None
    except FormatError:
        raise
    except ValueError as error:  # also UnicodeDecodeError
        raise FormatError(f"{where}: not valid JSON ({error})") from None
    if n_containers > MAX_DEPTH:
        _check_depth(found, where)
    if _SURROGATE.search(content):
        _check_surrogates(found, where)
    return found


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
            raise FormatError(
                f"{where}: unknown key {_show(unknown[0])}; allowed: {', '.join(sorted(expected))}"
            )
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
    """A finite number."""
    value = data.get(key)
    if type(value) is int and abs(value) <= INT64_MAX:
        return float(value)
    if type(value) is not float or not math.isfinite(value):
        raise FormatError(f"{where}: `{key}` must be a number, found {_show(value)}")
    return value


def get_bool(data: dict[str, Any], key: str, where: str) -> bool:
    value = data.get(key)
    if type(value) is not bool:
        raise FormatError(f"{where}: `{key}` must be true or false, found {_show(value)}")
    return value


def get_str(
    data: dict[str, Any], key: str, where: str, allowed: Iterable[str] | None = None, *, lines: bool = False
) -> str:
    """Text of moderate length that can be printed as it is; `lines`: it may hold line ends and tabs."""
    value = data.get(key)
    if type(value) is not str:
        raise FormatError(f"{where}: `{key}` must be a string, found {_show(value)}")
    if allowed is not None and value not in (options := tuple(allowed)):
        raise FormatError(f"{where}: `{key}` must be one of {', '.join(options)}, found {_show(value)}")
    if problem := text_problem(value.translate({10: 32, 9: 32}) if lines else value):
        raise FormatError(f"{where}: `{key}` {problem}, found {_show(value)}")
    return value


def get_hex(data: dict[str, Any], key: str, where: str, n_digits: int = 64) -> str:
    value = get_str(data, key, where)
    if len(value) != n_digits or set(value) - set("0123456789abcdef"):
        raise FormatError(f"{where}: `{key}` must be {n_digits} lower-case hex digits, found {_show(value)}")
    return value


def get_list(
    data: dict[str, Any], key: str, where: str, kind: type | tuple[type, ...], most: int | None = None
) -> list[Any]:
    """A list whose items all have exactly one of the given types (True is no integer)."""
    value = data.get(key)
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(value, list):
        raise FormatError(f"{where}: `{key}` must be a list, found {_show(value)}")
    items = cast("list[Any]", value)
    if most is not None and len(items) > most:
        raise FormatError(f"{where}: `{key}` has {len(items)} entries, at most {most} are allowed")
    for index, item in enumerate(items):
        if type(item) not in kinds:
            names = " or ".join(k.__name__ for k in kinds)
            raise FormatError(f"{where}: `{key}[{index}]` must be {names}, found {_show(item)}")
    return items


def get_ints(
    data: dict[str, Any], key: str, where: str, low: int = 0, high: int = INT64_MAX, most: int | None = None
) -> list[int]:
    """A list of integers in a range."""
    items = get_list(data, key, where, int, most)
    if items and not (low <= min(items) and max(items) <= high):
        raise FormatError(
            f"{where}: `{key}` holds {_show(min(items))}..{_show(max(items))}, allowed: {low}..{high}"
        )
    return items


def check_plain(data: object, where: str, depth: int = 4, *, any_text: bool = False) -> None:
    """Free facts (policies, settings): plain values, a few levels deep, with text that can be printed;
    `any_text`: values may hold any text, because whoever prints them has to make it safe."""
    if problem := _plain_problem(data, depth, any_text):
        raise FormatError(f"{where}{problem}")


def _plain_problem(data: object, depth: int, any_text: bool) -> str | None:
    """What is wrong, with the way to it in front; None where nothing is."""
    if isinstance(data, (dict, list)):
        if not depth:
            return " is nested too deeply"
        if isinstance(data, list):
            named = enumerate(cast("list[Any]", data))
        else:
            named = cast("dict[Any, Any]", data).items()
        for name, value in named:
            if isinstance(data, dict) and (not isinstance(name, str) or text_problem(name)):
                return f": {_show(name)} is not a name"
            if problem := _plain_problem(value, depth - 1, any_text):
                return f".{name}{problem}" if isinstance(data, dict) else f"[{name}]{problem}"
        return None
    if isinstance(data, str):
        problem = None if any_text else text_problem(data)
        return f" {problem}, found {_show(data)}" if problem else None
    if type(data) is float:
        return None if math.isfinite(data) else f" is {data}, a finite number is needed"
    if type(data) is int:
        return None if abs(data) <= INT64_MAX else " is an integer of more than 64 bits"
    return None if data is None or type(data) is bool else f" is {_show(data)}, which is no JSON value"


def _refuse(message: str) -> Any:
    raise FormatError(message)


def _finite(text: str, where: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse(f"{where}: {_show(text)} is beyond a float")


def _int64(text: str, where: str) -> int:
    value = int(text) if len(text) <= 20 else INT64_MAX + 1
    return value if abs(value) <= INT64_MAX else _refuse(f"{where}: {_show(text)} is beyond 64 bits")


def _unique(pairs: list[tuple[str, Any]], where: str) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise FormatError(f"{where}: key {_show(key)} stands twice")
        seen.add(key)
    return found


def _check_depth(data: object, where: str) -> None:
    """Level by level, so that nothing recurses; only containers are kept."""
    level: list[Any] = [data] if isinstance(data, (dict, list)) else []
    for _ in range(MAX_DEPTH):
        objects = chain.from_iterable(part.values() for part in level if type(part) is dict)
        items = chain(objects, chain.from_iterable(part for part in level if type(part) is list))
        level = [item for item in items if type(item) is dict or type(item) is list]
        if not level:
            return
    raise FormatError(f"{where}: JSON nested too deeply")


def _check_surrogates(data: object, where: str) -> None:
    try:
        json.dumps(data, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise FormatError(f"{where}: a string holds half of a surrogate pair") from None


def _show(value: object) -> str:
    """The value in an error: short, and nothing that a terminal would obey."""
    if isinstance(value, (dict, list)):
        size = len(cast("dict[Any, Any] | list[Any]", value))
        value = cast("Any", value if size <= 8 else (type(value).__name__, size, "entries"))
    if isinstance(value, int) and abs(value) > 10**60:
        return "an integer of many digits"
    text = printable(repr(value[:80] if isinstance(value, str) else value))
    return text if len(text) <= 60 else text[:57] + "..."
