"""What the steps of a study will work on: rows of its stores, layers, and how fast an earlier harvest was.

In: a model of a study and its shape. Out: frozen values that the plans of steps take. Rows are those of
corpora that are long enough: the most there can be. Cost: none, but small files for a harvest.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..collect.model_shape import ModelShape
from ..collect.planned_passes import StoreRows, StudyRows
from ..collect.settings import DEFAULT_BATCH_TOKENS, DEFAULT_SEQUENCE_LENGTH
from ..store.settings import chosen_layers
from .study_settings import ModelStudy, StoreJob


@dataclass(frozen=True, slots=True)
class Harvested:
    """The newest harvest of a model: tokens a second, and rows of its windows."""

    tokens_per_s: float
    window: int


def fitted_layers(model: ModelStudy, shape: ModelShape) -> tuple[int, ...]:
    """Those that all stores have; the settings may name fewer."""
    whole = tuple(range(shape.layers))
    stored = [set(chosen_layers(store.settings.layers, whole)) for store in model.stores]
    return chosen_layers(model.fit.layers, sorted(set.intersection(*stored)))


def rows_of(model: ModelStudy, shape: ModelShape) -> StudyRows:
    """What steps that run the model work on."""
    stores = tuple(_store(one) for one in model.stores)
    own = next((one for one in stores if one.name == model.fit.fit_on), stores[0])
    return StudyRows(shape, stores, own, fitted_layers(model, shape))


def harvested(model: ModelStudy) -> Harvested | None:
    """By the newest harvest of this model that is recorded in one of its stores."""
    for store, record in sorted(_records(model), key=lambda pair: pair[1].name, reverse=True):
        try:
            speed = json.loads(record.read_bytes())["tokens_per_s"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if isinstance(speed, int | float) and speed > 0:
            return Harvested(float(speed), window_of(store))
    return None


def window_of(store: StoreJob) -> int:
    """Rows of a whole window of a store."""
    return store.settings.sequence_length or DEFAULT_SEQUENCE_LENGTH


def _records(model: ModelStudy) -> Iterator[tuple[StoreJob, Any]]:
    for store in model.stores:
        yield from ((store, path) for path in (store.path / "runs").glob("*.json"))


def _store(job: StoreJob) -> StoreRows:
    batch = job.settings.batch_tokens or DEFAULT_BATCH_TOKENS["cpu"]
    return StoreRows(job.name, float(job.settings.tokens), window_of(job), batch)
