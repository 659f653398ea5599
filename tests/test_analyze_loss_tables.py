"""What single rows say of δ and of the needs: Spearman's ρ, the regression of loss on kl, histograms and the
noise floor equal their slow twins and hold what their intervals promise.
"""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from nearline.analyze.cost_tables import to_cost_table
from nearline.analyze.influences import transformed_bounds
from nearline.analyze.intervals import critical_value
from nearline.analyze.loss_tables import histogram_rows, kl_loss, kl_loss_rows, loss_row
from nearline.analyze.need_agreement import agreement_rows, pairs_of_needs
from nearline.analyze.noise_floor import noise_floor_row, refused_in, refused_labels, without_label_verdicts
from nearline.analyze.rank_agreement import ranked, spearman
from nearline.store import Study
from scipy import stats

SAME = 1e-9


def groups_of(rng: np.random.Generator, n_groups: int = 30, spread: float = 0.8) -> np.ndarray:
    """Rows of documents of very different lengths."""
    return np.repeat(np.arange(n_groups) * 3 + 1, np.ceil(rng.lognormal(4.0, spread, n_groups)).astype(int))


def related(rng: np.random.Generator, group: np.ndarray, rho: float) -> tuple[np.ndarray, np.ndarray]:
    """Two values of correlation `rho`, both within and between documents, with heavy tails; float32."""
    _, index = np.unique(group, return_inverse=True)
    shared, own = (
        rng.standard_normal(group.size) + 0.5 * rng.standard_normal(index.max() + 1)[index] for _ in range(2)
    )
    other = rho * shared + np.sqrt(1 - rho**2) * own
    return np.exp(shared).astype(np.float32), (other**3).astype(np.float32)


def rho_of(one: np.ndarray, other: np.ndarray) -> float:
    """scipy's."""
    found: Any = stats.spearmanr(one, other)
    return float(found.statistic)


@pytest.mark.parametrize("decimals", [None, 0])
def test_rho_is_scipys_and_its_spread_that_of_leaving_groups_out(decimals: int | None) -> None:
    rng = np.random.default_rng(0)
    group = groups_of(rng)
    one, other = related(rng, group, 0.6)
    if decimals is not None:  # ties
        one, other = np.round(one, decimals), np.round(other, decimals)
    found = spearman(ranked(one), ranked(other), group)
    assert found.estimate[0] == pytest.approx(rho_of(one, other), rel=SAME)
    without = np.array([rho_of(one[group != g], other[group != g]) for g in np.unique(group)])
    n = without.size
    error = np.sqrt((n - 1) / n * ((without - without.mean()) ** 2).sum())
    # To first order in a group's weight; the largest documents here weigh more than a tenth.
    assert found.standard_error[0] == pytest.approx(error, rel=0.05)
    fixed = np.corrcoef(ranked(one).mid, ranked(other).mid)[0, 1]
    assert fixed == pytest.approx(found.estimate[0], rel=SAME)


def test_rho_of_nothing_and_of_constants_is_unknown() -> None:
    nothing = ranked(np.zeros(0, np.float32))
    assert np.isnan(spearman(nothing, nothing, np.zeros(0, int)).estimate[0])
    rng = np.random.default_rng(1)
    constant, other = ranked(np.ones(50, np.float32)), ranked(rng.random(50).astype(np.float32))
    assert np.isnan(spearman(constant, other, np.repeat(np.arange(5), 10)).estimate[0])


@pytest.mark.sampled
@pytest.mark.parametrize("rho", [0.0, 0.7])
def test_rho_is_covered_at_its_level(rho: float, request: pytest.FixtureRequest) -> None:
    n_sets = 1000 if request.config.getoption("--run-long") else 100
    true = 6 / np.pi * np.arcsin(rho / 2)
    held = 0
    for seed in range(n_sets):
        rng = np.random.default_rng((seed, 5))
        group = groups_of(rng, spread=0.5)
        one, other = related(rng, group, rho)
        found = spearman(ranked(one), ranked(other), group)
        low, high = transformed_bounds(found, critical_value(found), "fisher")
        held += bool(low[0] <= true <= high[0])
    print(f"Spearman {rho}: {held / n_sets:.3f} covered")
    assert 0.90 <= held / n_sets <= (0.98 if n_sets > 100 else 1.0)


