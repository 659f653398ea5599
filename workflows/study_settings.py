"""One settings file as the settings of every step of every model: `[[models]]` × `[[corpora]]`.

In: a TOML file. Out: a frozen `Whole`: per model its stores (one for each corpus), and the settings of each
of its steps, with relative paths counted from the file and corpora named as the stores that they become. A
narrower table wins: [collect], then `collect` of the model, then `collect` of the corpus. Of each mistake
one sentence that names the file and the table. Cost: none; no torch is loaded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ..analyze.analyze_settings import AnalyzeSettings
from ..analyze.compute_settings import flatten_compute
from ..analyze.settings import FitSettings
from ..collect.measure_settings import MeasureSettings
from ..collect.model_shape import ModelShape
from ..collect.settings import HarvestSettings
from ..collect.tuning_settings import FinetuneSettings
from ..store.local import local_path
from ..store.settings import nearest_known
from .mistakes import Mistakes
from .study_paths import NAMES_OF_STORES, corpus_here, model_here, path_here, stores_named
from .study_tables import (
    COMPUTED,
    STEP_SETTINGS,
    UNSET,
    CorpusTable,
    ModelTable,
    Tables,
    in_compute,
    read_tables,
    usable,
)

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
    shape: ModelShape | None
    fit: FitSettings
    analyze: AnalyzeSettings
    measure: MeasureSettings
    finetune: FinetuneSettings | None

    @property
    def store_paths(self) -> list[Path]:
        return [store.path for store in self.stores]


@dataclass(frozen=True, slots=True)
class Whole:
    """A settings file: `out` holds `stores/`, `studies/` and `records/`. `complete`: but for models and
    corpora that a mistake left out."""

    path: Path
    out: Path
    models: tuple[ModelStudy, ...]
    corpora: tuple[str, ...]
    complete: bool = True

    @property
    def records(self) -> Path:
        return self.out / "records"


def read_study(
    path: Path,
    out: str | Path | None = None,
    collect: Mapping[str, Any] | None = None,
    name: str = "",
    mistakes: Mistakes | None = None,
) -> Whole:
    """The study that a settings file describes. `out`: instead of the file's own; `collect`: settings of
    harvests that win over the file's; `name`: what messages call the file; `mistakes`: where they are
    gathered, else they are told at once."""
    found = Mistakes() if mistakes is None else mistakes
    tables = read_tables(path, found)
    base = path.resolve().parent
    folder = base / Path(tables.file.out).expanduser() if out is None else local_path(out, "study")
    if folder.exists() and not folder.is_dir():
        found.add(f"{folder} is a file; `out` is the folder for stores, studies and reports")
    source = _Source(Path(name or path), base, folder, tables, collect or {}, found)
    found.parse(STEP_SETTINGS["report"], usable("report", tables.file.report)[0], f"{source.said}, [report]")
    models = tuple(_model(source, one) for one in tables.models)
    if not tables.doubts("name"):
        _check_stores(source.said, models, found)
    if mistakes is None:
        found.tell(source.said)
    complete = not tables.doubts("models", "model", "corpora", "corpus")
    return Whole(source.said, folder, models, tuple(one.name for one in tables.corpora), complete)


@dataclass(frozen=True, slots=True)
class _Source:
    """A settings file: what messages call it, its folder, where results go, its tables, settings of harvests
    that win over these, and what is wrong with it."""

    said: Path
    base: Path
    folder: Path
    tables: Tables
    given: Mapping[str, Any]
    mistakes: Mistakes

    def doubtful(self, step: str) -> set[str]:
        """What mistakes of wider tables say of a step: nothing, or that nothing is sure."""
        return {f"[{step}]"} if self.tables.doubts(step) else set()


def _model(source: _Source, table: ModelTable) -> ModelStudy:
    stores = tuple(_store(source, table, corpus) for corpus in source.tables.corpora)
    place = f"{source.said}, [[models]] {table.name}, shape"
    tuned = source.tables.file.finetune is not None or table.finetune is not None
    shape = None if table.shape is None else source.mistakes.parse(ModelShape, table.shape, place).settings
    return ModelStudy(
        name=table.name,
        path=source.folder / "studies" / table.name,
        stores=stores,
        shape=shape,
        fit=_step("fit", source, table, stores),
        analyze=_step("analyze", source, table, stores),
        measure=_step("measure", source, table, stores),
        finetune=_step("finetune", source, table, stores) if tuned else None,
    )


def _store(source: _Source, model: ModelTable, corpus: CorpusTable) -> StoreJob:
    said, doubtful = source.said, source.doubtful("collect")
    fixed = {"model": model_here(model.model, source.base)}
    with source.mistakes.here(f"{said}, [[corpora]] {corpus.name}"):
        fixed["corpus"] = corpus_here(corpus.corpus, source.base)
    if "corpus" not in fixed:
        doubtful.add("corpus")
    levels = (
        (f"{said}, [collect]", source.tables.file.collect),
        (f"{said}, [[models]] {model.name}, collect", model.collect),
        (f"{said}, [[corpora]] {corpus.name}, collect", corpus.collect),
        ("collect", source.given),
    )
    settings = _merged("collect", fixed, levels, source, doubtful)
    name = f"{model.name}-{corpus.name}"
    return StoreJob(name, source.folder / "stores" / name, model.name, corpus.name, settings)


def _step(step: str, source: _Source, table: ModelTable, stores: Sequence[StoreJob]) -> Any:
    """Settings of a step over the stores of a model."""
    said, own = source.said, getattr(source.tables.file, step) or {}
    doubtful = source.doubtful(step)
    if step in COMPUTED:
        compute = {key: value for key, value in source.tables.file.compute.items() if in_compute(key)}
        with source.mistakes.here(f"{said}, [{step}]"):
            own = flatten_compute({**own, "compute": compute})
    levels = (
        (f"{said}, [{step}]", own),
        (f"{said}, [[models]] {table.name}, {step}", getattr(table, step) or {}),
    )
    named = []
    for place, values in levels:
        with_stores, unknown = _named(step, source, stores, place, values)
        named.append((place, with_stores))
        doubtful |= unknown
    return _merged(step, {}, named, source, doubtful)


def _merged(
    step: str,
    fixed: Mapping[str, Any],
    levels: Sequence[tuple[str, Mapping[str, Any]]],
    source: _Source,
    doubtful: set[str],
) -> Any:
    """The narrowest table wins; what is wrong is said of the first table that makes it wrong."""
    merged = dict(fixed)
    settings = None
    for place, values in levels:
        right, meant = usable(step, values)
        doubtful |= meant
        for key, value in right.items():
            if value == UNSET:
                merged.pop(key, None)
            else:
                merged[key] = _located(key, value, source.base)
        if settings is None or values:
            found = source.mistakes.parse(STEP_SETTINGS[step], merged, place, doubtful)
            settings, merged = found.settings, found.right
            doubtful |= found.doubtful
    return settings


def _located(key: str, value: Any, base: Path) -> Any:
    """A setting that names a file, a folder or a model, counted from the settings file."""
    if not isinstance(value, str):
        return value
    if key in _FILES:
        return str(path_here(value, base))
    return model_here(value, base) if key in ("model", "adapter") else value


def _named(
    step: str, source: _Source, stores: Sequence[StoreJob], place: str, values: Mapping[str, Any]
) -> tuple[dict[str, Any], set[str]]:
    """Settings with stores in the place of corpora, and the fields that name corpora that there are not."""
    known = {one.corpus: one.name for one in stores} | {one.name: one.name for one in stores}
    found, unknown = stores_named(NAMES_OF_STORES.get(step, ()), values, known | {UNSET: UNSET})
    if not source.tables.doubts("corpora", "corpus", "name"):
        for key, name in unknown:
            corpora, hint = ", ".join(one.corpus for one in stores), nearest_known(name, known)
            source.mistakes.add(f"{place}: {key} = {name!r} is no corpus; there are {corpora}{hint}")
    return found, {key for key, _ in unknown}


def _check_stores(said: Path, models: Sequence[ModelStudy], mistakes: Mistakes) -> None:
    """No store has the name of another: `a-b` on `c` and `a` on `b-c` would."""
    seen: dict[str, StoreJob] = {}
    for store in (store for model in models for store in model.stores):
        other = seen.setdefault(store.name, store)
        if (other.model, other.corpus) != (store.model, store.corpus):
            mistakes.add(
                f"{said}: {other.model} on {other.corpus} and {store.model} on {store.corpus} would both be "
                f"stored as {store.name}; give one of them another `name`"
            )
