"""How good a surrogate is with fewer rows, with a lower rank, and fitted another way: moments in, R² out.

Everything comes from moments of the one pass; no row is read again. A learning curve takes the first folds:
whole groups in seeded order, so that fewer folds are a smaller sample of documents, not the same documents
cut short. Cost of a layer with d features and 5 folds: two eigendecompositions and about twelve d × d
products, beside the six and sixty of the surrogates themselves.

R² on test has one denominator throughout, Σ‖y − ȳ‖² about the mean of the rows that the default surrogate is
fitted on: what differs between two numbers is the error alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile
from typing import Final

import numpy as np
import scipy.linalg
from jaxtyping import Float64

from .moments import Moments, merge
from .ridge import (
    PAPER_PENALTY,
    AlphaRule,
    Spectrum,
    Surrogate,
    inverse_values,
    r_squared,
    solve,
    spectrum,
    squared_errors,
    total_error,
)

NAN: Final = float("nan")


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """The surrogate of the first `n_folds` folds."""

    n_folds: int
    fraction: float  # of the rows to fit
    n_tokens: int
    alpha: float
    r2_fit: float  # on its own rows
    r2_test: float


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to fit, scored on the body rows, the sink rows and all rows of test."""

    name: str
    n_tokens: int
    alpha: float
    penalty: float
    condition: float
    r2_body: float
    r2_sink: float
    r2_all: float


def learning_curve(
    folds: Sequence[Moments], test: Moments, rule: AlphaRule, mean_y: Float64[np.ndarray, "target"]
) -> tuple[CurvePoint, ...]:
    """R² of surrogates fitted on the first 1, 2, 4, … of the folds; on all of them it is the fit's own.

    `mean_y`: of all rows to fit. The relative alpha stays, so the penalty on sums shrinks with the rows.
    """
    lengths, n_rows = prefix_lengths(len(folds))[:-1], sum(fold.n for fold in folds)
    prefixes = list(accumulate(folds[: lengths[-1]], merge))
    total = total_error(test, mean_y)
    points: list[CurvePoint] = []
    for n_folds in lengths:
        prefix = prefixes[n_folds - 1]
        weight, lam = _ridge(prefix, rule)
        points.append(
            CurvePoint(
                n_folds=n_folds,
                fraction=prefix.n / max(1, n_rows),
                n_tokens=prefix.n,
                alpha=_relative(lam, prefix),
                r2_fit=r_squared(_fitted_error(weight, lam, prefix), prefix.syy),
                r2_test=r_squared(_error(weight, prefix, test), total),
            )
        )
    return tuple(points)


def prefix_lengths(n_folds: int) -> list[int]:
    """1, 2, 4, … below `n_folds`, and `n_folds`."""
    doubled = takewhile(lambda length: length < n_folds, (1 << power for power in range(n_folds)))
    return [*doubled, n_folds]


def rank_path(
    fitted: Spectrum, rule: AlphaRule, test: Moments, mean_y: Float64[np.ndarray, "target"]
) -> tuple[tuple[int, float], ...]:
    """(k, R² on test) of the surrogate reduced to rank k = 1, 2, 4, … and d.

    Reduced-rank ridge (Mukherjee & Zhu 2011; Izenman 1975 without penalty): Σ‖y − ŷ‖² + λ‖W‖² under rank k
    is smallest at U_k U_kᵀ W, where W is the ridge weight and U_k are the leading eigenvectors of
    W (G + λI) Wᵀ = Cᵀ (G + λI)⁻¹ C, the scatter of the fitted values with the rows that stand for the
    penalty. On test rows, with A and M the second moments of x with x and with y about the fitted means, the
    error falls by 2·uᵀWMu − uᵀWAWᵀu for each u taken in: one eigendecomposition gives every k.
    """
    inverse = inverse_values(fitted, rule)[:, None]
    root = fitted.projected * np.sqrt(inverse)
    _, vectors = scipy.linalg.eigh(root.T @ root, driver="evd", check_finite=False)
    vectors = vectors[:, ::-1]
    # Rotations run in float32, as in `solve`: nothing cancels in them.
    turned = vectors.T.astype(np.float32) @ (fitted.projected * inverse).T.astype(np.float32)
    weight = (turned @ fitted.vectors.T.astype(np.float32)).astype(np.float64)  # Uᵀ W
    dx, dy = test.mean_x - fitted.mean_x, test.mean_y - fitted.mean_y
    along, shift = weight @ dx, dy @ vectors
    linear = np.einsum("cf,fc->c", weight, test.cxy @ vectors) + test.n * along * shift
    quadratic = np.einsum("cf,cf->c", weight @ test.cxx, weight) + test.n * along * along
    gained = np.cumsum(2.0 * linear - quadratic)
    total, error = total_error(test, mean_y), test.syy + test.n * float(dy @ dy)
    return tuple((k, r_squared(error - float(gained[k - 1]), total)) for k in prefix_lengths(gained.size))


