"""The model that the stores of a study were harvested from, loaded again and compared with what they say.

In: settings, and readers of the stores. Out: the model with its anatomy, or a refusal in one sentence: the
weights and the configuration must be those whose digests the stores hold, or a cost would be measured of
another model than the surrogates stand for. Cost: loading, and one digest of the weights.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..store import Reader
from ..store.attributes import ComputeFacts
from ..store.errors import EnvironmentFault, UsageError
from ..store.places import LocalPlace
from . import models
from .batch_budget import is_full
from .bundled_models import BUNDLED
from .earlier_runs import model_places
from .measure_settings import MeasureSettings
from .models import LoadedModel

NAMED = ("revision", "gguf_file", "adapter")


def load_for(settings: MeasureSettings, stores: Mapping[str, Reader]) -> LoadedModel:
    """The model of these stores, from where the settings or their harvests say it is."""
    name, reader = next(iter(stores.items()))
    facts = reader.attributes
    place, compute = _place(settings, name, reader), compute_of(settings, reader)
    try:
        # Digests are of the weights as they were harvested; another dtype is cast as the checkpoint is.
        loaded = _load(settings, place, facts.compute.dtype, compute.attention)
        require_same(loaded, stores)
        if compute.dtype != facts.compute.dtype:
            del loaded
            loaded = _load(settings, place, compute.dtype, compute.attention)
    except RuntimeError as error:
        if not is_full(error):
            raise
        raise EnvironmentFault(
            f"the device has too little memory for the weights of {facts.model.name}: free memory on it, or "
            "choose another with --device"
        ) from None
    return loaded


def _load(settings: MeasureSettings, place: Mapping[str, Any], dtype: str, attention: str) -> LoadedModel:
    return models.load(
        **place,
        dtype=dtype,
        device=settings.device,
        attention=None if attention == "unknown" else attention,
        trust_remote_code=settings.trust_remote_code,
        allow_pickle=settings.allow_pickle,
    )


def described(model: nn.Module, stores: Mapping[str, Reader]) -> LoadedModel:
    """A live model as it is, if it is the one that these stores were harvested from."""
    loaded = models.describe(model)
    require_same(loaded, stores)
    return loaded


def require_same(loaded: LoadedModel, stores: Mapping[str, Reader]) -> None:
    """UsageError unless weights and configuration are those of every store."""
    for name, reader in stores.items():
        facts = reader.attributes.model
        pairs = {
            "weights": (loaded.weights_hash, facts.weights_hash),
            "configuration": (loaded.config_hash, facts.config_hash),
        }
        for what, (has, was) in pairs.items():
            if has != was:
                revision = "" if facts.revision is None else f" at revision {facts.revision}"
                raise UsageError(
                    f"{loaded.name} is not the model of store {name}: its {what} have digest {has[:12]}, "
                    f"those harvested {was[:12]}; name the place of {facts.name}{revision} with --model"
                )


def compute_of(settings: MeasureSettings, reader: Reader) -> ComputeFacts:
    """How the model shall run: as it did in the harvest, but for what the settings say."""
    facts = reader.attributes.compute
    return ComputeFacts(
        dtype=facts.dtype if settings.dtype == "auto" else settings.dtype,
        attention=settings.attention or facts.attention,
        device_type=facts.device_type,
        torch_threads=settings.threads or facts.torch_threads,
    )


def _place(settings: MeasureSettings, name: str, reader: Reader) -> dict[str, Any]:
    """What `models.load` finds the model by."""
    given = {key: getattr(settings, key) for key in NAMED if getattr(settings, key) is not None}
    if settings.model is not None:
        return {"model": settings.model} | given
    facts, place = reader.attributes.model, reader.place
    found = model_places(Path(place.path), facts.name) if isinstance(place, LocalPlace) else {}
    spread = {key: found.pop(key) for key in ("device_map", "offload_folder") if key in found}
    found.pop("max_memory", None)  # of the machine that harvested
    if not torch.cuda.is_available():
        spread = {}
    if not found and facts.revision is None and "/" not in facts.name and facts.name not in BUNDLED:
        raise UsageError(
            f"store {name} was harvested from a local model called {facts.name}, which is not where it was: "
            "name its place with --model"
        )
    revision = {} if facts.revision is None else {"revision": facts.revision}
    return {"model": facts.name, **revision, **found, **spread, **given}
