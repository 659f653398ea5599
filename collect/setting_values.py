"""Values of settings that may be written in several ways, as they are kept: one text for one meaning, or one
sentence on what is allowed.

In: what a flag, a TOML file or a caller gives. Out: types for the fields of `HarvestSettings`, whose
resolved text goes into a store. Cost: none.
"""

from collections.abc import Iterable
from fractions import Fraction
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator

from ..store.errors import UsageError
from ..store.parsing import INT32_MAX
from ..store.settings import layers_as_text, parse_bytes, parse_layers
from .site_names import parse_sites
from .stopping import parse_duration


def parse_share(text: str) -> Fraction:
    """`"1/8"`, `"0.125"` or `"12.5%"` as a fraction."""
    number = text.strip()
    try:
        share = Fraction(number.removesuffix("%").rstrip()) / (100 if number.endswith("%") else 1)
    except (ValueError, ZeroDivisionError):
        share = Fraction(0)
    if not 0 < share <= 1:
        raise UsageError(
            f"keep={text!r} is no share; write a number above 0 and at most 1, such as 1/8 or 12.5%"
        )
    return share


def parse_ids(text: str) -> tuple[int, ...]:
    """`"11,50256"` as token ids: sorted, each once."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    wrong = next((part for part in parts if not part.isdecimal() or int(part) > INT32_MAX), None)
    if wrong is not None:
        raise UsageError(
            f"exclude_tokens={text!r}: {wrong!r} is no token id; write numbers, such as 11,50256"
        )
    return tuple(sorted({int(part) for part in parts}))


def _layers(value: object) -> object:
    if value is None or value == "all":
        return None
    value = layers_as_text(value)
    if isinstance(value, str):
        parse_layers(value)
    return value


def _sites(value: object) -> object:
    if isinstance(value, str) or (isinstance(value, Iterable) and all(isinstance(one, str) for one in value)):
        return ",".join(parse_sites(value))
    return value


def _share(value: object) -> object:
    if value is None or isinstance(value, bool):
        return value
    share = parse_share(str(value))
    return None if share == 1 else str(share)


def _token_ids(value: object) -> object:
    if isinstance(value, int) and not isinstance(value, bool):
        value = [value]
    if isinstance(value, Iterable) and not isinstance(value, str):
        value = ",".join(str(token) for token in value)
    if isinstance(value, str):
        return ",".join(map(str, parse_ids(value))) or None
    return value


def _size(value: str | None) -> str | None:
    if value is not None:
        parse_bytes(value)
    return value


def _duration(value: str | None) -> str | None:
    if value is not None:
        parse_duration(value)
    return value


Layers = Annotated[str | None, BeforeValidator(_layers)]
Sites = Annotated[str | None, BeforeValidator(_sites)]
Share = Annotated[str | None, BeforeValidator(_share)]
TokenIds = Annotated[str | None, BeforeValidator(_token_ids)]
Size = Annotated[str | None, AfterValidator(_size)]
Duration = Annotated[str | None, AfterValidator(_duration)]
