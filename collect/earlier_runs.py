"""What earlier harvests into a store were asked for, and where they found the model.

In: a store's folder. Out: the settings of its runs, the newest first; these files are for people and under no
seal, so whatever is taken from them is checked against the store afterwards. Cost: a few small files.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from ..store.errors import UsageError
from ..store.folder import RUNS
from .models import recorded_name
from .settings import parse

MODEL_PLACES: Final = ("model", "gguf_file", "adapter", "device_map", "max_memory", "offload_folder")
# What a run was allowed to do is no setting to be taken over: whoever wants it asks for it anew.
NOT_TAKEN_OVER: Final = ("trust_remote_code", "allow_pickle", "rank", "world_size", "max_time")


def settings_of_runs(folder: Path) -> Iterator[dict[str, Any]]:
    """Settings of earlier runs into the store in `folder`, the newest first."""
    for path in sorted((folder / RUNS).glob("*.json"), reverse=True):
        try:
            used = json.loads(path.read_bytes())["settings"]
            for key in NOT_TAKEN_OVER:
                used.pop(key, None)
            parse(used)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
        yield used


def model_places(folder: Path, name: str) -> dict[str, Any]:
    """Where the newest run found a model that the store calls `name`; nothing where no run says so."""
    for used in settings_of_runs(folder):
        try:
            found = recorded_name(used["model"], used.get("gguf_file"), used.get("adapter"))
        except (KeyError, UsageError):
            continue
        if found == name:
            return {key: used[key] for key in MODEL_PLACES if used.get(key) is not None}
    return {}
