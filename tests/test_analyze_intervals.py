"""Intervals by group hold what they promise, families are wider than their members, verdicts follow the
bounds.
"""

import numpy as np
import pytest
from nearline.analyze.intervals import (
    MIN_GROUPS,
    bounds,
    critical_value,
    r_squared_bounds,
    ratios,
    share_bounds,
    simultaneous_value,
    stack,
    verdict_at_least,
)
from scipy import stats

N_GROUPS = 30
SIMULATIONS = 400
# With 400 simulations a true coverage of 95 % shows between 91 and 98 % all but once in ten thousand runs.
COVERED = (0.90, 0.98)


def simulated(seed: int, n_items: int, shared: float = 0.0) -> tuple[np.ndarray, np.ndarray, float]:
    """Values and counts of groups of very different size, each with an effect; the true ratio is 1."""
    rng = np.random.default_rng(seed)
    counts = np.ceil(rng.lognormal(4.0, 0.8, (N_GROUPS, n_items)))
    if shared:
        counts = np.broadcast_to(counts[:, :1], counts.shape)
    common = rng.gamma(8.0, 1 / 8, (N_GROUPS, 1))
    effect = shared * common + (1 - shared) * rng.gamma(8.0, 1 / 8, (N_GROUPS, n_items))
    noise = rng.standard_normal((N_GROUPS, n_items)) * np.sqrt(counts) * 0.5
    return effect * counts + noise, counts, 1.0


def test_a_mean_over_tokens_is_covered_at_its_level() -> None:
    values, counts, truth = simulated(0, SIMULATIONS)
    found = ratios(values, counts)
    low, high = bounds(found, critical_value(found))
    assert COVERED[0] <= np.mean((low <= truth) & (truth <= high)) <= COVERED[1]


def test_r_squared_is_covered_at_its_level() -> None:
    values, counts, truth = simulated(1, SIMULATIONS)
    found = ratios(np.abs(values) * 0.2, counts)
    low, high = r_squared_bounds(found, critical_value(found))
    assert COVERED[0] <= np.mean((low <= 1 - 0.2 * truth) & (1 - 0.2 * truth <= high)) <= COVERED[1]
    assert (high < 1).all()


def test_tokens_as_units_would_not_be_covered() -> None:
    """The control: an interval that takes tokens for independent fails on the same data."""
    values, counts, truth = simulated(0, SIMULATIONS)
    mean = values.sum(axis=0) / counts.sum(axis=0)
    half = 1.96 * 0.5 / np.sqrt(counts.sum(axis=0))
    assert np.mean(np.abs(mean - truth) <= half) < 0.5


def test_a_family_of_layers_is_covered_as_a_whole() -> None:
    """R² of eight layers on the same documents: a family with one interval beside the truth is missed."""
    together, apart = 0, 0
    n_layers, n_families = 8, 150
    for seed in range(n_families):
        values, counts, truth = simulated(100 + seed, n_layers, shared=0.5)
        found = ratios(np.abs(values) * 0.2, counts)
        for critical, joint in (
            (simultaneous_value(found, seed, draws=500), True),
            (critical_value(found), False),
        ):
            low, high = r_squared_bounds(found, critical)
            held = bool(((low <= 1 - 0.2 * truth) & (1 - 0.2 * truth <= high)).all())
            together, apart = together + (joint and held), apart + (not joint and held)
    # 500 families showed 93 %; the rest is the sampling error of 150.
    assert together / n_families >= 0.88
    assert apart < together - 0.1 * n_families


def test_simultaneous_is_wider_and_knows_dependence() -> None:
    values, counts, _ = simulated(3, 12)
    independent = ratios(values, counts)
    found = simultaneous_value(independent, seed=0)
    assert (found > critical_value(independent)).all()
    tail = (1 - 0.95 ** (1 / 12)) / 2
    np.testing.assert_allclose(found, stats.t.isf(tail, independent.n_effective - 1), rtol=0.15)
    values, counts, _ = simulated(3, 12, shared=1.0)
    dependent = ratios(values, counts)
    closer = simultaneous_value(dependent, seed=0)
    assert (closer >= critical_value(dependent)).all()
    assert (closer < stats.t.isf(tail, dependent.n_effective - 1)).all()
    np.testing.assert_array_equal(simultaneous_value(dependent, seed=0), closer)


def test_a_family_of_one_or_of_constants_is_pointwise() -> None:
    values, counts, _ = simulated(4, 1)
    alone = ratios(values, counts)
    assert simultaneous_value(alone, seed=0) == critical_value(alone)
    constant = ratios(np.full((30, 3), 2.0), np.full((30, 3), 4.0))
    np.testing.assert_array_equal(simultaneous_value(constant, seed=0), critical_value(constant))
    low, high = bounds(constant, critical_value(constant))
    np.testing.assert_array_equal(low, high)


def test_unequal_groups_count_as_fewer() -> None:
    counts = np.array([[900.0], *[[10.0]] * 29])
    uneven = ratios(counts * np.random.default_rng(0).random((30, 1)), counts)
    even = ratios(np.random.default_rng(0).random((30, 1)), np.ones((30, 1)))
    assert even.n_effective[0] == pytest.approx(30)
    assert uneven.n_effective[0] < 2
    assert critical_value(uneven)[0] > 3 * critical_value(even)[0]
    assert critical_value(even)[0] == pytest.approx(stats.t.ppf(0.975, 29))


