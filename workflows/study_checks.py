"""What can be said of a study before any step: layers that no model has, gates that no analysis makes.

In: a `Whole`. Out: of each mistake one sentence that names the file and the table, but for those that follow
from others. Cost: a look at the configurations of models; no torch is loaded.
"""

from pathlib import Path
from typing import Final

from ..analyze.evidence import BROUGHT_BY
from ..analyze.gate_features import choose_features
from ..analyze.needs import LOSS_ESTIMATE, NEEDS
from ..collect.interventions import check_rank, parse_interventions
from ..collect.measure_settings import chosen_set, layers_of_set
from ..store import UsageError
from ..store.dtypes import GRADIENT
from ..store.settings import nearest_known, parse_layers
from .mistakes import Follows, Mistakes
from .shapes import at_hand, check_shape, shape_of
from .study_settings import ModelStudy, Whole, read_study
from .study_sources import check_corpora, check_model
from .study_steps import MEASURED, has_gated, needs_losses

_KNOWN_NEEDS: Final = (*NEEDS, *BROUGHT_BY)


def checked_study(path: Path, out: str | Path | None = None, *, corpora: bool = False) -> Whole:
    """The study that a settings file describes, with nothing wrong that can be known beforehand. `corpora`:
    look into those that are here and not harvested yet."""
    mistakes = Mistakes()
    whole = read_study(path, out, mistakes=mistakes)
    check_study(whole, mistakes)
    if corpora:
        check_corpora(whole, mistakes)
    mistakes.tell(whole.path)
    return whole


def check_study(whole: Whole, mistakes: Mistakes) -> None:
    """Settings that cannot go together, whatever the models are."""
    for model in (model for model in whole.models if model.stores):
        for store in model.stores:
            with mistakes.here():
                check_model(whole.path, store, mistakes)
                check_shape(whole.path, model, store)
        _check_sites(whole, model, mistakes)
        _check_layers(whole, model, mistakes)
        _check_names(whole, model, mistakes)
        _check_needs(whole, model, mistakes)
        with mistakes.here(f"{whole.path}, [measure]"):
            if "gates" not in model.analyze.analyses and _gates(model):
                raise UsageError(
                    "interventions route by gates, and `only` of [analyze] makes none: add gates to it, or "
                    "name interventions without (linear, mean, zero)"
                )
        with mistakes.here(f"{whole.path}, [analyze]"):
            if "nofly" in model.analyze.only and len(whole.corpora) < 2 and whole.complete:
                raise UsageError(
                    "nofly compares corpora, and there is one; name another in [[corpora]], or other analyses"
                )


def _check_layers(whole: Whole, model: ModelStudy, mistakes: Mistakes) -> None:
    """Each step takes layers that the ones before it have. Where these are wrong themselves, it is held
    against those that they were held against."""

    def within(step: str, spelled: str | None, there: set[int] | None) -> set[int] | None:
        """The layers of a step, all of which are there. None: whatever the model has, which is not known."""
        if spelled in (None, "all"):
            return there
        asked = set(parse_layers(str(spelled)))
        _require_layers(f"{whole.path}, [{step}]: layers = {spelled}", model, asked, there)
        return asked

    there: set[int] | None = None
    for look in (lambda: at_hand(model.stores[0]), lambda: shape_of(model)):  # its own where that is wrong
        with mistakes.here():
            shape = look()
            there = there if shape is None else set(range(shape.layers))
    harvested: list[set[int]] = []
    for store in model.stores:
        with mistakes.here():
            layers = within("collect", store.settings.layers, there)
            harvested += [] if layers is None else [layers]
    fitted = common = set.intersection(*harvested) if harvested else there
    with mistakes.here():
        fitted = within("fit", model.fit.layers, common)
    analysed = measured = fitted
    with mistakes.here():
        analysed = within("analyze", model.analyze.layers, fitted)
    with mistakes.here():
        measured = within("measure", model.measure.layers, fitted)
        if needs_losses(model) and analysed and measured and (missing := sorted(analysed - measured)):
            raise UsageError(
                f"{whole.path}, [measure]: layers = {model.measure.layers} leaves out layer {missing[0]}, "
                "and `need` of [analyze] asks for losses of it"
            )
    with mistakes.here():
        if model.finetune is not None and chosen_set(model.finetune.layers) is None:
            within("finetune", model.finetune.layers, fitted)
    with mistakes.here():
        for one in model.measure.compound:
            with mistakes.here():
                said = f"{whole.path}, [measure]: compound = {one}"
                _require_layers(said, model, set(layers_of_set(one) or ()), measured)


