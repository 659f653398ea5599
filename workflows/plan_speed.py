"""How fast one core of this machine is, by three things that fits and analyses spend their time on; and how
fast a device was, by an earlier harvest.

In: nothing, or a model of a study. Out: a frozen `Speed`; operations a second of a harvest, None where there
was none. Cost: about a second for a core, small files for a device.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from threadpoolctl import threadpool_limits

from .study_settings import ModelStudy, StoreJob

_PRODUCT, _EIGEN, _VALUES, _SECONDS = 1024, 384, 2**20, 0.3
WINDOW: Final = 512  # rows of a window where nothing else is said


@dataclass(frozen=True, slots=True)
class Speed:
    """One core: operations of products a second, seconds of an eigendecomposition over width³, and seconds of
    one pass over an array over its values."""

    flops_per_s: float
    eigen_s: float
    value_s: float


@dataclass(frozen=True, slots=True)
class Harvested:
    """The newest harvest of a model: tokens a second, and rows of its windows."""

    tokens_per_s: float
    window: int


def probe() -> Speed:
    """One core as fits use it: products in float32, solves in float64, stored values decoded."""
    with threadpool_limits(1):
        rows = np.ones((_PRODUCT, _PRODUCT), np.float32)
        product_s = _seconds(lambda: rows @ rows)
        square = np.ones((_EIGEN, _EIGEN)) + np.diag(np.arange(float(_EIGEN)))
        eigen_s = _seconds(lambda: np.linalg.eigh(square))
        stored = np.ones(_VALUES, np.float16)
        value_s = _seconds(lambda: stored.astype(np.float32))
    return Speed(2 * _PRODUCT**3 / product_s, eigen_s / _EIGEN**3, value_s / _VALUES)


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
    return store.settings.sequence_length or WINDOW


def _records(model: ModelStudy) -> Iterator[tuple[StoreJob, Any]]:
    for store in model.stores:
        yield from ((store, path) for path in (store.path / "runs").glob("*.json"))


def _seconds(work: Any) -> float:
    """Of the fastest of several calls."""
    work()
    best, end = float("inf"), time.perf_counter() + _SECONDS
    while time.perf_counter() < end:
        begin = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - begin)
    return best
