"""Why a step runs, in a few words: what it was made from against what it would be made from now.

In: the record of a step, and the inputs and settings of now. Out: words, such as `alpha=0.1, was cv` or
`surrogates.zarr is another one`, and the same as it is said of a step that has run since: `surrogates.zarr
was another one`. Cost: none.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ..store import Study
from ..store.names import printable


@dataclass(frozen=True, slots=True)
class Why:
    """Why a step has to run, and why it had to, once it has."""

    now: str
    then: str


NOT_YET: Final = Why("not done yet", "not done before")
_GONE: Final = Why("what it wrote is gone or was changed", "what it wrote was gone or had been changed")
_MOST: Final = 3  # of each kind; who wants all of them compares the files
_LONG: Final = 6  # values of two lists together that are written out
_LAYER: Final = re.compile(r",? layer \d+")
# Settings that a step adds itself.
_WORDS: Final = {"results_version": "this version of nearline computes it otherwise"}


def why_again(
    study: Study, step: str, inputs: Mapping[str, str], settings: Mapping[str, Any], otherwise: Why = _GONE
) -> Why:
    """Why a step of a study that is not current is not; `otherwise`: where its record says nothing."""
    record = study.provenance().get(step)
    if record is None:
        return NOT_YET
    differ = [Why(one, one) for one in _settings(record["settings"], settings)]
    found = [*differ, *_inputs(record["inputs"], inputs)]
    if not found:
        return otherwise
    return Why(_few([one.now for one in found]), _few([one.then for one in found]))


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Settings that differ, as `tokens=2000, was 1000`."""
    return _few(_settings(before, now))


def _settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    differ = [key for key in dict.fromkeys((*now, *before)) if before.get(key) != _plain(now.get(key))]
    return [_WORDS.get(key) or _setting(key, before.get(key), _plain(now.get(key))) for key in differ]


def _setting(key: str, before: Any, now: Any) -> str:
    """A long list by what came and went."""
    if isinstance(before, list) and isinstance(now, list) and len(before) + len(now) > _LONG:
        came, went = ([one for one in of if one not in other] for of, other in ((now, before), (before, now)))
        parts = [f"{word} {_first(of)}" for word, of in (("with", came), ("without", went)) if of]
        if parts:
            return f"{key} {' and '.join(parts)}"
    return f"{key}={_text(now)}, was {_text(before)}"


def _first(values: list[Any]) -> str:
    more = len(values) - _MOST
    return ", ".join(map(_text, values[:_MOST])) + (f" and {more} more" if more > 0 else "")


def _inputs(before: Mapping[str, str], now: Mapping[str, str]) -> list[Why]:
    """Inputs that differ; what there is of each layer and store is said once."""
    found: list[Why] = []
    for key in dict.fromkeys((*now, *before)):
        if before.get(key) != now.get(key):
            word = "another one"
            if key not in now:
                word = "not needed any more"
            elif key not in before:
                word = "new"
            found.append(Why(f"{_short(key)} is {word}", f"{_short(key)} was {word}"))
    return list(dict.fromkeys(found))


def _short(key: str) -> str:
    """`tokens/need/layer=01/stdlib@measure.parquet` is the need of rows that `measure` brought."""
    if key.startswith("tokens/"):
        kind, brought = key.split("/")[1], key.removesuffix(".parquet").partition("@")[2]
        return f"{kind} of {brought or 'the fit'}"
    return printable(_LAYER.sub("", key))


def _few(found: list[str]) -> str:
    more = len(found) - _MOST
    return "; ".join([*found[:_MOST], *([f"and {more} more"] if more > 0 else [])])


def _plain(value: Any) -> Any:
    """As JSON gives it back."""
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ",".join(map(_text, value)) or "none"
    return "unset" if value is None else f"{value:g}" if isinstance(value, float) else printable(str(value))
