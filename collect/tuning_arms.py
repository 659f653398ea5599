"""The arms of a fine-tuning experiment: what stands in for the chosen MLPs, what may learn, and what an arm
is compared with.

Every arm sees the same windows in the same order for the same steps. A `course` is trained once and shared:
`linear`, `gated`, `restored` and `scaled` have the same first phase. A learning rate that is constant after
its warm-up makes every point of a course what a shorter one would have ended with, so that arms can be
compared at equal tokens along the whole curve. Cost: none; no torch is loaded.

| arm | in place of the chosen MLPs | learns |
|---|---|---|
| base | the MLPs | nothing: the model as it was |
| control | the MLPs | everything |
| control_matched | the MLPs | what `linear` may: everything but these MLPs |
| linear | frozen surrogates | everything but these |
| linear_trainable | surrogates | everything but these MLPs, surrogates too |
| mean, zero | the mean output, nothing | everything but these |
| gated | g·MLP + (1 − g)·surrogate, after `linear` | first `linear`, then gates alone |
| restored | the MLPs again, after `linear` | first `linear`, then nothing (a gate held at 1) |
| scaled | g·MLP, after `linear` | first `linear`, then gates alone |
| gated_hard | the MLP where g ≥ 0.5, else the surrogate, after `gated` | first as `gated`, then nothing |
| gate_only | g·MLP + (1 − g)·surrogate | gates alone |
| scale_only | g·MLP | gates alone |
"""

from dataclasses import dataclass
from typing import Final, Literal

# In place of a chosen MLP. `hard`: by each row's gate either the MLP or the surrogate.
Body = Literal["mlp", "linear", "trainable", "mean", "zero", "soft", "scaled", "hard"]
# What learns: every weight; all but the chosen MLPs and what replaces them; gates; nothing.
Learns = Literal["all", "rest", "gates", "nothing"]

# What is fitted anew before each stage, where a schedule asks for it.
REFITTED: Final[tuple[Body, ...]] = ("linear", "trainable", "mean")
BASE: Final = "base"


@dataclass(frozen=True, slots=True)
class Course:
    """One phase. `after`: the course whose weights it starts from; None: the model's own."""

    body: Body
    learns: Learns
    after: str | None = None


COURSES: Final[dict[str, Course]] = {
    BASE: Course("mlp", "nothing"),
    "control": Course("mlp", "all"),
    "control_matched": Course("mlp", "rest"),
    "linear": Course("linear", "rest"),
    "linear_trainable": Course("trainable", "rest"),
    "mean": Course("mean", "rest"),
    "zero": Course("zero", "rest"),
    "gated": Course("soft", "gates", "linear"),
    "scaled": Course("scaled", "gates", "linear"),
    "restored": Course("mlp", "nothing", "linear"),
    "gated_hard": Course("hard", "nothing", "gated"),
    "gate_only": Course("soft", "gates"),
    "scale_only": Course("scaled", "gates"),
}


@dataclass(frozen=True, slots=True)
class Arm:
    """`first`, `second`: its courses. `against`: what it is compared with, at equal tokens (`base`: none)."""

    first: str
    second: str | None
    against: tuple[str, ...]

    @property
    def last(self) -> str:
        """The course that it ends with."""
        return self.second or self.first


ARMS: Final[dict[str, Arm]] = {
    BASE: Arm(BASE, None, ()),
    "control": Arm("control", None, (BASE,)),
    "control_matched": Arm("control_matched", None, (BASE,)),
    "linear": Arm("linear", None, (BASE, "control_matched", "control")),
    "linear_trainable": Arm("linear_trainable", None, (BASE, "control")),
    "mean": Arm("mean", None, (BASE, "control_matched", "linear")),
    "zero": Arm("zero", None, (BASE, "control_matched", "linear")),
    "gated": Arm("linear", "gated", (BASE, "control_matched", "control", "restored", "scaled")),
    "gated_hard": Arm("linear", "gated_hard", (BASE, "control_matched", "control", "restored", "gated")),
    "restored": Arm("linear", "restored", (BASE, "control_matched", "control")),
    "scaled": Arm("linear", "scaled", (BASE, "control_matched", "control", "restored")),
    "gate_only": Arm("gate_only", None, (BASE, "scale_only")),
    "scale_only": Arm("scale_only", None, (BASE,)),
}


def with_controls(arms: tuple[str, ...]) -> tuple[str, ...]:
    """The arms asked for and those that they are compared with, in the order of `ARMS`."""
    wanted = {other for arm in arms for other in (arm, *ARMS[arm].against)}
    return tuple(arm for arm in ARMS if arm in wanted)


def controls_among(arms: tuple[str, ...]) -> tuple[str, ...]:
    """Those that train the model as it is, nothing replaced and nothing trained before."""
    last = {arm: COURSES[ARMS[arm].last] for arm in arms}
    return tuple(
        arm
        for arm, course in last.items()
        if course.body == "mlp" and course.after is None and course.learns != "nothing"
    )


def courses_of(arms: tuple[str, ...]) -> tuple[str, ...]:
    """What has to be trained for these arms, each once, what others start from before them."""
    wanted = {course for arm in arms for course in (ARMS[arm].first, ARMS[arm].second) if course}
    for name in reversed(COURSES):  # a course comes after the one it starts from
        if name in wanted and (after := COURSES[name].after) is not None:
            wanted.add(after)
    return tuple(name for name in COURSES if name in wanted)
