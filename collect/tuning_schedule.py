"""The courses of a fine-tuning experiment, their stages, the points at which they are scored and the learning
rates that are tried.

In: settings, arms with their controls, and layers in the order in which they are replaced. Out: a `Schedule`,
by which an experiment and its plan beforehand count the same steps. Cost: none; no torch is loaded.
"""

from dataclasses import dataclass

import numpy as np

from .tuning_arms import ARMS, BASE, COURSES, courses_of
from .tuning_settings import FinetuneSettings


@dataclass(frozen=True, slots=True)
class Stage:
    """Layers that are replaced now, and the steps that follow."""

    layers: tuple[int, ...]
    steps: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """What is trained for how long. `goes_on`: whether first phases go on for the steps of a second one, to
    be compared with it.
    """

    settings: FinetuneSettings
    arms: tuple[str, ...]
    layers: tuple[int, ...]
    goes_on: bool = True

    @property
    def courses(self) -> tuple[str, ...]:
        return courses_of(self.arms)

    @property
    def first_steps(self) -> int:
        """Steps of a first phase."""
        return sum(stage.steps for stage in self._first())

    @property
    def gate_steps(self) -> int:
        """Steps of a second phase; every first phase that is compared with one goes on for as many."""
        two_phases = any(ARMS[arm].second for arm in self.arms)
        return self.settings.gate_steps if two_phases and self.goes_on else 0

    def begins(self, course: str) -> int:
        """Steps that the courses before this one have taken."""
        after = COURSES[course].after
        if after is None:
            return 0
        return self.begins(after) + self.hands_over(after)

    def hands_over(self, course: str) -> int:
        """The step of a course after which another one starts from it."""
        return self.settings.gate_steps if COURSES[course].learns == "gates" else self.first_steps

    def stages(self, course: str) -> tuple[Stage, ...]:
        """The stages of a course. A second phase, and gates from the start, have one."""
        one = COURSES[course]
        if one.learns == "nothing":
            return (Stage(self.layers, 0),)
        if one.learns == "gates":
            return (Stage(self.layers, self.settings.gate_steps),)
        *before, last = self._first()
        return (*before, Stage(last.layers, last.steps + self.gate_steps))

    def points(self, course: str) -> tuple[int, ...]:
        """The steps of a course after which it is scored; 0 is before the first."""
        stages, n_points = self.stages(course), self.settings.points
        total = sum(stage.steps for stage in stages)
        if COURSES[course].learns in ("gates", "nothing"):
            return tuple(sorted({0, *_evenly(total, n_points)}))
        ends = np.cumsum([stage.steps for stage in self._first()]).tolist()
        more = [self.first_steps + step for step in _evenly(self.gate_steps, n_points)]
        return tuple(sorted({0, *_evenly(self.first_steps, n_points), *ends, *more}))

    def learning_rates(self, course: str) -> tuple[float, ...]:
        match COURSES[course].learns:
            case "gates":
                return self.settings.gate_learning_rates
            case "nothing":
                return (0.0,)
            case _:
                return self.settings.learning_rates

    def other_seeds(self, course: str) -> tuple[int, ...]:
        """Seeds behind the first, run at the best learning rate alone; `base` is the same for all."""
        return () if course == BASE else self.settings.seeds[1:]

    def _first(self) -> tuple[Stage, ...]:
        """The stages of a first phase, without the steps that a second one would take."""
        settings = self.settings
        if settings.schedule == "at_once" or len(self.layers) < 2:
            return (Stage(self.layers, settings.steps),)
        *before, last = self.layers
        return (*(Stage((layer,), settings.stage_steps) for layer in before), Stage((last,), settings.steps))


def _evenly(steps: int, n: int) -> list[int]:
    return sorted({max(1, round(steps * point / n)) for point in range(1, n + 1)}) if steps else []
