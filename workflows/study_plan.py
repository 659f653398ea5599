"""`nearline plan SETTINGS.toml`: what a study will take, with neither its models nor a network at hand.

In: a study's settings, and the shapes that are written in them (or those of models that are here). Out: bytes
and objects of each store, exact where the corpus has as many tokens as are asked for and an upper bound where
it is shorter; of each step of each model its operations, and hours where something was measured: of one core
by a probe of this processor, of a device by the newest harvest of the same model in the same folder. What
nothing here can know is None. Cost: none without the probe, a second with it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..analyze.core_speed import CoreSpeed
from ..analyze.core_speed import probe as probed
from ..collect.block_rows import block_rows
from ..collect.model_shape import ModelShape
from ..collect.planned_measure import measure_passes
from ..collect.planned_passes import Passes, forward_flops
from ..collect.planned_tuning import finetune_passes
from ..collect.site_names import LAYER_SITES
from ..store.layout import n_objects, store_bytes
from ..store.settings import chosen_layers
from .planned_study import harvested, rows_of, window_of
from .shapes import shape_of
from .study_settings import ModelStudy, StoreJob, Whole
from .study_steps import loss_settings, needs_losses

if TYPE_CHECKING:
    from ..analyze.planned_work import Work

NARROW_BYTES: Final = 2  # float16 and bfloat16, which everything but storage_dtype = "float32" is stored in
ON_CORES: Final = ("fit", "analyze")  # steps that run no model


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
class StepPlan:
    """A step behind the harvests. Fits and analyses take `cpu_hours`, on one core of this machine; steps that
    run the model take `device_hours`, at the operations a second of its newest harvest. `analyses`: CPU hours
    of each.
    """

    step: str
    model: str
    flops: float | None
    cpu_hours: float | None = None
    device_hours: float | None = None
    analyses: dict[str, float] | None = None

    @property
    def on_cores(self) -> bool:
        """Whether it runs no model."""
        return self.step in ON_CORES


@dataclass(frozen=True, slots=True)
class StudyPlan:
    """A whole study. Totals are None where a part is not known. `flops`: of all steps that run a model."""

    settings: Path
    out: Path
    stores: tuple[StorePlan, ...]
    steps: tuple[StepPlan, ...]
    bytes: int | None
    objects: int | None
    flops: float | None
    cpu_hours: float | None
    device_hours: float | None


def plan_study(whole: Whole, *, probe: bool = True) -> StudyPlan:
    """The plan of a study. `probe`: time products, an eigendecomposition and a pass on this processor."""
    speed = probed() if probe else None
    stores = [plan_store(model, store) for model in whole.models for store in model.stores]
    steps = [step for model in whole.models for step in plan_steps(model, speed)]
    on_device = [*stores, *(one for one in steps if not one.on_cores)]
    return StudyPlan(
        settings=whole.path,
        out=whole.out,
        stores=tuple(stores),
        steps=tuple(steps),
        bytes=_total([one.bytes for one in stores]),
        objects=_total([one.objects for one in stores]),
        flops=_total([one.flops for one in on_device]),
        cpu_hours=_total([one.cpu_hours for one in steps if one.on_cores]),
        device_hours=_total([one.device_hours for one in on_device]),
    )


def plan_store(model: ModelStudy, job: StoreJob) -> StorePlan:
    """The plan of one store."""
    settings, shape, before = job.settings, shape_of(model), harvested(model)
    tokens = settings.tokens
    known: dict[str, Any] = {
        "store": job.name,
        "model": model.name,
        "corpus": job.corpus,
        "tokens": tokens,
        "device_hours": None if before is None else tokens / before.tokens_per_s / 3600,
    }
    if shape is None:
        return StorePlan(**known, n_layers=None, d_model=None, bytes=None, objects=None, flops=None)
    n_layers = len(chosen_layers(settings.layers, range(shape.layers)))
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
        flops=tokens * forward_flops(shape, window_of(job)),
    )


def plan_steps(model: ModelStudy, speed: CoreSpeed | None) -> Iterator[StepPlan]:
    """The steps of a model behind its harvests, in the order in which they run."""
    shape = shape_of(model)
    names = ["fit", *(["losses"] if needs_losses(model) else []), "analyze", "measure"]
    names += ["finetune"] if model.finetune is not None else []
    for name in names:
        if shape is None:
            yield StepPlan(name, model.name, None)
        elif name in ON_CORES:
            yield _on_cores(name, model, shape, speed)
        else:
            passes = passes_of(name, model, shape)
            hours = _device_hours(model, shape, passes.flops)
            yield StepPlan(name, model.name, passes.flops, device_hours=hours)


def passes_of(step: str, model: ModelStudy, shape: ModelShape) -> Passes:
    """Forward and backward passes of losses, measure or finetune."""
    rows, features = rows_of(model, shape), model.analyze.features or None
    if step == "losses":
        return measure_passes(rows, loss_settings(model), features)
    if step == "measure":
        return measure_passes(rows, model.measure, features, known=needs_losses(model))
    return Passes() if model.finetune is None else finetune_passes(rows, model.finetune)


def work_of(step: str, model: ModelStudy, shape: ModelShape) -> "dict[str, Work]":
    """Of each analysis, or of a fit."""
    # Loads scikit-learn, which jobs of a cluster that ask for the size of a store need not wait for.
    from ..analyze.planned_work import Rows, analyze_work, fit_work

    study = rows_of(model, shape)
    own, everything = study.fitted_on, tuple(one.all for one in study.stores)
    test = sum(one.test for one in study.stores)
    rows = Rows(float(shape.d_model), own.fit, own.gate, own.all, everything, test)
    if step == "fit":
        return {"fit": fit_work(rows, len(study.layers), model.fit)}
    layers = chosen_layers(model.analyze.layers, study.layers)
    return analyze_work(rows, len(layers), model.analyze, model.fit)


def _on_cores(name: str, model: ModelStudy, shape: ModelShape, speed: CoreSpeed | None) -> StepPlan:
    parts = work_of(name, model, shape)
    flops = sum(part.flops for part in parts.values())
    if speed is None:
        return StepPlan(name, model.name, flops)
    each = {one: part.hours(speed) for one, part in parts.items()}
    hours = sum(each.values())
    return StepPlan(name, model.name, flops, hours, analyses=each if name == "analyze" else None)


def _device_hours(model: ModelStudy, shape: ModelShape, flops: float) -> float | None:
    """At the operations a second of a harvest, whose losses and writing are in its time."""
    before = harvested(model)
    if before is None:
        return None
    return flops / (before.tokens_per_s * forward_flops(shape, before.window)) / 3600


def _total(values: Sequence[Any]) -> Any:
    return None if None in values else sum(values)
