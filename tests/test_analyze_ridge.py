"""Surrogates equal scikit-learn's Ridge, choose the alpha that a grid search chooses, and find what is
planted.
"""

import numpy as np
import pytest
from nearline.analyze.moments import from_rows, merge_all, without
from nearline.analyze.ridge import (
    PAPER_PENALTY,
    fitted_errors,
    path_errors,
    r_squared,
    solve,
    spectrum,
    squared_error,
    total_error,
)
from nearline.analyze.settings import FitSettings
from nearline.analyze.surrogates import LayerMoments, solve_layer
from nearline.store import NotFinite
from sklearn.base import clone
from sklearn.linear_model import Ridge
from sklearn.model_selection import GridSearchCV, PredefinedSplit

# Moments are products in float32, scikit-learn here works on the same rows in float64.
WEIGHT_TOLERANCE = 1e-4
# Scores are ratios of large sums; only the rounding of the products is left in them.
SCORE_TOLERANCE = 2e-6
ALPHAS = FitSettings().alphas
N, D, K = 1500, 24, 5


def planted(seed: int, noise: float, n: int = N, d: int = D) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x with spreads over three decades, y linear in it plus noise, and folds of unequal size."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, d)) * np.logspace(0, -1.5, d) + rng.standard_normal(d)
    y = x @ rng.standard_normal((d, d)) + noise * rng.standard_normal((n, d)) + 3.0
    folds = rng.choice(K, n, p=[0.3, 0.25, 0.2, 0.15, 0.1])
    return x.astype(np.float32), y.astype(np.float32), folds


def parts(x: np.ndarray, y: np.ndarray, folds: np.ndarray) -> LayerMoments:
    return LayerMoments(tuple(from_rows(x[folds == k], y[folds == k]) for k in range(K)), from_rows(x, y))


class RelativeRidge(Ridge):
    """Ridge whose alpha is relative to the mean variance of its rows: our definition, fold by fold."""

    def fit(self, X: np.ndarray, y: np.ndarray, sample_weight: object = None) -> "RelativeRidge":
        relative, self.alpha = self.alpha, self.alpha * len(X) * float(X.var(axis=0).mean())
        super().fit(X, y, sample_weight)
        self.alpha = relative
        return self


@pytest.mark.parametrize("alpha", [1e-6, 1e-3, 1.0, 100.0])
@pytest.mark.parametrize("seed", [0, 1])
def test_weights_are_those_of_scikit_learn(alpha: float, seed: int) -> None:
    x, y, folds = planted(seed, noise=1.0)
    moments = parts(x, y, folds)
    total = merge_all(list(moments.folds))
    populations = [(total, np.full(N, True))]
    populations += [(without(total, fold), folds != k) for k, fold in enumerate(moments.folds)]
    for fitted, used in populations:
        ours = solve(spectrum(fitted), alpha)
        wide = x[used].astype(np.float64)
        theirs = Ridge(alpha=alpha * len(wide) * wide.var(axis=0).mean()).fit(
            wide, y[used].astype(np.float64)
        )
        scale = np.abs(theirs.coef_).max()
        np.testing.assert_allclose(ours.weight / scale, theirs.coef_ / scale, atol=WEIGHT_TOLERANCE)
        np.testing.assert_allclose(ours.bias, theirs.intercept_, atol=WEIGHT_TOLERANCE * np.abs(y).max())
        assert ours.penalty == pytest.approx(theirs.alpha, rel=1e-5)
        scatter = np.linalg.eigvalsh(len(wide) * np.cov(wide.T, bias=True)) + theirs.alpha
        assert ours.condition == pytest.approx(scatter[-1] / scatter[0], rel=1e-3)


@pytest.mark.parametrize(("seed", "noise"), [(0, 0.3), (1, 3.0), (2, 10.0), (3, 30.0)])
def test_alpha_is_the_one_a_grid_search_with_pooled_errors_chooses(seed: int, noise: float) -> None:
    x, y, folds = planted(seed, noise, n=200)
    wide_x, wide_y = x.astype(np.float64), y.astype(np.float64)

    def sum_of_squares(model: Ridge, held_x: np.ndarray, held_y: np.ndarray) -> float:
        """Its mean over folds is the pooled squared error, but for the sign and the factor K."""
        return -float(((held_y - model.predict(held_x)) ** 2).sum())

    split = PredefinedSplit(folds)
    search = GridSearchCV(RelativeRidge(), {"alpha": ALPHAS}, cv=split, scoring=sum_of_squares)
    search.fit(wide_x, wide_y)
    ours = solve_layer(parts(x, y, folds), ALPHAS)
    assert ALPHAS[ours.chosen] == search.best_params_["alpha"]
    np.testing.assert_allclose(ours.cv_errors, -K * search.cv_results_["mean_test_score"], rtol=1e-4)
    for fold, surrogate in enumerate(ours.surrogates[:-1]):
        used = folds != fold
        refitted = clone(search.best_estimator_).fit(wide_x[used], wide_y[used])
        scale = np.abs(refitted.coef_).max()
        np.testing.assert_allclose(surrogate.weight / scale, refitted.coef_ / scale, atol=WEIGHT_TOLERANCE)
    scale = np.abs(search.best_estimator_.coef_).max()
    np.testing.assert_allclose(
        ours.full.weight / scale, search.best_estimator_.coef_ / scale, atol=WEIGHT_TOLERANCE
    )


