"""What a fit keeps of each layer: a solved layer and its needs in, rows of tables and columns for the study
out.

A worker makes it of one layer; the calling process writes the needs as soon as their layer is done. What
stays in memory of a layer is its surrogate and a few hundred numbers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from ..store import Study
from .engine import MAIN
from .examples import Texts, example_rows
from .intervals import Estimates, r_squared_bounds, simultaneous_value, stack, verdict_at_least
from .needs import COLUMNS, LOSS_ESTIMATE
from .population import TEST
from .ridge import Surrogate
from .settings import FitSettings
from .summaries import histogram_rows, largest_share, need_rows, r2_interval, unexplained
from .surrogates import LayerFit
from .tasks import Evaluated


@dataclass(frozen=True, slots=True)
class LayerOutcome:
    """Rows of tables that one layer contributes, its surrogate, and the group influences behind its R²."""

    layer: int
    surrogate: Surrogate
    surrogates: dict[str, dict[str, Any]]  # by store
    influences: dict[str, Estimates]  # by store, of 1 − R² on test
    tables: dict[str, list[dict[str, Any]]]  # by table
    columns: dict[str, dict[str, np.ndarray]]  # by store, of the needs; empty once they are written
    files: list[str]  # written to the study, by their paths inside it

    def written(self, study: Study) -> "LayerOutcome":
        """The same, with its needs in the study."""
        files = [write_needs(study, self.layer, store, columns) for store, columns in self.columns.items()]
        return replace(self, columns={}, files=files)


def write_needs(
    study: Study, layer: int, store: str, columns: Mapping[str, np.ndarray], surrogate: str | None = None
) -> str:
    """Write the needs of a layer in a store; the path of the file inside the study."""
    table = pa.table({name: columns[name] for name in (*COLUMNS, LOSS_ESTIMATE) if name in columns})
    return study.write_need(layer, store, table, surrogate=surrogate)


@dataclass(frozen=True, slots=True)
class Fitted:
    """What the surrogates are fitted on: a store, or moments without rows."""

    name: str
    n_groups: tuple[int, ...]  # in the first 0, 1, … folds


@dataclass(frozen=True, slots=True)
class LayerFinisher:
    """Makes the outcome of a layer; called on workers, each time with another layer."""

    fitted: Fitted
    stores: Sequence[Evaluated]
    texts: Mapping[str, Texts]
    settings: FitSettings

    def __call__(
        self, layer: int, fits: dict[str, LayerFit], needs: dict[str, dict[str, dict[str, np.ndarray]]]
    ) -> LayerOutcome:
        fit, by_store = fits[MAIN], needs[MAIN]
        tables: dict[str, list[dict[str, Any]]] = {"alphas": self._alphas(layer, fit)} | self._extras(
            layer, fit
        )
        tables |= {"needs": [], "need_histogram": [], "examples": []}
        outcome = LayerOutcome(layer, fit.full, {}, {}, tables, by_store, [])
        for store in self.stores:
            key = {"store": store.name, "layer": layer}
            columns, population = by_store[store.name], store.population
            row, influence = self._score(layer, fit, store, columns)
            outcome.surrogates[store.name], outcome.influences[store.name] = row, influence
            tables["needs"].extend(key | row for row in need_rows(columns, population))
            bins = self.settings.histogram_bins
            tables["need_histogram"].extend(key | row for row in histogram_rows(columns, population, bins))
            shown = example_rows(columns, population, self.texts[store.name], self.settings.examples)
            tables["examples"].extend(key | row for row in shown)
        return outcome

    def _extras(self, layer: int, fit: LayerFit) -> dict[str, list[dict[str, Any]]]:
        """How R² depends on the rows, on the rank and on how it is fitted."""
        key = {"store": self.fitted.name, "layer": layer}
        points = [asdict(point) for point in fit.curve]
        for point in points:
            point["n_groups"] = self.fitted.n_groups[point.pop("n_folds")]
        found = [asdict(one) for one in fit.variants]
        for one in found:
            one["variant"] = one.pop("name")
        return {
            "learning_curve": [key | point for point in points],
            "ranks": [key | {"rank": rank, "r2_test": r2} for rank, r2 in fit.ranks],
            "variants": [key | one for one in found],
        }

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
    ) -> tuple[dict[str, Any], Estimates]:
        """A row of the table `surrogates`, still without what needs all layers: simultaneous bounds and
        verdict.
        """
        population, full = store.population, fit.full
        tested, sinks = population.rows(TEST), population.rows(TEST, "sink")
        r2, low, high, influence = r2_interval(unexplained(columns, population, tested))
        contribution = r2_interval(unexplained(columns, population, tested, contribution=True))[0]
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
            "largest_row": largest_share(columns["y_centred_norm"][tested]),
            "n_tokens": fit.n_fit,
            "n_groups": self.fitted.n_groups[-1],
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


def stacked(layers: Sequence[int], surrogates: Sequence[Surrogate]) -> dict[str, Any]:
    """Surrogates of all layers as arrays for the study, with what it takes to compute `error` of new rows:
    the fitted mean of y and its spread τ².
    """
    return {
        "weight": np.stack([surrogate.weight for surrogate in surrogates]),
        "bias": np.stack([surrogate.bias for surrogate in surrogates]),
        "alpha": np.array([surrogate.alpha for surrogate in surrogates]),
        "penalty": (("layer",), np.array([surrogate.penalty for surrogate in surrogates])),
        "mean_y": (("layer", "feature_out"), np.stack([surrogate.mean_y for surrogate in surrogates])),
        "spread": (("layer",), np.array([surrogate.spread for surrogate in surrogates])),
        "layer": np.array(layers, np.int32),
    }
