"""Do token needs carry over to another corpus? Every statistic against its slow twin, planted correlations
are covered, and noise is never taken for an answer: neither for transfer nor for its absence.
"""

from typing import Any

import numpy as np
import pytest
from helpers_nofly import Design, correlated, noisy, occurrences, of_types, planted, without_group
from nearline.analyze.intervals import MIN_GROUPS, bounds, critical_value
from nearline.analyze.nofly_family import TRANSFERS, disattenuated, family_bounds, fieller, reliable, verdict
from nearline.analyze.nofly_statistics import ITEMS, MIN_TYPES, Comparison, compare, nothing
from nearline.analyze.token_means import TokenSums, cells_of, chosen_sums
from scipy import stats

# Sums in another order, differences of sums of squares: rounding only.
ROUNDING = 1e-9
# Of 95 % intervals at interior truths, as promised.
COVERED = (0.90, 0.98)
FALSE_VERDICTS = 0.05
SMALL = Design(n_types=40, n_groups=12, occurrences=14.0)


def cross_group_product(one: TokenSums, kind: int, shift: float) -> float:
    """Mean product over pairs of occurrences of a type in different groups: one pair after another."""
    cells = [
        (count, total - shift * count)
        for k, count, total in zip(one.type, one.count, one.total, strict=True)
        if k == kind
    ]
    products = pairs = 0.0
    for i, (n_i, s_i) in enumerate(cells):
        for j, (n_j, s_j) in enumerate(cells):
            if i != j:
                products, pairs = products + s_i * s_j, pairs + n_i * n_j
    return products / pairs


def slow_square_of_mean(one: TokenSums, shift: float, without: int = -1) -> float:
    """The square of the mean over types, from pairs of different groups: types count alike, each by its
    occurrences in all groups, also when one group is left out.
    """
    occurrences = np.bincount(one.type, one.count, one.n_types)
    level, share = np.zeros((2, one.n_groups))
    for kind, group, count, total in zip(one.type, one.group, one.count, one.total, strict=True):
        if group != without:
            level[group] += (total - shift * count) / occurrences[kind] / one.n_types
            share[group] += count / occurrences[kind] / one.n_types
    different = ~np.eye(one.n_groups, dtype=bool)
    return np.outer(level, level)[different].sum() / np.outer(share, share)[different].sum()


def slow_true_variance(one: TokenSums, shift: float, square_of_mean: float) -> float:
    products = [cross_group_product(one, kind, shift) for kind in range(one.n_types)]
    return (sum(products) - one.n_types * square_of_mean) / (one.n_types - 1)


def slow_items(a: TokenSums, b: TokenSums, shifts: list[float], squares: list[float]) -> np.ndarray:
    x, y = a.means, b.means
    true = [
        slow_true_variance(one, shift, square)
        for one, shift, square in zip((a, b), shifts, squares, strict=True)
    ]
    return np.array([stats.pearsonr(x, y)[0], np.cov(x, y)[0, 1], *true])


def test_statistics_are_those_of_the_slow_formulas() -> None:
    ((a, b),) = planted(0, 0.5, (0.5, 0.7), SMALL)
    found = compare(a, b)
    shifts = [one.means.mean() for one in (a, b)]
    squares = [slow_square_of_mean(one, shift) for one, shift in zip((a, b), shifts, strict=True)]
    slow = slow_items(a, b, shifts, squares)
    np.testing.assert_allclose(found.estimates.estimate, slow, rtol=ROUNDING)
    assert found.spearman == pytest.approx(stats.spearmanr(a.means, b.means)[0], rel=ROUNDING)
    reliability = slow[2:] / [np.var(one.means, ddof=1) for one in (a, b)]
    np.testing.assert_allclose([found.reliability_a, found.reliability_b], reliability, rtol=ROUNDING)
    assert found.ceiling == pytest.approx(np.sqrt(reliability[0] * reliability[1]), rel=ROUNDING)
    assert found.r_disattenuated == pytest.approx(slow[1] / np.sqrt(slow[2] * slow[3]), rel=ROUNDING)


