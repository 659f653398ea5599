"""What fine-tuning did: sums of losses over groups of documents in, tables out.

`finetune` has the mean loss of every arm at every point, `finetune_summary` what arms are beside those they
are compared with (finetune_excess.py), `finetune_gates` and `finetune_work` what gates and arms came to.
Cost: one pass over the sums.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import pyarrow as pa

from ..store import Study
from .budget_tables import BUDGET_SCHEMAS
from .cost_bounds import perplexity
from .finetune_excess import summary
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


def write_finetune_tables(
    study: Study,
    scores: Sequence[Mapping[str, Any]],
    gates: Sequence[Mapping[str, Any]],
    work: Sequence[Mapping[str, Any]],
    train_on: str,
    against: Mapping[str, Sequence[str]],
    controls: Collection[str],
) -> list[str]:
    """Write all tables; their paths inside the study. `against`: what each arm is compared with; `controls`:
    arms that train the model as it is."""
    kept = _as(scores, "finetune_scores")
    tables = {
        "finetune_scores": kept,
        "finetune": curves(kept),
        "finetune_gates": _as(gates, "finetune_gates"),
        "finetune_work": _as(work, "finetune_work"),
        "finetune_summary": _as(summary(kept.to_pylist(), train_on, against, controls), "finetune_summary"),
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


def _as(rows: Sequence[Mapping[str, Any]], table: str) -> pa.Table:
    return pa.Table.from_pylist([dict(row) for row in rows], FINETUNE_SCHEMAS[table])
