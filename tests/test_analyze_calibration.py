"""Calibration, curves and thresholds are those of scikit-learn, statsmodels or a plain loop."""

import numpy as np
import pytest
import statsmodels.api as sm
from nearline.analyze.calibration import (
    brier,
    calibration_bins,
    calibration_line,
    need_curve,
    threshold_for_cost,
    threshold_for_share,
)
from scipy.special import expit, logit
from sklearn.calibration import calibration_curve
from sklearn.metrics import brier_score_loss

# The same sums in float64, in another order.
SAME = 1e-12
# Both sides stop when Newton's step no longer matters in float64; statsmodels' default is a little looser.
SAME_FIT = 1e-6


def predicted(seed: int = 0, n_tokens: int = 3000) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Probabilities that are too sure of themselves (true slope 0.5, intercept −0.3), label, group, need."""
    rng = np.random.default_rng(seed)
    z = 2.0 * rng.standard_normal(n_tokens)
    label = rng.random(n_tokens) < expit(0.5 * z - 0.3)
    return expit(z).astype(np.float32), label, rng.integers(0, 40, n_tokens), rng.gamma(2.0, 1.0, n_tokens)


def test_brier_is_that_of_scikit_learn() -> None:
    p, label, *_ = predicted()
    assert brier(p, label) == pytest.approx(brier_score_loss(label, p.astype(np.float64)), abs=SAME)
    assert np.isnan(brier(p[:0], label[:0]))


def test_bins_are_those_of_scikit_learn() -> None:
    p, label, group, _ = predicted()
    observed, mean = calibration_curve(label, p.astype(np.float64), n_bins=10, strategy="quantile")
    rows = calibration_bins(p, label, group)
    np.testing.assert_allclose([row["observed"] for row in rows], observed, atol=SAME)
    np.testing.assert_allclose([row["predicted"] for row in rows], mean, atol=SAME)
    assert [row["bin"] for row in rows] == list(range(10))
    assert sum(row["n_tokens"] for row in rows) == p.size
    for row in rows:
        assert 0 <= row["observed_lo"] < row["observed"] < row["observed_hi"] <= 1


def test_bins_without_tokens_are_left_out() -> None:
    group = np.arange(100)
    rows = calibration_bins(np.repeat([0.2, 0.9], [95, 5]), np.arange(100) < 95, group)
    assert [row["n_tokens"] for row in rows] == [95, 5]
    assert [row["observed"] for row in rows] == [1.0, 0.0]
    assert rows[0]["observed_lo"] > 0.9
    assert rows[1]["observed_hi"] > 0.4  # none of five documents is not none
    assert calibration_bins(np.empty(0), np.empty(0, bool), group[:0]) == []


def test_intervals_of_bins_cover_where_documents_differ() -> None:
    """The share of easy tokens moves by document; intervals by token would miss it."""
    held, narrow, n_sets = 0, 0, 300
    for seed in range(n_sets):
        rng = np.random.default_rng(seed)
        group = np.repeat(np.arange(40), rng.integers(10, 60, 40))
        share = rng.beta(2.0, 2.0, 40)[group]
        label = rng.random(group.size) < share
        row = calibration_bins(np.full(group.size, 0.5), label, group, n_bins=1)[0]
        held += row["observed_lo"] <= 0.5 <= row["observed_hi"]
        narrow += abs(row["observed"] - 0.5) <= 1.96 * np.sqrt(0.25 / group.size)
    assert 0.90 <= held / n_sets <= 0.98
    assert narrow / n_sets < 0.7


def test_the_line_is_a_logistic_regression() -> None:
    p, label, *_ = predicted()
    slope, intercept = calibration_line(p, label)
    x = sm.add_constant(logit(p.astype(np.float64)))
    theirs = sm.Logit(label.astype(float), x).fit(disp=0).params
    np.testing.assert_allclose((intercept, slope), theirs, rtol=SAME_FIT)
    assert slope == pytest.approx(0.5, abs=0.06)
    assert intercept == pytest.approx(-0.3, abs=0.12)


def test_the_line_of_calibrated_probabilities_is_the_diagonal() -> None:
    rng = np.random.default_rng(1)
    p = rng.uniform(0.02, 0.98, 40_000)
    assert calibration_line(p, rng.random(p.size) < p) == pytest.approx((1.0, 0.0), abs=0.05)


@pytest.mark.parametrize(
    ("p", "label"),
    [
        (np.full(6, 0.4), np.array([1, 0, 1, 0, 1, 0], bool)),  # constant: no slope
        (np.linspace(0.1, 0.9, 6), np.ones(6, bool)),  # one class
        (np.linspace(0.1, 0.9, 6), np.arange(6) > 2),  # separated: the slope is infinite
        (np.empty(0), np.empty(0, bool)),
    ],
)
def test_where_there_is_no_line_it_is_nan(p: np.ndarray, label: np.ndarray) -> None:
    assert np.isnan(calibration_line(p, label)).all()


def test_certain_and_wrong_probabilities_have_a_line() -> None:
    p, label, *_ = predicted()
    p[:5], label[:5] = 0.0, True
    p[5:10], label[5:10] = 1.0, False
    slope, intercept = calibration_line(p, label)
    assert 0 < slope < 0.5
    assert np.isfinite(intercept)


def test_the_curve_is_a_running_sum() -> None:
    p, _, _, need = predicted()
    order = np.argsort(-p, kind="stable")
    shares = np.array([0.0, 0.1, 0.25, 0.5, 0.9, 1.0])
    plain = [need[order[: round(share * p.size)]].sum() / need.sum() for share in shares]
    np.testing.assert_allclose(need_curve(p, need, shares), plain, atol=SAME)


def test_tokens_of_equal_score_are_not_told_apart() -> None:
    need = np.array([5.0, 1.0, 0.0, 4.0])
    np.testing.assert_allclose(need_curve(np.full(4, 0.5), need, [0.25, 0.5, 1.0]), [0.25, 0.5, 1.0])
    np.testing.assert_allclose(need_curve(-need, need, [0.25, 0.5, 0.75]), [0.0, 0.1, 0.5])
    assert np.isnan(need_curve(need, -need, [0.5])).all()


def by_trying(p: np.ndarray, cost: np.ndarray, most: float) -> int:
    """Most tokens that can go linear without costing more than this share, threshold by threshold."""
    best = 0
    for threshold in [-np.inf, *np.unique(p)]:
        taken = p > threshold
        if cost[taken].sum() <= most * cost.sum() * (1 + SAME):
            best = max(best, int(taken.sum()))
    return best


@pytest.mark.parametrize("decimals", [1, 8])
@pytest.mark.parametrize("share", [0.0, 0.003, 0.3, 0.9, 1.0])
def test_thresholds_take_what_they_may_and_no_more(share: float, decimals: int) -> None:
    p, _, _, need = predicted(n_tokens=400)
    p = np.round(p, decimals)
    by_share = p > threshold_for_share(p, share)
    assert by_share.sum() == by_trying(p, np.ones(p.size), share)
    by_cost = p > threshold_for_cost(p, need, share)
    assert by_cost.sum() == by_trying(p, need, share)
    losses = need - 1.0  # losses may be negative
    assert (p > threshold_for_cost(p, losses, share)).sum() == by_trying(p, losses, share)


def test_without_any_need_nothing_goes_linear() -> None:
    p, _, _, need = predicted()
    assert not (p > threshold_for_cost(p, -need, 0.5)).any()
    assert not (p[:0] > threshold_for_share(p[:0], 0.5)).any()
