"""What an arm of a fine-tuning is beside another one: the excess of its test loss, and a verdict.

In: sums of losses over groups of documents, by arm, seed and point. Out: rows of table `finetune_summary`.
The excess is the difference of two mean losses on the same test rows after the same tokens, in nats a token,
paired by seed and over groups of documents. Bounds of the last points hold for all pairs of arms, seeds and
stores at once; those of the points before hold for the stores, and are shown without a verdict. An arm is
better or worse only where the bounds of every seed say so, with one sign, over three seeds at least. By a
control that training has made worse than the model was, on the very corpus it was trained on, nothing is
judged. Cost: a family of bounds a store, and one a pair of arms, seed and point.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from .cost_bounds import percent
from .influences import difference
from .intervals import (
    LEVEL,
    MIN_GROUPS,
    Estimates,
    bounds,
    critical_value,
    ratios,
    simultaneous_value,
    stack,
)

BASE: Final = "base"
BETTER, WORSE, CANNOT_TELL, FEW = "better", "worse", "cannot tell", "too few documents"
FEW_SEEDS, FAILED = "too few seeds", "control failed"
MIN_SEEDS: Final = 3  # with fewer, how much the order of the data moves a loss is not known
_SIGNS: Final = 0  # seed of the random signs behind simultaneous bounds

Row = dict[str, Any]


def summary(
    scores: Iterable[Mapping[str, Any]],
    train_on: str,
    against: Mapping[str, Sequence[str]],
    controls: Collection[str],
) -> list[Row]:
    """The excess of every arm over each one it is compared with, at every point that both have."""
    points = _Points(scores)
    found = [
        excess
        for arm, others in against.items()
        for other in others
        for excess in _pair(points, arm, other, train_on)
    ]
    stores = list(dict.fromkeys(one.row["store"] for one in found))
    level = 1.0 - (1.0 - LEVEL) / max(1, len(stores))  # Bonferroni: stores have other documents
    for store in stores:
        _bound([one for one in found if one.row["store"] == store], level)
    rows = [one.row for one in found]
    _judge(rows, controls)
    return rows


class _Points:
    """Test losses of what was chosen: by arm, seed and step, of each store."""

    def __init__(self, rows: Iterable[Mapping[str, Any]]) -> None:
        self.facts: dict[tuple[str, int, int], Mapping[str, Any]] = {}
        self.sums: dict[tuple[str, int, int], dict[str, dict[int, tuple[int, float]]]] = {}
        for row in rows:
            if row["split"] == "test" and row["chosen"]:
                key = (row["arm"], row["seed"], row["step"])
                # The last phase that reaches a step speaks for it.
                if key in self.facts and self.facts[key]["phase"] > row["phase"]:
                    continue
                self.facts[key] = row
                of_store = self.sums.setdefault(key, {}).setdefault(row["store"], {})
                of_store[row["group"]] = (row["n_tokens"], row["nll"])

    def steps(self, arm: str) -> set[int]:
        return {step for name, _, step in self.facts if name == arm}

    def seeds(self, arm: str) -> set[int]:
        return {seed for name, seed, _ in self.facts if name == arm}


@dataclass(frozen=True, slots=True, eq=False)
class _Excess:
    """A row of the table, and what its bounds are made of."""

    row: Row
    excess: Estimates


def _pair(points: _Points, arm: str, other: str, train_on: str) -> list[_Excess]:
    if other == BASE:
        steps, seeds = points.steps(arm), points.seeds(arm)
    else:
        steps = points.steps(arm) & points.steps(other)
        seeds = points.seeds(arm) & points.seeds(other)
    return [
        one
        for step in sorted(steps)
        for seed in sorted(seeds)
        for one in _excess(
            points,
            (arm, seed, step),
            _other(points, other, seed, step),
            {"against": other, "last": step == max(steps)},
            train_on,
        )
    ]


def _other(points: _Points, other: str, seed: int, step: int) -> tuple[str, int, int]:
    """The model as it was is the same for every seed and step."""
    return (BASE, min(points.seeds(BASE)), 0) if other == BASE else (other, seed, step)


def _excess(
    points: _Points, ours: tuple[str, int, int], theirs: tuple[str, int, int], said: Row, train_on: str
) -> list[_Excess]:
    if ours not in points.sums or theirs not in points.sums:
        return []
    facts = points.facts[ours]
    found = []
    for store, mine in points.sums[ours].items():
        yours = points.sums[theirs][store]
        groups = sorted(mine)
        n_tokens = np.array([[mine[group][0]] for group in groups], float)
        a, b = (ratios(np.array([[one[group][1]] for group in groups]), n_tokens) for one in (mine, yours))
        excess = difference(a, b)
        row = {
            "arm": ours[0],
            "store": store,
            "in_domain": store == train_on,
            "seed": ours[1],
            "learning_rate": facts["learning_rate"],
            "against_learning_rate": points.facts[theirs]["learning_rate"],
            "step": ours[2],
            "tokens_seen": facts["tokens_seen"],
            "distinct_tokens": facts["distinct_tokens"],
            "n_tokens": int(n_tokens.sum()),
            "n_groups": len(groups),
            "nll": float(a.estimate[0]),
            "against_nll": float(b.estimate[0]),
            "excess": float(excess.estimate[0]),
            "excess_pct": percent(float(excess.estimate[0])),
        }
        found.append(_Excess(row | said, excess))
    return found


def _bound(of_store: Sequence[_Excess], level: float) -> None:
    """Bounds of one store: of the last points a family, of each point before by itself."""
    last = [one for one in of_store if one.row["last"]]
    before = [one for one in of_store if not one.row["last"]]
    family = simultaneous_value(stack([one.excess for one in last]), _SIGNS, level)
    alone = [critical_value(one.excess, level) for one in before]
    for one, critical in zip([*last, *before], [*family[:, None], *alone], strict=True):
        low, high = (float(end[0]) for end in bounds(one.excess, critical))
        one.row.update(lo=low, hi=high, lo_pct=percent(low), hi_pct=percent(high))


def _judge(rows: Sequence[Row], controls: Collection[str]) -> None:
    """A verdict of each pair on each store. The model as it was judges the controls, these the others."""
    failed: set[str] = set()
    pairs: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        row["verdict"] = ""
        if row["last"]:
            pairs.setdefault((row["arm"], row["against"], row["store"]), []).append(row)
    for (arm, other, _), same in pairs.items():
        if other == BASE and arm in controls and same[0]["in_domain"] and _verdict(same) == WORSE:
            failed.add(arm)
    for (_, other, _), same in pairs.items():
        verdict = FAILED if other in failed else _verdict(same)
        for row in same:
            row["verdict"] = verdict


def _verdict(rows: Sequence[Mapping[str, Any]]) -> str:
    """Of one arm against another on one store, over all seeds."""
    if any(row["n_groups"] < MIN_GROUPS for row in rows):
        return FEW
    if len(rows) < MIN_SEEDS:
        return FEW_SEEDS
    if all(row["hi"] < 0 for row in rows):
        return BETTER
    return WORSE if all(row["lo"] > 0 for row in rows) else CANNOT_TELL
