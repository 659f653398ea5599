"""All mistakes of a settings file in one message, each once and none that only follows from another.

In: tables, and blocks of code that each may find one mistake. Out: one `UsageError`: the sentence itself
where there is one, else their number and a line for each. Settings with a mistake are an `Unread`: they have
what stands there rightly, and whoever asks for what a mistake may have been meant for has nothing to say.
Cost: none.
"""

import re
from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pydantic

from ..store import NearlineError, UsageError
from ..store.settings import all_problems, nearest_name, unknown_setting


class Follows(Exception):
    """An answer would rest on a mistake that is told already."""


class Unread:
    """In the place of settings with a mistake. What was given and is right can be looked at, and so can the
    default of what no mistake was meant for. `doubtful`: names of fields; one that is none casts doubt on
    all."""

    def __init__(self, right: pydantic.BaseModel | None, doubtful: Collection[str]) -> None:
        self._right, self._doubtful = right, frozenset(doubtful)

    def __getattr__(self, name: str) -> Any:
        right, doubtful = self._right, self._doubtful
        if right is None:
            raise Follows(name)
        fields = type(right).model_fields
        given = name in right.model_fields_set
        # A property may rest on any field.
        if not given and (name not in fields or name in doubtful or not doubtful <= fields.keys()):
            raise Follows(name)
        return getattr(right, name)


@dataclass(frozen=True, slots=True)
class Parsed:
    """Settings (`Unread` with a mistake), the part of their table that is right, and the fields that a
    mistake was meant for."""

    settings: Any
    right: dict[str, Any]
    doubtful: frozenset[str]


class Mistakes:
    """What has been found wrong so far."""

    def __init__(self) -> None:
        self._found: dict[str, None] = {}  # each once, in the order in which they were found

    def __bool__(self) -> bool:
        return bool(self._found)

    def add(self, sentence: str) -> None:
        self._found.setdefault(sentence)

    @contextmanager
    def here(self, place: str = "") -> Generator[None]:
        """Goes on behind a block that finds a mistake; `place` is put before its sentence."""
        try:
            yield
        except Follows:
            pass
        except UsageError as error:
            self.add(f"{place}: {error}" if place else str(error))
        except NearlineError:
            if not self._found:  # of the machine, not of the file: it can wait until the file is right
                raise

    def parse(
        self,
        kind: type[pydantic.BaseModel],
        table: Mapping[str, Any],
        place: str,
        doubtful: Collection[str] = (),
    ) -> Parsed:
        """Settings of `kind`. `doubtful`: fields that mistakes told before were meant for."""
        fields, doubted = kind.model_fields, set(doubtful)
        for key in table.keys() - fields.keys():
            doubted.add(nearest_name(key, fields) or key)
        for key in table:
            if key not in fields:
                self.add(f"{place}: {unknown_setting(key, fields)}")
        right = {key: value for key, value in table.items() if key in fields}
        try:
            found: pydantic.BaseModel | None = kind.model_validate(right)
        except pydantic.ValidationError as error:
            problems = all_problems(error, fields)
            for key, sentence in problems.items():
                missing = key not in right and (key in doubted or not doubted <= fields.keys())
                if not missing and not _asks_for(sentence, (doubted | problems.keys()) - {key}):
                    self.add(f"{place}: {sentence}")
            right = {key: value for key, value in right.items() if key not in problems}
            doubted |= problems.keys()
            found = _or_none(kind, right)
        return Parsed(Unread(found, doubted) if doubted else found, right, frozenset(doubted))

    def tell(self, file: object) -> None:
        """Nothing where nothing is wrong."""
        sentences = list(self._found)
        if len(sentences) == 1:
            raise UsageError(sentences[0])
        if sentences:
            raise UsageError("\n".join([f"{len(sentences)} mistakes in {file}:", *sentences]))


def _asks_for(sentence: str, doubtful: Collection[str]) -> bool:
    """Whether a problem is there only because of another one: `set device_map=auto too`, and that is wrong
    itself."""
    names = "|".join(map(re.escape, doubtful))
    return bool(names) and re.search(rf"\b({names})=", sentence) is not None


def _or_none(kind: type[pydantic.BaseModel], table: Mapping[str, Any]) -> pydantic.BaseModel | None:
    try:
        return kind.model_validate(dict(table))
    except pydantic.ValidationError:
        return None
