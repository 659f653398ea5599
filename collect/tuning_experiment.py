"""All courses of a fine-tuning experiment, one after the other in one live model.

In: a request, the model with its original weights, windows to train on, and what earlier runs have left
aside. Out: scores of every arm. A course starts from the original weights, or from those that another one had
at the end of its first phase; every learning rate is tried at the first seed, the best on gate rows at the
others. Cost: the steps and points of each course.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import torch
from torch import Tensor, nn

from ..analyze.population import GATE, TEST
from ..store import Progress, Study
from .anatomy import Anatomy
from .substitutes import LinearMap, substitutes_of
from .tuned_export import export_tuned, tuned_substitutes
from .tuned_layers import Tuned
from .tuned_scores import Score, score
from .tuning_arms import ARMS, BASE, COURSES, Course
from .tuning_data import ScoredRows, Windows, scored_rows
from .tuning_pieces import Name, TuningPieces
from .tuning_refit import refitted
from .tuning_request import TuningRequest
from .tuning_rows import ArmRows
from .tuning_run import (
    Run,
    chosen_weights,
    load_weights,
    put_weights,
    save_weights,
    standing,
    train_stage,
    trained,
)

TUNED: Final = "tuned"


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """All scores with what names them, arm by arm, and the gates."""

    scores: pa.Table
    gates: pa.Table


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
        self._progress = progress
        self._original = original
        self._rows = _scored(request)
        self._dtype = torch.bfloat16 if request.settings.dtype == "bfloat16" else torch.float32
        self._rates: dict[str, float] = {}
        self._kept = {ARMS[arm].last for arm in request.settings.keep}
        self._done = 0
        self._total = self._n_steps()

    def run(self) -> Found:
        seeds = self._request.settings.seeds
        names: list[Name] = []
        for course in self._request.courses:
            rates = self._request.learning_rates(course)
            tried = [self._name(course, seeds[0], rate) for rate in rates]
            for name in tried:
                self._course(name)
            best = min(tried, key=lambda name: (self._gate_loss(name), name.learning_rate))
            self._rates[course] = best.learning_rate
            others = () if course == BASE else seeds[1:]
            rest = [self._name(course, seed, best.learning_rate) for seed in others]
            for name in rest:
                self._course(name)
            names += [*tried, *rest]
        rows = ArmRows(self._request, self._windows, self._pieces, self._rates)
        return Found(*rows.tables(names))

    def keep(self, name: str, study: Study) -> None:
        """Save the chosen models of the first seed, made anew from the original. `name`: of the model."""
        request, special = (
            self._request,
            self._request.evidence.fitted.reader.attributes.tokenizer.special_ids,
        )
        for arm in request.settings.keep:
            course = ARMS[arm].last
            of = self._name(course, request.settings.seeds[0], self._rates[course])
            put_weights(self._net.model, self._original)
            self._start(of)
            tuned = Tuned(self._net, special)
            run = self._run_of(of)
            try:
                self._replace(tuned, run, request.layers, anew=False)
                put_weights(self._net.model, load_weights(self._pieces.weights(of, "end")))
                substitutes = tuned_substitutes(tuned.layers)
            finally:
                tuned.remove()
            export_tuned(study.path / TUNED / arm, self._net, substitutes, special, f"{name}, {arm}")

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
        if self._pieces.is_done(name):
            self._tick(sum(stage.steps for stage in self._request.stages(name.course)))
            return
        course, request = COURSES[name.course], self._request
        put_weights(self._net.model, self._original)
        self._start(name)
        tuned = Tuned(self._net, request.evidence.fitted.reader.attributes.tokenizer.special_ids)
        run = self._run_of(name)
        offset = request.first_steps if course.after else 0
        try:
            self._stages(name, run, tuned, offset)
            if name.seed == request.settings.seeds[0] and name.course in self._kept:
                save_weights(standing(self._net.model), self._pieces.weights(name, "end"))
        finally:
            tuned.remove()
            if request.settings.gradient_checkpointing:
                model: Any = self._net.model
                model.activation_checkpointing_disable()
        self._pieces.finish(name)

    def _start(self, name: Name) -> None:
        """Put the weights of the course before it into the model."""
        after = COURSES[name.course].after
        if after is not None and name.after is not None:
            start = Name(after, name.seed, name.after)
            found = load_weights(self._pieces.weights(start, self._request.first_steps))
            put_weights(self._net.model, found)

    def _run_of(self, name: Name) -> Run:
        stages, points = self._request.stages(name.course), self._request.points(name.course)
        return Run(COURSES[name.course], stages, name.seed, name.learning_rate, points)

    def _stages(self, name: Name, run: Run, tuned: Tuned, offset: int) -> None:
        """`offset`: steps whose windows another course has seen before this one."""
        model, pieces = self._net.model, self._pieces
        at = 0
        for index, stage in enumerate(run.stages):
            self._replace(tuned, run, stage.layers)
            chosen_weights(model, run, self._chosen_modules())
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
                        lambda step: self._point(name, tuned, step),
                    )
                if index + 1 < len(run.stages):
                    save_weights(trained(model), ended)
            at += stage.steps
            self._tick(stage.steps)

    def _point(self, name: Name, tuned: Tuned, step: int) -> None:
        if step == self._request.first_steps and any(
            one.after == name.course for one in map(COURSES.__getitem__, self._request.courses)
        ):
            save_weights(trained(self._net.model), self._pieces.weights(name, step))
        found: list[Score] = score(self._net, self._rows, self._dtype, tuned)
        self._pieces.add(name, step, found)

    def _replace(self, tuned: Tuned, run: Run, layers: Sequence[int], *, anew: bool = True) -> None:
        """Put what the course has in the place of these layers' MLPs. `anew`: fit it again if asked for."""
        settings = self._request.settings
        maps = self._surrogates(run.course, layers)
        if (
            anew
            and settings.refit
            and settings.schedule != "at_once"
            and run.course.body in ("linear", "trainable")
        ):
            maps = refitted(self._net, self._request, self._windows, layers)
        start = settings.gate_start if run.course.body == "soft" else 1.0 - settings.gate_start
        for layer, surrogate in maps.items():
            tuned.replace(layer, run.course.body, surrogate, gate=settings.gate, start=start, seed=run.seed)

    def _surrogates(self, course: Course, layers: Sequence[int]) -> Mapping[int, LinearMap]:
        made = substitutes_of(self._request.study, "linear", layers, torch.float32)
        maps: dict[int, Any] = {layer: one.replacement for layer, one in made.items()}
        if course.body not in ("mean", "zero"):
            return maps
        values = substitutes_of(self._request.study, course.body, layers, torch.float32)
        constant: dict[int, Any] = {layer: one.replacement for layer, one in values.items()}
        return {layer: LinearMap(one.weight, constant[layer].value) for layer, one in maps.items()}

    def _chosen_modules(self) -> list[nn.Module]:
        """The MLPs that are replaced sooner or later: in no arm but `control` do they learn."""
        found: list[nn.Module] = []
        for layer in self._request.layers:
            parts = self._net.layers[layer]
            found += [parts.mlp_first, parts.mlp_last]
        return found

    # Progress

    def _n_steps(self) -> int:
        request, more = self._request, len(self._request.settings.seeds) - 1
        return sum(
            (len(request.learning_rates(course)) + more)
            * sum(stage.steps for stage in request.stages(course))
            for course in request.courses
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
