"""Estimates made of influences are those of the jackknife, their intervals and p-values those of textbooks,
also where groups are few, one-sided or missing.
"""

import numpy as np
import pytest
from nearline.analyze.influences import (
    difference,
    from_influence,
    holm,
    intervals,
    leave_one_out,
    p_values,
    side_by_side,
    transformed_bounds,
    verdict_above,
)
from nearline.analyze.intervals import MIN_GROUPS, Estimates, bounds, critical_value, ratios
from scipy import stats
from statsmodels.stats.multitest import multipletests

# Sums of some dozen float64 numbers, in another order.
SAME = 1e-12


def jackknife(values: np.ndarray, statistic: object, unbias: bool = True) -> Estimates:
    """A statistic of groups of equal size, by leaving each out."""
    without = np.array([statistic(np.delete(values, g)) for g in range(len(values))])  # type: ignore[operator]
    whole = np.array([statistic(values)])  # type: ignore[operator]
    return leave_one_out(whole, without[:, None], np.ones(len(values)), unbias=unbias)


def test_the_jackknife_of_a_mean_is_the_mean() -> None:
    values = np.random.default_rng(0).standard_normal(25)
    found = jackknife(values, np.mean)
    assert found.estimate[0] == pytest.approx(values.mean(), abs=SAME)
    assert found.standard_error[0] == pytest.approx(stats.sem(values), rel=SAME)
    low, high = bounds(found, critical_value(found))
    theirs = stats.t.interval(0.95, 24, values.mean(), stats.sem(values))
    np.testing.assert_allclose((low[0], high[0]), theirs, rtol=1e-9)


def test_the_jackknife_takes_the_bias_away() -> None:
    """Of the plug-in variance it leaves the unbiased one, exactly (Quenouille's own example)."""
    values = np.random.default_rng(1).gamma(2.0, 1.0, 25)
    assert jackknife(values, np.var).estimate[0] == pytest.approx(np.var(values, ddof=1), rel=SAME)
    assert jackknife(values, np.var, unbias=False).estimate[0] == pytest.approx(np.var(values), rel=SAME)


def test_leaving_groups_out_of_a_ratio_is_what_ratios_do() -> None:
    rng = np.random.default_rng(2)
    counts = np.ceil(rng.lognormal(3.0, 1.0, (30, 2)))
    values = counts * rng.gamma(4.0, 0.25, (30, 2))
    direct = ratios(values, counts)
    without = (values.sum(axis=0) - values) / (counts.sum(axis=0) - counts)
    found = leave_one_out(direct.estimate, without, counts, unbias=False)
    np.testing.assert_allclose(found.standard_error, direct.standard_error, rtol=1e-9)
    np.testing.assert_allclose(found.n_effective, direct.n_effective, rtol=SAME)
    np.testing.assert_allclose(found.influence, direct.influence, rtol=1e-6, atol=1e-9)


def test_groups_weigh_what_they_hold() -> None:
    found = from_influence(np.zeros(1), np.zeros((4, 1)), np.array([3.0, 1.0, 1.0, 1.0]))
    assert found.n_effective[0] == pytest.approx(36 / 12)
    by_item = from_influence(np.zeros(2), np.zeros((4, 2)), np.array([[3.0, 1]] * 1 + [[1.0, 1]] * 3))
    np.testing.assert_allclose(by_item.n_effective, (3.0, 4.0))


def two_means(rng: np.random.Generator) -> tuple[Estimates, Estimates, np.ndarray, np.ndarray]:
    """Mean of 12 wide groups less mean of 40 narrow ones, as each set of groups sees it."""
    first, second = 3.0 * rng.standard_normal(12), rng.standard_normal(40)
    whole = np.array([first.mean() - second.mean()])
    parts = [
        leave_one_out(
            whole, (sign * (values.sum() - values) / (values.size - 1) + rest)[:, None], np.ones(values.size)
        )
        for values, sign, rest in ((first, 1.0, -second.mean()), (second, -1.0, first.mean()))
    ]
    return parts[0], parts[1], first, second


def test_two_sets_of_groups_are_welch() -> None:
    one, other, first, second = two_means(np.random.default_rng(3))
    found = side_by_side([one, other])
    _, p = stats.ttest_ind(first, second, equal_var=False)
    variance, more = stats.sem(first) ** 2, stats.sem(second) ** 2
    assert found.n_groups == 52
    assert found.standard_error[0] == pytest.approx(np.hypot(stats.sem(first), stats.sem(second)), rel=1e-9)
    assert found.n_effective[0] - 1 == pytest.approx(
        (variance + more) ** 2 / (variance**2 / 11 + more**2 / 39), rel=1e-9
    )
    assert p_values(found)[0] == pytest.approx(p, rel=1e-9)


def test_two_sets_of_groups_are_covered() -> None:
    rng, held, n_sets = np.random.default_rng(4), 0, 400
    for _ in range(n_sets):
        found = side_by_side(two_means(rng)[:2])
        low, high = bounds(found, critical_value(found))
        held += bool(low[0] <= 0.0 <= high[0])
    assert 0.92 <= held / n_sets <= 0.98


