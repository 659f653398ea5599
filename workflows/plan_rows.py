"""What the steps of a study work on: how many rows of each split, and which layers.

In: a model of a study and its shape. Out: frozen values. Rows are those of corpora that are long enough: the
most there can be. Cost: none.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ..collect.planning import FRACTIONS
from ..store.settings import parse_layers
from .study_settings import ModelStudy, StoreJob
from .study_tables import Shape


@dataclass(frozen=True, slots=True)
class Layers:
    """Layers that steps work on, increasing."""

    fitted: tuple[int, ...]
    analysed: tuple[int, ...]
    measured: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one store."""

    all: float
    fit: float
    gate: float
    test: float


def layers_of(model: ModelStudy, shape: Shape) -> Layers:
    """Each step takes those that the ones before it have; the settings may name fewer."""
    whole = tuple(range(shape.layers))
    stored = [set(chosen(store.settings.layers, whole)) for store in model.stores]
    fitted = chosen(model.fit.layers, sorted(set.intersection(*stored)))
    return Layers(fitted, chosen(model.analyze.layers, fitted), chosen(model.measure.layers, fitted))


def chosen(spelled: str | None, there: Sequence[int]) -> tuple[int, ...]:
    """Layers by how settings write them; all that are there by default."""
    return tuple(there if spelled in (None, "all") else sorted(set(parse_layers(str(spelled)))))


def rows_of(store: StoreJob) -> Rows:
    """Rows of a store by split."""
    tokens = float(store.settings.tokens)
    return Rows(tokens, *(fraction * tokens for fraction in FRACTIONS))


def fit_on(model: ModelStudy) -> StoreJob:
    """The store that surrogates and gates are made on."""
    return next((one for one in model.stores if one.name == model.fit.fit_on), model.stores[0])
