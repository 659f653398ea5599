"""One settings file as the settings of every step of every model: `[[models]]` × `[[corpora]]`.

In: a TOML file. Out: a frozen `Whole`: per model its stores (one for each corpus), and the settings of each
of its steps, with relative paths counted from the file and corpora named as the stores that they become. A
narrower table wins: [collect], then `collect` of the model, then `collect` of the corpus. Whatever is wrong
is one sentence that names the file and the table. Cost: none; no torch is loaded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ..analyze.analyze_settings import AnalyzeSettings
from ..analyze.compute_settings import flatten_compute
from ..analyze.settings import FitSettings
from ..collect.measure_settings import MeasureSettings
from ..collect.settings import HarvestSettings
from ..collect.tuning_settings import FinetuneSettings
from ..store import UsageError
from ..store.local import local_path
from ..store.settings import nearest_known
from .study_paths import corpus_here, model_here, path_here
from .study_tables import (
    COMPUTED,
    STEP_SETTINGS,
    UNSET,
    CorpusTable,
    ModelTable,
    Shape,
    StudyFile,
    parsed,
    read_tables,
)

# Fields that name stores of the study; in the file they name corpora.
_NAMES_OF_STORES: Final[Mapping[str, tuple[str, ...]]] = {
    "fit": ("fit_on",),
    "measure": ("stores",),
    "finetune": ("train_on", "stores"),
}
_FILES: Final = ("include", "exclude", "offload_folder")


@dataclass(frozen=True, slots=True)
class StoreJob:
    """A store to be harvested. `model` and `corpus` are the names of the tables."""

    name: str
    path: Path
    model: str
    corpus: str
    settings: HarvestSettings


@dataclass(frozen=True, slots=True)
class ModelStudy:
    """All that is asked of one model."""

    name: str
    path: Path
    stores: tuple[StoreJob, ...]
    shape: Shape | None
    fit: FitSettings
    analyze: AnalyzeSettings
    measure: MeasureSettings
    finetune: FinetuneSettings | None

    @property
    def store_paths(self) -> list[Path]:
        return [store.path for store in self.stores]


@dataclass(frozen=True, slots=True)
class Whole:
    """A settings file: `out` holds `stores/`, `studies/` and `records/`."""

    path: Path
    out: Path
    models: tuple[ModelStudy, ...]
    corpora: tuple[str, ...]

    @property
    def records(self) -> Path:
        return self.out / "records"


def read_study(
    path: Path, out: str | Path | None = None, collect: Mapping[str, Any] | None = None, name: str = ""
) -> Whole:
    """The study that a settings file describes. `out`: instead of the file's own; `collect`: settings of
    harvests that win over the file's; `name`: what messages call the file."""
    file, models, corpora = read_tables(path)
    base = path.resolve().parent
    folder = base / Path(file.out).expanduser() if out is None else local_path(out, "study")
    source = _Source(Path(name or path), base, folder, file, tuple(corpora), collect or {})
    found = tuple(_model(source, one) for one in models)
    _check_stores(source.said, found)
    return Whole(source.said, folder, found, tuple(one.name for one in corpora))


@dataclass(frozen=True, slots=True)
class _Source:
    """A settings file: what messages call it, its folder, where results go, its tables, and settings of
    harvests that win over these."""

    said: Path
    base: Path
    folder: Path
    file: StudyFile
    corpora: tuple[CorpusTable, ...]
    given: Mapping[str, Any]


def _model(source: _Source, table: ModelTable) -> ModelStudy:
    said = source.said
    stores = tuple(_store(source, table, corpus) for corpus in source.corpora)
    place = f"{said}, [[models]] {table.name}, shape"
    tuned = source.file.finetune is not None or table.finetune is not None
    parsed(STEP_SETTINGS["report"], source.file.report, f"{said}, [report]")
    return ModelStudy(
        name=table.name,
        path=source.folder / "studies" / table.name,
        stores=stores,
        shape=None if table.shape is None else parsed(Shape, table.shape, place),
        fit=_step("fit", source, table, stores),
        analyze=_step("analyze", source, table, stores),
        measure=_step("measure", source, table, stores),
        finetune=_step("finetune", source, table, stores) if tuned else None,
    )


