"""`nearline run SETTINGS.toml`: a whole study, several models on several corpora, from one settings file.

In: a settings file; perhaps only some steps, models or corpora of it. Out: stores, studies and reports in one
folder, and of each step whether it ran and why. What is there and current is not done again, what was stopped
goes on; a store is never replaced. Everything that can be refused is refused before the first step. Cost:
that of the steps; with nothing to do about a second for each model, and torch is never loaded.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..reports.report import PAGE
from ..store import Progress, UsageError, silent
from ..store.settings import nearest_known
from .mistakes import Mistakes
from .records import why_collect
from .steps import Job, Step, planned, run_jobs
from .study_checks import check_study
from .study_settings import StoreJob, Whole, read_study
from .study_sources import check_sources
from .study_steps import KINDS, jobs_of


@dataclass(frozen=True, slots=True)
class Ran:
    """The steps in order, and one report per model."""

    steps: tuple[Step, ...]
    reports: tuple[Path, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """What of a study is asked for. `only`: steps, `models` and `corpora`: names of tables; all by default.
    `dry`: say what would run, and run nothing."""

    only: Sequence[str] = ()
    models: Sequence[str] = ()
    corpora: Sequence[str] = ()
    dry: bool = False

    def check(self, whole: Whole) -> None:
        """Every name is one of the study's."""
        _known("only", self.only, KINDS)
        _known("model", self.models, [model.name for model in whole.models])
        _known("corpus", self.corpora, whole.corpora)
        if self.corpora and tuple(self.only) != ("collect",):
            raise UsageError(
                f"corpus={','.join(self.corpora)}: a study is of all its corpora; give it with only=collect, "
                "or leave it out"
            )

    def has(self, kind: str, model: str) -> bool:
        return (not self.only or kind in self.only) and (not self.models or model in self.models)

    def has_store(self, store: StoreJob) -> bool:
        return self.has("collect", store.model) and (not self.corpora or store.corpus in self.corpora)

    def jobs(self, whole: Whole) -> tuple[Job, ...]:
        stores = {
            f"collect {store.name}"
            for model in whole.models
            for store in model.stores
            if self.has_store(store)
        }
        return tuple(
            job
            for job in jobs_of(whole)
            if self.has(job.kind, job.model) and (job.kind != "collect" or job.name in stores)
        )


EVERYTHING: Final = Part()


def run(
    settings: str | Path,
    out: str | Path | None = None,
    progress: Progress = silent,
    part: Part = EVERYTHING,
) -> Ran:
    """Do what a settings file describes and is not done yet, or a part of it."""
    mistakes = Mistakes()
    return run_whole(read_study(Path(settings), out, mistakes=mistakes), progress, part, mistakes)


def run_whole(
    whole: Whole, progress: Progress = silent, part: Part = EVERYTHING, mistakes: Mistakes | None = None
) -> Ran:
    """As `run`, of settings that were read. `mistakes`: what was found wrong with them."""
    mistakes = Mistakes() if mistakes is None else mistakes
    check_study(whole, mistakes)
    if mistakes:  # with what is missing for stores, which can be asked without the steps behind them
        check_sources(whole, lambda store: part.has_store(store) and _is_to_do(whole, store), mistakes)
        mistakes.tell(whole.path)
    part.check(whole)
    jobs = part.jobs(whole)
    steps = planned(jobs)
    to_do = {step.name for step in steps if step.state == "to do"}
    check_sources(whole, lambda store: f"collect {store.name}" in to_do, mistakes)
    mistakes.tell(whole.path)
    if to_do and not part.dry:
        steps = run_jobs(jobs, steps, progress)
    pages = [model.path / PAGE for model in whole.models if not part.models or model.name in part.models]
    return Ran(steps, tuple(page for page in pages if page.exists()))


def _is_to_do(whole: Whole, store: StoreJob) -> bool:
    return why_collect(whole.records, store) is not None


def _known(flag: str, names: Sequence[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            raise UsageError(
                f"{flag}={name}: there is no such one; there are {', '.join(known)}"
                f"{nearest_known(name, known)}"
            )
