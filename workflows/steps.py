"""Steps in their order: each says whether it has anything to do and why, and is run only then.

In: jobs, each with a question (`why`: the reason to run, None where its result is there and current) and what
to do. Out: one `Step` a job. All jobs are asked before the first one runs, so that whatever can be refused is
refused while nothing has been touched; a job behind one that has to run is asked again when its turn comes.
Cost: that of the questions.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..store import Progress, silent
from .interrupted import saying_what_is_kept
from .reasons import Why

State = Literal["done", "current", "to do"]
_LOG = logging.getLogger("nearline")


@dataclass(frozen=True, slots=True)
class Step:
    """One step that was asked for: why it has to run or not (of one that is done: why it had to), and whether
    it did."""

    name: str
    why: str
    state: State


@dataclass(frozen=True, slots=True)
class Job:
    """A step that may have to run. `model`: jobs of one model follow from one another; `current`: what to
    say where it has not."""

    kind: str
    name: str
    model: str
    why: Callable[[], Why | None]
    run: Callable[[Progress], Any]
    current: str = "these settings and inputs"


def planned(jobs: Sequence[Job]) -> tuple[Step, ...]:
    """What is known before anything runs. Whatever stands behind a job that has to run may have to, too."""
    steps: list[Step] = []
    before: dict[str, list[str]] = {}
    for job in jobs:
        # Stores do not follow from one another, everything else follows from them.
        if job.kind != "collect" and job.model in before:
            first, *others = before[job.model]
            more = f" and {len(others)} more" if others else ""
            steps.append(Step(job.name, f"follows {first}{more}", "to do"))
            continue
        why = job.why()
        if why is None:
            steps.append(Step(job.name, job.current, "current"))
        else:
            before.setdefault(job.model, []).append(job.name)
            steps.append(Step(job.name, why.now, "to do"))
    return tuple(steps)


def run_jobs(jobs: Sequence[Job], plan: Sequence[Step], progress: Progress = silent) -> tuple[Step, ...]:
    """Run what the plan has to do, where it is still so when its turn comes."""
    return tuple(
        step if step.state == "current" else _done(job, progress)
        for job, step in zip(jobs, plan, strict=True)
    )


def _done(job: Job, progress: Progress) -> Step:
    why = job.why()
    if why is None:
        return Step(job.name, job.current, "current")
    _LOG.info("%s: %s", job.name, why.now)
    with saying_what_is_kept(job.kind, job.name):
        job.run(progress)
    return Step(job.name, why.then, "done")