def test_influences_are_what_leaving_a_group_out_changes() -> None:
    """Recomputed from scratch without each group of either store; the correction of what is counted twice
    only scales them.
    """
    design = Design(n_types=30, n_groups=7, occurrences=9.0, clump=2.0)
    ((a, b),) = planted(1, 0.5, (0.5, 0.7), design)
    estimates = compare(a, b).estimates
    shifts = [one.means.mean() for one in (a, b)]
    squares = [slow_square_of_mean(one, shift) for one, shift in zip((a, b), shifts, strict=True)]
    whole = slow_items(a, b, shifts, squares)
    dropped = 0
    for side, offset in ((0, 0), (1, a.n_groups)):
        slow = []
        n_groups = (a, b)[side].n_groups
        for group in range(n_groups):
            pair = [a, b]
            pair[side] = without_group(pair[side], group)
            groups_of = np.bincount(pair[side].type, minlength=design.n_types)
            kept = np.flatnonzero(groups_of >= 2)
            dropped += design.n_types - kept.size
            left = list(squares)
            left[side] = slow_square_of_mean((a, b)[side], shifts[side], group)
            reduced = [of_types(one, kept) for one in pair]
            slow.append(whole - slow_items(reduced[0], reduced[1], shifts, left))
        influence = np.array(slow) - np.mean(slow, axis=0)
        found = estimates.influence[offset : offset + n_groups]
        for item, name in enumerate(ITEMS):
            scale = (found[:, item] @ influence[:, item]) / (influence[:, item] @ influence[:, item])
            np.testing.assert_allclose(found[:, item], scale * influence[:, item], atol=1e-9, err_msg=name)
    assert dropped > 0  # types that would be left in one group took part


