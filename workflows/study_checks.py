"""What can be said of a study before any step: layers that no model has, gates that no analysis makes, files
that are not there.

In: a `Whole`, and the names of jobs that have to run. Out: nothing, or the first mistake in one
sentence. Cost: a look at files; no torch is loaded.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Final

from ..analyze.evidence import BROUGHT_BY
from ..analyze.gate_features import choose_features
from ..analyze.needs import LOSS_ESTIMATE, NEEDS
from ..collect.bundled_models import BUNDLED
from ..collect.interventions import parse_interventions
from ..collect.measure_settings import chosen_set, layers_of_set
from ..store import UsageError
from ..store.dtypes import GRADIENT
from ..store.settings import nearest_known, parse_layers
from .shapes import check_shape, shape_of
from .study_paths import corpus_files, model_folder
from .study_settings import ModelStudy, StoreJob, Whole
from .study_steps import MEASURED, has_gated, needs_losses

_KNOWN_NEEDS: Final = (*NEEDS, *BROUGHT_BY)


def check_study(whole: Whole) -> None:
    """Settings that cannot go together, whatever the models are."""
    for model in whole.models:
        for store in model.stores:
            check_shape(whole.path, model, store)
            _check_sites(whole, model, store)
        _check_layers(whole, model)
        _check_needs(whole, model)
        _check_gates(whole, model)
        choose_features(model.analyze.features, has_positions=True)
        if "nofly" in model.analyze.only and len(model.stores) < 2:
            raise UsageError(
                f"{whole.path}, [analyze]: nofly compares corpora, and there is one; name another in "
                "[[corpora]], or other analyses"
            )


def check_sources(whole: Whole, to_do: Collection[str]) -> None:
    """What harvests that have to run are made from is there. `to_do`: names of jobs."""
    for model in whole.models:
        for store in model.stores:
            if f"collect {store.name}" in to_do:
                _check_files(whole.path, store)


def _check_files(said: Path, store: StoreJob) -> None:
    settings = store.settings
    if settings.model not in BUNDLED:
        from ..collect.sources import find, require_weights

        try:
            if settings.adapter is None and not _is_adapter(settings.model):
                source = find(settings.model, gguf_file=settings.gguf_file)
                require_weights(source, allow_pickle=settings.allow_pickle)
        except UsageError as error:
            raise UsageError(f"{said}, [[models]] {store.model}: {error}") from None
    path = corpus_files(settings.corpus)
    if path is not None and not path.exists():
        raise UsageError(f"{said}, [[corpora]] {store.corpus}: {path} does not exist")
    for key in ("include", "exclude"):
        named = getattr(settings, key)
        if named is not None and not Path(named).is_file():
            raise UsageError(f"{said}: {key} = {named}: there is no such file")


def _is_adapter(model: str) -> bool:
    folder = model_folder(model)
    return folder is not None and (folder / "adapter_config.json").is_file()


def _check_layers(whole: Whole, model: ModelStudy) -> None:
    """Each step takes layers that the ones before it have."""
    shape = shape_of(model)
    there = None if shape is None else set(range(shape.layers))
    for store in model.stores:
        _within(whole, model, "collect", store.settings.layers, there)
    harvested = [_layers(store.settings.layers, there) for store in model.stores]
    known = [layers for layers in harvested if layers is not None]
    common = set.intersection(*known) if known else there
    _within(whole, model, "fit", model.fit.layers, common)
    fitted = _layers(model.fit.layers, common)
    _within(whole, model, "analyze", model.analyze.layers, fitted)
    _within(whole, model, "measure", model.measure.layers, fitted)
    measured = _layers(model.measure.layers, fitted)
    analysed = _layers(model.analyze.layers, fitted)
    if needs_losses(model) and analysed and measured and (missing := sorted(analysed - measured)):
        raise UsageError(
            f"{whole.path}, [measure]: layers = {model.measure.layers} leaves out layer {missing[0]}, and "
            "`need` of [analyze] asks for losses of it"
        )
    if model.finetune is not None and chosen_set(model.finetune.layers) is None:
        _within(whole, model, "finetune", model.finetune.layers, fitted)
    for one in model.measure.compound:
        layers = layers_of_set(one)
        spelled = None if layers is None else ",".join(map(str, layers))
        _within(whole, model, "measure", spelled, measured, "compound")


def _layers(spelled: str | None, otherwise: set[int] | None) -> set[int] | None:
    """None: whatever the model has, which is not known."""
    return otherwise if spelled in (None, "all") else set(parse_layers(str(spelled)))


def _within(
    whole: Whole,
    model: ModelStudy,
    step: str,
    spelled: str | None,
    there: set[int] | None,
    key: str = "layers",
) -> None:
    asked = _layers(spelled, None)
    if asked is None or there is None:
        return
    if missing := sorted(asked - there):
        has = ",".join(map(str, sorted(there)))
        first, last = min(there), max(there)
        has = f"{first}-{last}" if len(there) > 1 and there == set(range(first, last + 1)) else has
        raise UsageError(
            f"{whole.path}, [{step}]: {key} = {spelled}: {model.name} has no layer {missing[0]} "
            f"here; it has {has}"
        )


def _check_needs(whole: Whole, model: ModelStudy) -> None:
    for step, needs in (("analyze", model.analyze.need), ("measure", (model.measure.need,))):
        for need in needs:
            if need not in _KNOWN_NEEDS:
                raise UsageError(
                    f"{whole.path}, [{step}]: need = {need!r} is none; known are {', '.join(_KNOWN_NEEDS)}"
                    f"{nearest_known(need, _KNOWN_NEEDS)}"
                )
    if model.measure.need in MEASURED and model.measure.need not in model.analyze.need:
        raise UsageError(
            f"{whole.path}, [measure]: need = {model.measure.need!r}: no gate is made for it; add it to "
            "`need` of [analyze]"
        )

    if needs_losses(model) and model.measure.stores and len(model.measure.stores) < len(model.stores):
        raise UsageError(
            f"{whole.path}, [measure]: stores leaves out corpora, and `need` of [analyze] asks for losses of "
            "all: leave stores out"
        )


def _check_sites(whole: Whole, model: ModelStudy, store: StoreJob) -> None:
    """A store holds what the steps behind it read."""
    by_estimate = LOSS_ESTIMATE in (*model.analyze.need, model.measure.need)
    wanted = {"residual": "fits", "mlp_output": "fits"}
    if set(model.analyze.analyses) & {"decomposition", "gates"}:
        wanted["embedding"] = "decomposition and gates of [analyze]"
    if model.measure.validate_estimate or by_estimate:
        wanted[GRADIENT] = LOSS_ESTIMATE
    for site, what in wanted.items():
        if site not in store.settings.chosen_sites:
            raise UsageError(
                f"{whole.path}: {what} read the site {site}, and collect of {store.name} leaves it out: add "
                "it to `sites`"
            )


def _check_gates(whole: Whole, model: ModelStudy) -> None:
    """What a measurement routes by is made by the analyses before it."""
    parse_interventions(model.measure.interventions)
    made = "gates" in model.analyze.analyses
    if has_gated(model.measure) and not made:
        raise UsageError(
            f"{whole.path}, [measure]: interventions route by gates, and `only` of [analyze] makes none: add "
            "gates to it, or name interventions without (linear, mean, zero)"
        )
    if has_gated(model.measure) and model.measure.need not in model.analyze.need:
        raise UsageError(
            f"{whole.path}, [measure]: need = {model.measure.need!r}: `need` of [analyze] makes gates of "
            f"{', '.join(model.analyze.need)} alone; add it there"
        )
