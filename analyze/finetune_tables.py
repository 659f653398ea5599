"""What fine-tuning did: sums of losses over groups of documents in, tables `finetune` and `finetune_summary`.

`finetune` has the mean loss of every arm at every point. `finetune_summary` has, for each arm and each arm it
is compared with, the excess: the difference of their mean losses on the same test rows after the same tokens,
in nats a token, paired by seed and over groups of documents; bounds are simultaneous over the stores. An arm
is better or worse only where the bounds of every seed say so, with one sign. What is compared at other points
than the last is shown without a verdict. Cost: a family of bounds a pair of arms, seed and point.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa

from ..store import Study
from .budget_tables import BUDGET_SCHEMAS
from .cost_bounds import percent, perplexity
from .influences import difference
from .intervals import MIN_GROUPS, Estimates, bounds, critical_value, ratios
from .schemas import FLAG, INT, REAL, TEXT, reals, schema

_RUN: Final = {"arm": TEXT, "seed": INT, "learning_rate": REAL, "chosen": FLAG, "phase": INT, "step": INT}
_SEEN: Final = {"tokens_seen": INT, "distinct_tokens": INT}

FINETUNE_SCHEMAS: Final = {
    # One row for each (arm, seed, learning rate, point, store, split, group): sums over its scored rows.
    "finetune_scores": schema(
        **_RUN, **_SEEN, store=TEXT, split=TEXT, group=INT, n_tokens=INT, **reals("nll")
    ),
    "finetune": schema(
        **_RUN, **_SEEN, store=TEXT, split=TEXT, n_tokens=INT, n_groups=INT, **reals("nll ppl")
    ),
    "finetune_gates": schema(
        **_RUN, **_SEEN, store=TEXT, split=TEXT, layer=INT, **reals("mean_gate share_linear")
    ),
    # What each arm computes at its end, a token of a store's test windows: `share_linear` of all tokens,
    # those never replaced included, need no MLP, the mean over the layers replaced; `mlp_flops_saved` is a
    # share of the MLPs of all layers, net of surrogates and gates, `flops_saved` of the whole model.
    "finetune_work": schema(
        arm=TEXT,
        seed=INT,
        store=TEXT,
        layers=TEXT,
        **reals("mean_gate share_linear mlp_flops_saved flops_saved"),
    ),
    "finetune_summary": schema(
        arm=TEXT,
        against=TEXT,
        store=TEXT,
        in_domain=FLAG,
        seed=INT,
        learning_rate=REAL,
        against_learning_rate=REAL,
        step=INT,
        **_SEEN,
        last=FLAG,
        n_tokens=INT,
        n_groups=INT,
        **reals("nll against_nll excess lo hi excess_pct lo_pct hi_pct"),
        verdict=TEXT,
    ),
    "finetune_timing": BUDGET_SCHEMAS["timing"],
}
BASE: Final = "base"
BETTER, WORSE, CANNOT_TELL, FEW = "better", "worse", "cannot tell", "too few documents"


def write_finetune_tables(
    study: Study,
    scores: Sequence[Mapping[str, Any]],
    gates: Sequence[Mapping[str, Any]],
    work: Sequence[Mapping[str, Any]],
    train_on: str,
    against: Mapping[str, Sequence[str]],
) -> list[str]:
    """Write all tables; their paths inside the study."""
    kept = _as(scores, "finetune_scores")
    tables = {
        "finetune_scores": kept,
        "finetune": curves(kept),
        "finetune_gates": _as(gates, "finetune_gates"),
        "finetune_work": _as(work, "finetune_work"),
        "finetune_summary": summary(kept, train_on, against),
    }
    return [study.write_table(name, table) for name, table in tables.items()]


def curves(scores: pa.Table) -> pa.Table:
    """The mean loss of every arm at every point."""
    keys = [name for name in FINETUNE_SCHEMAS["finetune"].names if name in scores.column_names]
    keys = [name for name in keys if name not in ("n_tokens", "nll")]
    found: dict[tuple[Any, ...], list[float]] = {}
    for row in scores.to_pylist():
        total = found.setdefault(tuple(row[name] for name in keys), [0, 0, 0.0])
        total[0] += row["n_tokens"]
        total[1] += 1
        total[2] += row["nll"]
    rows = []
    for key, (n_tokens, n_groups, nll) in found.items():
        mean = nll / n_tokens if n_tokens else float("nan")
        counts = {"n_tokens": n_tokens, "n_groups": n_groups, "nll": mean, "ppl": perplexity(mean)}
        rows.append(dict(zip(keys, key, strict=True)) | counts)
    return _as(rows, "finetune")


def summary(scores: pa.Table, train_on: str, against: Mapping[str, Sequence[str]]) -> pa.Table:
    """The excess of every arm over each one it is compared with, at every point that both have."""
    points = _Points(scores.to_pylist())
    rows: list[dict[str, Any]] = []
    for arm, others in against.items():
        for other in others:
            rows += _pair(points, arm, other, train_on)
    return _as(rows, "finetune_summary")


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


def _pair(points: _Points, arm: str, other: str, train_on: str) -> list[dict[str, Any]]:
    if other == BASE:
        steps, seeds = points.steps(arm), points.seeds(arm)
    else:
        steps = points.steps(arm) & points.steps(other)
        seeds = points.seeds(arm) & points.seeds(other)
    rows: list[dict[str, Any]] = []
    for step in sorted(steps):
        last = step == max(steps)
        at_step = [
            row
            for seed in sorted(seeds)
            for row in _excess(points, (arm, seed, step), _other(points, other, seed, step), other, train_on)
        ]
        for row in at_step:
            same = [one for one in at_step if one["store"] == row["store"]]
            rows.append(row | {"last": last, "verdict": _verdict(same) if last else ""})
    return rows


def _other(points: _Points, other: str, seed: int, step: int) -> tuple[str, int, int]:
    """The model as it was is the same for every seed and step."""
    return (BASE, min(points.seeds(BASE)), 0) if other == BASE else (other, seed, step)


def _excess(
    points: _Points, ours: tuple[str, int, int], theirs: tuple[str, int, int], other: str, train_on: str
) -> list[dict[str, Any]]:
    if ours not in points.sums or theirs not in points.sums:
        return []
    facts = points.facts[ours]
    rows = []
    for store, mine in points.sums[ours].items():
        yours = points.sums[theirs][store]
        groups = sorted(mine)
        n_tokens = np.array([[mine[group][0]] for group in groups], float)
        a, b = (ratios(np.array([[one[group][1]] for group in groups]), n_tokens) for one in (mine, yours))
        excess = difference(a, b)
        low, high = (float(end[0]) for end in _bounds(excess, len(points.sums[ours])))
        value = float(excess.estimate[0])
        rows.append(
            {
                "arm": ours[0],
                "against": other,
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
                "excess": value,
                "lo": low,
                "hi": high,
                "excess_pct": percent(value),
                "lo_pct": percent(low),
                "hi_pct": percent(high),
            }
        )
    return rows


def _bounds(excess: Estimates, n_stores: int) -> tuple[np.ndarray, np.ndarray]:
    """Simultaneous over stores by Bonferroni: stores have other documents."""
    return bounds(excess, critical_value(excess, level=1.0 - 0.05 / n_stores))


def _verdict(rows: Sequence[Mapping[str, Any]]) -> str:
    """Of one arm against another on one store, over all seeds."""
    if any(row["n_groups"] < MIN_GROUPS for row in rows):
        return FEW
    if all(row["hi"] < 0 for row in rows):
        return BETTER
    return WORSE if all(row["lo"] > 0 for row in rows) else CANNOT_TELL


def _as(rows: Sequence[Mapping[str, Any]], table: str) -> pa.Table:
    return pa.Table.from_pylist([dict(row) for row in rows], FINETUNE_SCHEMAS[table])
