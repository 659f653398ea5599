"""The share of variance that token identity explains: its definition, pair by pair, and planted truths."""

import numpy as np
import pytest
from helpers_occurrences import Occurring, Plan, occurring
from hypothesis import given
from hypothesis import strategies as st
from nearline.analyze.identity import verdict_of
from nearline.analyze.influences import intervals
from nearline.analyze.intervals import Estimates, stack
from nearline.analyze.same_type import (
    Occurrences,
    epsilon_squared,
    occurrences,
    type_share,
    type_weighted_share,
)
from scipy import stats
from statsmodels.stats.oneway import anova_oneway

# Sums of a few hundred products in float64, in another order.
EXACT = 1e-10
# A true coverage of 95 % shows outside these all but once in ten thousand runs of 400.
COVERED = (0.90, 0.98)
# And below this once in a thousand runs of 40.
LEAST_OF_FEW = 0.85
FALSE_VERDICTS = 0.05
SHARES = (0.2, 0.5, 0.8)


def n_sets(request: pytest.FixtureRequest, few: int) -> int:
    return 400 if request.config.getoption("--run-long") else few


def of(data: Occurring) -> tuple[np.ndarray, Occurrences]:
    seen = occurrences(data.type, data.group, data.n_groups)
    return data.values[seen.rows], seen


def share_of(data: Occurring) -> Estimates:
    return type_share(*of(data))


# The definition, pair by pair


def pairwise_share(values: np.ndarray, types: np.ndarray, group: np.ndarray, by_type: bool = False) -> float:
    """Loops over all pairs of rows in different groups."""
    covered = np.array([len(set(group[types == one])) >= 2 for one in types], bool)
    values, types, group = values[covered], types[covered], group[covered]
    n_of = {one: int((types == one).sum()) for one in types.tolist()}
    weight = np.array([1.0 / n_of[one] if by_type else 1.0 for one in types.tolist()])
    products: dict[int, list[float]] = {one: [] for one in n_of}
    any_two = pairs = 0.0
    for i in range(values.size):
        for j in range(values.size):
            if group[i] == group[j]:
                continue
            any_two += weight[i] * weight[j] * values[i] * values[j]
            pairs += weight[i] * weight[j]
            if types[i] == types[j]:
                products[int(types[i])].append(values[i] * values[j])
    total = sum(1.0 if by_type else n for n in n_of.values())
    same = sum(float(np.mean(found)) * (1.0 if by_type else n_of[one]) for one, found in products.items())
    square = float((weight * values**2).sum())
    return (same / total - any_two / pairs) / (square / total - any_two / pairs)


