"""What a call of `fit` asks for, checked: stores and settings in; what its record will hold, whether that is
there already, and what it replaces out. Cost: the metadata of the stores, digests of the study's files.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ..store import Study
from ..store.names import printable
from .saved_moments import moments_are_kept
from .settings import FitSettings
from .stores import Sources, StorePaths, choose_layers, name_stores, open_sources

STEP: Final = "fit"
# Raised whenever the same stores and settings give other numbers: older results are then not current.
RESULTS_VERSION: Final = 5


@dataclass(frozen=True, slots=True)
class Request:
    """What one call of `fit` asks for, checked: its stores are sealed, comparable and have the layers."""

    paths: Mapping[str, str | Path]
    sources: Sources
    layers: Sequence[int]
    settings: FitSettings

    @property
    def fit_on(self) -> str:
        return self.sources.fit_on

    @property
    def inputs(self) -> dict[str, str]:
        return self.sources.digests

    @property
    def resolved(self) -> dict[str, Any]:
        chosen = {"fit_on": self.fit_on, "layers": list(self.layers), "results_version": RESULTS_VERSION}
        return self.settings.results() | chosen

    def is_current(self, study: Study) -> bool:
        wanted = self.settings.keep_moments and self.sources.fitted is None
        if wanted and not moments_are_kept(study, self.fit_on, self.inputs, self.settings, self.layers):
            return False
        return study.step_is_current(STEP, self.inputs, self.resolved)

    def replaces(self, study: Study) -> str | None:
        """What was other in the fit that is there: its settings, its stores."""
        step = study.provenance().get(STEP)
        if step is None:
            return None
        before, now = step["settings"], self.resolved
        other = [f"{key}={_plain(before[key])}" for key in before if before[key] != now.get(key)]
        other += [f"no {key}" for key in now if key not in before]
        if step["inputs"] != self.inputs:
            names = ", ".join(sorted(step["inputs"]))
            same = set(step["inputs"]) == set(self.inputs)
            other.append(f"stores {names}" + (" of other content" if same else ""))
        return printable(f"with {'; '.join(other)}") if other else None


def _plain(value: object) -> str:
    return (
        ",".join(map(_plain, value))
        if isinstance(value, list)
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )


def resolve(stores: StorePaths, settings: FitSettings) -> Request:
    named = name_stores(stores)
    sources = open_sources(named, settings)
    return Request(named, sources, choose_layers({**sources.readers, **sources.moments}, settings), settings)
