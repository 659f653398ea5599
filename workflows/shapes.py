"""The sizes of a model: as a settings file writes them down, as the model's own config.json has them, and
that the two agree.

In: a model of a study. Out: its `ModelShape`, or None where neither says it; a sentence where they differ.
Cost: one small file; no torch is loaded, but by `require_shape`, which asks the Hub for the config of a model
that is not here.
"""

import json
from pathlib import Path

from ..collect.model_shape import ModelShape, shape_in
from ..store import UsageError
from .study_paths import model_folder
from .study_settings import ModelStudy, StoreJob


def shape_of(model: ModelStudy) -> ModelShape | None:
    """As it is written down, else as the model has it where it is at hand."""
    return model.shape or at_hand(model.stores[0])


def at_hand(store: StoreJob) -> ModelShape | None:
    """The sizes that a model on this machine has; None where it is not here or does not say."""
    path = _config_path(store)
    if path is None or not path.is_file():
        return None
    try:
        return shape_in(json.loads(path.read_bytes()))
    except ValueError:
        return None  # the harvest says what is wrong with it


def check_shape(said: Path, model: ModelStudy, store: StoreJob) -> None:
    """What is written down is what the model at hand has."""
    if model.shape is not None and (found := at_hand(store)) is not None:
        _compare(said, model, model.shape, found)


def require_shape(said: Path, model: ModelStudy, store: StoreJob) -> None:
    """The same of a model that may have to come from the Hub, before its weights do."""
    settings = store.settings
    if model.shape is None or settings.gguf_file is not None or model_folder(settings.model) is not None:
        return
    from ..collect.model_config import config_dict

    config = config_dict(settings.model, settings.revision, settings.trust_remote_code)
    if (found := shape_in(config)) is not None:
        _compare(said, model, model.shape, found)


def _compare(said: Path, model: ModelStudy, written: ModelShape, found: ModelShape) -> None:
    for size in ModelShape.model_fields:
        has, was = getattr(found, size), getattr(written, size)
        if has != was:
            raise UsageError(
                f"{said}, [[models]] {model.name}, shape: {size} = {was:,} is written and the model has "
                f"{has:,}: write that, or name another model"
            )


def _config_path(store: StoreJob) -> Path | None:
    settings = store.settings
    if settings.gguf_file is not None:
        return None
    if (folder := model_folder(settings.model)) is not None:
        return folder / "config.json"
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    try:
        found = try_to_load_from_cache(settings.model, "config.json", revision=settings.revision)
    except ValueError:  # a name that the Hub has for no model
        return None
    return Path(found) if isinstance(found, str) else None