def few_rows(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Seven groups, some types in two of them only, some in one, one frequent."""
    rng = np.random.default_rng(seed)
    types = np.concatenate([rng.integers(0, 8, 45), rng.integers(20, 30, 12), np.full(8, 99)])
    group = rng.integers(0, 7, types.size)
    return rng.standard_normal(types.size) + 0.3 * types % 3, types, group


@given(st.integers(0, 10_000))
def test_the_share_and_every_influence_are_the_definition(seed: int) -> None:
    values, types, group = few_rows(seed)
    seen = occurrences(types, group, 7)
    centred = values - values[seen.rows].mean()
    whole = pairwise_share(centred, types, group)
    left = [group != out for out in range(7)]
    without = np.array([pairwise_share(centred[kept], types[kept], group[kept]) for kept in left])
    found = type_share(values[seen.rows], seen)
    np.testing.assert_allclose(found.influence[:, 0], whole - without, atol=EXACT)
    assert found.estimate[0] == pytest.approx(7 * whole - 6 * without.mean(), abs=EXACT)
    weighted = pairwise_share(centred, types, group, by_type=True)
    assert type_weighted_share(values[seen.rows], seen) == pytest.approx(weighted, abs=EXACT)
    covered = [len(set(group[types == one])) >= 2 for one in types]
    assert seen.coverage == pytest.approx(np.mean(covered))
    assert seen.n_types == len(set(types[covered]))


def test_epsilon_squared_is_that_of_the_analysis_of_variance() -> None:
    values, seen = of(occurring(Plan(0.3), 1))
    types = seen.type[seen.pair]
    k, n = seen.n_types, values.size
    by_scipy = stats.f_oneway(*(values[types == one] for one in range(k))).statistic
    by_statsmodels = anova_oneway(values, groups=types, use_var="equal").statistic
    for f in (by_scipy, by_statsmodels):
        wanted = (k - 1) * (f - 1) / ((k - 1) * f + n - k)
        assert epsilon_squared(values, seen) == pytest.approx(wanted, rel=1e-9)


def test_a_shift_and_a_scale_of_the_values_change_nothing() -> None:
    data = occurring(Plan(0.5), 3)
    moved = Occurring(data.values * 7.0 - 4000.0, data.type, data.group, data.n_groups)
    np.testing.assert_allclose(share_of(moved).influence, share_of(data).influence, atol=1e-9)


# Planted truths


def coverage(plan: Plan, n: int, realised: bool = False) -> tuple[float, float]:
    """How often the interval holds the truth, and the mean estimate."""
    families = [share_of(occurring(plan, seed, realised=realised)) for seed in range(n)]
    bounds = [intervals(one, 0) for one in families]
    held = [found["lo"][0] <= plan.share <= found["hi"][0] for found in bounds]
    return float(np.mean(held)), float(np.mean([one.estimate[0] for one in families]))


@pytest.mark.sampled
@pytest.mark.parametrize("realised", [False, True])
@pytest.mark.parametrize("share", SHARES)
def test_a_planted_share_is_covered(
    share: float, realised: bool, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    n = n_sets(request, 40)
    held, mean = coverage(Plan(share), n, realised)
    assert mean == pytest.approx(share, abs=0.02)
    if n < 100:
        assert held >= LEAST_OF_FEW
        return
    with capsys.disabled():
        kind = "these occurrences" if realised else "all documents"
        print(f"\nidentity share {share} of {kind}: {n} sets, mean {mean:.3f}, covered {held:.3f}")
    assert COVERED[0] <= held <= COVERED[1]


@pytest.mark.long
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize(
    "harder",
    [{"spread": 1.3}, {"skewed": True}, {"document": 0.5, "neighbours": 0.3}, {"n_groups": 100}],
    ids=lambda one: "+".join(one),
)
def test_a_planted_share_is_covered_in_harder_corpora(
    share: float, harder: dict, capsys: pytest.CaptureFixture[str]
) -> None:
    """Very unequal documents; skewed effects and noise; most of the rest by document; many documents."""
    held, mean = coverage(Plan(share, **harder), 400)
    with capsys.disabled():
        print(f"\nidentity share {share} with {harder}: 400 sets, mean {mean:.3f}, covered {held:.3f}")
    assert COVERED[0] <= held <= COVERED[1]


def verdicts(plan: Plan, n: int, layers: int) -> dict[str, float]:
    """Shares of verdicts over n families of layers; a family counts by the first that is no "cannot tell"."""
    counted: dict[str, int] = {}
    for seed in range(n):
        data = occurring(plan, seed)
        seen = occurrences(data.type, data.group, data.n_groups)
        family = [type_share(data.values[seen.rows], seen)]
        for layer in range(1, layers):
            other = occurring(plan, seed + 100_000 * layer)
            again = occurrences(other.type, other.group, other.n_groups)
            family.append(type_share(other.values[again.rows], again))
        found = intervals(stack(family), 0)
        said = {
            verdict_of(low, sim_low, sim_high, data.n_groups)
            for low, sim_low, sim_high in zip(found["lo"], found["sim_lo"], found["sim_hi"], strict=True)
        }
        for one in said:
            counted[one] = counted.get(one, 0) + 1
    return {one: count / n for one, count in counted.items()}


BOUNDARIES = {
    "pure context": Plan(0.0, document=0.5, neighbours=0.5),
    "pure noise": Plan(0.0, document=0.0, neighbours=0.0),
    "context and topics": Plan(0.0, document=0.6, neighbours=0.2, topics=20.0),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", BOUNDARIES)
def test_without_token_identity_nothing_is_concluded(
    name: str, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither "supported" nor "not supported" is said of a whole family of layers, at most once in twenty."""
    n = n_sets(request, 10)
    found = verdicts(BOUNDARIES[name], n, layers=4)
    if n >= 100:
        with capsys.disabled():
            print(f"\n{name}: {n} families of 4 layers: {found}")
    wrong = found.get("supported", 0) + found.get("not supported", 0)
    assert wrong <= FALSE_VERDICTS
    assert found["cannot tell"] == 1.0


@pytest.mark.sampled
def test_pure_token_identity_is_seen(
    request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    n = n_sets(request, 10)
    found = {share: verdicts(Plan(share), n, layers=2) for share in (1.0, 0.95)}
    if n >= 100:
        with capsys.disabled():
            print(f"\npure token: {n} families of 2 layers: {found}")
    assert all(by_share == {"supported": 1.0} for by_share in found.values())


# What the naive estimators say of the same data


def without_documents(data: Occurring) -> np.ndarray:
    """Values less the mean of their document, the usual way to be rid of its effect."""
    sums = np.bincount(data.group, data.values) / np.bincount(data.group)
    return data.values - sums[data.group]


NAIVE = {
    "documents pass for tokens": (Plan(0.0, document=0.8, neighbours=0.1, topics=20.0), "plain", 0.2),
    "centred too high": (Plan(0.5, document=0.8, neighbours=0.1, topics=20.0), "centred", 0.65),
    "centred too low": (Plan(0.5, document=0.1, neighbours=0.1, topics=60.0, length=12.0), "centred", -0.4),
}


@pytest.mark.parametrize("name", NAIVE)
def test_naive_estimators_fail_where_pairs_in_different_documents_do_not(name: str) -> None:
    """The analysis of variance by type, as it stands and after taking out document means. The last number is
    a bound that its mean is beyond (negative: below).
    """
    plan, kind, beyond = NAIVE[name]
    naive, ours, held = [], [], []
    for seed in range(25):
        data = occurring(plan, seed)
        values, seen = of(data)
        taken = values if kind == "plain" else without_documents(data)[seen.rows]
        naive.append(epsilon_squared(taken, seen))
        share = type_share(values, seen)
        found = intervals(share, 0)
        ours.append(share.estimate[0])
        held.append(found["lo"][0] <= plan.share <= found["hi"][0])
    assert np.mean(naive) > beyond if beyond > 0 else np.mean(naive) < -beyond
    assert np.mean(ours) == pytest.approx(plan.share, abs=0.06)
    assert np.mean(held) >= LEAST_OF_FEW


def test_shuffled_types_explain_nothing() -> None:
    data = occurring(Plan(0.8), 11)
    shuffled = np.random.default_rng(0).permutation(data.type)
    found = intervals(share_of(Occurring(data.values, shuffled, data.group, data.n_groups)), 0)
    assert found["lo"][0] <= 0 <= found["hi"][0]
    assert found["hi"][0] < 0.1


# Edges


def test_types_of_one_group_and_no_rows_at_all_give_nothing() -> None:
    values, types, group = np.arange(6.0), np.arange(6), np.repeat([0, 1], 3)
    for kept in (slice(None), slice(0, 0)):
        seen = occurrences(types[kept], group[kept], 2)
        covered = values[kept][seen.rows]
        assert (seen.n_types, seen.coverage, covered.size) == (0, 0.0, 0)
        share = type_share(covered, seen)
        assert np.isnan(share.estimate).all()
        assert np.isnan(intervals(share, 0)["lo"]).all()
        assert np.isnan(epsilon_squared(covered, seen))
        assert np.isnan(type_weighted_share(covered, seen))


def test_a_constant_need_has_no_share() -> None:
    seen = occurrences(np.array([1, 1, 2, 2]), np.array([0, 1, 0, 1]), 2)
    assert np.isnan(type_share(np.full(4, 3.0), seen).estimate).all()
    assert np.isnan(epsilon_squared(np.full(4, 3.0), seen))


@pytest.mark.parametrize(
    ("low", "sim_low", "sim_high", "n_groups", "verdict"),
    [
        (0.6, 0.55, 0.9, 30, "supported"),
        (0.1, 0.05, 0.4, 30, "not supported"),
        (-0.1, -0.2, 0.1, 30, "cannot tell"),
        (0.01, -0.01, 0.2, 30, "cannot tell"),
        (0.4, 0.3, 0.7, 30, "cannot tell"),
        (float("nan"), float("nan"), float("nan"), 30, "cannot tell"),
        (0.6, 0.55, 0.9, 19, "too few documents"),
    ],
)
def test_verdicts(low: float, sim_low: float, sim_high: float, n_groups: int, verdict: str) -> None:
    assert verdict_of(low, sim_low, sim_high, n_groups) == verdict
