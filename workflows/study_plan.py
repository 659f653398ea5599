"""`nearline plan SETTINGS.toml`: what a study will take, with neither its models nor a network at hand.

In: a study's settings, and the shapes that are written in them (or those of models that are here). Out: bytes
and objects of each store, exact where the corpus has as many tokens as are asked for and an upper bound where
it is shorter; of each step of each model its operations, and hours where something was measured: of one core
by a probe of this processor (plan_analyses.py), of a device by the newest harvest of the same model in the
same folder (plan_measure.py, plan_tuning.py). What nothing here can know is None. Cost: none without the
probe, a second with it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ..collect.block_rows import block_rows
from ..collect.site_names import LAYER_SITES
from ..store.layout import n_objects, store_bytes
from .plan_measure import losses_passes, measure_passes
from .plan_passes import forward_flops
from .plan_rows import chosen
from .plan_speed import Speed, harvested, window_of
from .plan_speed import probe as probed
from .plan_tuning import finetune_passes
from .shapes import shape_of
from .study_settings import ModelStudy, StoreJob, Whole
from .study_steps import needs_losses
from .study_tables import Shape

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
    n_layers = len(chosen(settings.layers, range(shape.layers)))
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


def plan_steps(model: ModelStudy, speed: Speed | None) -> Iterator[StepPlan]:
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
            passes = _PASSES[name](model, shape)
            hours = _device_hours(model, shape, passes.flops)
            yield StepPlan(name, model.name, passes.flops, device_hours=hours)


_PASSES: Final = {"losses": losses_passes, "measure": measure_passes, "finetune": finetune_passes}


def _on_cores(name: str, model: ModelStudy, shape: Shape, speed: Speed | None) -> StepPlan:
    # Loads scikit-learn, which jobs of a cluster that ask for the size of a store need not wait for.
    from .plan_analyses import Work, analyze_work, fit_work

    parts = {"fit": fit_work(model, shape)} if name == "fit" else analyze_work(model, shape)
    work = sum(parts.values(), Work())
    if speed is None:
        return StepPlan(name, model.name, work.flops)
    each = {one: part.hours(speed) for one, part in parts.items()} if name == "analyze" else None
    return StepPlan(name, model.name, work.flops, work.hours(speed), analyses=each)


def _device_hours(model: ModelStudy, shape: Shape, flops: float) -> float | None:
    """At the operations a second of a harvest, whose losses and writing are in its time."""
    before = harvested(model)
    if before is None:
        return None
    return flops / (before.tokens_per_s * forward_flops(shape, before.window)) / 3600


def _total(values: Sequence[Any]) -> Any:
    return None if None in values else sum(values)