def _store(source: _Source, model: ModelTable, corpus: CorpusTable) -> StoreJob:
    said, base = source.said, source.base
    fixed = {
        "model": model_here(model.model, base),
        "corpus": corpus_here(corpus.corpus, base, f"{said}, [[corpora]] {corpus.name}"),
    }
    levels = (
        (f"{said}, [collect]", source.file.collect),
        (f"{said}, [[models]] {model.name}, collect", model.collect),
        (f"{said}, [[corpora]] {corpus.name}, collect", corpus.collect),
        ("collect", source.given),
    )
    settings = _merged("collect", fixed, levels, base)
    name = f"{model.name}-{corpus.name}"
    return StoreJob(name, source.folder / "stores" / name, model.name, corpus.name, settings)


def _step(step: str, source: _Source, table: ModelTable, stores: Sequence[StoreJob]) -> Any:
    """Settings of a step over the stores of a model."""
    said, own = source.said, getattr(source.file, step) or {}
    if step in COMPUTED:
        try:
            own = flatten_compute({**own, "compute": source.file.compute})
        except UsageError as error:
            raise UsageError(f"{said}, [{step}]: {error}") from None
    levels = (
        (f"{said}, [{step}]", own),
        (f"{said}, [[models]] {table.name}, {step}", getattr(table, step) or {}),
    )
    named = [(place, _stores_named(step, values, stores, place)) for place, values in levels]
    return _merged(step, {}, named, source.base)


def _merged(
    step: str, fixed: Mapping[str, Any], levels: Sequence[tuple[str, Mapping[str, Any]]], base: Path
) -> Any:
    """The narrowest table wins; what is wrong is said of the first table that makes it wrong."""
    merged = dict(fixed)
    settings = None
    for place, values in levels:
        for key, value in values.items():
            if value == UNSET:
                merged.pop(key, None)
            else:
                merged[key] = _located(key, value, base)
        if settings is None or values:
            settings = parsed(STEP_SETTINGS[step], merged, place)
    return settings


def _located(key: str, value: Any, base: Path) -> Any:
    """A setting that names a file, a folder or a model, counted from the settings file."""
    if not isinstance(value, str):
        return value
    if key in _FILES:
        return str(path_here(value, base))
    return model_here(value, base) if key in ("model", "adapter") else value


def _stores_named(
    step: str, values: Mapping[str, Any], stores: Sequence[StoreJob], place: str
) -> dict[str, Any]:
    """Corpora in settings as the stores that they are in the study of this model."""
    known = {one.corpus: one.name for one in stores} | {one.name: one.name for one in stores}

    def store(name: str) -> str:
        if name not in known and name != UNSET:
            corpora = ", ".join(one.corpus for one in stores)
            hint = nearest_known(name, known)
            raise UsageError(f"{place}: {key} = {name!r} is no corpus; there are {corpora}{hint}")
        return known.get(name, name)

    found = dict(values)
    for key in _NAMES_OF_STORES.get(step, ()):
        value = found.get(key)
        if isinstance(value, str):
            parts = [part.strip() for part in value.split(",")] if key == "stores" else [value]
            found[key] = ",".join(map(store, parts))
        elif isinstance(value, list) and all(isinstance(one, str) for one in value):
            found[key] = [store(one) for one in value]
    return found


def _check_stores(said: Path, models: Sequence[ModelStudy]) -> None:
    """No store has the name of another: `a-b` on `c` and `a` on `b-c` would."""
    seen: dict[str, StoreJob] = {}
    for store in (store for model in models for store in model.stores):
        if store.name in seen:
            other = seen[store.name]
            raise UsageError(
                f"{said}: {other.model} on {other.corpus} and {store.model} on {store.corpus} would both be "
                f"stored as {store.name}; give one of them another `name`"
            )
        seen[store.name] = store
