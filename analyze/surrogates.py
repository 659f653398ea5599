"""The surrogates of one layer: moments per fold in; one surrogate a fold, one for all rows, and their scores
out.

Alpha is the one with the smallest squared error pooled over folds. Cost: K + 1 eigendecompositions of d × d
and about ten d × d products a fold, in float64, and with `extras` about a third more; no row is read.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float64

from .curves import CurvePoint, Variant, learning_curve, rank_path, variants
from .moments import Moments, merge, merge_all, without
from .ridge import (
    AlphaRule,
    Spectrum,
    Surrogate,
    fitted_errors,
    path_errors,
    r_squared,
    solve,
    spectrum,
    squared_error,
    total_error,
)


@dataclass(frozen=True, slots=True)
class LayerMoments:
    """Moments of a layer's body rows: one value per fold of `fit`, one for `test`, and the sum of
    contributions over the body rows of `fit`; of its sink rows, one value for `fit` and one for `test`.
    """

    folds: tuple[Moments, ...]
    test: Moments
    contribution: Float64[np.ndarray, "target"] | None = None  # Σ c(y); None where c is a constant factor
    sinks: Moments | None = None  # None: not counted
    test_sinks: Moments | None = None


@dataclass(frozen=True, slots=True)
class LayerFit:
    """What is known of a layer once its moments are solved."""

    surrogates: tuple[Surrogate, ...]  # one per fold, left out; the last one is fitted on every fit row
    cv_errors: Float64[np.ndarray, "alpha"]  # Σ‖y − ŷ‖² over fit rows, out of fold
    r2_fit: float
    r2_cv: Float64[np.ndarray, "alpha"]
    chosen: int  # index into the alphas
    r2_test: float
    n_fit: int
    mean_contribution: Float64[np.ndarray, "target"] | None
    curve: tuple[CurvePoint, ...] = ()
    ranks: tuple[tuple[int, float], ...] = ()  # rank, R² on test
    variants: tuple[Variant, ...] = ()

    @property
    def full(self) -> Surrogate:
        return self.surrogates[-1]


def merge_layers(a: LayerMoments, b: LayerMoments) -> LayerMoments:
    """Moments of the rows of both, fold by fold."""
    contribution = None
    if a.contribution is not None and b.contribution is not None:
        contribution = a.contribution + b.contribution
    return LayerMoments(
        folds=tuple(merge(left, right) for left, right in zip(a.folds, b.folds, strict=True)),
        test=merge(a.test, b.test),
        contribution=contribution,
        sinks=_merge_known(a.sinks, b.sinks),
        test_sinks=_merge_known(a.test_sinks, b.test_sinks),
    )


def _merge_known(a: Moments | None, b: Moments | None) -> Moments | None:
    return None if a is None or b is None else merge(a, b)


def solve_layer(moments: LayerMoments, rules: Sequence[AlphaRule], *, extras: bool = False) -> LayerFit:
    """Surrogates of a layer for the best of the given alphas, and their scores.

    `extras`: the learning curve, the path over ranks and the variants too.
    """
    total = merge_all(list(moments.folds))
    held_in = [spectrum(without(total, fold)) for fold in moments.folds]
    everything = spectrum(total)
    cv_errors = sum((path_errors(fitted, everything, rules) for fitted in held_in), np.zeros(len(rules)))
    chosen = int(np.argmin(cv_errors))
    rule = rules[chosen]
    surrogates, full = [solve(fitted, rule) for fitted in held_in], solve(everything, rule)
    del held_in
    fit = LayerFit(
        surrogates=(*surrogates, full),
        cv_errors=cv_errors,
        r2_fit=r_squared(float(fitted_errors(everything, [rule])[0]), total.syy),
        r2_cv=np.array([r_squared(error, total.syy) for error in cv_errors]),
        chosen=chosen,
        r2_test=r_squared(squared_error(full, moments.test), total_error(moments.test, total.mean_y)),
        n_fit=total.n,
        mean_contribution=None if moments.contribution is None else moments.contribution / max(1, total.n),
    )
    return _with_extras(fit, moments, total, everything, rule) if extras else fit


def _with_extras(
    fit: LayerFit, moments: LayerMoments, total: Moments, everything: Spectrum, rule: AlphaRule
) -> LayerFit:
    with_sinks = None
    if moments.sinks is not None and moments.sinks.n:
        with_sinks = merge(total, moments.sinks)
    everyone = CurvePoint(len(moments.folds), 1.0, total.n, fit.full.alpha, fit.r2_fit, fit.r2_test)
    return replace(
        fit,
        curve=(*learning_curve(moments.folds, moments.test, rule, total.mean_y), everyone),
        ranks=rank_path(everything, rule, moments.test, total.mean_y),
        variants=variants(everything, fit.full, rule, with_sinks, moments.test, moments.test_sinks),
    )


def working_bytes(n_features: int, n_folds: int) -> int:
    """Peak of `solve_layer` beyond its argument: two d × d matrices kept per fold, and about eight for the
    one at work.
    """
    return (2 * n_folds + 8) * n_features * n_features * 8
