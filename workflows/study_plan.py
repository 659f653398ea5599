"""`nearline plan SETTINGS.toml`: what a study will take, with neither its models nor a network at hand.

In: a study's settings, and the shapes that are written in them (or those of models that are here). Out: bytes
and objects of each store, exact where the corpus has as many tokens as are asked for and an upper bound where
it is shorter; operations of harvests and fits; hours where something was measured: of fits by a probe of this
processor, of harvests by earlier ones of the same model in the same folder. What nothing here can know is
None. Cost: none without the probe, a second with it.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from threadpoolctl import threadpool_limits

from ..collect.block_rows import block_rows
from ..collect.planning import FRACTIONS
from ..collect.site_names import LAYER_SITES
from ..store.layout import n_objects, store_bytes
from ..store.settings import parse_layers
from .shapes import shape_of
from .study_settings import ModelStudy, StoreJob, Whole
from .study_tables import Shape

NARROW_BYTES: Final = 2  # float16 and bfloat16, which everything but storage_dtype = "float32" is stored in
WINDOW: Final = 512  # rows of a window where nothing else is said
FIT_PRODUCTS, NEED_PRODUCTS = 3, 2  # d² operations a row and layer, of moments and of needs
_PROBE_WIDTH, _EIGEN_WIDTH, _PROBE_S = 1024, 384, 0.3


@dataclass(frozen=True, slots=True)
class StorePlan:
    """A store that is to be harvested. `flops`: of the forward passes; `device_hours`: of the harvest."""

    store: str
    model: str
    corpus: str
    tokens: int
    n_layers: int | None
    d_model: int | None
    bytes: int | None
    objects: int | None
    flops: float | None
    device_hours: float | None


@dataclass(frozen=True, slots=True)
class FitPlan:
    """The fit of a model on its stores. `cpu_hours`: on one core of this machine."""

    model: str
    flops: float | None
    cpu_hours: float | None


@dataclass(frozen=True, slots=True)
class StudyPlan:
    """A whole study. Totals are None where a part is not known."""

    settings: Path
    out: Path
    stores: tuple[StorePlan, ...]
    fits: tuple[FitPlan, ...]
    bytes: int | None
    objects: int | None
    cpu_hours: float | None
    device_hours: float | None


@dataclass(frozen=True, slots=True)
class Speed:
    """One core: operations of products a second, and seconds of an eigendecomposition over width³."""

    flops_per_s: float
    eigen_s: float


def plan_study(whole: Whole, *, probe: bool = True) -> StudyPlan:
    """The plan of a study. `probe`: time products and an eigendecomposition on this processor."""
    speed = _probe() if probe else None
    stores = [plan_store(model, store) for model in whole.models for store in model.stores]
    fits = [_fit(model, speed) for model in whole.models]
    return StudyPlan(
        settings=whole.path,
        out=whole.out,
        stores=tuple(stores),
        fits=tuple(fits),
        bytes=_total([one.bytes for one in stores]),
        objects=_total([one.objects for one in stores]),
        cpu_hours=_total([one.cpu_hours for one in fits]),
        device_hours=_total([one.device_hours for one in stores]),
    )


def forward_flops(shape: Shape, length: int) -> float:
    """Operations of one token of a window of `length`: four projections of attention and two matrices of an
    MLP in each layer, scores and values over half the window, the head."""
    layer = 4 * shape.d_model**2 + 2 * shape.d_model * shape.d_ff + shape.d_model * length
    return 2.0 * (shape.layers * layer + shape.d_model * shape.vocabulary)


def plan_store(model: ModelStudy, job: StoreJob) -> StorePlan:
    """The plan of one store."""
    settings, shape = job.settings, shape_of(model)
    tokens = settings.tokens
    known: dict[str, Any] = {
        "store": job.name,
        "model": model.name,
        "corpus": job.corpus,
        "tokens": tokens,
        "device_hours": _measured_hours(model, tokens),
    }
    if shape is None:
        return StorePlan(**known, n_layers=None, d_model=None, bytes=None, objects=None, flops=None)
    n_layers = _n_layers(settings.layers, shape)
    sites = settings.chosen_sites
    # One array a layer and site, and the embedding; where that is not stored, one of these stands for it.
    n_arrays = n_layers * sum(site in LAYER_SITES for site in sites) + ("embedding" in sites)
    itemsize = 4 if settings.storage_dtype == "float32" else NARROW_BYTES
    sizes = (shape.d_model, 1, n_arrays - 1, itemsize)
    block = block_rows(tokens, sizes, settings)
    return StorePlan(
        **known,
        n_layers=n_layers,
        d_model=shape.d_model,
        bytes=store_bytes(tokens, block, *sizes),
        objects=n_objects(tokens, block, *sizes[1:3]),
        flops=tokens * forward_flops(shape, settings.sequence_length or WINDOW),
    )


def _fit(model: ModelStudy, speed: Speed | None) -> FitPlan:
    """Moments of the rows fitted and tested, needs of all rows, an eigendecomposition a fold and one more."""
    shape = shape_of(model)
    if shape is None:
        return FitPlan(model.name, None, None)
    n_layers = _n_layers(model.fit.layers, shape)
    fitted, tested = FRACTIONS[0], FRACTIONS[2]
    rows = [store.settings.tokens for store in model.stores]
    summed = fitted * rows[0] + tested * sum(rows)
    flops = n_layers * shape.d_model**2 * (FIT_PRODUCTS * summed + NEED_PRODUCTS * sum(rows))
    if speed is None:
        return FitPlan(model.name, flops, None)
    eigen_s = n_layers * (model.fit.folds + 1) * speed.eigen_s * shape.d_model**3
    return FitPlan(model.name, flops, (flops / speed.flops_per_s + eigen_s) / 3600)


def _n_layers(spelled: str | None, shape: Shape) -> int:
    return shape.layers if spelled in (None, "all") else len(parse_layers(str(spelled)))


def _total(values: Sequence[Any]) -> Any:
    return None if None in values else sum(values)


def _measured_hours(model: ModelStudy, tokens: int) -> float | None:
    """By the newest harvest of this model that is recorded in one of its stores."""
    runs = [path for store in model.stores for path in (store.path / "runs").glob("*.json")]
    for path in sorted(runs, key=lambda path: path.name, reverse=True):
        try:
            speed = json.loads(path.read_bytes())["tokens_per_s"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if isinstance(speed, int | float) and speed > 0:
            return tokens / speed / 3600
    return None


def _probe() -> Speed:
    """The speed of one core, as fits use it: products in float32, solves in float64."""
    with threadpool_limits(1):
        rows = np.ones((_PROBE_WIDTH, _PROBE_WIDTH), np.float32)
        product_s = _seconds(lambda: rows @ rows)
        square = np.ones((_EIGEN_WIDTH, _EIGEN_WIDTH)) + np.diag(np.arange(float(_EIGEN_WIDTH)))
        eigen_s = _seconds(lambda: np.linalg.eigh(square))
    return Speed(2 * _PROBE_WIDTH**3 / product_s, eigen_s / _EIGEN_WIDTH**3)


def _seconds(work: Any) -> float:
    """Of the fastest of several calls."""
    work()
    best, end = float("inf"), time.perf_counter() + _PROBE_S
    while time.perf_counter() < end:
        begin = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - begin)
    return best
