"""How much of a need simple features of the token explain: a fitted study in, tables `regression` and
`regression_terms` out.

Ordinary least squares of each need on standardised `token_features`, on the fit and gate rows of `fit_on`
(needs of fit rows are out of fold, so both count). R² = 1 − Σ(need − plane)² / Σ(need − mean fitted need)² on
held-out rows of every store has intervals by group, simultaneous over layers. Coefficients are in units of
the need per standard deviation of the feature; features that do not vary, or repeat those before them, have
none (NaN). Cost: no activations; two passes over token columns and needs (`plane`).
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
from jaxtyping import Float, Int64

from .compute import Session
from .evidence import Evidence
from .intervals import (
    Estimates,
    bounds,
    critical_value,
    r_squared_bounds,
    simultaneous_value,
    stack,
    verdict_at_least,
)
from .plane import Plane, fit_plane, unexplained
from .population import FIT, GATE
from .results import to_table
from .token_features import TERMS, TokenFeatures, token_features

# The claim that is judged: the features explain at least this share of the need's variance.
EXPLAINED: Final = 0.1

Row = dict[str, Any]


def run(evidence: Evidence, session: Session) -> list[str]:
    """Write both tables; returns their paths inside the study. No worker is needed: columns are here."""
    features = {
        name: token_features(store.reader, store.population) for name, store in evidence.stores.items()
    }
    planes = {layer: _planes(evidence, features[evidence.fit_on], layer) for layer in evidence.layers}
    tables = {
        "regression": [
            row for name in evidence.stores for row in _rows(evidence, features[name], name, planes)
        ],
        "regression_terms": [
            row
            for layer, by_need in planes.items()
            for need, plane in by_need.items()
            for row in term_rows(evidence.fit_on, layer, need, plane)
        ],
    }
    return [evidence.study.write_table(name, to_table(name, rows)) for name, rows in tables.items()]


def _planes(evidence: Evidence, features: TokenFeatures, layer: int) -> dict[str, Plane]:
    """The regression of each need on what `fit_on` has to learn from."""
    population = evidence.fitted.population
    learned = np.flatnonzero(population.body & np.isin(population.split, (FIT, GATE)))
    needs = evidence.need_columns(layer, evidence.fit_on)
    return {
        need: fit_plane(features.of, values, population.group, _known(values, learned))
        for need, values in needs.items()
    }


def _known(need: Float[np.ndarray, "token"], rows: Int64[np.ndarray, "row"]) -> Int64[np.ndarray, "known"]:
    return rows[np.isfinite(need[rows])]


def _rows(
    evidence: Evidence, features: TokenFeatures, name: str, planes: Mapping[int, Mapping[str, Plane]]
) -> Iterator[Row]:
    """Rows of `regression` of one store."""
    population, tested = evidence.stores[name].population, evidence.test_rows(name)
    errors: dict[str, list[Estimates]] = {need: [] for need in evidence.needs}
    n_tokens: list[dict[str, int]] = []
    for layer in evidence.layers:
        needs = evidence.need_columns(layer, name)
        rows = {need: _known(values, tested) for need, values in needs.items()}
        n_tokens.append({need: int(found.size) for need, found in rows.items()})
        for need, values in needs.items():
            plane = planes[layer][need]
            errors[need].append(unexplained(plane, features.of, values, population.group, rows[need]))
    bounds_of = {need: _bounds(stack(found), evidence.settings.seed) for need, found in errors.items()}
    for place, layer in enumerate(evidence.layers):
        for need in evidence.needs:
            interval = {column: float(values[place]) for column, values in bounds_of[need].items()}
            n_groups = errors[need][place].n_groups
            yield {
                "store": name,
                "layer": layer,
                "need": need,
                "n_tokens": n_tokens[place][need],
                "n_groups": n_groups,
                "r2_fit": planes[layer][need].r2,
                **interval,
                "verdict": verdict_at_least(
                    interval["r2_sim_lo"], interval["r2_sim_hi"], EXPLAINED, n_groups
                ),
            }


def _bounds(family: Estimates, seed: int) -> dict[str, np.ndarray]:
    """R² of one store and need over layers, with its bounds."""
    low, high = r_squared_bounds(family, critical_value(family))
    sim_low, sim_high = r_squared_bounds(family, simultaneous_value(family, seed))
    return {
        "r2_test": 1.0 - family.estimate,
        "r2_lo": low,
        "r2_hi": high,
        "r2_sim_lo": sim_low,
        "r2_sim_hi": sim_high,
    }


def term_rows(fit_on: str, layer: int, need: str, plane: Plane) -> Iterator[Row]:
    """Rows of `regression_terms`; a feature that is left out has no coefficient."""
    low, high = bounds(plane.coefficients, critical_value(plane.coefficients))
    columns = np.full((3, len(TERMS)), np.nan)
    columns[:, plane.kept] = plane.coefficients.estimate, low, high
    for place, term in enumerate(TERMS):
        coefficient, lo, hi = columns[:, place].tolist()
        yield {
            "store": fit_on,
            "layer": layer,
            "need": need,
            "term": term,
            "coefficient": coefficient,
            "lo": lo,
            "hi": hi,
            "r": float(plane.correlation[place]),
        }
