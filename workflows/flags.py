"""Command line flags and TOML keys from one settings class, so that the names cannot drift apart.

In: a pydantic settings class. Out: a class whose fields are optional flags with the same names, types,
choices and help; and the table that results from a TOML file with the given flags laid over it. Cost:
nothing.
"""

import inspect
import tomllib
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import pydantic

from ..store import UsageError

Settings = TypeVar("Settings")
Table = Mapping[str, Any]


def _plain(annotation: Any) -> Any:
    """The annotation without constraints and None: the settings class checks values, in better words."""
    if typing.get_origin(annotation) is Annotated:
        return _plain(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        inner = [argument for argument in typing.get_args(annotation) if argument is not type(None)]
        return _plain(inner[0]) if len(inner) == 1 else str
    if typing.get_origin(annotation) in (tuple, list):
        return str
    return annotation


def _default_text(value: Any) -> str:
    if isinstance(value, tuple | list):
        return ",".join(f"{item:g}" if isinstance(item, float) else str(item) for item in value)
    return str(value)


def own_first(settings: type[pydantic.BaseModel]) -> dict[str, Any]:
    """The fields in the order in which they are shown: what a step is about, then what it shares with
    others (which pydantic has the other way round)."""
    owners = [kind for kind in settings.__mro__ if issubclass(kind, pydantic.BaseModel)]
    names = dict.fromkeys(name for kind in owners for name in inspect.get_annotations(kind))
    return {name: settings.model_fields[name] for name in names if name in settings.model_fields}


def flags_of(settings: type[pydantic.BaseModel], leave_out: tuple[str, ...] = ()) -> type[pydantic.BaseModel]:
    """A model with one optional flag per setting; None means that the flag was not given."""
    fields: dict[str, Any] = {}
    for name, field in own_first(settings).items():
        if name in leave_out:
            continue
        text = field.description or ""
        if field.default not in (None, ()) and "default:" not in text:
            text = f"{text} [default: {_default_text(field.default)}]"
        fields[name] = (_plain(field.annotation) | None, pydantic.Field(None, description=text))
    return pydantic.create_model(f"{settings.__name__}Flags", **fields)


def given(flags: pydantic.BaseModel | None) -> dict[str, Any]:
    """The flags that were given, by name."""
    return {} if flags is None else flags.model_dump(exclude_none=True)


def parsed(
    parse: Callable[[Table], Settings],
    config: Path | None,
    flags: pydantic.BaseModel | None,
    *,
    table: Callable[[Table], Table] = dict,
    **arguments: Any,
) -> Settings:
    """Settings from a file, the flags over it and the arguments over both. `table`: the file's table as
    fields. A mistake that is there only because of the file names it.
    """
    over = given(flags) | arguments
    read = read_toml(config)
    try:
        return parse({**table(read), **over})
    except UsageError as error:
        if config is None or str(error) == _problem(parse, over):
            raise
        raise UsageError(f"--config {config}: {error}") from None


def _problem(parse: Callable[[Table], Any], values: Table) -> str:
    try:
        parse(values)
    except UsageError as error:
        return str(error)
    return ""


def read_toml(path: Path | None, what: str = "--config ") -> dict[str, Any]:
    """The table in a settings file; none for no file. `what` a message calls it."""
    if path is None:
        return {}
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"{what}{path}: there is no such file.") from None
    except IsADirectoryError:
        raise UsageError(f"{what}{path}: this is a folder; give a TOML file of settings.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise UsageError(f"{what}{path}: not a readable TOML file ({error}).") from None
