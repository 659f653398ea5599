"""Forward and backward passes of `finetune` beforehand.

In: what the study will have, and settings. Out: `Passes`: every course at each of its learning rates
and seeds, by the same stages and points as when it runs (tuning_schedule.py). In training a backward pass
counts as one or two more, and every window as a whole one. A timing on the clock is not in it. Cost: none.
"""

from ..store.settings import chosen_layers
from .measure_settings import chosen_set
from .planned_passes import Passes, Sized, StudyRows, sized_for, spread
from .tuning_arms import COURSES, REFITTED, Course, with_controls
from .tuning_schedule import Schedule
from .tuning_settings import FinetuneSettings


def finetune_passes(study: StudyRows, settings: FinetuneSettings) -> Passes:
    """Every course at each of its learning rates and seeds: its steps, and its points on held-out rows."""
    shape, own = study.shape, study.fitted_on
    cheapest = chosen_set(settings.layers)
    layers = spread(study.layers)[: cheapest[1]] if cheapest else chosen_layers(settings.layers, study.layers)
    plan = Schedule(settings, with_controls(settings.arms), layers)
    trained = next((one for one in study.stores if one.name == settings.train_on), own)
    test = sum((sized_for(shape, one).base(one.test) for one in study.named(settings.stores)), Passes())
    gate = sized_for(shape, own).base(own.gate)
    found = Passes()
    seen: set[object] = set()  # models before the first step, scored once
    for name in plan.courses:
        course, points = COURSES[name], plan.points(name)
        for _ in range(len(plan.learning_rates(name)) + len(plan.other_seeds(name))):
            found += _training(sized_for(shape, trained), plan, course, name)
            found += _refits(sized_for(shape, trained), trained.fit, plan, course)
            for point in points:
                body = "linear" if course.body == "trainable" else course.body
                if not point and course.after is None:
                    if (body, point == points[-1]) in seen:
                        continue
                    seen.add((body, point == points[-1]))
                found += test
                if point == points[-1]:
                    found += gate
    return found


def _training(sized: Sized, plan: Schedule, course: Course, name: str) -> Passes:
    """Forward and back. Where weights everywhere learn, a backward pass is two forward ones; where gates
    alone do, one, down to the lowest of them.
    """
    settings, n_blocks = plan.settings, sized.shape.layers
    steps = sum(stage.steps for stage in plan.stages(name))
    rows = float(steps * settings.batch_sequences * settings.accumulate * sized.window)
    again = n_blocks if settings.gradient_checkpointing else 0
    if course.learns == "gates":
        return sized.passes(rows, 2 * n_blocks - min(plan.layers) + again, 2)
    return sized.passes(rows, 3 * n_blocks + again, 3)


def _refits(sized: Sized, rows: float, plan: Schedule, course: Course) -> Passes:
    """All windows of the fit rows before each stage, where surrogates are fitted anew."""
    anew = plan.settings.refit and plan.settings.schedule != "at_once"
    if not anew or course.body not in REFITTED:
        return Passes()
    return sized.passes(rows * len(plan.layers), sized.shape.layers, 0)