def test_the_true_variance_is_what_random_halves_agree_on() -> None:
    """DESIGN's definition: the covariance of half-means, averaged over random splits of the documents.

    Where all documents have as many occurrences of each type the two agree exactly but for the sampling of
    splits; where they do not, both are without bias and only their weights differ.
    """
    rng = np.random.default_rng(2)
    n_types, n_groups, n_splits = 60, 10, 400
    count = np.full((n_types, n_groups), 3)
    one = noisy(rng, count, correlated(rng, n_types, 0.0)[0], 0.5)
    table = one.total.reshape(n_types, n_groups)
    halves = []
    for _ in range(n_splits):
        order = rng.permutation(n_groups)
        a, b = (
            table[:, part].sum(axis=1) / count[:, part].sum(axis=1)
            for part in (order[: n_groups // 2], order[n_groups // 2 :])
        )
        halves.append(np.cov(a, b)[0, 1])
    found = compare(one, one).estimates.estimate[ITEMS.index("true_variance_a")]
    error = np.std(halves) / np.sqrt(n_splits)
    assert found == pytest.approx(np.mean(halves), abs=4 * error)
    assert error < 0.02 * found
    assert np.var(one.means, ddof=1) > 1.5 * found  # the variance of the means is no estimate of it


def test_the_true_variance_has_no_bias_with_unequal_documents() -> None:
    found = [compare(*planted(seed, 0.5, (0.2, 0.7))[0]).estimates.estimate for seed in range(60)]
    mean, error = np.mean(found, axis=0), np.std(found, axis=0) / np.sqrt(len(found))
    for item, truth in (("covariance", 0.5), ("true_variance_a", 1.0), ("true_variance_b", 1.0)):
        assert mean[ITEMS.index(item)] == pytest.approx(truth, abs=3.5 * error[ITEMS.index(item)])


def test_one_document_of_half_the_rows_adds_nothing_to_the_true_variance() -> None:
    """Its level is in the mean over types with another weight than in the products: M² less its variance, in
    the place of pairs of different groups, finds 1.5 here.
    """
    n_types, n_groups, level = 150, 31, 2.0
    found = []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        count = rng.poisson(np.where(np.arange(n_groups) == 0, 60.0, 2.0), (n_types, n_groups))
        kind, group = np.nonzero(count)
        n = count[kind, group].astype(np.float64)
        mean = correlated(rng, n_types, 0.0)[0][kind] + level * rng.standard_normal(n_groups)[group]
        total = n * mean + np.sqrt(n) * rng.standard_normal(n.size)
        sums = TokenSums(kind, group, n, total, n_types, n_groups)
        found.append(compare(sums, sums).estimates.estimate[ITEMS.index("true_variance_a")])
    assert np.mean(found) == pytest.approx(1.0, abs=3.5 * np.std(found) / np.sqrt(40))
    assert np.std(found) / np.sqrt(40) < 0.05


def half_reliability(one: TokenSums, first: np.ndarray, sums: np.ndarray) -> float:
    """Correlation over types of the means of two halves; `first`, `sums`: counts and sums of one half by
    cell.
    """
    halves = [
        np.bincount(one.type, part, one.n_types) / np.bincount(one.type, count, one.n_types)
        for part, count in ((sums, first), (one.total - sums, one.count - first))
    ]
    return float(np.corrcoef(halves[0], halves[1])[0, 1])


def by_occurrences(one: TokenSums, rng: np.random.Generator) -> float:
    """Halves of a corpus's occurrences, whatever documents they are in, each a normal draw of variance 1."""
    first = rng.binomial(one.count.astype(int), 0.5)
    noise = np.sqrt(first * (one.count - first) / one.count) * rng.standard_normal(first.size)
    r = half_reliability(one, first, one.total * first / one.count + noise)
    return 2 * r / (1 + r)  # of the whole: Spearman and Brown


def by_half_of_groups(one: TokenSums, rng: np.random.Generator) -> float:
    """Halves of the documents, but taken for the reliability of the whole."""
    inside = rng.permutation(one.n_groups)[one.group] % 2 == 0
    return half_reliability(one, inside * one.count, inside * one.total)


def test_ratios_without_cross_group_pairs_are_wrong_where_ours_is_right() -> None:
    """Types have a level of their own in each document, which is no trait: halves of occurrences share it,
    and the ratio comes out too small. Halves of documents are less reliable than the whole: the ratio comes
    out above 1, as the 1.63 of a first attempt did.
    """
    design = Design(n_types=200, n_groups=40, occurrences=120.0)
    rng = np.random.default_rng(3)
    found: dict[str, list[float]] = {"ours": [], "occurrences": [], "groups": []}
    for _ in range(20):
        sums = []
        for truth in correlated(rng, design.n_types, 0.9):
            kind, group = np.nonzero(count := 1 + occurrences(rng, design))
            n = count[kind, group].astype(np.float64)
            level = truth[kind] + 8.0 * rng.standard_normal(kind.size)  # of the type in this document
            total = n * level + np.sqrt(n) * rng.standard_normal(kind.size)
            sums.append(TokenSums(kind, group, n, total, design.n_types, design.n_groups))
        comparison = compare(sums[0], sums[1])
        r = float(comparison.estimates.estimate[0])
        found["ours"].append(comparison.r_disattenuated)
        for name, reliability in (("occurrences", by_occurrences), ("groups", by_half_of_groups)):
            product = np.prod([reliability(one, rng) for one in sums])
            found[name].append(r / np.sqrt(product) if product > 0 else np.nan)
    mean = {name: float(np.nanmean(values)) for name, values in found.items()}
    print(mean)
    error = np.std(found["ours"]) / np.sqrt(20)
    assert mean["ours"] == pytest.approx(0.9, abs=3 * error)
    assert mean["occurrences"] < 0.6
    assert mean["groups"] > 1.2


def judged(layers: list[Comparison], n_groups: int, p: float = 0.0) -> list[str]:
    """Verdicts of a family; p = 0 leaves the permutation test out, which only ever takes verdicts away."""
    columns = family_bounds(layers, 0)
    told = reliable(layers, 0)
    return [
        verdict(low, high, p, bool(ok), layer.n_types, n_groups)
        for low, high, ok, layer in zip(
            columns["r_disattenuated_sim_lo"], columns["r_disattenuated_sim_hi"], told, layers, strict=True
        )
    ]


def covered(
    r: float, reliability: tuple[float, float], design: Design, n_sets: int, first: int = 0
) -> tuple[float, float, dict[str, int]]:
    """Share of intervals that hold r (no bounds: not counted), share with bounds, verdicts."""
    held, bounded, verdicts = 0, 0, dict[str, int]()
    for seed in range(first, first + n_sets):
        found = compare(*planted(seed, r, reliability, design)[0])
        low, high = fieller(found, float(critical_value(disattenuated([found]))[0]))
        if np.isfinite(low):
            bounded += 1
            held += low <= r <= high
        (said,) = judged([found], design.n_groups)
        verdicts[said] = verdicts.get(said, 0) + 1
    return held / max(bounded, 1), bounded / n_sets, verdicts


CASES = {
    # r, reliabilities, types: more types where means are noisier, so that intervals have bounds
    "r .3, rel .7 .7": (0.3, (0.7, 0.7), Design(n_groups=30)),
    "r .6, rel .7 .7": (0.6, (0.7, 0.7), Design(n_groups=30)),
    "r .3, rel .2 .7": (0.3, (0.2, 0.7), Design(n_types=800)),
    "r .6, rel .2 .7": (0.6, (0.2, 0.7), Design(n_types=800)),
    "r .6, rel .2 .2": (0.6, (0.2, 0.2), Design(n_types=1000, n_groups=60)),
    "r 0, rel .5 .5": (0.0, (0.5, 0.5), Design(n_types=500)),
}


@pytest.mark.sampled
@pytest.mark.parametrize("case", CASES)
def test_planted_correlations_are_covered(case: str, request: pytest.FixtureRequest) -> None:
    r, reliability, design = CASES[case]
    long = request.config.getoption("--run-long")
    n_sets = 500 if long else 24
    share, bounded, verdicts = covered(r, reliability, design, n_sets)
    print(f"{case}: covered {share:.3f} of {bounded * n_sets:.0f} with bounds of {n_sets}; {verdicts}")
    if long:
        assert COVERED[0] <= share <= COVERED[1]
    # Of 24 intervals at 95 %, five or more are missed once in a hundred and fifty such samples.
    assert share >= 20 / 24
    assert bounded >= 0.9


def test_a_joint_interval_of_layers_is_wider_and_uses_the_same_documents() -> None:
    layers = [compare(*pair) for pair in planted(4, 0.5, (0.7, 0.7), layers=6)]
    found = family_bounds(layers, 0)
    inner = found["r_disattenuated_hi"] - found["r_disattenuated_lo"]
    outer = found["r_disattenuated_sim_hi"] - found["r_disattenuated_sim_lo"]
    assert (outer > inner).all()
    alone = family_bounds(layers[:1], 0)
    assert (
        alone["r_disattenuated_sim_lo"][0] == alone["r_disattenuated_lo"][0] == found["r_disattenuated_lo"][0]
    )


@pytest.mark.long
def test_a_family_of_layers_is_covered_as_a_whole() -> None:
    n_sets, together, apart = 300, 0, 0
    for seed in range(n_sets):
        layers = [compare(*pair) for pair in planted(seed, 0.5, (0.6, 0.7), Design(n_types=150), layers=6)]
        found = family_bounds(layers, 0)
        for prefix in ("sim_", ""):
            low, high = (found[f"r_disattenuated_{prefix}{end}"] for end in ("lo", "hi"))
            held = bool(((low <= 0.5) & (0.5 <= high)).all())
            together, apart = together + (held and prefix == "sim_"), apart + (held and not prefix)
    print(f"six layers: all covered in {together} of {n_sets}, with one-layer intervals in {apart}")
    assert COVERED[0] <= together / n_sets
    assert apart < together


@pytest.mark.sampled
@pytest.mark.parametrize("reliability", [(0.0, 0.0), (0.7, 0.0), (0.0, 0.7)])
def test_noise_reads_cannot_tell(reliability: tuple[float, float], request: pytest.FixtureRequest) -> None:
    """In both stores or in one: neither "carries over" nor "does not"."""
    long = request.config.getoption("--run-long")
    n_sets = 600 if long else 40
    *_, verdicts = covered(0.0, reliability, Design(n_groups=30), n_sets, first=9000)
    false = (n_sets - verdicts.get("cannot tell", 0)) / n_sets
    print(f"noise, reliabilities {reliability}: false verdicts {false:.3f} of {n_sets}; {verdicts}")
    # 40 sets at a true rate of 5 % show six or more in one of seventy such samples.
    assert false <= (FALSE_VERDICTS if long else 5 / 40)


@pytest.mark.sampled
def test_a_stable_trait_seen_through_noise_is_not_called_unstable(request: pytest.FixtureRequest) -> None:
    """The paper's mistake: r near 0 between noisy means, of a trait that is perfectly stable."""
    long = request.config.getoption("--run-long")
    n_sets = 400 if long else 12
    plain = []
    for reliability in ((0.2, 0.2), (0.05, 0.1)):
        design = Design(n_types=800, n_groups=30)
        verdicts: dict[str, int] = {}
        for seed in range(n_sets):
            found = compare(*planted(seed, 1.0, reliability, design)[0])
            plain.append(float(found.estimates.estimate[0]))
            (said,) = judged([found], design.n_groups)
            verdicts[said] = verdicts.get(said, 0) + 1
        print(f"stable trait, reliabilities {reliability}: r {np.mean(plain[-n_sets:]):.3f}; {verdicts}")
        wrong = verdicts.get("not supported", 0)
        assert wrong <= (0.01 * n_sets if long else 0)
    assert np.mean(plain) < 0.2


def test_a_trait_that_does_not_carry_over_is_called_so() -> None:
    """With reliable means: the verdict can be reached, in either direction."""
    for r, said in ((0.0, "not supported"), (0.8, "supported")):
        found = [compare(*planted(seed, r, (0.7, 0.7))[0]) for seed in range(5)]
        assert [judged([one], 40)[0] for one in found].count(said) >= 4


def test_verdicts_say_what_they_rest_on() -> None:
    known: dict[str, Any] = {"p_holm": 0.01, "reliable": True, "n_types": MIN_TYPES, "n_groups": MIN_GROUPS}

    def judge(low: float, high: float, **other: Any) -> str:
        return verdict(low, high, **{**known, **other})

    assert judge(0.1, 0.4) == "supported"
    assert judge(-0.1, TRANSFERS - 0.01) == "not supported"
    assert judge(-0.1, TRANSFERS) == "cannot tell"
    assert judge(float("nan"), float("nan")) == "cannot tell"
    assert judge(0.1, 0.9, p_holm=0.06) == "cannot tell"
    assert judge(0.1, 0.9, reliable=False) == "cannot tell"
    assert judge(-0.1, 0.1, reliable=False) == "cannot tell"
    assert judge(0.1, 0.9, n_types=MIN_TYPES - 1) == "cannot tell"
    assert judge(0.1, 0.9, n_groups=MIN_GROUPS - 1) == "too few documents"


def test_bounds_are_above_zero_exactly_where_the_covariance_is() -> None:
    """Fieller's bounds, so that the two cannot contradict each other."""
    for seed in range(20):
        found = compare(*planted(seed, 0.25, (0.5, 0.6), Design(n_types=100))[0])
        critical = float(critical_value(disattenuated([found]))[0])
        low, _ = fieller(found, critical)
        interval = bounds(found.estimates, np.full(len(ITEMS), critical))
        if np.isfinite(low):
            assert (low > 0) == (interval[0][ITEMS.index("covariance")] > 0)


def test_needs_that_do_not_vary_give_no_number_and_no_warning() -> None:
    ((a, b),) = planted(5, 0.5, (0.7, 0.7), SMALL)
    flat = TokenSums(a.type, a.group, a.count, 0.25 * a.count, a.n_types, a.n_groups)
    for pair in ((flat, b), (a, flat), (flat, flat)):
        found = compare(*pair)
        columns = family_bounds([found, nothing(3, a.n_groups + b.n_groups)], 0)
        assert np.isnan(columns["r_disattenuated_lo"]).all()
        assert judged([found], 40) == ["cannot tell"]


def test_cells_are_the_sums_of_a_loop() -> None:
    rng = np.random.default_rng(6)
    key, group, values = rng.integers(0, 9, 300) * 7, rng.integers(0, 5, 300), rng.standard_normal(300)
    cells = cells_of(key, group, 6)
    sums = cells.sums(values)
    for cell in range(cells.type.size):
        rows = (key == cells.types[cells.type[cell]]) & (group == cells.group[cell])
        assert cells.count[cell] == rows.sum()
        assert sums[cell] == pytest.approx(values[rows].sum(), rel=ROUNDING)
        assert (cells.of_row[rows] == cell).all()
    assert cells.n_groups == 6
    chosen = chosen_sums(cells, sums, np.array([7, 35, 56]))
    np.testing.assert_allclose(chosen.means, [values[key == kind].mean() for kind in (7, 35, 56)])
    assert chosen.group_rows.sum() == np.isin(key, (7, 35, 56)).sum()
