"""How each store of a study was made: one small JSON file a store, written when it is sealed.

In: a store that is to be there. Out: why it has to be collected, or None where it is there and current; a
store that was made with other settings, from other files, or is no longer whole is refused, never replaced: a
harvest costs a night, and deleting it is for a person to decide. Cost: two small files read, and a look at
the files of a local model and corpus.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ..collect.specs import portable
from ..store import NearlineError, Reader, UsageError
from ..store.durable import write_file
from ..store.folder import committed_blocks
from ..store.names import typed
from ..store.parsing import parse_json
from .fingerprints import ALL, MODEL_FILES, fingerprint, is_same
from .reasons import Why, differences
from .study_paths import corpus_files, model_folder
from .study_settings import StoreJob

# They say where and how fast, never what: another value makes the same store.
_NOT_RECORDED: Final = frozenset(
    {
        "max_time",
        "device_map",
        "max_memory",
        "offload_folder",
        "trust_remote_code",
        "allow_pickle",
        "streaming",
    }
)


def record_path(records: Path, store: StoreJob) -> Path:
    return records / f"{store.name}.json"


def why_collect(records: Path, store: StoreJob) -> Why | None:
    """Why a store has to be collected or continued; None where it is sealed and current."""
    if not store.path.exists():
        return Why("there is no store yet", "there was no store")
    path = record_path(records, store)
    known = parse_json(path.read_bytes(), str(path)) if path.exists() else None
    if not isinstance(known, dict) or not isinstance(known.get("settings"), dict):
        if (store.path / "SEALED").exists():
            return Why("sealed, but nothing says how it was made", "nothing said how it was made")
        done = len(committed_blocks(store.path))
        blocks = f"{done} block{'' if done == 1 else 's'}"
        return Why(f"unfinished: {blocks} committed", f"{blocks} {'was' if done == 1 else 'were'} there")
    _refuse_other_settings(store, known["settings"])
    _refuse_other_files(store, known.get("inputs") or {})
    if known.get("seal") != seal_of(store.path):
        raise UsageError(
            f"{store.path}: this store is no longer the one that was sealed here: `nearline verify "
            f"{typed(store.path)}` says what is wrong, or delete it to make it again"
        )
    return None


def write_record(records: Path, store: StoreJob) -> None:
    """Note how a store that is sealed now was made."""
    found = {name: fingerprint(*place) for name, place in _inputs(store).items()}
    record = {"settings": _recorded(store), "inputs": found, "seal": seal_of(store.path)}
    records.mkdir(parents=True, exist_ok=True)
    write_file(record_path(records, store), json.dumps(record, indent=2, sort_keys=True).encode() + b"\n")


def seal_of(store: Path) -> str | None:
    """The digest of a sealed store; None where it is none."""
    try:
        return Reader.open(store).digest
    except NearlineError:
        return None


def _recorded(store: StoreJob) -> dict[str, Any]:
    """What the rows depend on; a local model or corpus by its last name, wherever it stands."""
    settings = store.settings.model_dump(mode="json", exclude=set(_NOT_RECORDED), exclude_none=True)
    folder = model_folder(store.settings.model)
    named = {"model": store.settings.model if folder is None else folder.name}
    for key in ("include", "exclude"):
        if key in settings:
            named[key] = Path(settings[key]).name
    return settings | named | {"corpus": portable(store.settings.corpus)}


def _inputs(store: StoreJob) -> dict[str, tuple[Path, tuple[str, ...]]]:
    """Files of this machine that a store is made from."""
    settings, found = store.settings, dict[str, tuple[Path, tuple[str, ...]]]()
    if (folder := model_folder(settings.model)) is not None:
        found["model"] = (folder, MODEL_FILES)
    if settings.adapter is not None and (adapter := model_folder(settings.adapter)) is not None:
        found["adapter"] = (adapter, MODEL_FILES)
    if (files := corpus_files(settings.corpus)) is not None:
        found["corpus"] = (files, ALL)
    for key in ("include", "exclude"):
        if (named := getattr(settings, key)) is not None:
            found[key] = (Path(named), ALL)
    return found


def _refuse_other_settings(store: StoreJob, before: Mapping[str, Any]) -> None:
    if found := differences(before, _recorded(store)):
        raise UsageError(
            f"{store.path}: this store was made with other settings ({found}): name another output folder, "
            "set them back, or delete this store to make it again"
        )


def _refuse_other_files(store: StoreJob, before: Mapping[str, Any]) -> None:
    for name, place in _inputs(store).items():
        if isinstance(before.get(name), dict) and not is_same(before[name], *place):
            raise UsageError(
                f"{store.path}: this store was made from other files: {place[0]} ({name}) has changed since; "
                "name another output folder, or delete this store to make it again"
            )
