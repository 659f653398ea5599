"""One section of a store's attributes out of untrusted JSON.

In: a frozen dataclass of plain fields, and an object that should have exactly these. Out: a value of it, or
an error that names the field. Cost: none.
"""

import dataclasses
from typing import Any, cast, get_args

from .dtypes import MOST_EXPONENT
from .parsing import (
    INT32_MAX,
    INT64_MAX,
    check_plain,
    get_bool,
    get_int,
    get_ints,
    get_list,
    get_number,
    get_object,
    get_str,
)

MAX_ENTRIES = 2**17  # of any list
_MOST = {"n_layers": 4096, "d_model": 2**18, "torch_threads": 2**16}  # far beyond any model or machine
_MOST |= dict.fromkeys(("vocab_size", "bos_id", "n_documents", "n_groups", "block"), INT32_MAX)


def parse_section(kind: Any, data: object, where: str) -> Any:
    """One section: a dataclass with exactly its fields, or a flat object of numbers, strings or anything."""
    if not dataclasses.is_dataclass(kind):
        found = get_object(data, where)
        check_plain(found, where)
        for key in found:
            if kind == dict[str, float]:
                get_number(found, key, where)
            elif kind == dict[str, str]:
                get_str(found, key, where)
        return found
    given = get_object(data, where)
    # A field with a default came later: stores without it are older.
    fields = [
        field
        for field in dataclasses.fields(kind)
        if field.name in given or field.default is dataclasses.MISSING
    ]
    found = get_object(data, where, keys=[field.name for field in fields])
    return cast("Any", kind)(**{field.name: _value(field.type, found, field.name, where) for field in fields})


def _value(kind: Any, data: dict[str, Any], key: str, where: str) -> Any:
    """A value of the type that the dataclass declares."""
    if kind is bool:
        return get_bool(data, key, where)
    if kind in (int, int | None):
        if data[key] is None and kind is not int:
            return None
        return get_int(data, key, where, high=_MOST.get(key, INT64_MAX))
    if kind in (str, str | None):
        if data[key] is None and kind is not str:
            return None
        return get_str(data, key, where, lines=key == "sentence")
    return tuple(_items(cast("type", get_args(kind)[0]), data, key, where))


def _items(item: type, data: dict[str, Any], key: str, where: str) -> list[Any]:
    """The values of a list."""
    if item is int:
        low = -MOST_EXPONENT if key == "gradient_exponents" else 0
        return get_ints(data, key, where, low, INT32_MAX, most=MAX_ENTRIES)
    values = get_list(data, key, where, (int, float) if item is float else item, MAX_ENTRIES)
    check_plain(values, f"{where}.{key}")
    return list(map(float, values)) if item is float else values
