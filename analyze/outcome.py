"""What a fit keeps of each layer: a solved layer and its needs in, files of the study and rows of its tables
out.

Needs go to the study as soon as their layer is done; what stays in memory of a layer is its surrogate and a
few hundred numbers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from ..store import Study
from .examples import Texts, example_rows
from .intervals import Ratios, r_squared_bounds, simultaneous_value, stack, verdict_at_least
from .needs import COLUMNS
from .population import FIT, TEST
from .ridge import Surrogate
from .settings import FitSettings
from .summaries import histogram_rows, need_rows, r2_interval, unexplained
from .surrogates import LayerFit
from .tasks import Evaluated


@dataclass(frozen=True, slots=True)
class LayerOutcome:
    """Rows of tables that one layer contributes, its surrogate, and the group influences behind its R²."""

    layer: int
    surrogate: Surrogate
    surrogates: dict[str, dict[str, Any]]  # by store
    influences: dict[str, Ratios]  # by store, of 1 − R² on test
    alphas: list[dict[str, Any]]
    needs: list[dict[str, Any]]
    histograms: list[dict[str, Any]]
    examples: list[dict[str, Any]]
    files: list[str]  # written to the study, by their paths inside it


@dataclass(frozen=True, slots=True)
class LayerWriter:
    """Finishes layers into one study; called from several threads, each with another layer."""

    study: Study
    fitted: Evaluated
    stores: Sequence[Evaluated]
    texts: Mapping[str, Texts]
    settings: FitSettings

    def __call__(self, layer: int, fit: LayerFit, needs: dict[str, dict[str, np.ndarray]]) -> LayerOutcome:
        outcome = LayerOutcome(layer, fit.full, {}, {}, self._alphas(layer, fit), [], [], [], [])
        for store in self.stores:
            key = {"store": store.name, "layer": layer}
            columns, population = needs[store.name], store.population
            table = pa.table({name: columns[name] for name in COLUMNS})
            outcome.files.append(self.study.write_need(layer, store.name, table))
            row, influence = self._score(layer, fit, store, columns)
            outcome.surrogates[store.name], outcome.influences[store.name] = row, influence
            outcome.needs.extend(key | row for row in need_rows(columns, population))
            bins = self.settings.histogram_bins
            outcome.histograms.extend(key | row for row in histogram_rows(columns, population, bins))
            shown = example_rows(columns, population, self.texts[store.name], self.settings.examples)
            outcome.examples.extend(key | row for row in shown)
        return outcome

    def _alphas(self, layer: int, fit: LayerFit) -> list[dict[str, Any]]:
        key = {"store": self.fitted.name, "layer": layer}
        rules = self.settings.rules
        return [
            key
            | {
                "alpha": fit.full.alpha if rule == "paper" else float(rule),
                "r2_cv": float(fit.r2_cv[index]),
                "chosen": index == fit.chosen,
            }
            for index, rule in enumerate(rules)
        ]

    def _score(
        self, layer: int, fit: LayerFit, store: Evaluated, columns: dict[str, np.ndarray]
    ) -> tuple[dict[str, Any], Ratios]:
        """A row of the table `surrogates`, still without what needs all layers: simultaneous bounds and
        verdict.
        """
        population, full = store.population, fit.full
        tested, sinks = population.rows(TEST), population.rows(TEST, "sink")
        r2, low, high, influence = r2_interval(unexplained(columns, population, tested))
        contribution = r2_interval(unexplained(columns, population, tested, contribution=True))[0]
        fitted_rows = self.fitted.population.rows(FIT)
        own = store.name == self.fitted.name
        row = {
            "store": store.name,
            "layer": layer,
            "fit_on": self.fitted.name,
            "alpha": self._alphas(layer, fit)[fit.chosen]["alpha"],
            "r2_fit": fit.r2_fit if own else None,
            "r2_cv": float(fit.r2_cv[fit.chosen]) if own else None,
            "r2_test": r2,
            "r2_lo": low,
            "r2_hi": high,
            "r2_contribution": contribution,
            "n_tokens": fit.n_fit,
            "n_groups": self.fitted.population.n_groups(fitted_rows),
            "n_test_tokens": tested.size,
            "n_test_groups": population.n_groups(tested),
            "tokens_per_feature": fit.n_fit / full.weight.shape[1],
            "condition": full.condition,
            "r2_sink": r2_interval(unexplained(columns, population, sinks))[0],
            "n_sink": sinks.size,
        }
        return row, influence


def surrogate_rows(
    outcomes: Sequence[LayerOutcome], stores: Sequence[str], settings: FitSettings
) -> list[dict[str, Any]]:
    """The table `surrogates`: the layers of a store are one family with simultaneous bounds and verdicts."""
    rows: list[dict[str, Any]] = []
    for store in stores:
        found = [outcome.influences[store] for outcome in outcomes]
        family = stack(found)
        lows, highs = r_squared_bounds(family, simultaneous_value(family, settings.seed))
        for outcome, low, high in zip(outcomes, lows.tolist(), highs.tolist(), strict=True):
            verdict = verdict_at_least(low, high, settings.linear_at, family.n_groups)
            rows.append(outcome.surrogates[store] | {"r2_sim_lo": low, "r2_sim_hi": high, "verdict": verdict})
    return rows


def stacked(outcomes: Sequence[LayerOutcome]) -> dict[str, Any]:
    """Surrogates of all layers as arrays for the study, with what it takes to compute `error` of new rows:
    the fitted mean of y and its spread τ².
    """
    return {
        "weight": np.stack([outcome.surrogate.weight for outcome in outcomes]),
        "bias": np.stack([outcome.surrogate.bias for outcome in outcomes]),
        "alpha": np.array([outcome.surrogate.alpha for outcome in outcomes]),
        "penalty": (("layer",), np.array([outcome.surrogate.penalty for outcome in outcomes])),
        "mean_y": (
            ("layer", "feature_out"),
            np.stack([outcome.surrogate.mean_y for outcome in outcomes]),
        ),
        "spread": (("layer",), np.array([outcome.surrogate.spread for outcome in outcomes])),
        "layer": np.array([outcome.layer for outcome in outcomes], np.int32),
    }