def test_needs_agree_over_rows_where_all_are_known() -> None:
    rng = np.random.default_rng(2)
    group = groups_of(rng)
    found = []
    for _ in range(3):
        one, other = related(rng, group, 0.9)
        loss = one.copy()
        loss[::4] = np.nan
        found.append(pairs_of_needs({"error": one, "kl": other, "loss": loss}, group))
    rows = agreement_rows("a", [3, 4, 5], found, seed=0, refused={4})
    assert [(row["need_a"], row["need_b"]) for row in rows[::3]] == [
        ("error", "kl"),
        ("error", "loss"),
        ("kl", "loss"),
    ]
    assert {row["n_tokens"] for row in rows} == {group.size - len(group[::4])}
    for row in rows:
        assert -1 <= row["sim_lo"] <= row["lo"] <= row["spearman"] <= row["hi"] <= row["sim_hi"] <= 1
        refused = "loss" in (row["need_a"], row["need_b"]) and row["layer"] == 4
        assert row["verdict"] == ("below the noise floor" if refused else "supported")
    assert to_cost_table("need_agreement", rows).num_rows == 9


def test_loss_on_kl_is_what_a_regression_says() -> None:
    rng = np.random.default_rng(3)
    group = groups_of(rng)
    kl = rng.gamma(0.5, 0.2, group.size).astype(np.float32)
    loss = (0.02 + 1.4 * kl + 0.3 * rng.standard_t(3, group.size)).astype(np.float32)
    loss[5] = np.nan
    row = kl_loss("a", 0, loss, kl, group).row
    keep = np.isfinite(loss)

    def fitted(kept: np.ndarray) -> tuple[float, float]:
        line: Any = stats.linregress(kl[kept].astype(float), loss[kept].astype(float))
        return line.slope, line.rvalue**2

    slope, r2 = fitted(keep)
    assert row["slope"] == pytest.approx(slope, rel=1e-6)
    assert row["r2"] == pytest.approx(r2, rel=1e-6)
    without = np.array([fitted(keep & (group != g))[0] for g in np.unique(group)])
    n = without.size
    error = np.sqrt((n - 1) / n * ((without - without.mean()) ** 2).sum())
    weight = np.bincount(group[keep])
    quantile = stats.t.ppf(0.975, weight.sum() ** 2 / (weight.astype(float) ** 2).sum() - 1)
    assert (row["slope_hi"] - row["slope_lo"]) / 2 == pytest.approx(quantile * error, rel=1e-6)
    assert 0 <= row["r2_lo"] < row["r2"] < row["r2_hi"] <= 1
    assert row["spearman"] == pytest.approx(rho_of(kl[keep], loss[keep]), rel=SAME)


