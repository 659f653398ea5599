"""How fast one core of this machine is, by three things that fits and analyses spend their time on.

In: nothing. Out: a frozen `CoreSpeed`. Cost: about a second.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from threadpoolctl import threadpool_limits

_PRODUCT: Final = 1024
_EIGEN: Final = 384
_VALUES: Final = 2**20
_SECONDS: Final = 0.3  # of calls, the fastest of which counts


@dataclass(frozen=True, slots=True)
class CoreSpeed:
    """One core: operations of products a second, seconds of an eigendecomposition over width³, and seconds of
    one pass over an array over its values."""

    flops_per_s: float
    eigen_s: float
    value_s: float


def probe() -> CoreSpeed:
    """One core as fits use it: products in float32, solves in float64, stored values decoded."""
    with threadpool_limits(1):
        rows = np.ones((_PRODUCT, _PRODUCT), np.float32)
        product_s = _seconds(lambda: rows @ rows)
        square = np.ones((_EIGEN, _EIGEN)) + np.diag(np.arange(float(_EIGEN)))
        eigen_s = _seconds(lambda: np.linalg.eigh(square))
        stored = np.ones(_VALUES, np.float16)
        value_s = _seconds(lambda: stored.astype(np.float32))
    return CoreSpeed(2 * _PRODUCT**3 / product_s, eigen_s / _EIGEN**3, value_s / _VALUES)


def _seconds(work: Callable[[], Any]) -> float:
    """Of the fastest of several calls."""
    work()
    best, end = float("inf"), time.perf_counter() + _SECONDS
    while time.perf_counter() < end:
        begin = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - begin)
    return best
