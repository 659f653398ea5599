"""The tables of a fine-tuning, from planted sums of losses: means, excess over controls, and which arm may be
called better.
"""

from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from nearline.analyze.finetune_excess import summary
from nearline.analyze.finetune_tables import FINETUNE_SCHEMAS, curves
from scipy import stats

N_GROUPS = 30
AGAINST = {"base": (), "control": ("base",), "linear": ("base", "control")}


def scores(
    gains: dict[int, float],
    *,
    n_groups: int = N_GROUPS,
    seed: int = 0,
    control: float = 0.2,
    n_arms: int = 1,
    shared: float = 0.0,
) -> pa.Table:
    """Groups of unequal size. At the end `linear` gains so many nats a token over `control`, by seed, and
    so do `linear1`, … up to `n_arms`; `control` gains over the model as it was. `shared`: how much of the
    variance of an arm's noise is that of all seeds."""
    rng = np.random.default_rng(seed)
    n_tokens = rng.integers(40, 200, n_groups)
    arms = ["linear", *(f"linear{number}" for number in range(1, n_arms))]
    rows: list[dict[str, Any]] = []

    def add(arm: str, of_seed: int, step: int, mean: np.ndarray, rate: float, chosen: bool) -> None:
        for group, (n, nll) in enumerate(zip(n_tokens.tolist(), (mean * n_tokens).tolist(), strict=True)):
            rows.append(
                {
                    "arm": arm,
                    "seed": of_seed,
                    "learning_rate": rate,
                    "chosen": chosen,
                    "phase": 1,
                    "step": step,
                    "tokens_seen": 100 * step,
                    "distinct_tokens": 50 * step,
                    "store": "a",
                    "split": "test",
                    "group": group,
                    "n_tokens": n,
                    "nll": nll,
                }
            )

    base = 3.0 + 0.5 * rng.standard_normal(n_groups)
    add("base", min(gains), 0, base, 0.0, chosen=True)
    of_all = {arm: 0.02 * rng.standard_normal(n_groups) for arm in ("control", *arms)}
    for of_seed, gain in gains.items():
        noise = {
            arm: np.sqrt(shared) * common + np.sqrt(1 - shared) * 0.02 * rng.standard_normal(n_groups)
            for arm, common in of_all.items()
        }
        for step in (0, 2):
            change = (0.0, noise["control"] - control)[step // 2]
            add("control", of_seed, step, base + change, 1e-3, chosen=True)
            for arm in arms:
                change = (0.05, noise[arm] - control - gain)[step // 2]
                add(arm, of_seed, step, base + change, 1e-3, chosen=True)
        add("linear", of_seed, 2, base - 9.0, 1e-2, chosen=False)
    return pa.Table.from_pylist(rows, FINETUNE_SCHEMAS["finetune_scores"])


def summarised(table: pa.Table, against: dict[str, tuple[str, ...]] = AGAINST) -> pl.DataFrame:
    return pl.DataFrame(summary(table.to_pylist(), "a", against, ("control",)))


def test_means_are_over_tokens() -> None:
    table = scores({0: 0.0})
    found = pl.from_arrow(curves(table))
    assert isinstance(found, pl.DataFrame)
    for row in found.to_dicts():
        of = pl.DataFrame(table).filter(
            *(pl.col(name) == row[name] for name in ("arm", "seed", "step", "learning_rate"))
        )
        mean = of["nll"].to_numpy().sum() / of["n_tokens"].to_numpy().sum()
        assert row["nll"] == pytest.approx(mean, rel=1e-12)
        assert row["ppl"] == pytest.approx(np.exp(row["nll"]), rel=1e-12)
        assert row["n_groups"] == N_GROUPS


def test_an_excess_is_that_of_paired_groups() -> None:
    """Against the linearised ratio, written out; what was not chosen does not count."""
    table = scores({1: 0.01})
    (row,) = summarised(table, {"linear": ("control",)}).filter("last").to_dicts()
    rows = pl.DataFrame(table).filter("chosen", pl.col("step") == 2).sort("group")
    n = rows.filter(pl.col("arm") == "linear")["n_tokens"].to_numpy().astype(float)
    delta = (
        rows.filter(pl.col("arm") == "linear")["nll"].to_numpy()
        - rows.filter(pl.col("arm") == "control")["nll"].to_numpy()
    )
    mean = delta.sum() / n.sum()
    leave_out = (delta.sum() - delta) / (n.sum() - n)
    spread = np.sqrt((N_GROUPS - 1) / N_GROUPS * ((leave_out - leave_out.mean()) ** 2).sum())
    assert row["excess"] == pytest.approx(mean, rel=1e-9)
    degrees = n.sum() ** 2 / (n**2).sum() - 1
    half = stats.t.ppf(0.975, degrees) * spread
    assert (row["hi"] - row["lo"]) / 2 == pytest.approx(half, rel=0.02)
    assert row["excess_pct"] == pytest.approx(100 * np.expm1(mean), rel=1e-9)
    assert row["tokens_seen"] == 200


def test_bounds_of_last_points_hold_for_all_pairs_and_seeds() -> None:
    """Wider than those of one pair and seed by itself, and no wider than Bonferroni's."""
    table = scores({0: 0.0, 1: 0.0, 2: 0.0})
    found = summarised(table).filter(pl.col("arm") == "linear", pl.col("against") == "control", "last")
    n = pl.DataFrame(table).filter(pl.col("arm") == "base")["n_tokens"].to_numpy().astype(float)
    degrees = n.sum() ** 2 / (n**2).sum() - 1
    n_pairs = sum(map(len, AGAINST.values()))
    for row in found.to_dicts():
        one = pl.DataFrame(table).filter(pl.col("seed").is_in((0, row["seed"])))
        alone = summarised(pa.Table.from_pylist(one.to_dicts(), table.schema), {"linear": ("control",)})
        (of_one,) = alone.filter("last", pl.col("seed") == row["seed"]).to_dicts()
        wider = (row["hi"] - row["lo"]) / (of_one["hi"] - of_one["lo"])
        most = stats.t.isf(0.025 / (3 * n_pairs), degrees) / stats.t.isf(0.025, degrees)
        assert 1.1 < wider < most + 1e-6


@pytest.mark.parametrize(
    ("gains", "verdict"),
    [
        ({0: 0.05, 1: 0.04, 2: 0.06}, "better"),
        ({0: -0.05, 1: -0.04, 2: -0.06}, "worse"),
        ({0: 0.05, 1: -0.05, 2: 0.05}, "cannot tell"),
        ({0: 0.0, 1: 0.0, 2: 0.0}, "cannot tell"),
    ],
)
def test_a_verdict_needs_every_seed(gains: dict[int, float], verdict: str) -> None:
    found = summarised(scores(gains)).filter(pl.col("arm") == "linear", pl.col("against") == "control")
    last = found.filter("last")
    assert last["verdict"].to_list() == [verdict] * 3
    assert found.filter(~pl.col("last"))["verdict"].to_list() == [""] * 3


def test_few_groups_get_no_verdict() -> None:
    found = summarised(scores({0: 0.5, 1: 0.5, 2: 0.5}, n_groups=19)).filter("last")
    assert set(found["verdict"]) == {"too few documents"}


def test_few_seeds_get_no_verdict() -> None:
    found = summarised(scores({0: 0.5, 1: 0.5})).filter("last")
    assert set(found["verdict"]) == {"too few seeds"}


@pytest.mark.parametrize(("in_domain", "verdict"), [("a", "control failed"), ("elsewhere", "better")])
def test_a_control_that_training_has_broken_judges_nothing(in_domain: str, verdict: str) -> None:
    """What it loses on another corpus than the one it is trained on is what training does."""
    gains = {0: 0.5, 1: 0.5, 2: 0.5}
    rows = summary(scores(gains, control=-0.3).to_pylist(), in_domain, AGAINST, ("control",))
    last = {(row["arm"], row["against"]): row["verdict"] for row in rows if row["last"]}
    assert last == {
        ("control", "base"): "worse",
        ("linear", "base"): "better",
        ("linear", "control"): verdict,
    }
    rows = summary(scores(gains, control=-0.3).to_pylist(), "a", AGAINST, ())
    assert [row["verdict"] for row in rows if row["last"] and row["against"] == "control"] == ["better"] * 3


def test_the_base_is_compared_at_every_step() -> None:
    found = summarised(scores({0: 0.0, 1: 0.0})).filter(pl.col("against") == "base")
    assert sorted(found.filter(pl.col("arm") == "linear")["step"].to_list()) == [0, 0, 2, 2]
    start = found.filter(pl.col("arm") == "linear", pl.col("step") == 0)["excess"].to_list()
    assert start == pytest.approx([0.05, 0.05], rel=1e-9)


@pytest.mark.parametrize("n_sets", [40, pytest.param(400, marks=pytest.mark.long)])
@pytest.mark.parametrize("shared", [0.0, 0.7, 1.0])
def test_noise_is_seldom_called_better_or_worse(n_sets: int, shared: float) -> None:
    """Ten arms without any gain, whose seeds have nothing, most or all of their noise in common: in 5 % of
    the studies at most is one called better or worse, and three standard errors are allowed for chance.
    """
    arms = ["linear", *(f"linear{number}" for number in range(1, 10))]
    called = 0
    for number in range(n_sets):
        table = scores({0: 0.0, 1: 0.0, 2: 0.0}, seed=number, n_arms=len(arms), shared=shared)
        last = summarised(table, {arm: ("control",) for arm in arms}).filter("last")
        called += last["verdict"].is_in(["better", "worse"]).any()
    print(f"noise shared by {shared:g}: {called} of {n_sets} studies call an arm better or worse")
    assert called <= 0.05 * n_sets + 3 * np.sqrt(0.05 * 0.95 * n_sets)
