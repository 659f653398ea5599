"""What all settings classes share: unknown keys, wrong values, layers and sizes, each answered in one
sentence.

In: named values from flags, a TOML table or keyword arguments, and the pydantic class they are meant for.
Out: a validated value of that class, or a UsageError that names the key, the nearest known one and what is
allowed. Cost: none; pydantic is imported when the first settings are parsed.
"""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from .errors import UsageError

if TYPE_CHECKING:
    import pydantic

Settings = TypeVar("Settings", bound="pydantic.BaseModel")

_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")
_LAYERS = re.compile(r"(\d+)\s*(?:-\s*(\d+))?")


def parse_settings(kind: type[Settings], data: Mapping[str, Any]) -> Settings:
    """Settings of `kind` from named values; an unknown key or a wrong value is one sentence."""
    import pydantic

    for key in data:
        if key not in kind.model_fields:
            raise UsageError(unknown_setting(key, kind.model_fields))
    try:
        return kind.model_validate(dict(data))
    except pydantic.ValidationError as error:
        raise UsageError(first_problem(error, kind.model_fields)) from None


def unknown_setting(key: str, known: Iterable[str]) -> str:
    """A key that no field has, with the nearest one that is."""
    near = nearest_name(key, known)
    hint = f"did you mean {near!r}?" if near else f"known are {', '.join(known)}."
    return f"unknown setting {key!r}: {hint}"


def nearest_name(key: str, known: Iterable[str]) -> str | None:
    """The field that a key may have been meant for."""
    near = difflib.get_close_matches(key.replace("-", "_"), list(known), n=1, cutoff=0.5)
    return near[0] if near else None


def first_problem(error: "pydantic.ValidationError", fields: Mapping[str, Any]) -> str:
    """The first thing that pydantic found, as one sentence with the field's own description."""
    return next(iter(all_problems(error, fields).values()))


def all_problems(error: "pydantic.ValidationError", fields: Mapping[str, Any]) -> dict[str, str]:
    """What pydantic found, by field: its first problem as one sentence with its own description."""
    found: dict[str, str] = {}
    for one in error.errors():
        name = str(one["loc"][0]) if one["loc"] else "settings"
        if name not in found:
            found[name] = _problem(name, one, fields)
    return found


def _problem(name: str, found: Mapping[str, Any], fields: Mapping[str, Any]) -> str:
    cause = found.get("ctx", {}).get("error")
    message = str(cause) if cause is not None else str(found["msg"])
    given = "" if message.startswith(f"{name}=") else f"{name}={found['input']!r}: "
    if found["type"] == "literal_error":
        message += nearest_known(
            str(found["input"]), re.findall(r"'([^']*)'", str(found.get("ctx", {}).get("expected")))
        )
    meaning = fields[name].description if name in fields else None
    message = f"{message[0].lower()}{message[1:]}".rstrip(".")
    return f"{given}{message}" + (f". {name}: {meaning}" if meaning else "")


def nearest_known(name: str, known: Iterable[str]) -> str:
    """The nearest known name, to follow a sentence that lists them; empty where none is near."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; the nearest is {near[0]!r}" if near else ""


def layers_as_text(layers: object) -> object:
    """Layers as settings keep them: a list or a single number as `"5,8"`; anything else as it is."""
    if isinstance(layers, Iterable) and not isinstance(layers, str):
        return ",".join(str(layer) for layer in layers)
    return str(layers) if isinstance(layers, int) else layers


def parse_layers(text: str) -> list[int]:
    """`"0-5,8"` as [0, 1, 2, 3, 4, 5, 8]: sorted, each once."""
    layers: set[int] = set()
    for part in text.split(","):
        match = _LAYERS.fullmatch(part.strip())
        if match is None:
            raise UsageError(f"layers={text!r}: {part.strip()!r} is no layer or range; write 0-5,8 or all")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise UsageError(
                f"layers={text!r}: the range {part.strip()!r} runs backwards; write {last}-{first}"
            )
        layers.update(range(first, last + 1))
    return sorted(layers)


def chosen_layers(spelled: str | None, there: Sequence[int]) -> tuple[int, ...]:
    """Layers by how settings write them; all that are there by default."""
    return tuple(there if spelled in (None, "all") else parse_layers(str(spelled)))


def parse_bytes(text: str) -> int:
    """`"4 GiB"` as a number of bytes."""
    match = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise UsageError(f"{text!r} is no size; write a number and a unit, such as 4 GiB or 800 MiB")
    size = int(float(match[1]) * unit)
    if size < 1:
        raise UsageError(f"{text!r} is no size above zero; write a number and a unit, such as 4 GiB")
    return size
