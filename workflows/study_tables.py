"""The tables of a study's settings file, as TOML has them: names and places checked, values not yet.

In: what `tomllib` read. Out: a frozen `StudyFile`, or one sentence that names the file, the table and the
nearest known key. The fields of a step are those of its settings class and are defined there alone; here is
only what no step has: where results go, and which models and corpora there are. Cost: none.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import pydantic
from pydantic import Field

from ..analyze.analyze_settings import AnalyzeSettings
from ..analyze.compute_settings import IN_TABLE, MACHINE_FIELDS
from ..analyze.settings import FitSettings
from ..collect.measure_settings import MeasureSettings
from ..collect.settings import HarvestSettings
from ..collect.tuning_settings import FinetuneSettings
from ..store import UsageError
from ..store.settings import nearest_known, parse_settings
from .flags import read_toml

UNSET: Final = "default"  # a value that takes a field back to its default, whatever a wider table says
NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*")
Size = Annotated[int, Field(ge=1)]


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


class Shape(pydantic.BaseModel):
    """The sizes of a model, written down so that a study can be planned without it."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    layers: Size = Field(description="Decoder blocks.")
    d_model: Size = Field(description="Width of the residual stream.")
    d_ff: Size = Field(description="Inner width of an MLP.")
    vocabulary: Size = Field(description="Rows of the embedding.")


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


def read_tables(path: Path) -> tuple[StudyFile, list[ModelTable], list[CorpusTable]]:
    """The tables of a settings file, every key known and every name usable."""
    file = parsed(StudyFile, read_toml(path, what=""), str(path))
    models = [_entry(ModelTable, one, path, "models", at) for at, one in enumerate(file.models)]
    corpora = [_entry(CorpusTable, one, path, "corpora", at) for at, one in enumerate(file.corpora)]
    for kind, found in (("models", models), ("corpora", corpora)):
        if not found:
            raise UsageError(f"{path}: there is no [[{kind}]]; a study needs at least one")
        _check_names(path, kind, [one.name for one in found])
    for step in STEP_SETTINGS:
        _check_keys(step, getattr(file, step) or {}, f"{path}, [{step}]")
    for one in models:
        for step in set(STEP_SETTINGS) - {"report"}:
            _check_keys(step, getattr(one, step) or {}, f"{path}, [[models]] {one.name}, {step}")
    for one in corpora:
        _check_keys("collect", one.collect, f"{path}, [[corpora]] {one.name}, collect")
    for key in file.compute:
        if key not in IN_TABLE and key not in MACHINE_FIELDS:
            raise UsageError(f"{path}, [compute]: unknown setting {key!r}{_near(key, IN_TABLE)}")
    return file, models, corpora


def parsed(kind: type[pydantic.BaseModel], table: Mapping[str, Any], place: str) -> Any:
    """Settings of `kind`; what is wrong with them is said with its place."""
    try:
        return parse_settings(kind, table)
    except UsageError as error:
        raise UsageError(f"{place}: {error}") from None


def default_name(spec: str) -> str:
    """What a model or a corpus is called where nothing else is said: the last part of a path or id, without
    the ending of a file: `docs:stdlib` is stdlib, `jsonl:data/books.jsonl:body` is books."""
    kind, colon, rest = spec.partition(":")
    rest = rest if colon and len(kind) > 1 and "/" not in kind else spec
    if "/" in rest:
        rest = rest.rstrip("/").rpartition("/")[2]
    rest = rest.partition(":")[0].partition("@")[0]
    return re.sub(r"\.(jsonl|parquet|txt|md|npy|gguf)$", "", rest)


def _entry(kind: Any, table: Mapping[str, Any], path: Path, key: str, at: int) -> Any:
    word = {"models": "model", "corpora": "corpus"}[key]
    spec = table.get(word)
    called = table.get("name") or (default_name(spec) if isinstance(spec, str) else "")
    place = f"{path}, [[{key}]] {called or at + 1}"
    if not isinstance(spec, str):
        known = kind.model_fields
        for name in table:
            if name not in known:
                raise UsageError(f"{place}: unknown setting {name!r}{_near(name, known)}")
        raise UsageError(f"{place}: it names no {word}")
    return parsed(kind, {**table, "name": called}, place)


def _check_names(path: Path, kind: str, names: Sequence[str]) -> None:
    for name in names:
        if not NAME.fullmatch(name):
            raise UsageError(
                f"{path}, [[{kind}]]: {name!r} cannot name a folder; give it a `name` of letters, digits, "
                "dots, dashes and underscores"
            )
        if names.count(name) > 1:
            raise UsageError(f"{path}, [[{kind}]]: two are called {name}; give one of them another `name`")


def _check_keys(step: str, table: Mapping[str, Any], place: str) -> None:
    """Every key is a field of the step, here and not elsewhere."""
    known = STEP_SETTINGS[step].model_fields
    for key in table:
        if key in NOT_HERE.get(step, {}):
            raise UsageError(f"{place}: {key} has no place here: {NOT_HERE[step][key]}")
        if key == "compute" and step in COMPUTED:
            raise UsageError(f"{place}: [compute] stands by itself, for fits and analyses alike")
        if key not in known:
            raise UsageError(f"{place}: unknown setting {key!r}{_near(key, known)}")


def _near(key: str, known: Any) -> str:
    hint = nearest_known(key.replace("-", "_"), known)
    return hint or f"; known are {', '.join(known) or 'none'}"
