"""The tables of a study's settings file, as TOML has them: names and places checked, values not yet.

In: what `tomllib` read. Out: frozen `Tables`; of each mistake one sentence that names the file, the table
and the nearest known key. The fields of a step are those of its settings class and are defined there alone;
here is only what no step has: where results go, and which models and corpora there are. Cost: none.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pydantic
from pydantic import Field

from ..analyze.analyze_settings import AnalyzeSettings
from ..analyze.compute_settings import IN_TABLE, MACHINE_FIELDS
from ..analyze.settings import FitSettings
from ..collect.measure_settings import MeasureSettings
from ..collect.settings import HarvestSettings
from ..collect.tuning_settings import FinetuneSettings
from ..store.settings import nearest_known, nearest_name
from .flags import read_toml
from .mistakes import Mistakes, Parsed

UNSET: Final = "default"  # a value that takes a field back to its default, whatever a wider table says
NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*")


class ReportSettings(pydantic.BaseModel):
    """Settings of `nearline report`: it has none."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")


STEP_SETTINGS: Final[Mapping[str, type[pydantic.BaseModel]]] = {
    "collect": HarvestSettings,
    "fit": FitSettings,
    "analyze": AnalyzeSettings,
    "measure": MeasureSettings,
    "finetune": FinetuneSettings,
    "report": ReportSettings,
}
# Fields that a study's file cannot hold, and why.
NOT_HERE: Final[Mapping[str, Mapping[str, str]]] = {
    "collect": {
        "model": "[[models]] names the models",
        "corpus": "[[corpora]] names the corpora",
        "rank": "`nearline collect --rank` shares one store among processes",
        "world_size": "`nearline collect --world-size` shares one store among processes",
        "moments_only": "analyses need rows; `nearline collect --moments-only` stores sums",
        "folds": "it goes with moments_only; those of a fit stand in [fit]",
        "fold_seed": "it goes with moments_only; that of a fit stands in [fit]",
    }
}
COMPUTED: Final = ("fit", "analyze")  # steps that [compute] holds for


class ModelTable(pydantic.BaseModel):
    """One of [[models]]."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    model: str = Field(description="A bundled model, a local folder or a Hub id.")
    name: str = Field(default="", description="Of its study and stores; default: the last part of `model`.")
    shape: dict[str, Any] | None = Field(
        default=None, description="layers, d_model, d_ff and vocabulary, by which `plan` needs no model."
    )
    collect: dict[str, Any] = Field(default={}, description="Settings of this model alone.")
    fit: dict[str, Any] = Field(default={}, description="The same.")
    analyze: dict[str, Any] = Field(default={}, description="The same.")
    measure: dict[str, Any] = Field(default={}, description="The same.")
    finetune: dict[str, Any] | None = Field(
        default=None, description="The same; it is fine-tuned where this table or [finetune] is there."
    )


class CorpusTable(pydantic.BaseModel):
    """One of [[corpora]]."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    corpus: str = Field(description="As `nearline collect` takes it, such as jsonl:PATH:FIELD.")
    name: str = Field(default="", description="Of its stores; default: the last part of `corpus`.")
    collect: dict[str, Any] = Field(default={}, description="Settings of this corpus alone.")


class StudyFile(pydantic.BaseModel):
    """A whole settings file."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    out: str = Field(
        default="study", description="Folder for stores and studies; OUT on the command line wins."
    )
    models: list[dict[str, Any]] = Field(default=[], description="Which models.")
    corpora: list[dict[str, Any]] = Field(default=[], description="Which corpora.")
    collect: dict[str, Any] = Field(default={}, description="Settings of every harvest.")
    fit: dict[str, Any] = Field(default={}, description="Settings of every fit.")
    analyze: dict[str, Any] = Field(default={}, description="Settings of all analyses.")
    measure: dict[str, Any] = Field(default={}, description="Settings of every measurement.")
    finetune: dict[str, Any] | None = Field(
        default=None, description="Settings of fine-tuning, which runs where this table is there."
    )
    report: dict[str, Any] = Field(default={}, description="Settings of reports.")
    compute: dict[str, Any] = Field(default={}, description="Where fits and analyses compute.")


@dataclass(frozen=True, slots=True)
class Tables:
    """The tables of a settings file. `doubtful`: what mistakes among them were meant for: `out`, `name`, a
    step; an empty name casts doubt on all."""

    file: StudyFile
    models: tuple[ModelTable, ...]
    corpora: tuple[CorpusTable, ...]
    doubtful: frozenset[str]

    def doubts(self, *names: str) -> bool:
        return bool(self.doubtful & {"", *names})


def read_tables(path: Path, mistakes: Mistakes) -> Tables:
    """The tables of a settings file, every key known and every name usable."""
    found = mistakes.parse(StudyFile, read_toml(path, what=""), str(path))
    file, doubtful = StudyFile(**found.right), set(_meant(found.doubtful, StudyFile))
    models = _entries(ModelTable, file.models, path, mistakes, doubtful)
    corpora = _entries(CorpusTable, file.corpora, path, mistakes, doubtful)
    for step in STEP_SETTINGS:
        _check_keys(step, getattr(file, step) or {}, f"{path}, [{step}]", mistakes)
    for one in models:
        for step in (step for step in STEP_SETTINGS if step != "report"):
            place = f"{path}, [[models]] {one.name}, {step}"
            _check_keys(step, getattr(one, step) or {}, place, mistakes)
    for one in corpora:
        _check_keys("collect", one.collect, f"{path}, [[corpora]] {one.name}, collect", mistakes)
    for key in file.compute:
        if not in_compute(key):
            mistakes.add(f"{path}, [compute]: unknown setting {key!r}{_near(key, IN_TABLE)}")
    return Tables(file, models, corpora, frozenset(doubtful))


def in_compute(key: str) -> bool:
    return key in IN_TABLE or key in MACHINE_FIELDS


def usable(step: str, table: Mapping[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """The part of a step's table that has a place there, and the fields that the rest was meant for."""
    known = STEP_SETTINGS[step].model_fields
    right = {key: value for key, value in table.items() if key in known and key not in NOT_HERE.get(step, {})}
    odd = [key for key in table if key not in known and not (key == "compute" and step in COMPUTED)]
    return right, {nearest_name(key, known) or key for key in odd}


