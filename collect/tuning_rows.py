"""The scores of courses as those of the arms that they belong to.

In: the scores that were kept of each course, seed and learning rate. Out: rows of the tables
`finetune_scores` and `finetune_gates`: a first phase ends where the second begins, and tokens are counted
over both. Cost: that of the rows.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from .tuning_arms import ARMS
from .tuning_data import Windows
from .tuning_pieces import Name, TuningPieces
from .tuning_request import TuningRequest


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """Rows of the tables `finetune_scores` and `finetune_gates`."""

    scores: list[dict[str, Any]]
    gates: list[dict[str, Any]]


@dataclass(frozen=True, slots=True, eq=False)
class ArmRows:
    """`rates`: the learning rate that was chosen for each course."""

    request: TuningRequest
    windows: Windows
    pieces: TuningPieces
    rates: Mapping[str, float]
    _tokens: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)

    def found(self, names: Sequence[Name]) -> Found:
        scores, gates = list[dict[str, Any]](), list[dict[str, Any]]()
        for arm in self.request.arms:
            first, second = ARMS[arm].first, ARMS[arm].second
            for name in names:
                if name.course not in (first, second):
                    continue
                for kind, table in ((scores, self.pieces.scores(name)), (gates, self.pieces.gates(name))):
                    kind += [row for row in self._of_arm(arm, name, table)]
        return Found(scores, gates)

    def _of_arm(self, arm: str, name: Name, table: pa.Table) -> Iterator[dict[str, Any]]:
        """Rows of one course as those of an arm. A first phase ends where the second begins; what trains
        nothing stands still as long as the others train.
        """
        schedule, second = self.request.schedule, ARMS[arm].second
        is_second = second is not None and name.course == second and name.course != ARMS[arm].first
        chosen = self.rates[name.course] == name.learning_rate
        for row in table.to_pylist():
            if second is not None and not is_second and row["step"] > schedule.first_steps:
                continue
            steps = [row["step"] + (schedule.begins(name.course) if is_second else 0)]
            if name.course == "restored":
                steps += [schedule.first_steps + one for one in schedule.points("gated") if one]
            for step in steps:
                seen, distinct = self._seen(name.seed, step)
                yield {
                    "arm": arm,
                    "seed": name.seed,
                    "learning_rate": name.learning_rate,
                    "chosen": chosen,
                    "phase": 2 if is_second else 1,
                    "step": step,
                    "tokens_seen": seen,
                    "distinct_tokens": distinct,
                    **{key: value for key, value in row.items() if key != "step"},
                }

    def _seen(self, seed: int, step: int) -> tuple[int, int]:
        """Tokens that a seed has passed until a step, and how many of them are not the same."""
        if (seed, step) not in self._tokens:
            settings = self.request.settings
            order = self.windows.order(seed, step * settings.batch_sequences * settings.accumulate)
            self._tokens[seed, step] = self.windows.tokens(order)
        return self._tokens[seed, step]
