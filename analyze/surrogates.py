"""The surrogates of one layer: moments per fold in; one surrogate a fold, one for all rows, and their scores
out.

Alpha is the one with the smallest squared error pooled over folds. Cost: K + 1 eigendecompositions of d × d
and about ten d × d products a fold, in float64; no row is read.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64

from .moments import Moments, merge, merge_all, without
from .ridge import (
    AlphaRule,
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
    contributions over `fit`.
    """

    folds: tuple[Moments, ...]
    test: Moments
    contribution: Float64[np.ndarray, "target"] | None = None  # Σ c(y); None where c is a constant factor


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

    @property
    def full(self) -> Surrogate:
        return self.surrogates[-1]


def merge_layers(a: LayerMoments, b: LayerMoments) -> LayerMoments:
    """Moments of the blocks of both."""
    contribution = None
    if a.contribution is not None and b.contribution is not None:
        contribution = a.contribution + b.contribution
    folds = tuple(merge(left, right) for left, right in zip(a.folds, b.folds, strict=True))
    return LayerMoments(folds, merge(a.test, b.test), contribution)


def solve_layer(moments: LayerMoments, rules: Sequence[AlphaRule]) -> LayerFit:
    """Surrogates of a layer for the best of the given alphas, and their scores."""
    total = merge_all(list(moments.folds))
    held_in = [spectrum(without(total, fold)) for fold in moments.folds]
    everything = spectrum(total)
    cv_errors = sum((path_errors(fitted, everything, rules) for fitted in held_in), np.zeros(len(rules)))
    chosen = int(np.argmin(cv_errors))
    full, variance = solve(everything, rules[chosen]), total.syy
    return LayerFit(
        surrogates=(*(solve(fitted, rules[chosen]) for fitted in held_in), full),
        cv_errors=cv_errors,
        r2_fit=r_squared(float(fitted_errors(everything, rules[chosen : chosen + 1])[0]), variance),
        r2_cv=np.array([r_squared(error, variance) for error in cv_errors]),
        chosen=chosen,
        r2_test=r_squared(squared_error(full, moments.test), total_error(moments.test, total.mean_y)),
        n_fit=total.n,
        mean_contribution=None if moments.contribution is None else moments.contribution / max(1, total.n),
    )


def working_bytes(n_features: int, n_folds: int) -> int:
    """Peak of `solve_layer` beyond its argument: two d × d matrices kept per fold, and about eight for the
    one at work.
    """
    return (2 * n_folds + 8) * n_features * n_features * 8