def test_errors_from_moments_are_errors_of_rows() -> None:
    x, y, folds = planted(5, noise=1.0)
    moments = parts(x, y, folds)
    total = merge_all(list(moments.folds))
    whole, fitted = spectrum(total), spectrum(without(total, moments.folds[0]))
    held = folds == 0
    for index, alpha in enumerate(ALPHAS):
        surrogate = solve(fitted, alpha)
        direct = float(((y[held] - surrogate.predict(x[held])).astype(np.float64) ** 2).sum())
        assert path_errors(fitted, whole, ALPHAS)[index] == pytest.approx(direct, rel=1e-4)
        assert squared_error(surrogate, moments.folds[0]) == pytest.approx(direct, rel=1e-4)
        inside = float(((y[~held] - surrogate.predict(x[~held])).astype(np.float64) ** 2).sum())
        assert fitted_errors(fitted, ALPHAS)[index] == pytest.approx(inside, rel=1e-4)


def test_r_squared_from_moments_is_that_of_rows() -> None:
    x, y, folds = planted(6, noise=1.0)
    other_x, other_y, _ = planted(6, noise=2.0)
    test = from_rows(other_x[::2], other_y[::2])
    fit = solve_layer(LayerMoments(parts(x, y, folds).folds, test), ALPHAS)
    mean = y.astype(np.float64).mean(axis=0)

    def of_rows(rows_x: np.ndarray, rows_y: np.ndarray) -> float:
        errors = (rows_y - fit.full.predict(rows_x)).astype(np.float64)
        return 1.0 - float((errors**2).sum() / ((rows_y.astype(np.float64) - mean) ** 2).sum())

    assert fit.r2_fit == pytest.approx(of_rows(x, y), abs=SCORE_TOLERANCE)
    assert fit.r2_test == pytest.approx(of_rows(other_x[::2], other_y[::2]), abs=SCORE_TOLERANCE)
    assert fit.r2_cv[fit.chosen] == max(fit.r2_cv)
    assert r_squared(squared_error(fit.full, test), total_error(test, mean)) == pytest.approx(fit.r2_test)
    assert fit.r2_fit > fit.r2_cv[fit.chosen]


def test_a_linear_map_is_found() -> None:
    x, y, folds = planted(7, noise=0.0)
    fit = solve_layer(parts(x, y, folds), ALPHAS)
    assert ALPHAS[fit.chosen] == min(ALPHAS)
    assert min(fit.r2_fit, fit.r2_cv[fit.chosen], fit.r2_test) > 0.9999


def test_the_paper_adds_its_constant_to_sums() -> None:
    x, y, _ = planted(8, noise=1.0)
    found = solve(spectrum(from_rows(x, y)), "paper")
    theirs = Ridge(alpha=PAPER_PENALTY).fit(x.astype(np.float64), y.astype(np.float64))
    assert found.penalty == PAPER_PENALTY
    scale = np.abs(theirs.coef_).max()
    np.testing.assert_allclose(found.weight / scale, theirs.coef_ / scale, atol=WEIGHT_TOLERANCE)
    assert solve(spectrum(from_rows(x, y)), found.alpha).penalty == pytest.approx(PAPER_PENALTY)


def test_features_that_never_vary_or_repeat_get_no_weight_of_their_own() -> None:
    x, y, _ = planted(9, noise=0.1)
    x[:, 3] = 2.0
    x[:, 5] = x[:, 4]
    found = solve(spectrum(from_rows(x, y)), 1e-6)
    assert np.isfinite(found.weight).all()
    np.testing.assert_allclose(found.weight[:, 3], 0.0, atol=1e-6)
    np.testing.assert_allclose(found.weight[:, 4], found.weight[:, 5], rtol=1e-2, atol=1e-3)


def test_an_output_that_never_varies_is_its_own_mean() -> None:
    x, y, folds = planted(10, noise=0.1)
    y[:] = 4.0
    fit = solve_layer(parts(x, y, folds), ALPHAS)
    assert np.isnan(r_squared(0.0, 0.0))
    np.testing.assert_allclose(fit.full.predict(x), y, atol=1e-5)


def test_values_that_are_not_finite_are_refused() -> None:
    x, y, _ = planted(11, noise=0.1)
    x[7, 2] = np.inf
    with np.errstate(invalid="ignore"), pytest.raises(NotFinite, match="not finite"):
        spectrum(from_rows(x, y))
