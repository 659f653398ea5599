"""All courses of a fine-tuning experiment, one after the other in one live model.

In: a request, the model with its original weights, windows to train on, and what earlier runs have left
aside. Out: scores of every arm. A course starts from the original weights, or from those that another one had
at the end of its first phase; every learning rate is tried at the first seed, the best on gate rows at the
others. Cost: the steps and points of each course.
"""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..analyze.population import GATE, TEST
from ..store import Progress, Study
from .anatomy import Anatomy
from .models import LoadedModel
from .tuned_export import TUNED, export_tuned, tuned_substitutes
from .tuned_layers import Tuned
from .tuned_scores import Score, score
from .tuned_timing import Ways, ways
from .tuned_weights import load_weights, put_weights, standing, trained
from .tuning_arms import ARMS, COURSES, Body
from .tuning_data import ScoredRows, Windows, scored_rows
from .tuning_pieces import Name, TuningPieces
from .tuning_replacing import chosen_modules, replace_layers
from .tuning_request import TuningRequest
from .tuning_rows import ArmRows, Found
from .tuning_run import Run, chosen_weights, train_stage


class Experiment:
    """`run()` trains every course that the arms need, and gives their scores."""

    def __init__(
        self,
        request: TuningRequest,
        net: Anatomy,
        original: Mapping[str, Tensor],
        windows: Windows,
        pieces: TuningPieces,
        progress: Progress,
    ) -> None:
        self._request, self._net, self._windows, self._pieces = request, net, windows, pieces
        self._schedule = request.schedule
        self._progress = progress
        self._original = original
        self._rows = _scored(request)
        self._dtype = torch.bfloat16 if request.settings.dtype == "bfloat16" else torch.float32
        self._at_start: dict[tuple[Body, bool], list[Score]] = {}
        self._rates: dict[str, float] = {}
        self._kept = {ARMS[arm].last for arm in request.settings.keep}
        # Others start from their weights, `gated_hard` at least for the clock.
        self._starts = {"gated", *(COURSES[course].after for course in self._schedule.courses)}
        self._done = 0
        self._total = self._n_steps()

    def run(self) -> Found:
        names = self.train()
        return ArmRows(self._request, self._windows, self._pieces, self._rates).found(names)

    def train(self) -> list[Name]:
        """Every course, as far as it is not there yet."""
        seeds = self._request.settings.seeds
        names: list[Name] = []
        for course in self._schedule.courses:
            rates = self._schedule.learning_rates(course)
            tried = [self._name(course, seeds[0], rate) for rate in rates]
            for name in tried:
                self._course(name)
            self._pieces.wait()
            best = min(tried, key=lambda name: (self._gate_loss(name), name.learning_rate))
            self._rates[course] = best.learning_rate
            others = self._schedule.other_seeds(course)
            rest = [self._name(course, seed, best.learning_rate) for seed in others]
            for name in rest:
                self._course(name)
            names += [*tried, *rest]
        return names

    def keep(self, loaded: LoadedModel, study: Study) -> None:
        """Save the chosen models of the first seed, made anew from the original. `loaded`: its name, and its
        tokenizer.
        """
        request, special = self._request, self._special
        for arm in request.settings.keep:
            of = self._name(ARMS[arm].last, request.settings.seeds[0], self._rates[ARMS[arm].last])
            with self._standing(of, load_weights(self._pieces.weights(of, "end"))) as tuned:
                substitutes = tuned_substitutes(tuned.layers)
            name, folder = f"{loaded.name}, {arm}", study.path / TUNED / arm
            export_tuned(folder, self._net, substitutes, special, name, loaded.tokenizer)

    def timed(self) -> Ways:
        """What stands in at the end of `gated`, the model left with the weights of its first seed; without
        that arm the surrogates before `linear`.
        """
        course = "gated_hard" if "gated" in self._rates else "linear"
        with self._standing(self._name(course, self._request.settings.seeds[0], 0.0), {}) as tuned:
            return ways(tuned_substitutes(tuned.layers))

    @contextmanager
    def _standing(self, name: Name, weights: Mapping[str, Tensor]) -> Generator[Tuned]:
        """The model at the start of a course, then with these weights of it."""
        put_weights(self._net.model, self._original)
        start = self._start(name)
        tuned = Tuned(self._net, self._special)
        try:
            run = self._run_of(name)
            replace_layers(tuned, self._net, self._request, None, run, self._request.layers)
            put_weights(self._net.model, {**start, **weights}, some=True)
            yield tuned
        finally:
            tuned.remove()

    @property
    def _special(self) -> tuple[int, ...]:
        return self._request.evidence.fitted.reader.attributes.tokenizer.special_ids

    def _name(self, course: str, seed: int, rate: float) -> Name:
        after = COURSES[course].after
        return Name(course, seed, rate, None if after is None else self._rates[after])

    def _gate_loss(self, name: Name) -> float:
        """Mean loss on gate rows at the end of a course; one that diverged comes last."""
        table = self._pieces.scores(name)
        last = max(table["step"].to_pylist())
        rows = [row for row in table.to_pylist() if row["step"] == last and row["split"] == "gate"]
        mean = sum(row["nll"] for row in rows) / sum(row["n_tokens"] for row in rows)
        return mean if mean == mean else float("inf")

    # One course

    def _course(self, name: Name) -> None:
        self._pieces.wait()
        if self._pieces.is_done(name):
            self._tick(sum(stage.steps for stage in self._schedule.stages(name.course)))
            return
        request = self._request
        put_weights(self._net.model, self._original)
        start = self._start(name)
        tuned = Tuned(self._net, self._special)
        run = self._run_of(name)
        try:
            self._stages(name, run, tuned, start)
            if name.seed == request.settings.seeds[0] and name.course in self._kept:
                self._pieces.keep_weights(standing(self._net.model), name, "end")
        finally:
            tuned.remove()
            if request.settings.gradient_checkpointing:
                model: Any = self._net.model
                model.activation_checkpointing_disable()
        self._pieces.finish(name)

    def _start(self, name: Name) -> dict[str, Tensor]:
        """The weights of the courses before this one, put into the model; those of what stands in for MLPs
        have their place there only when it does.
        """
        after = COURSES[name.course].after
        if after is None:
            return {}
        before = self._name(after, name.seed, self._rates[after])
        step = self._schedule.hands_over(after)
        found = self._start(before) | load_weights(self._pieces.weights(before, step))
        put_weights(self._net.model, found, some=True)
        return found

    def _run_of(self, name: Name) -> Run:
        stages, points = self._schedule.stages(name.course), self._schedule.points(name.course)
        return Run(COURSES[name.course], stages, name.seed, name.learning_rate, points)

    def _stages(self, name: Name, run: Run, tuned: Tuned, start: Mapping[str, Tensor]) -> None:
        model, pieces = self._net.model, self._pieces
        offset = self._schedule.begins(name.course)  # other courses have seen the windows before
        at = 0
        for index, stage in enumerate(run.stages):
            replace_layers(tuned, self._net, self._request, self._windows, run, stage.layers)
            if index == 0:
                put_weights(model, start, some=True)
            chosen_weights(model, run, chosen_modules(self._net, self._request))
            ended = pieces.weights(name, f"stage {index}")
            if ended.exists():
                put_weights(model, load_weights(ended))
            else:
                if index == 0 and not pieces.checkpoints(name).exists():
                    self._point(name, tuned, 0)
                if stage.steps:
                    train_stage(
                        model,
                        tuned,
                        run,
                        stage,
                        at,
                        offset,
                        self._windows,
                        self._request.settings,
                        pieces.checkpoints(name) / f"{index}",
                        pieces.n_processes,
                        lambda step: self._point(name, tuned, step),
                    )
                if index + 1 < len(run.stages):
                    pieces.keep_weights(trained(model), name, f"stage {index}")
            at += stage.steps
            self._tick(stage.steps)

    def _point(self, name: Name, tuned: Tuned, step: int) -> None:
        if name.course in self._starts and step == self._schedule.hands_over(name.course):
            self._pieces.keep_weights(standing(self._net.model), name, step)
        self._pieces.add(name, step, self._scores(name, tuned, step))

    def _scores(self, name: Name, tuned: Tuned, step: int) -> list[Score]:
        """Test rows, and at the end of a course gate rows too, by which its learning rate is chosen. Before
        the first step courses with the same in the place of the MLPs are the same model, whatever the seed.
        """
        course, at_end = COURSES[name.course], step == self._schedule.points(name.course)[-1]
        rows = [one for one in self._rows if one.split == "test" or at_end]
        if step or course.after:
            return score(self._net, rows, self._dtype, tuned)
        body: Body = "linear" if course.body == "trainable" else course.body
        if (body, at_end) not in self._at_start:
            self._at_start[body, at_end] = score(self._net, rows, self._dtype, tuned)
        return self._at_start[body, at_end]

    # Progress

    def _n_steps(self) -> int:
        schedule, more = self._schedule, len(self._request.settings.seeds) - 1
        return sum(
            (len(schedule.learning_rates(course)) + more)
            * sum(stage.steps for stage in schedule.stages(course))
            for course in schedule.courses
        )

    def _tick(self, n_steps: int) -> None:
        self._done += n_steps
        self._progress("finetune", self._done, max(self._total, self._done), "steps")


def _scored(request: TuningRequest) -> list[ScoredRows]:
    """Test rows of every store, and gate rows of the one that was fitted."""
    found = []
    wanted = [(name, TEST) for name in request.stores] + [(request.evidence.fit_on, GATE)]
    for name, split in wanted:
        rows = request.evidence.stores[name]
        found.append(
            scored_rows(name, rows.reader, split, request.scored(name, split), rows.population.group)
        )
    return found
