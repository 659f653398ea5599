"""Checks of `loss_estimate` against exact patches: plain statistics, their intervals, and what misleads."""

from typing import Any

import numpy as np
import pytest
import scipy.stats
from nearline.analyze.estimate_checks import (
    ESTIMATE_SCHEMAS,
    Patches,
    Sequences,
    estimate_rows,
    sample_patches,
    sequence_sums,
    targets_following,
    to_estimate_table,
)

N_GROUPS, EACH = 40, 6


def patches(seed: int = 0, *, slope: float = 0.8, noise: float = 0.5, bias: float = 0.0) -> Patches:
    """loss_single = slope · (estimate − bias) and noise, groups of one size."""
    rng = np.random.default_rng(seed)
    n = N_GROUPS * EACH
    estimate = rng.standard_normal(n)
    exact = slope * (estimate - bias) + noise * rng.standard_normal(n)
    return Patches(estimate, exact, np.repeat(np.arange(N_GROUPS), EACH), rng.integers(1, 100, n))


def one_row(found: Patches, sequences: Sequences | None = None) -> dict[str, Any]:
    given = None if sequences is None else {3: sequences}
    (row,) = to_estimate_table(estimate_rows("a", {3: found}, given)).to_pylist()
    return row


def test_the_plain_statistics() -> None:
    found = patches(bias=0.3)
    row = one_row(found)
    assert row["spearman"] == pytest.approx(scipy.stats.spearmanr(found.estimate, found.loss_single)[0])
    assert row["slope"] == pytest.approx(np.polyfit(found.estimate, found.loss_single, 1)[0])
    assert row["bias"] == pytest.approx((found.estimate - found.loss_single).mean())
    assert row["bias"] == pytest.approx(row["mean_estimate"] - row["mean_loss_single"])
    assert (row["n_patches"], row["n_groups"], row["verdict"]) == (N_GROUPS * EACH, N_GROUPS, "supported")
    assert row["spearman_lo"] < row["spearman"] < row["spearman_hi"]
    assert row["slope_lo"] < 0.8 < row["slope_hi"]
    assert np.isnan(row["sequence_spearman"])
    assert row["n_sequences"] == 0


def test_an_interval_leaves_each_group_out_in_turn() -> None:
    """The jackknife written out: the half-width is Student's quantile times its standard error, on Fisher's
    scale."""
    found = patches()
    rho = [
        float(scipy.stats.spearmanr(found.estimate[kept], found.loss_single[kept]).statistic)  # type: ignore[attr-defined]
        for kept in (found.group != group for group in range(N_GROUPS))
    ]
    error = np.sqrt((N_GROUPS - 1) / N_GROUPS * np.square(np.array(rho) - np.mean(rho)).sum())
    row = one_row(found)
    half = scipy.stats.t.ppf(0.975, N_GROUPS - 1) * error / (1 - row["spearman"] ** 2)
    assert np.arctanh(row["spearman_hi"]) - np.arctanh(row["spearman"]) == pytest.approx(half)


def test_the_window_alone_makes_no_agreement_at_like_positions() -> None:
    """Both grow with what is left of the window and agree in nothing else."""
    rng = np.random.default_rng(5)
    following = rng.integers(1, 200, 400)
    estimate, exact = (following * rng.lognormal(0, 0.3, 400) for _ in range(2))
    row = one_row(Patches(estimate, exact, np.repeat(np.arange(40), 10), following))
    assert row["spearman"] > 0.8
    assert row["within_position"] < 0.35, "bins of an eighth leave a little of the window's length in them"
    assert one_row(patches())["within_position"] > 0.6


def test_rows_that_agree_by_chance_are_not_called_alike() -> None:
    """Of tables in which nothing agrees, about one in forty says so (a two-sided interval's upper half)."""
    said = [one_row(patches(seed, slope=0.0))["verdict"] for seed in range(15)]
    assert said.count("supported") <= 2
    assert "cannot tell" in said
    few = patches()
    kept = few.group < 10
    small = Patches(few.estimate[kept], few.loss_single[kept], few.group[kept], few.following[kept])
    assert one_row(small)["verdict"] == "too few documents"


def test_layers_of_a_store_are_one_family() -> None:
    many = list(estimate_rows("a", {layer: patches(layer) for layer in (2, 0, 1)}))
    assert [row["layer"] for row in many] == [0, 1, 2]
    for row in many:
        assert row["spearman_sim_lo"] < row["spearman_lo"] < row["spearman_hi"] < row["spearman_sim_hi"]


def test_targets_that_follow_and_sums_over_sequences() -> None:
    sequence = np.array([0, 0, 0, 1, 1, 4, 4, 4])
    target = np.array([5, 5, -1, 7, 7, -1, 2, -1])
    assert targets_following(sequence, target).tolist() == [2, 1, 0, 2, 1, 1, 1, 0]
    nan = np.nan
    estimate = np.array([nan, 1.0, nan, 2.0, 4.0, nan, 3.0, nan])
    loss = np.array([0.5, 1.5, nan, 1.0, nan, 8.0, 2.0, nan])
    found = sequence_sums(estimate, loss, sequence, np.array([9, 9, 9, 8, 8, 7, 7, 7]), target)
    assert found.estimate.tolist() == [1.0, 3.0], "sequence 1 lacks a loss"
    assert found.loss.tolist() == [2.0, 2.0], "a loss counts where there is a target"
    assert found.group.tolist() == [9, 7]
    assert found.n_rows.tolist() == [2, 1]


def test_sums_over_sequences_have_columns_of_their_own() -> None:
    rng = np.random.default_rng(2)
    loss = rng.lognormal(1, 1, 50)
    sums = Sequences(0.7 * loss, loss, np.arange(50), np.full(50, 10))
    row = one_row(patches(), sums)
    assert row["n_sequences"] == 50
    assert row["sequence_spearman"] == pytest.approx(1.0)
    assert row["sequence_slope"] == pytest.approx(1 / 0.7)
    assert row["sequence_bias"] == pytest.approx(-0.3 * loss.mean() / 10)


def test_a_sample_takes_from_every_group_in_turn() -> None:
    group = np.repeat(np.arange(12), [200, *[3] * 10, 50])
    estimate = np.ones(group.size, np.float32)
    estimate[::7] = np.nan
    candidates = np.flatnonzero(np.arange(group.size) % 2 == 0)
    rows = sample_patches(candidates, estimate, group, 30, seed=1)
    assert np.isin(rows, candidates).all()
    assert np.isfinite(estimate[rows]).all()
    assert (np.diff(rows) > 0).all()
    usable = candidates[np.isfinite(estimate[candidates])]
    assert set(group[rows]) == set(group[usable]), "each group that has one"
    assert rows.size == 30
    np.testing.assert_array_equal(rows, sample_patches(candidates, estimate, group, 30, seed=1))
    assert not np.array_equal(rows, sample_patches(candidates, estimate, group, 30, seed=2))
    np.testing.assert_array_equal(sample_patches(candidates, estimate, group, 10**6, 0), usable)


def test_a_row_with_other_columns_is_refused() -> None:
    row = next(estimate_rows("a", {0: patches()}))
    assert list(row) == ESTIMATE_SCHEMAS["estimate"].names
    with pytest.raises(ValueError, match="more"):
        to_estimate_table([row | {"more": 1.0}])