@pytest.mark.parametrize("sizes", [(0, 0), (1, 0), (1, 1), (0, 5), (1, 5)])
def test_a_set_without_enough_groups_gives_no_interval(sizes: tuple[int, int]) -> None:
    parts = [
        from_influence(np.zeros(1), np.ones((size, 1)) * np.arange(size)[:, None], np.ones(size))
        for size in sizes
    ]
    found = side_by_side(parts)
    assert found.n_groups == sum(sizes)
    for values in intervals(found, 0).values():
        assert np.isnan(values).all()


def test_a_difference_is_paired() -> None:
    rng = np.random.default_rng(5)
    shared, counts = rng.standard_normal((30, 1)), np.full((30, 1), 10.0)
    one, other = (ratios(counts * (shared + 0.1 * rng.standard_normal((30, 1))), counts) for _ in range(2))
    found = difference(one, other)
    apart = ((one.influence - other.influence) * 29)[:, 0]
    assert found.standard_error[0] == pytest.approx(stats.sem(apart), rel=1e-9)
    assert found.standard_error[0] < 0.3 * one.standard_error[0]


def test_bounds_on_another_scale_are_those_of_the_scale() -> None:
    influence = np.random.default_rng(6).standard_normal((30, 2)) * 0.01
    found = from_influence(np.array([0.8, 0.3]), influence, np.ones(30))
    critical = critical_value(found)
    low, high = transformed_bounds(found, critical, "logit")
    for place, value in enumerate(found.estimate):
        half = critical[place] * found.standard_error[place] / (value * (1 - value))
        centre = np.log(value / (1 - value))
        np.testing.assert_allclose(
            (low[place], high[place]), 1 / (1 + np.exp(-centre - half * np.array([-1, 1]))), rtol=1e-9
        )
    low, high = transformed_bounds(found, critical, "fisher")
    half = critical * found.standard_error / (1 - found.estimate**2)
    np.testing.assert_allclose(np.arctanh(high) - np.arctanh(low), 2 * half, rtol=1e-9)


def test_bounds_stay_inside_the_scale() -> None:
    influence = np.random.default_rng(7).standard_normal((30, 3))
    found = from_influence(np.array([0.999, 0.001, 0.5]), influence, np.ones(30))
    low, high = transformed_bounds(found, critical_value(found), "logit")
    assert (low >= 0).all()
    assert (high <= 1).all()


def test_never_wrong_in_few_documents_is_not_never_wrong() -> None:
    found = from_influence(np.array([1.0, 0.0]), np.zeros((30, 2)), np.ones(30))
    critical = critical_value(found)
    low, high = transformed_bounds(found, critical, "logit")
    share = 30 / (30 + critical[0] ** 2)  # Wilson's bound of 30 of 30
    np.testing.assert_allclose(low, (share, 0.0), atol=SAME)
    np.testing.assert_allclose(high, (1.0, 1 - share), atol=SAME)


def test_p_values_are_those_of_a_t_test() -> None:
    values = 0.3 + np.random.default_rng(8).standard_normal((25, 3))
    found = from_influence(values.mean(axis=0), (values - values.mean(axis=0)) / 24, np.ones(25))
    _, theirs = stats.ttest_1samp(values, 0.0)
    np.testing.assert_allclose(p_values(found), np.asarray(theirs), rtol=1e-9)
    _, theirs = stats.ttest_1samp(values, 0.2, alternative="greater")
    np.testing.assert_allclose(p_values(found, 0.2, one_sided=True), np.asarray(theirs), rtol=1e-9)


def test_p_of_no_spread() -> None:
    still = from_influence(np.array([0.5, 0.6]), np.zeros((25, 2)), np.ones(25))
    p = p_values(still, 0.5)
    assert np.isnan(p[0])
    assert p[1] == 0.0


def test_holm_is_that_of_statsmodels() -> None:
    for seed in range(20):
        p = np.random.default_rng(seed).random(12) ** 3
        p[3] = p[7]
        np.testing.assert_allclose(holm(p), np.asarray(multipletests(p, method="holm")[1], float), rtol=SAME)
    gaps = np.array([0.01, np.nan, 0.04])
    np.testing.assert_array_equal(holm(gaps), (0.02, np.nan, 0.04))
    assert holm(np.empty(0)).size == 0


def test_a_family_is_wider_than_its_members() -> None:
    found = from_influence(np.zeros(6), np.random.default_rng(9).standard_normal((40, 6)), np.ones(40))
    bound = intervals(found, 0)
    assert set(bound) == {"lo", "hi", "sim_lo", "sim_hi"}
    assert (bound["sim_lo"] < bound["lo"]).all()
    assert (bound["sim_hi"] > bound["hi"]).all()
    for name, values in intervals(found, 0).items():
        np.testing.assert_array_equal(values, bound[name])


@pytest.mark.parametrize(
    ("low", "high", "margin", "n_groups", "verdict"),
    [
        (0.51, 0.60, 0.01, 40, "supported"),
        (0.51, 0.60, 0.01, MIN_GROUPS - 1, "too few documents"),
        (0.49, 0.505, 0.01, 40, "not supported"),
        (0.49, 0.505, 0.0, 40, "cannot tell"),
        (0.49, 0.52, 0.01, 40, "cannot tell"),
        (0.30, 0.40, 0.0, 40, "not supported"),
        (float("nan"), float("nan"), 0.01, 40, "cannot tell"),
    ],
)
def test_verdicts(low: float, high: float, margin: float, n_groups: int, verdict: str) -> None:
    assert verdict_above(low, high, 0.5, n_groups, margin) == verdict
