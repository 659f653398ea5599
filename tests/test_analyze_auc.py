"""Areas under ROC curves are those of the plain definition, their intervals those of leaving groups out; they
hold their level at the truth, over families of layers, for paired differences and where nothing is there.
"""

import numpy as np
import pytest
from nearline.analyze.auc import auc, auc_within, average_precision
from nearline.analyze.influences import difference, intervals, transformed_bounds, verdict_above
from nearline.analyze.intervals import Estimates, critical_value, stack
from scipy.stats import norm
from sklearn.metrics import average_precision_score, roc_auc_score

N_GROUPS = 30
N_LAYERS = 12
MARGIN = 0.01
# Both sides count the same pairs in float64; only the order of sums differs.
SAME = 1e-12


def planted(
    rng: np.random.Generator,
    area: float,
    n_layers: int = 1,
    n_groups: int = N_GROUPS,
    dependence: float = 0.15,
    of_layers: float = 0.5,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Groups of very different size, labels that go by group, and scores (layer, token) whose area is `area`:
    normal, apart by √2·Φ⁻¹(area), with a share `dependence` of their variance between groups, half of it
    common to all layers.
    """
    group = np.repeat(np.arange(n_groups), np.ceil(rng.lognormal(4.0, 0.8, n_groups)).astype(int))
    label = np.sqrt(0.2) * rng.standard_normal(n_groups)[group] + np.sqrt(0.8) * rng.standard_normal(
        group.size
    )
    common = rng.standard_normal((1, n_groups))
    own = rng.standard_normal((n_layers, n_groups))
    shift = (np.sqrt(of_layers) * common + np.sqrt(1 - of_layers) * own)[:, group]
    noise = rng.standard_normal((n_layers, group.size))
    positive = label > 0
    apart = np.sqrt(2.0) * norm.ppf(area) * positive
    return apart + np.sqrt(dependence) * shift + np.sqrt(1 - dependence) * noise, positive, group


def areas(scores: np.ndarray, positive: np.ndarray, group: np.ndarray) -> Estimates:
    return stack([auc(score, positive, group) for score in scores])


def tied(n_groups: int = 12, n_tokens: int = 400) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    score = np.round(rng.standard_normal(n_tokens), 1).astype(np.float32)
    return score, rng.random(n_tokens) < 1 / (1 + np.exp(-score)), rng.integers(0, n_groups, n_tokens) * 7 + 3


def test_the_area_is_the_share_of_pairs_in_order() -> None:
    score, positive, group = tied()
    above, below = score[positive][:, None], score[~positive][None]
    pairs = np.mean((above > below) + 0.5 * (above == below))
    found = auc(score, positive, group)
    assert found.estimate[0] == pytest.approx(pairs, abs=SAME)
    assert found.estimate[0] == pytest.approx(roc_auc_score(positive, score), abs=SAME)
    assert auc(np.exp(score), positive, group).estimate[0] == found.estimate[0]
    assert auc(-score, positive, group).estimate[0] == pytest.approx(1 - pairs, abs=SAME)


def test_the_standard_error_is_that_of_leaving_groups_out() -> None:
    score, positive, group = tied()
    found = auc(score, positive, group)
    without = np.array(
        [roc_auc_score(positive[group != one], score[group != one]) for one in np.unique(group)]
    )
    np.testing.assert_allclose(found.influence[:, 0], found.estimate - without, atol=SAME)
    spread = np.sum((without - without.mean()) ** 2) * (without.size - 1) / without.size
    assert found.standard_error[0] == pytest.approx(np.sqrt(spread), rel=1e-9)


def test_it_is_near_the_variance_of_structural_components() -> None:
    """DeLong's components summed by group (Obuchowski 1997): right to first order in 1 / groups."""
    scores, positive, group = planted(np.random.default_rng(1), 0.7, n_groups=100)
    score = scores[0]
    order = (score[positive][:, None] > score[~positive][None]).astype(np.float64)
    m, n = order.shape
    area = order.mean()
    ten = np.bincount(group[positive], order.mean(axis=1) - area, 100)
    one = np.bincount(group[~positive], order.mean(axis=0) - area, 100)
    variance = 100 / 99 * np.sum((ten / m + one / n) ** 2)
    # The largest of 100 groups holds about 5 % of the tokens, and as much may its influence differ.
    assert auc(score, positive, group).standard_error[0] == pytest.approx(np.sqrt(variance), rel=0.03)


def pairs_within(score: np.ndarray, positive: np.ndarray, stratum: np.ndarray) -> float:
    """The plain definition: pairs of one stratum, each stratum's over its number of tokens."""
    ordered = pairs = 0.0
    for one in np.unique(stratum):
        above = score[(stratum == one) & positive][:, None]
        below = score[(stratum == one) & ~positive][None]
        size = above.size + below.size
        ordered += np.sum((above > below) + 0.5 * (above == below)) / size
        pairs += above.size * below.size / size
    return ordered / pairs


def test_the_area_within_strata_is_the_share_of_their_pairs_in_order() -> None:
    score, positive, group = tied()
    stratum = np.random.default_rng(1).integers(0, 30, score.size)
    found = auc_within(score, positive, group, stratum)
    assert found.estimate[0] == pytest.approx(pairs_within(score, positive, stratum), abs=SAME)
    without = [
        pairs_within(*(values[group != one] for values in (score, positive, stratum)))
        for one in np.unique(group)
    ]
    np.testing.assert_allclose(found.influence[:, 0], found.estimate - without, atol=SAME)
    one_stratum = auc_within(score, positive, group, np.full_like(group, 4))
    whole = auc(score, positive, group)
    for name in ("estimate", "influence", "n_effective"):
        np.testing.assert_allclose(getattr(one_stratum, name), getattr(whole, name), rtol=1e-9, atol=SAME)


def test_what_the_stratum_decides_has_no_area_within_it() -> None:
    """Any function of a token's type, however well it tells the labels apart."""
    score, positive, group = tied()
    stratum = np.round(score).astype(int)
    assert auc(stratum**3.0, positive, group).estimate[0] > 0.6
    found = auc_within(stratum**3.0, positive, group, stratum)
    assert found.estimate[0] == 0.5
    assert found.standard_error[0] == 0.0
    alone = auc_within(score, positive, group, np.arange(score.size))
    for nothing in (alone, auc_within(score[:0], positive[:0], group[:0], stratum[:0])):
        assert np.isnan(nothing.estimate[0])
        assert np.isnan(critical_value(nothing) * nothing.standard_error).all()


def test_average_precision_is_that_of_scikit_learn() -> None:
    score, positive, _ = tied()
    assert average_precision(score, positive) == pytest.approx(
        average_precision_score(positive, score), abs=SAME
    )
    assert np.isnan(average_precision(score, np.zeros(400, bool)))


@pytest.mark.parametrize("labels", [True, False])
def test_one_class_has_no_area(labels: bool) -> None:
    score, _, group = tied()
    found = auc(score, np.full(score.size, labels), group)
    for name, values in intervals(found, 0, "logit").items():
        assert np.isnan(values).all(), name
    assert np.isnan(found.estimate[0])
    assert found.n_groups == 12


def test_no_token_no_score_and_one_group_give_no_interval() -> None:
    score, positive, group = tied()
    empty = auc(score[:0], positive[:0], group[:0])
    assert np.isnan(empty.estimate[0])
    assert empty.n_groups == 0
    missing = auc(np.where(group == 3, np.nan, score), positive, group)
    assert np.isnan(missing.estimate[0])
    alone = auc(score, positive, np.zeros_like(group))
    assert alone.estimate[0] == auc(score, positive, group).estimate[0]
    for found in (
        empty,
        missing,
        alone,
        auc(score, group == 3, group),
    ):  # the last: one group is all easy ones
        assert np.isnan(transformed_bounds(found, critical_value(found), "logit")[0]).all()


def test_a_constant_score_says_nothing() -> None:
    _, positive, group = tied()
    found = auc(np.full(400, 0.3, np.float32), positive, group)
    assert (found.estimate[0], found.standard_error[0]) == (0.5, 0.0)
    bound = intervals(found, 0, "logit")
    assert verdict_above(bound["sim_lo"][0], bound["sim_hi"][0], 0.5, 40) == "cannot tell"


def test_a_few_groups_with_all_positives_count_as_few() -> None:
    rng = np.random.default_rng(0)
    group = np.repeat(np.arange(40), 25)
    rare = (group < 3) & (rng.random(1000) < 0.5)
    found = auc(rng.standard_normal(1000), rare, group)
    assert found.n_effective[0] < 12
    assert auc(rng.standard_normal(1000), rng.random(1000) < 0.5, group).n_effective[0] > 38


@pytest.mark.sampled
@pytest.mark.parametrize("area", [0.6, 0.8])
def test_areas_are_covered_at_their_level(area: float, request: pytest.FixtureRequest) -> None:
    """Twelve layers a data set, each by itself and all at once."""
    n_sets = 1000 if request.config.getoption("--run-long") else 30
    apart, together = 0.0, 0
    for seed in range(n_sets):
        found = areas(*planted(np.random.default_rng((seed, 1)), area, N_LAYERS))
        bound = intervals(found, seed, "logit")
        apart += np.mean((bound["lo"] <= area) & (area <= bound["hi"]))
        together += bool(((bound["sim_lo"] <= area) & (area <= bound["sim_hi"])).all())
    print(f"AUC {area}: {apart / n_sets:.3f} covered, families of {N_LAYERS} {together / n_sets:.3f}")
    assert 0.90 <= apart / n_sets <= 0.98
    assert together / n_sets >= 0.90


@pytest.mark.sampled
def test_nothing_is_found_where_there_is_nothing(request: pytest.FixtureRequest) -> None:
    """Scores that know nothing of the label: no layer of a family is "supported" in 95 % of data sets."""
    n_sets = 1000 if request.config.getoption("--run-long") else 60
    false = 0
    for seed in range(n_sets):
        scores, positive, group = planted(np.random.default_rng((seed, 2)), 0.5, N_LAYERS)
        found = areas(scores, positive, group)
        bound = intervals(found, seed, "logit")
        verdicts = [
            verdict_above(low, high, 0.5, found.n_groups, MARGIN)
            for low, high in zip(bound["sim_lo"], bound["sim_hi"], strict=True)
        ]
        false += "supported" in verdicts
    print(f"AUC 0.5: a layer is supported in {false / n_sets:.3f} of families of {N_LAYERS}")
    assert false / n_sets <= 0.05


@pytest.mark.sampled
@pytest.mark.parametrize("second", [0.6, 0.7])
def test_paired_differences_are_covered(second: float, request: pytest.FixtureRequest) -> None:
    """Two scores of the same tokens, correlated within and between groups; without a difference (0.7 and 0.7)
    this is the size of the test.
    """
    n_sets = 1000 if request.config.getoption("--run-long") else 200
    covered, width, unpaired = 0, 0.0, 0.0
    for seed in range(n_sets):
        rng = np.random.default_rng((seed, 3))
        scores, positive, group = planted(rng, 0.5, 3, of_layers=0.0)
        shared, *own = scores
        one, other = (
            np.sqrt(2.0) * norm.ppf(area) * positive + (2.0 * shared + noise) / np.sqrt(5.0)
            for area, noise in zip((0.7, second), own, strict=True)
        )
        larger, smaller = auc(one, positive, group), auc(other, positive, group)
        found = difference(larger, smaller)
        bound = intervals(found, seed)
        covered += bool(bound["lo"][0] <= 0.7 - second <= bound["hi"][0])
        width += found.standard_error[0]
        unpaired += np.hypot(larger.standard_error[0], smaller.standard_error[0])
    print(f"AUC 0.7 - {second}: {covered / n_sets:.3f} covered")
    assert 0.90 <= covered / n_sets <= 0.98
    assert width < 0.7 * unpaired


def test_tokens_as_units_would_not_be_covered() -> None:
    """The control: one group a token, on the same data."""
    held = 0
    for seed in range(60):
        scores, positive, group = planted(np.random.default_rng((seed, 1)), 0.8)
        found = auc(scores[0], positive, np.arange(group.size))
        low, high = transformed_bounds(found, critical_value(found), "logit")
        held += bool(low[0] <= 0.8 <= high[0])
    assert held / 60 < 0.75
