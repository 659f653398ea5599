"""Ridge surrogates from moments: centred scatters in, weights, held-out errors and conditions out; all in
float64.

ŷ = W x + b minimises (1/n) Σ‖y − W x − b‖² + alpha·(tr S/d)·‖W‖² with S = G/n: on sums, λ = alpha·tr(G)/d.
One eigendecomposition serves every alpha: with G = V diag(s) Vᵀ and B = VᵀC the weight is V diag(1/(s+λ)) B,
and the squared error on held-out moments is a quadratic form of diag(1/(s+λ)), so that each alpha costs O(d²)
once (VᵀC)(VᵀC)ᵀ is formed. Cost of a fold: one eigendecomposition and five d × d products. No row is needed
anywhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import scipy.linalg
from jaxtyping import Float32, Float64

from ..store import NotFinite
from .moments import Moments

# λ of the paper, added to unnormalised sums of squares.
PAPER_PENALTY: Final = 0.01
# Directions whose s + λ is below this share of the largest one hold rounding only; they get weight 0.
RANK_TOLERANCE: Final = 1e-15

AlphaRule = float | str


@dataclass(frozen=True, slots=True)
class Surrogate:
    """ŷ = weight @ x + bias, and what the needs are measured against: the mean and spread of y where it was
    fitted.
    """

    weight: Float32[np.ndarray, "target feature"]
    bias: Float32[np.ndarray, "target"]
    mean_y: Float64[np.ndarray, "target"]
    spread: float  # τ²: the mean of ‖y − ȳ‖² over the rows fitted
    alpha: float
    penalty: float
    condition: float

    def predict(self, x: Float32[np.ndarray, "token feature"]) -> Float32[np.ndarray, "token target"]:
        out = x @ self.weight.T
        out += self.bias
        return out


@dataclass(frozen=True, slots=True)
class Spectrum:
    """The eigendecomposition of one population's scatter, with its cross-scatter turned into that basis.

    It keeps two d × d matrices, not the two of the moments as well.
    """

    n: int
    mean_x: Float64[np.ndarray, "feature"]
    mean_y: Float64[np.ndarray, "target"]
    trace: float  # tr G
    syy: float
    values: Float64[np.ndarray, "component"]
    vectors: Float64[np.ndarray, "feature component"]
    projected: Float64[np.ndarray, "component target"]


def spectrum(moments: Moments) -> Spectrum:
    """G = V diag(values) Vᵀ and B = VᵀC."""
    if not np.isfinite(moments.cxx.sum() + moments.cxy.sum()):
        raise NotFinite(
            f"the moments of {moments.n} rows hold values that are not finite: no linear map can be fitted"
        )
    values, vectors = scipy.linalg.eigh(moments.cxx, driver="evd", check_finite=False)
    return Spectrum(
        moments.n,
        moments.mean_x,
        moments.mean_y,
        float(np.trace(moments.cxx)),
        moments.syy,
        np.maximum(values, 0.0),
        vectors,
        vectors.T @ moments.cxy,
    )


def penalty(rule: AlphaRule, spectrum: Spectrum) -> float:
    """λ on sums for one alpha ("paper": the paper's constant)."""
    if rule == "paper":
        return PAPER_PENALTY
    return float(rule) * spectrum.trace / spectrum.mean_x.size


def inverse_values(spectrum: Spectrum, rule: AlphaRule) -> Float64[np.ndarray, "component"]:
    """1/(s + λ), 0 where that would be rounding."""
    return _inverse(spectrum.values, penalty(rule, spectrum))


def solve(spectrum: Spectrum, rule: AlphaRule) -> Surrogate:
    """The ridge surrogate of the spectrum's population."""
    lam = penalty(rule, spectrum)
    inverse = _inverse(spectrum.values, lam)
    # The last rotation runs in float32, as the weight is kept: V is orthonormal, so nothing cancels in it.
    scaled = (spectrum.projected * inverse[:, None]).astype(np.float32)
    weight = scaled.T @ spectrum.vectors.T.astype(np.float32)
    floor = float(spectrum.values.min()) + lam
    return Surrogate(
        weight=weight,
        bias=(spectrum.mean_y - weight.astype(np.float64) @ spectrum.mean_x).astype(np.float32),
        mean_y=spectrum.mean_y,
        spread=spectrum.syy / max(1, spectrum.n),
        alpha=lam * spectrum.mean_x.size / spectrum.trace if spectrum.trace > 0 else 0.0,
        penalty=lam,
        condition=(float(spectrum.values.max()) + lam) / floor if floor > 0 else float("inf"),
    )


def path_errors(
    fitted: Spectrum, whole: Spectrum, rules: Sequence[AlphaRule]
) -> Float64[np.ndarray, "alpha"]:
    """Σ‖y − ŷ‖² over the rows of `whole` that `fitted` has not seen, for the surrogate of each alpha.

    Their scatter about the fitted means is that of all rows less that of the fitted ones, which is diagonal
    in this basis: one product less than turning the held-out scatter itself.
    """
    dx, dy = whole.mean_x - fitted.mean_x, whole.mean_y - fitted.mean_y
    rotation = whole.vectors.T @ fitted.vectors
    shift, projected = fitted.vectors.T @ dx, fitted.projected
    linear = np.einsum("ct,ct->c", rotation.T @ whole.projected, projected)
    linear += whole.n * shift * (projected @ dy) - np.einsum("ct,ct->c", projected, projected)
    rotation *= np.sqrt(whole.values)[:, None]
    # One more row carries the shift of the means: no further pass over a d × d matrix.
    rotation = np.vstack([rotation, np.sqrt(whole.n) * shift])
    quadratic = rotation.T @ rotation
    np.einsum("cc->c", quadratic)[...] -= fitted.values
    quadratic *= projected @ projected.T
    total = whole.syy + whole.n * float(dy @ dy) - fitted.syy
    return _errors(fitted, rules, total, linear, quadratic)


def fitted_errors(spectrum: Spectrum, rules: Sequence[AlphaRule]) -> Float64[np.ndarray, "alpha"]:
    """Σ‖y − ŷ‖² over the fitted rows themselves: their scatter is diagonal in its own basis."""
    power = np.einsum("ct,ct->c", spectrum.projected, spectrum.projected)
    return _errors(spectrum, rules, spectrum.syy, power, np.diag(spectrum.values * power))


def _errors(
    spectrum: Spectrum, rules: Sequence[AlphaRule], total: float, linear: np.ndarray, quadratic: np.ndarray
) -> np.ndarray:
    """total − 2·Dᵀlinear + Dᵀ·quadratic·D with D = 1/(s + λ), for the λ of each alpha."""
    inverses = [_inverse(spectrum.values, penalty(rule, spectrum)) for rule in rules]
    errors = [total - 2.0 * (inverse @ linear) + inverse @ quadratic @ inverse for inverse in inverses]
    return np.maximum(np.array(errors), 0.0)


def squared_error(surrogate: Surrogate, moments: Moments) -> float:
    """Σ‖y − ŷ‖² over the rows of the moments, for a surrogate fitted anywhere."""
    return squared_errors(surrogate, [moments])[0]


def squared_errors(surrogate: Surrogate, populations: Sequence[Moments]) -> list[float]:
    """`squared_error` on each of several populations: WᵀW, the one product of this, serves them all."""
    weight, bias = surrogate.weight.astype(np.float64), surrogate.bias.astype(np.float64)
    gram, errors = weight.T @ weight, list[float]()
    for moments in populations:
        offset = moments.mean_y - weight @ moments.mean_x - bias
        error = moments.syy - 2.0 * np.einsum("tf,ft->", weight, moments.cxy)
        error += np.einsum("fg,fg->", gram, moments.cxx) + moments.n * (offset @ offset)
        errors.append(max(0.0, float(error)))
    return errors


def total_error(moments: Moments, mean_y: Float64[np.ndarray, "target"]) -> float:
    """Σ‖y − mean_y‖² over the rows of the moments: the denominator of R²."""
    shift = moments.mean_y - mean_y
    return moments.syy + moments.n * float(shift @ shift)


def r_squared(error: float, total: float) -> float:
    """1 − error/total; NaN where y does not vary at all."""
    return 1.0 - error / total if total > 0 else float("nan")


def _inverse(values: np.ndarray, lam: float) -> np.ndarray:
    shifted = values + lam
    usable = shifted > RANK_TOLERANCE * shifted.max(initial=0.0) * values.size
    return np.divide(1.0, shifted, out=np.zeros_like(shifted), where=usable)