def test_a_family_of_unequal_groups_is_covered() -> None:
    """Twelve independent items on documents of very unequal size: where a plain max-t falls short."""
    rng = np.random.default_rng(11)
    n_groups, n_items, n_families = 40, 12, 200
    held = 0
    for seed in range(n_families):
        weight = np.ceil(rng.lognormal(0, 1, (n_groups, 1)) * 200) * np.ones((1, n_items))
        found = ratios(weight * (1 + 0.3 * rng.standard_normal((n_groups, n_items))), weight)
        low, high = bounds(found, simultaneous_value(found, seed, draws=1000))
        held += bool(((low <= 1) & (1 <= high)).all())
    # At a true 95 %, 200 families show 91 % or less once in a hundred runs; the seed is fixed.
    assert 0.91 <= held / n_families <= 0.995


def test_all_of_a_few_documents_is_not_all() -> None:
    counts = np.full((26, 1), 50.0)
    whole = ratios(counts, counts)
    low, high = share_bounds(whole, critical_value(whole))
    z = stats.t.ppf(0.975, 25)
    assert high[0] == pytest.approx(1.0)
    assert low[0] == pytest.approx(26 / (26 + z**2))
    half = ratios(counts * np.random.default_rng(0).uniform(0.3, 0.7, (26, 1)), counts)
    low, high = share_bounds(half, critical_value(half))
    wald = bounds(half, critical_value(half))
    np.testing.assert_allclose((low, high), wald, atol=0.01)


def test_a_stacked_family_is_the_family() -> None:
    values, counts, _ = simulated(7, 3)
    apart = [ratios(values[:, [k]], counts[:, [k]]) for k in range(3)]
    together = ratios(values, counts)
    for name in ("estimate", "influence", "n_effective"):
        np.testing.assert_allclose(getattr(stack(apart), name), getattr(together, name), rtol=1e-12)


def test_a_family_may_miss_other_groups_at_each_layer() -> None:
    """A need that is missing in other documents at each layer: every layer keeps its own interval, one with
    too little for any has none, and simultaneous bounds hold.
    """
    values, counts, _ = simulated(8, 4)
    kept = (30, 22, 25, 1)
    apart = [ratios(values[-n:, [k]], counts[-n:, [k]]) for k, n in enumerate(kept)]
    apart.append(ratios(values[:0, [0]], counts[:0, [0]]))
    family = stack(apart)
    assert family.n_groups == 30
    for name in ("estimate", "standard_error", "n_effective"):
        alone = np.concatenate([getattr(part, name) for part in apart])
        np.testing.assert_allclose(getattr(family, name), alone, rtol=1e-12)
    low, high = bounds(family, simultaneous_value(family, seed=0))
    least, most = bounds(family, critical_value(family))
    assert (low[:3] < least[:3]).all()
    assert (high[:3] > most[:3]).all()
    assert np.isnan([low[3:], high[3:], least[3:], most[3:]]).all()


def test_the_standard_error_is_that_of_the_jackknife() -> None:
    values, counts, _ = simulated(5, 3)
    found = ratios(values, counts)
    left_out = np.array(
        [
            np.delete(values, g, axis=0).sum(axis=0) / np.delete(counts, g, axis=0).sum(axis=0)
            for g in range(N_GROUPS)
        ]
    )
    spread = ((left_out - left_out.mean(axis=0)) ** 2).sum(axis=0)
    np.testing.assert_allclose(found.standard_error, np.sqrt(spread * (N_GROUPS - 1) / N_GROUPS), rtol=1e-9)


def test_groups_without_rows_do_not_count_and_too_few_give_no_interval() -> None:
    values, counts, _ = simulated(6, 2)
    padded = ratios(np.vstack([values, np.zeros((4, 2))]), np.vstack([counts, np.zeros((4, 2))]))
    assert padded.n_groups == N_GROUPS
    np.testing.assert_array_equal(padded.standard_error, ratios(values, counts).standard_error)
    for n_groups in (0, 1):
        few = ratios(values[:n_groups], counts[:n_groups])
        assert np.isnan(bounds(few, critical_value(few))[0]).all()


def test_no_error_at_all_is_an_r_squared_of_one() -> None:
    exact = ratios(np.zeros((30, 1)), np.ones((30, 1)))
    low, high = r_squared_bounds(exact, critical_value(exact))
    assert (low[0], high[0]) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("low", "high", "n_groups", "verdict"),
    [
        (0.91, 0.95, 40, "supported"),
        (0.90, 0.95, 40, "supported"),
        (0.80, 0.89, 40, "not supported"),
        (0.80, 0.90, 40, "cannot tell"),
        (0.85, 0.95, 40, "cannot tell"),
        (float("nan"), float("nan"), 40, "cannot tell"),
        (0.91, 0.95, MIN_GROUPS, "supported"),
        (0.91, 0.95, MIN_GROUPS - 1, "too few documents"),
    ],
)
def test_verdicts(low: float, high: float, n_groups: int, verdict: str) -> None:
    assert verdict_at_least(low, high, 0.9, n_groups) == verdict