def default_name(spec: str) -> str:
    """What a model or a corpus is called where nothing else is said: the last part of a path or id, without
    the ending of a file: `docs:stdlib` is stdlib, `jsonl:data/books.jsonl:body` is books."""
    kind, colon, rest = spec.partition(":")
    rest = rest if colon and len(kind) > 1 and "/" not in kind else spec
    if "/" in rest:
        rest = rest.rstrip("/").rpartition("/")[2]
    rest = rest.partition(":")[0].partition("@")[0]
    return re.sub(r"\.(jsonl|parquet|txt|md|npy|gguf)$", "", rest)


def _entries(
    kind: Any, tables: Sequence[Mapping[str, Any]], path: Path, mistakes: Mistakes, doubtful: set[str]
) -> tuple[Any, ...]:
    """[[models]] or [[corpora]], but for those that name none."""
    key, word = ("models", "model") if kind is ModelTable else ("corpora", "corpus")
    if not tables and not {"", key} & doubtful:
        mistakes.add(f"{path}: there is no [[{key}]]; a study needs at least one")
    found = [_entry(kind, one, f"{path}, [[{key}]]", word, at, mistakes) for at, one in enumerate(tables)]
    for entry in found:
        doubtful |= {word} if entry is None else set(_meant(entry.doubtful, kind))
    entries = tuple(kind(**entry.right) for entry in found if entry is not None)
    if not {"", "name"} & doubtful:
        _check_names(f"{path}, [[{key}]]", [one.name for one in entries], mistakes)
    return entries


def _entry(
    kind: Any, table: Mapping[str, Any], place: str, word: str, at: int, mistakes: Mistakes
) -> Parsed | None:
    spec = table.get(word)
    called = table.get("name") or (default_name(spec) if isinstance(spec, str) else "")
    place = f"{place} {called or at + 1}"
    if isinstance(spec, str):
        return mistakes.parse(kind, {**table, "name": called}, place)
    known = kind.model_fields
    unknown = [name for name in table if name not in known]
    for name in unknown:
        mistakes.add(f"{place}: unknown setting {name!r}{_near(name, known)}")
    if not unknown:
        mistakes.add(f"{place}: it names no {word}")
    return None


def _meant(doubtful: Collection[str], kind: type[pydantic.BaseModel]) -> Iterator[str]:
    """Doubtful fields; a key that is near to none casts doubt on all, as an empty name."""
    return (name if name in kind.model_fields else "" for name in doubtful)


def _check_names(place: str, names: Sequence[str], mistakes: Mistakes) -> None:
    for name in names:
        if not NAME.fullmatch(name):
            mistakes.add(
                f"{place}: {name!r} cannot name a folder; give it a `name` of letters, digits, "
                "dots, dashes and underscores"
            )
        if names.count(name) > 1:
            mistakes.add(f"{place}: two are called {name}; give one of them another `name`")


def _check_keys(step: str, table: Mapping[str, Any], place: str, mistakes: Mistakes) -> None:
    """Every key is a field of the step, here and not elsewhere."""
    known = STEP_SETTINGS[step].model_fields
    for key in table:
        if key in NOT_HERE.get(step, {}):
            mistakes.add(f"{place}: {key} has no place here: {NOT_HERE[step][key]}")
        elif key == "compute" and step in COMPUTED:
            mistakes.add(f"{place}: [compute] stands by itself, for fits and analyses alike")
        elif key not in known:
            mistakes.add(f"{place}: unknown setting {key!r}{_near(key, known)}")


def _near(key: str, known: Any) -> str:
    hint = nearest_known(key.replace("-", "_"), known)
    return hint or f"; known are {', '.join(known) or 'none'}"
