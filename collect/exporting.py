"""Take surrogates and gates out of a study, put them into a live model for good, and save them from there.

In: a study and layers, or a model. Out: the folder of exported_folder.py, or the model, which then generates
with its linear layers (linearised.py). An export belongs to the weights that the study's stores were
harvested from: it goes into another model, or into the same one cast to another dtype, only when told to.
Cost: one copy of the surrogates; loading digests the model's weights once.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from ..analyze.moments_file import is_moments_folder
from ..store import NearlineError, Reader, Study, UsageError
from ..store.names import typed
from ..store.settings import parse_layers
from .anatomy import Anatomy, anatomy, config_of, unwrapped
from .exported_folder import Exported, ExportedModel, claim_export, read_exported, write_exported
from .hashes import config_hash, weights_hash
from .interventions import Intervention, parse_intervention
from .linearised import Linearised, linearised_of
from .substitutes import substitutes_of

Model = TypeVar("Model", bound=nn.Module)
# Feature sets of which a gate is made without the norms and positions of the model.
_PLAIN = ("input", "norm", "position", "token_type")


def export(
    study_path: str | Path,
    out: str | Path,
    layers: Sequence[int] | str,
    gated: str | None = None,
    *,
    need: str | None = None,
    model: nn.Module | None = None,
) -> Path:
    """Write the surrogates of `layers` into the folder `out`; with `gated` (FEATURES, or FEATURES:SHARE) only
    for the tokens that this gate sends to them. `need`: the gate's, where the study has several.

    Gates that look at parts of the MLP's input are written with the norms of the model: it is loaded, from
    where the harvest had it, unless `model` is it. A folder that holds anything but an export is refused.
    """
    study, folder = Study.open(study_path), Path(out)
    one = parse_intervention("linear" if gated is None else f"gated@{gated}")
    chosen = _layers(layers)
    name, reader = _reader(study)
    parts = _parts(one, {name: reader}, model)
    substitutes = substitutes_of(study, one, chosen, anatomy=parts, need=need)
    facts = reader.attributes
    origin = ExportedModel(
        name=facts.model.name,
        revision=facts.model.revision,
        config_hash=facts.model.config_hash,
        weights_hash=facts.model.weights_hash,
        n_layers=facts.model.n_layers,
        d_model=facts.model.d_model,
    )
    claim_export(folder)
    write_exported(folder, Exported(origin, facts.tokenizer.special_ids, substitutes))
    return folder


def load_linearised(model: Model, out: str | Path, *, any_model: bool = False) -> Model:
    """`model` itself, whose MLPs in the layers of the export `out` are replaced from now on.

    Refuses another model than the one that the study was made of; `any_model=True` lets it pass if layers and
    width fit. Load in evaluation mode and in the dtype it shall run in: the surrogates are rounded to it.
    """
    exported = read_exported(Path(out))
    parts = anatomy(model)
    _require_fit(parts, exported.model, out)
    if not any_model:
        _require_same(model, exported.model, out)
    Linearised(parts, exported.substitutes, exported.special_ids, exported.model)
    return model


def save_linearised(model: nn.Module, out: str | Path) -> Path:
    """Write what is replaced in `model` into the folder `out`, as it is now: from a float32 model the very
    bytes it was loaded from, else the surrogates in the model's dtype."""
    write_exported(Path(out), linearised_of(model).exported)
    return Path(out)


def remove_linearised(model: Model) -> Model:
    """`model` itself, with its own MLPs again."""
    linearised_of(model).remove()
    return model


def _layers(layers: Sequence[int] | str) -> list[int]:
    chosen = parse_layers(layers) if isinstance(layers, str) else sorted(set(layers))
    if not chosen:
        raise UsageError("name at least one layer to export, such as --layers 5-8")
    return chosen


def _reader(study: Study) -> tuple[str, Reader]:
    """A store of the study that is at hand, by name; all are of one model."""
    problem: NearlineError | None = None
    for name, path in study.stores().items():
        try:
            if not is_moments_folder(path):
                return name, Reader.open(path)
        except NearlineError as error:  # one that is elsewhere now is not needed if another is here
            problem = problem or error
    raise problem or UsageError(
        f"{study.path} names no store with rows, so its model is not known: run `nearline fit "
        f"{typed(study.path)} STORE…` first"
    )


def _parts(one: Intervention, readers: Mapping[str, Reader], model: nn.Module | None) -> Anatomy | None:
    """The model's anatomy, where a gate is made of more than x, token and position."""
    if one.features is None or one.features in _PLAIN:
        return None
    from .measure_settings import MeasureSettings
    from .models import describe
    from .study_model import load_for, require_same

    if model is None:
        return anatomy(load_for(MeasureSettings(device="cpu"), readers).model)
    require_same(describe(model), readers)
    return anatomy(model)


def _require_fit(parts: Anatomy, origin: ExportedModel, out: str | Path) -> None:
    has, wanted = (parts.n_layers, parts.d_model), (origin.n_layers, origin.d_model)
    if has != wanted:
        raise UsageError(
            f"{out} is for {origin.name} ({wanted[0]} layers of width {wanted[1]}), and this model has "
            f"{has[0]} layers of width {has[1]}"
        )


def _require_same(model: Any, origin: ExportedModel, out: str | Path) -> None:
    inner = unwrapped(model)
    pairs = {
        "configuration": (config_hash(config_of(inner)), origin.config_hash),
        "weights": (weights_hash(inner), origin.weights_hash),
    }
    for what, (has, was) in pairs.items():
        if has != was:
            revision = "" if origin.revision is None else f" at revision {origin.revision}"
            raise UsageError(
                f"{out} is for {origin.name}{revision} as it was harvested, and the {what} of this model "
                f"have another digest ({has[:12]}, not {was[:12]}): give that model in that dtype, or "
                "any_model=True"
            )