def beliefs(seed: int, bent: float = 0.0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """loss, kl and group of a toy model of eight next tokens: targets are drawn from what it believes, or,
    `bent`, from what the linearised model believes less of.
    """
    rng = np.random.default_rng((seed, 7))
    group = groups_of(rng, spread=0.5)
    logits = rng.standard_normal((group.size, 8))
    full = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    moved = logits + 0.5 * rng.standard_normal(logits.shape)
    linear = np.exp(moved) / np.exp(moved).sum(axis=1, keepdims=True)
    real = full * (full / linear) ** bent
    real /= real.sum(axis=1, keepdims=True)
    target = (real.cumsum(axis=1) < rng.random((group.size, 1))).sum(axis=1)
    ratio = np.log(full / linear)
    loss = ratio[np.arange(group.size), target]
    return loss.astype(np.float32), (full * ratio).sum(axis=1).astype(np.float32), group


def test_a_calibrated_model_loses_what_it_expects_to_lose() -> None:
    """mean(loss) − mean(kl) is 0 where targets come from the model's beliefs, and slope 1."""
    rows = kl_loss_rows([kl_loss("a", layer, *beliefs(layer)) for layer in range(6)], seed=0)
    assert sum(row["difference_lo"] <= 0 <= row["difference_hi"] for row in rows) >= 5
    assert [row["verdict"] for row in rows] == ["cannot tell"] * 6
    assert sum(row["slope_lo"] <= 1 <= row["slope_hi"] for row in rows) >= 5
    bent = kl_loss_rows([kl_loss("a", layer, *beliefs(layer, bent=0.5)) for layer in range(6)], seed=0)
    assert [row["verdict"] for row in bent] == ["supported"] * 6
    assert to_cost_table("kl_loss", rows + bent).num_rows == 12
    assert kl_loss_rows([], seed=0) == []


def test_the_distribution_of_losses() -> None:
    rng = np.random.default_rng(4)
    group = groups_of(rng)
    values = (0.02 + 0.1 * rng.standard_t(3, group.size)).astype(np.float32)
    values[[3, 9]] = np.nan
    row = loss_row("a", 2, "loss", values, group)
    known = values[np.isfinite(values)].astype(float)
    assert row["n_tokens"] == known.size == group.size - 2
    assert row["mean"] == pytest.approx(known.mean())
    assert row["q90"] == pytest.approx(np.quantile(known, 0.9))
    assert row["median_abs"] == pytest.approx(np.median(np.abs(known)))
    assert row["share_negative"] == pytest.approx(np.mean(known < 0))
    assert row["share_small"] == pytest.approx(np.mean(np.abs(known) < 0.05))
    assert row["share_negative_lo"] < row["share_negative"] < row["share_negative_hi"]
    top = np.sort(known)[-int(np.ceil(0.05 * known.size)) :]
    assert row["top5_share"] == pytest.approx(top.sum() / known.sum())
    bins = histogram_rows("a", 2, "loss", values)
    assert sum(one["count"] for one in bins) == known.size
    assert (bins[0]["bin_lo"], bins[-1]["bin_hi"]) == (known.min(), known.max())
    for one, following in pairwise(bins):
        assert one["bin_hi"] == following["bin_lo"]
    for one in bins[:-1]:
        assert one["count"] == np.sum((known >= one["bin_lo"]) & (known < one["bin_hi"]))
    assert to_cost_table("losses", [row]).num_rows == 1


@pytest.mark.parametrize("values", [np.zeros(0), np.full(9, np.nan), np.zeros(9), np.full(1, 0.5)])
def test_hardly_any_losses_are_no_trouble(values: np.ndarray) -> None:
    values, group = values.astype(np.float32), np.arange(values.size)
    row = loss_row("a", 0, "loss", values, group)
    assert row["n_tokens"] == np.isfinite(values).sum()
    bins = histogram_rows("a", 0, "loss", values)
    assert sum(one["count"] for one in bins) == row["n_tokens"]
    (found,) = kl_loss_rows([kl_loss("a", 0, values, values, group)], seed=0)
    assert np.isnan(found["slope"])
    assert found["verdict"] == "too few documents"
    assert pairs_of_needs({"loss": values, "kl": values}, group)[0] == row["n_tokens"]


def noise_rows(size: float, rounding: float) -> pa.Table:
    rng = np.random.default_rng(6)
    group = groups_of(rng)
    true = size * rng.standard_t(3, group.size)
    rows = []
    for layer, scale in enumerate((rounding, rounding / 100)):
        change = scale * rng.standard_normal(group.size)
        base = scale * rng.standard_normal(group.size)
        coarse = (true + change).astype(np.float32)
        coarse[0] = np.nan
        rows.append(noise_floor_row("a", layer, ("bfloat16", "float32"), coarse, true, base, group))
    return to_cost_table("noise_floor", rows)


def test_labels_are_refused_where_rounding_decides() -> None:
    """Also where rounding is all there is: δ of the coarse dtype is then as large as its own noise."""
    for size, refused in ((0.1, {}), (0.005, {"a": {0}}), (0.0, {"a": {0, 1}})):
        found = noise_rows(size, rounding=0.01)
        assert refused_labels(found) == refused
        coarse, fine = found.to_pylist()
        assert coarse["floor"] == pytest.approx(0.01 * stats.norm.ppf(0.75), rel=0.1)
        assert coarse["floor"] == pytest.approx(100 * fine["floor"], rel=0.1)
        assert coarse["mean_lo"] <= 0 <= coarse["mean_hi"]
        assert coarse["labels_changed"] > fine["labels_changed"] or size == 0.0
        assert coarse["spearman"] < fine["spearman"] or size == 0.0
    assert noise_rows(0.1, 0.01)["labels_changed"].to_pylist()[1] < 0.01


def test_verdicts_on_labels_are_taken_back(tmp_path: Path) -> None:
    """Of `loss` only, at the layers where the store or the one that the cut comes from is refused."""
    study = Study.create(tmp_path / "study")
    assert refused_in(study) == {}
    study.write_table("noise_floor", noise_rows(0.005, rounding=0.01))
    assert refused_in(study) == {"a": {0}}
    keys = [(s, layer, n) for s in ("a", "b") for layer in (0, 1) for n in ("loss", "error")]
    columns = dict(zip(("store", "layer", "need"), map(list, zip(*keys, strict=True)), strict=True))
    gates = pa.table({**columns, "verdict": ["supported"] * len(keys), "auc": np.arange(len(keys)) / 10})
    for fit_on, taken in (("a", {("a", 0, "loss"), ("b", 0, "loss")}), ("b", {("a", 0, "loss")})):
        found = without_label_verdicts(gates, refused_in(study), fit_on)
        assert found.schema.equals(gates.schema)
        changed = {
            key
            for key, verdict in zip(keys, found["verdict"].to_pylist(), strict=True)
            if verdict != "supported"
        }
        assert changed == taken
        assert set(found["verdict"].to_pylist()) == {"supported", "below the noise floor"}