def _require_layers(said: str, model: ModelStudy, asked: set[int], there: set[int] | None) -> None:
    if there is not None and (missing := sorted(asked - there)):
        has = ",".join(map(str, sorted(there)))
        first, last = min(there), max(there)
        has = f"{first}-{last}" if len(there) > 1 and there == set(range(first, last + 1)) else has
        raise UsageError(f"{said}: {model.name} has no layer {missing[0]} here; it has {has}")


def _check_names(whole: Whole, model: ModelStudy, mistakes: Mistakes) -> None:
    """Interventions and sets of features are those that there are, and ranks those of a model as wide."""
    width: int | None = None
    for look in (lambda: at_hand(model.stores[0]), lambda: shape_of(model)):
        with mistakes.here():
            shape = look()
            width = width if shape is None else shape.d_model
    for name in ("interventions", "compound_with"):
        with mistakes.here():
            for one in getattr(model.measure, name):
                with mistakes.here(f"{whole.path}, [measure]"):
                    named = parse_interventions([one])[0]
                    if width is not None:
                        check_rank(named, width)
    with mistakes.here():
        for one in model.analyze.features:
            with mistakes.here(f"{whole.path}, [analyze]"):
                choose_features([one], has_positions=True)


def _gates(model: ModelStudy) -> bool:
    """Whether a measurement routes by gates; unknown where it names what is none."""
    try:
        return has_gated(model.measure)
    except UsageError:
        raise Follows from None


def _check_needs(whole: Whole, model: ModelStudy, mistakes: Mistakes) -> None:
    """Needs are those that there are, and what is measured by one has what it takes."""
    with mistakes.here():
        for need in model.analyze.need:
            with mistakes.here(f"{whole.path}, [analyze]"):
                _require_need(need)
    with mistakes.here(f"{whole.path}, [measure]"):
        need, made = model.measure.need, model.analyze.need
        _require_need(need)
        if need in MEASURED and need not in made:
            raise UsageError(f"need = {need!r}: no gate is made for it; add it to `need` of [analyze]")
        if need not in made and _gates(model) and "gates" in model.analyze.analyses:
            raise UsageError(
                f"need = {need!r}: `need` of [analyze] makes gates of {', '.join(made)} alone; add it there"
            )
    with mistakes.here(f"{whole.path}, [measure]"):
        if needs_losses(model) and model.measure.stores and len(model.measure.stores) < len(model.stores):
            raise UsageError(
                "stores leaves out corpora, and `need` of [analyze] asks for losses of all: leave stores out"
            )


def _require_need(need: str) -> None:
    if need not in _KNOWN_NEEDS:
        raise UsageError(
            f"need = {need!r} is none; known are {', '.join(_KNOWN_NEEDS)}{nearest_known(need, _KNOWN_NEEDS)}"
        )


def _check_sites(whole: Whole, model: ModelStudy, mistakes: Mistakes) -> None:
    """Stores hold what the steps behind them read."""
    wanted = {"residual": "fits", "mlp_output": "fits"}
    with mistakes.here():
        if set(model.analyze.analyses) & {"decomposition", "gates"}:
            wanted["embedding"] = "decomposition and gates of [analyze]"
    with mistakes.here():
        by_estimate = LOSS_ESTIMATE in (*model.analyze.need, model.measure.need)
        if model.measure.validate_estimate or by_estimate:
            wanted[GRADIENT] = LOSS_ESTIMATE
    for site, what in wanted.items():
        without: list[str] = []
        for store in model.stores:
            with mistakes.here():
                without += [store.name] if site not in store.settings.chosen_sites else []
        if without:
            more = f" and {len(without) - 1} more" if len(without) > 1 else ""
            mistakes.add(
                f"{whole.path}, [collect]: {what} read the site {site}, and collect of {without[0]}{more} "
                "leaves it out: add it to `sites`"
            )
