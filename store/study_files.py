"""The two files that say what a study is: study.toml (its stores and settings) and provenance.json (how each
result came to be).

In: a study's folder, which may come from elsewhere. Out: their content as plain values, checked like that of
a store, or one sentence on what is wrong with them. Cost: reading them.
"""

import os
import tomllib
from pathlib import Path
from typing import Any, Final

from .errors import FormatError, IncompleteError
from .names import is_file_name, printable
from .parsing import SMALL_JSON_BYTES, check_plain, get_hex, get_int, get_object, get_str, parse_json
from .places import LocalPlace, place_of, scheme_of
from .records import check_key

SETTINGS: Final = "study.toml"
PROVENANCE: Final = "provenance.json"
MAX_SETTINGS_BYTES: Final = 2**20
_STEP_KEYS: Final = ("inputs", "settings", "outputs", "facts")
_DEPTH: Final = 8  # of settings and facts


def read_settings(folder: Path) -> dict[str, Any]:
    """The resolved settings."""
    where = f"{folder / SETTINGS}: settings"
    found = get_object(_toml(folder)["settings"], where)
    check_plain(found, where, _DEPTH, any_text=True)
    return found


def read_stores(folder: Path) -> dict[str, str]:
    """Where the stores are, by name, as it is written."""
    where = f"{folder / SETTINGS}: stores"
    named = get_object(_toml(folder)["stores"], where)
    for name in named:
        if not is_file_name(name):
            raise FormatError(f"{where}: {name[:80]!r} cannot name a store")
    return {name: get_str(named, name, where) for name in named}


def read_steps(folder: Path) -> dict[str, dict[str, Any]]:
    """Recorded steps by name; none where nothing was recorded."""
    where = str(folder / PROVENANCE)
    try:
        content = LocalPlace(folder).read(PROVENANCE, limit=SMALL_JSON_BYTES)
    except FileNotFoundError:
        return {}
    found = get_object(parse_json(content, where), where, keys=("schema", "steps"))
    get_int(found, "schema", where, 1, 1)
    steps = get_object(found["steps"], f"{where}: steps")
    check_plain(steps, f"{where}: steps", _DEPTH + 2, any_text=True)
    for name, step in steps.items():
        _check_step(step, f"{where}: {name}")
    return steps


def shown_place(where: str | Path, folder: Path) -> str:
    """The place of a store as study.toml writes it: a URL, or relative to the study where possible."""
    return _relative(Path(where), folder) if scheme_of(where) is None else place_of(where).url


def _toml(folder: Path) -> dict[str, Any]:
    where = str(folder / SETTINGS)
    try:
        content = LocalPlace(folder).read(SETTINGS, limit=MAX_SETTINGS_BYTES)
        found = tomllib.loads(content.decode("utf-8"))
    except FileNotFoundError:
        raise IncompleteError(f"{where} does not exist") from None
    except RecursionError:
        raise FormatError(f"{where}: nested too deeply") from None
    except ValueError as error:  # TOML, UTF-8, or an integer of thousands of digits
        if isinstance(error, FormatError):
            raise
        raise FormatError(f"{where}: {printable(str(error))[:200]}") from None
    return get_object({"stores": {}, "settings": {}} | found, where, keys=("stores", "settings"))


def _check_step(step: object, where: str) -> None:
    """Inputs are digests or other words by name, outputs digests by their path inside the study."""
    checked = get_object(step, where, keys=_STEP_KEYS)
    for key in _STEP_KEYS:
        get_object(checked[key], f"{where}.{key}")
    for name in checked["inputs"]:
        get_str(checked["inputs"], name, f"{where}.inputs")
    for output in checked["outputs"]:
        get_hex(checked["outputs"], check_key(output, f"{where}.outputs"), f"{where}.outputs")


def _relative(path: Path, folder: Path) -> str:
    """`path` as seen from the study's folder, so that both can be moved together; absolute across drives."""
    try:
        return Path(os.path.relpath(path.resolve(), folder.resolve())).as_posix()
    except ValueError:
        return path.resolve().as_posix()