def variants(
    fitted: Spectrum,
    full: Surrogate,
    rule: AlphaRule,
    with_sinks: Moments | None,
    test: Moments,
    test_sinks: Moments | None,
) -> tuple[Variant, ...]:
    """The surrogate beside others: fitted on sink rows too, and with the paper's λ on sums, which is its rule
    with or without them.

    `full` is the default, fitted on the rows of `fitted` with `rule`; `with_sinks` has its rows and the sink
    rows of the same split. Where a store has no sink rows, or they were not counted, those numbers are NaN
    and those variants absent.
    """
    made = [("default", fitted, full), ("paper", fitted, solve(fitted, "paper"))]
    if with_sinks is not None:
        wide = spectrum(with_sinks)
        made += [("with_sinks", wide, solve(wide, rule)), ("paper_with_sinks", wide, solve(wide, "paper"))]
    populations = [rows for rows in (test, test_sinks) if rows is not None]
    totals = [total_error(rows, fitted.mean_y) for rows in populations]
    found: list[Variant] = []
    for name, of, surrogate in made:
        errors = squared_errors(surrogate, populations)
        scores = [r_squared(error, total) for error, total in zip(errors, totals, strict=True)]
        found.append(
            Variant(
                name=name,
                n_tokens=of.n,
                alpha=surrogate.alpha,
                penalty=surrogate.penalty,
                condition=surrogate.condition,
                r2_body=scores[0],
                r2_sink=scores[1] if test_sinks else NAN,
                r2_all=r_squared(sum(errors), sum(totals)) if test_sinks else NAN,
            )
        )
    return tuple(found)


def _ridge(moments: Moments, rule: AlphaRule) -> tuple[Float64[np.ndarray, "feature target"], float]:
    """(G + λI)⁻¹ C and λ; by Cholesky, a twentieth of an eigendecomposition, where that goes."""
    lam = PAPER_PENALTY if rule == "paper" else float(rule) * float(np.trace(moments.cxx)) / len(moments.cxx)
    shifted = moments.cxx.copy()
    np.einsum("ff->f", shifted)[...] += lam
    try:
        factor = scipy.linalg.cho_factor(shifted, lower=True, overwrite_a=True, check_finite=False)
    except np.linalg.LinAlgError:  # singular to rounding: the directions without variance get weight 0
        found = spectrum(moments)
        return found.vectors @ (found.projected * inverse_values(found, rule)[:, None]), lam
    return scipy.linalg.cho_solve(factor, moments.cxy, check_finite=False), lam


def _relative(lam: float, moments: Moments) -> float:
    trace = float(np.trace(moments.cxx))
    return lam * moments.mean_x.size / trace if trace > 0 else 0.0


def _fitted_error(weight: Float64[np.ndarray, "feature target"], lam: float, moments: Moments) -> float:
    """Σ‖y − ŷ‖² over the fitted rows: with (G + λI)W = C it is syy − tr(WᵀC) − λ‖W‖²."""
    explained = np.einsum("ft,ft->", weight, moments.cxy) + lam * np.einsum("ft,ft->", weight, weight)
    return max(0.0, moments.syy - float(explained))


def _error(weight: Float64[np.ndarray, "feature target"], fitted: Moments, rows: Moments) -> float:
    """Σ‖y − ŷ‖² over the rows of `rows`, for the weight fitted on those of `fitted`."""
    offset = rows.mean_y - fitted.mean_y - (rows.mean_x - fitted.mean_x) @ weight
    explained = np.einsum("ft,ft->", weight, rows.cxy)
    square = np.einsum("fg,fg->", weight @ weight.T, rows.cxx)
    return max(0.0, rows.syy - 2.0 * float(explained) + float(square) + rows.n * float(offset @ offset))
