"""The stores of a fit: names and paths in, open readers of one model out, checked before any work starts.

A folder of moments (`collect --moments-only`) may stand where the store to be fitted on stands; needs are
computed of rows, so at least one store beside it has them.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from ..store import Reader, UsageError
from ..store.comparable import check_comparable
from ..store.comparable import name_stores as by_name
from ..store.settings import parse_layers
from .moments_file import is_moments_folder, open_moments
from .moments_source import MomentsSource
from .settings import FitSettings

SITES = ("residual", "mlp_output")
ONE_MODEL = ("weights", "tokenizer")  # or numbers of two models would stand in one study

_NAMED = re.compile(r"([\w.-]+)=(.+)")  # a URL or a path with folders has other characters before its "="

Source = Reader | MomentsSource
StorePaths = Mapping[str, str | Path] | Sequence[str | Path]


def name_stores(stores: StorePaths) -> dict[str, str | Path]:
    """Store names with their folders or URLs; a plain list is named by the last part of each."""
    named = by_name(stores)
    if not named:
        raise UsageError("a fit needs at least one store")
    for name in named:
        if not name or name.startswith(".") or "/" in name or "\\" in name:
            raise UsageError(f"{name!r} cannot name a store: it becomes a file name in the study")
    return named


def parse_stores(arguments: Sequence[str]) -> StorePaths:
    """Stores as a command line names them: STORE, or NAME=STORE. What exists as it stands is a path."""
    if not any(_split(argument)[0] for argument in arguments):
        return list(arguments)
    named: dict[str, str | Path] = {}
    for argument in arguments:
        name, where = _split(argument)
        name = name or next(iter(by_name([where])))
        if name in named:
            raise UsageError(
                f"two stores are called {name} ({named[name]} and {where}): give them other names"
            )
        named[name] = where
    return named


def _split(argument: str) -> tuple[str, str]:
    match = None if Path(argument).exists() else _NAMED.fullmatch(argument)
    return (match[1], match[2]) if match else ("", argument)


@dataclass(frozen=True, slots=True, eq=False)
class Sources:
    """What a fit was given: stores with rows, and moments to be fitted on."""

    readers: dict[str, Reader]
    moments: dict[str, MomentsSource]
    fit_on: str

    @property
    def fitted(self) -> MomentsSource | None:
        """The moments that are fitted; None where it is a store with rows."""
        return self.moments.get(self.fit_on)

    @property
    def digests(self) -> dict[str, str]:
        """Of all of them, by name: the inputs of a step."""
        return {name: str(source.digest) for name, source in (*self.readers.items(), *self.moments.items())}


def open_sources(named: Mapping[str, str | Path], settings: FitSettings) -> Sources:
    """Stores with rows, and at most one folder of moments: the one that is fitted on."""
    opened: dict[str, Source] = {}
    for name, path in named.items():
        opened[name] = open_moments(path, name) if is_moments_folder(path) else _open_store(name, path)
    readers = {name: one for name, one in opened.items() if isinstance(one, Reader)}
    moments = {name: one for name, one in opened.items() if isinstance(one, MomentsSource)}
    fit_on = fit_store(opened, settings)
    for name in moments:
        _check_moments(name, moments[name], fit_on, settings, list(readers))
    _refuse_copies(opened)
    # Both say what they are of in the same words, and no row is read.
    check_comparable(cast("dict[str, Reader]", opened), allow=settings.allow, sites=SITES, never=ONE_MODEL)
    return Sources(readers, moments, fit_on)


def _check_moments(
    name: str, source: MomentsSource, fit_on: str, settings: FitSettings, with_rows: Sequence[str]
) -> None:
    if not with_rows:
        raise UsageError(
            f"{name} holds moments only, and needs are computed of rows: give a store with rows beside it"
        )
    if name != fit_on:
        raise UsageError(
            f"{name} holds moments only: surrogates can be fitted on it (fit_on={name}), but it has no rows "
            f"to evaluate those of {fit_on} on; leave it out"
        )
    if (source.n_folds, source.seed) != (settings.folds, settings.seed):
        raise UsageError(
            f"the moments of {name} are of {source.n_folds} folds with seed {source.seed}, this fit asks for "
            f"{settings.folds} with seed {settings.seed}: set folds={source.n_folds} and seed={source.seed}"
        )


def open_stores(named: Mapping[str, str | Path], allow: Collection[str] = ()) -> dict[str, Reader]:
    """Readers of sealed stores that may stand in one study. `allow`: differences accepted by name."""
    readers = {name: _open_store(name, path) for name, path in named.items()}
    _refuse_copies(readers)
    check_comparable(readers, allow=allow, sites=SITES, never=ONE_MODEL)
    return readers


def _open_store(name: str, path: str | Path) -> Reader:
    reader = Reader.open(path)
    for site in SITES:
        if site not in reader.attributes.storage.sites:
            raise UsageError(f"store {name} has no `{site}`: a fit needs {' and '.join(SITES)}")
    return reader


def _refuse_copies(readers: Mapping[str, Source]) -> None:
    """One store under two names would stand in the study as two that agree."""
    seen: dict[str, str] = {}
    for name, reader in readers.items():
        if (digest := str(reader.digest)) in seen:
            raise UsageError(
                f"stores {seen[digest]} and {name} are one and the same (seal {digest[:12]}…): give it once"
            )
        seen[digest] = name


def fit_store(readers: Mapping[str, Source], settings: FitSettings) -> str:
    """The name of the store that surrogates are fitted on."""
    chosen = settings.fit_on or next(iter(readers))
    if chosen not in readers:
        raise UsageError(f"fit_on = {chosen!r}: the stores of this fit are {', '.join(readers)}")
    return chosen


def choose_layers(readers: Mapping[str, Source], settings: FitSettings) -> list[int]:
    """The layers to fit; every store must have them."""
    if settings.layers == "all":
        common = set.intersection(*(set(reader.layers) for reader in readers.values()))
        if not common:
            raise UsageError(f"the stores {', '.join(readers)} have no layer in common")
        return sorted(common)
    layers = parse_layers(settings.layers)
    for name, reader in readers.items():
        if missing := sorted(set(layers) - set(reader.layers)):
            raise UsageError(f"store {name} has no layer {missing[0]}; it has {spell_layers(reader.layers)}")
    return layers


def spell_layers(layers: Sequence[int]) -> str:
    whole = len(layers) > 1 and list(layers) == list(range(layers[0], layers[-1] + 1))
    return f"{layers[0]}-{layers[-1]}" if whole else ", ".join(map(str, layers))
