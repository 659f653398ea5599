"""Learning curve, ranks and variants from moments equal what the rows themselves give, and show what is
planted: a rank, a lack of rows, sinks that bend the fit.
"""

from dataclasses import replace

import numpy as np
import pytest
from nearline.analyze.curves import prefix_lengths
from nearline.analyze.moments import from_rows
from nearline.analyze.surrogates import LayerFit, LayerMoments, merge_layers, solve_layer
from sklearn.linear_model import Ridge

# Moments are float32 products of centred rows, the twins run in float64 on the rows; R² is a ratio of sums.
TOLERANCE = 5e-6
# At λ next to nothing a direction without variance holds rounding alone, and its share of R² is as uncertain.
UNREGULARISED = 1e-4
D, K = 20, 4
RULES = (1e-4, 1e-2)


class Rows:
    """Fit rows with folds, test rows, and sink rows of both: far out, with another linear map."""

    def __init__(self, seed: int = 0, rank: int = D, n: int = 1200, noise: float = 1.0) -> None:
        rng = np.random.default_rng(seed)
        self.map = rng.standard_normal((D, rank)) @ rng.standard_normal((rank, D))
        self.x, self.y = self._rows(rng, n, noise)
        self.folds = rng.choice(K, n, p=[0.4, 0.3, 0.2, 0.1])
        self.test = self._rows(rng, 700, noise)
        self.sinks = self._sinks(rng, 30)
        self.test_sinks = self._sinks(rng, 20)

    def _rows(self, rng: np.random.Generator, n: int, noise: float) -> tuple[np.ndarray, np.ndarray]:
        x = rng.standard_normal((n, D)) * np.logspace(0, -1, D) + rng.standard_normal(D)
        y = x @ self.map + noise * rng.standard_normal((n, D)) + 2.0
        return x.astype(np.float32), y.astype(np.float32)

    def _sinks(self, rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
        x = 30.0 + rng.standard_normal((n, D))
        return x.astype(np.float32), (-200.0 + rng.standard_normal((n, D))).astype(np.float32)

    @property
    def moments(self) -> LayerMoments:
        return LayerMoments(
            tuple(from_rows(self.x[self.folds == fold], self.y[self.folds == fold]) for fold in range(K)),
            from_rows(*self.test),
            sinks=from_rows(*self.sinks),
            test_sinks=from_rows(*self.test_sinks),
        )

    @property
    def fit(self) -> LayerFit:
        return solve_layer(self.moments, RULES, extras=True)


def ridge(x: np.ndarray, y: np.ndarray, rule: float | str) -> Ridge:
    wide = x.astype(np.float64)
    lam = 0.01 if rule == "paper" else float(rule) * len(x) * float(wide.var(axis=0).mean())
    return Ridge(alpha=lam).fit(wide, y.astype(np.float64))


def r2(y: np.ndarray, predicted: np.ndarray, mean: np.ndarray) -> float:
    return float(1 - np.square(y - predicted).sum() / np.square(y - mean).sum())


@pytest.fixture(scope="module")
def rows() -> Rows:
    return Rows()


def test_the_learning_curve_is_that_of_refitting_on_the_first_folds(rows: Rows) -> None:
    fit, mean = rows.fit, rows.y.mean(axis=0, dtype=np.float64)
    assert [point.n_folds for point in fit.curve] == [1, 2, 4]
    for point in fit.curve:
        chosen = rows.folds < point.n_folds
        model = ridge(rows.x[chosen], rows.y[chosen], RULES[fit.chosen])
        own = rows.y[chosen].mean(axis=0, dtype=np.float64)
        assert point.n_tokens == chosen.sum()
        assert point.fraction == pytest.approx(chosen.mean())
        assert point.r2_test == pytest.approx(
            r2(rows.test[1], model.predict(rows.test[0]), mean), abs=TOLERANCE
        )
        fitted = r2(rows.y[chosen], model.predict(rows.x[chosen]), own)
        assert point.r2_fit == pytest.approx(fitted, abs=TOLERANCE)
        assert point.alpha == pytest.approx(RULES[fit.chosen])
    last = fit.curve[-1]
    assert (last.r2_fit, last.r2_test) == pytest.approx((fit.r2_fit, fit.r2_test), abs=TOLERANCE)


def test_more_rows_help_where_rows_are_few() -> None:
    """In sample the few rows look better than they are."""
    curve = Rows(n=100, noise=3.0).fit.curve
    scores = [point.r2_test for point in curve]
    assert scores == sorted(scores)
    assert scores[-1] - scores[0] > 0.05
    gaps = [point.r2_fit - point.r2_test for point in curve]
    assert gaps == sorted(gaps, reverse=True)


def test_prefixes_double() -> None:
    assert prefix_lengths(2) == [1, 2]
    assert prefix_lengths(5) == [1, 2, 4, 5]
    assert prefix_lengths(8) == [1, 2, 4, 8]


def test_ranks_are_those_of_projecting_predictions_of_the_augmented_rows(rows: Rows) -> None:
    """The slow twin appends √λ·I to the centred rows, as Mukherjee and Zhu do, and takes an SVD of their
    fit."""
    fit, mean = rows.fit, rows.y.mean(axis=0, dtype=np.float64)
    model = ridge(rows.x, rows.y, RULES[fit.chosen])
    centre = rows.x.mean(axis=0, dtype=np.float64)
    augmented = np.vstack([rows.x - centre, np.sqrt(model.alpha) * np.eye(D)])
    _, _, right = np.linalg.svd(augmented @ model.coef_.T, full_matrices=False)
    assert [rank for rank, _ in fit.ranks] == [1, 2, 4, 8, 16, D]
    for rank, found in fit.ranks:
        weight = right[:rank].T @ right[:rank] @ model.coef_
        predicted = (rows.test[0] - centre) @ weight.T + mean
        assert found == pytest.approx(r2(rows.test[1], predicted, mean), abs=TOLERANCE)
    assert fit.ranks[-1][1] == pytest.approx(fit.r2_test, abs=TOLERANCE)


def test_a_planted_rank_shows() -> None:
    """Rank 4 is all there is: less loses much, more gains nothing."""
    found = dict(Rows(rank=4, noise=0.1).fit.ranks)
    assert found[4] - found[2] > 0.05
    assert abs(found[D] - found[4]) < 1e-3


def test_no_rank_predicts_better_than_ours_in_sample(rows: Rows) -> None:
    """Eckart and Young: of all rank-2 maps made from the fit, the one along the leading vectors leaves least
    error where it was fitted; random directions leave more."""
    moments = rows.moments
    everything = from_rows(rows.x, rows.y)
    ours = dict(solve_layer(replace(moments, test=everything), RULES, extras=True).ranks)[2]
    rng, mean = np.random.default_rng(1), rows.y.mean(axis=0, dtype=np.float64)
    model = ridge(rows.x, rows.y, RULES[rows.fit.chosen])
    for _ in range(20):
        basis = np.linalg.qr(rng.standard_normal((D, 2)))[0]
        predicted = (model.predict(rows.x) - mean) @ basis @ basis.T + mean
        assert ours > r2(rows.y, predicted, mean)


def test_variants_are_those_of_fitting_the_rows_that_way(rows: Rows) -> None:
    fit, mean = rows.fit, rows.y.mean(axis=0, dtype=np.float64)
    rule = RULES[fit.chosen]
    with_sinks = [np.vstack(pair) for pair in zip((rows.x, rows.y), rows.sinks, strict=True)]
    twins = {
        "default": ridge(rows.x, rows.y, rule),
        "paper": ridge(rows.x, rows.y, "paper"),
        "with_sinks": ridge(with_sinks[0], with_sinks[1], rule),
        "paper_with_sinks": ridge(with_sinks[0], with_sinks[1], "paper"),
    }
    assert {variant.name for variant in fit.variants} == set(twins)
    everything = [np.vstack(pair) for pair in zip(rows.test, rows.test_sinks, strict=True)]
    for variant in fit.variants:
        model, tolerance = twins[variant.name], UNREGULARISED if "paper" in variant.name else TOLERANCE
        found = variant.r2_body, variant.r2_sink, variant.r2_all
        for (x, y), score in zip((rows.test, rows.test_sinks, everything), found, strict=True):
            expected = r2(y, model.predict(x.astype(np.float64)), mean)
            assert score == pytest.approx(expected, abs=tolerance)
        assert variant.penalty == pytest.approx(model.alpha, rel=1e-5)
        assert variant.n_tokens == 1200 + (30 if "with_sinks" in variant.name else 0)
    by_name = {variant.name: variant for variant in fit.variants}
    assert by_name["default"].r2_body == pytest.approx(fit.r2_test, abs=TOLERANCE)
    # Thirty rows of 1,230 cost the body something and are worth a world at the sinks.
    assert by_name["with_sinks"].r2_sink > 0.9 > by_name["default"].r2_sink
    assert by_name["with_sinks"].r2_body < by_name["default"].r2_body


def test_without_sinks_the_other_variants_stand(rows: Rows) -> None:
    bare = replace(rows.moments, sinks=None, test_sinks=None)
    found = solve_layer(bare, RULES, extras=True).variants
    assert [variant.name for variant in found] == ["default", "paper"]
    assert all(np.isnan(variant.r2_sink) and np.isnan(variant.r2_all) for variant in found)
    assert [variant.r2_body for variant in found] == [variant.r2_body for variant in rows.fit.variants[:2]]


def test_extras_change_nothing_of_the_fit(rows: Rows) -> None:
    plain = solve_layer(rows.moments, RULES)
    assert (plain.curve, plain.ranks, plain.variants) == ((), (), ())
    assert plain.full.weight.tobytes() == rows.fit.full.weight.tobytes()


def test_features_without_variance_stop_nothing(rows: Rows) -> None:
    """A layer norm leaves one direction without variance; here three features are constant, and λ is the
    paper's."""
    rows = Rows()
    for x in (rows.x, rows.test[0]):
        x[:, :3] = 1.0
    fit = solve_layer(rows.moments, ("paper",), extras=True)
    assert fit.curve[-1].r2_test == pytest.approx(fit.r2_test, abs=UNREGULARISED)
    constant = replace(rows.moments, folds=tuple(from_rows(0 * rows.x, 0 * rows.y) for _ in range(K)))
    for point in solve_layer(constant, (1e-4,), extras=True).curve:
        assert np.isnan(point.r2_fit)
        assert point.r2_test < 1e-6  # the mean of nothing, or worse


def test_merging_layers_merges_every_part(rows: Rows) -> None:
    """Halves of the rows, joined, score as all of them; what one half did not count is not made up."""
    one, two = Rows(seed=1), Rows(seed=2)
    merged = merge_layers(one.moments, two.moments)
    assert merged.sinks is not None
    assert merged.test_sinks is not None
    assert (merged.sinks.n, merged.test_sinks.n) == (60, 40)
    assert sum(fold.n for fold in merged.folds) == 2400
    both = from_rows(np.vstack([one.sinks[0], two.sinks[0]]), np.vstack([one.sinks[1], two.sinks[1]]))
    np.testing.assert_allclose(merged.sinks.cxy, both.cxy, rtol=1e-4, atol=1e-4 * np.abs(both.cxy).max())
    assert merge_layers(one.moments, replace(two.moments, sinks=None)).sinks is None
