"""What a settings file calls a model, a corpus or a file, as a path from anywhere: relative ones are counted
from the file. And corpora as the stores that they become.

In: text of the file, and its folder. Out: the same with an absolute path, where it names one; a bundled
model, a Hub id and a built-in corpus stay. Cost: a look at which files there are.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ..collect.built_in import RESERVED
from ..collect.bundled_models import BUNDLED, bundled_path
from ..collect.specs import split_dataset, split_field, split_spec

# Fields that name stores of the study; in the file they name corpora.
NAMES_OF_STORES: Final[Mapping[str, tuple[str, ...]]] = {
    "fit": ("fit_on",),
    "measure": ("stores",),
    "finetune": ("train_on", "stores"),
}


def path_here(text: str, base: Path) -> Path:
    """An absolute path."""
    return base / Path(text).expanduser()


def model_here(model: str, base: Path) -> str:
    """A folder as an absolute path. `OWNER/NAME` is a folder where there is one, else a Hub id."""
    if model in BUNDLED:
        return model
    path = path_here(model, base)
    named = model.startswith((".", "/", "~")) or model.count("/") > 1
    return str(path) if named or path.exists() else model


def model_folder(model: str) -> Path | None:
    """The folder of a model; None for a Hub id."""
    if model in BUNDLED:
        return bundled_path(model)
    return Path(model) if Path(model).is_absolute() else None


def corpus_here(spec: str, base: Path) -> str:
    """A corpus with an absolute path; what names none is refused."""
    if spec in RESERVED:
        return spec
    kind, rest = split_spec(spec)
    if kind == "hf" and not _is_folder(rest, base):
        return spec
    return f"{kind}:{path_here(rest, base)}"


def corpus_files(spec: str) -> Path | None:
    """The file or folder of a corpus; None where it is none of this machine."""
    if spec in RESERVED:
        return None
    kind, rest = split_spec(spec)
    if kind == "hf":
        found = split_dataset(rest)
        return Path(found.name) if found.local else None
    return split_field(rest)[0] if kind in ("jsonl", "parquet") else Path(rest)


def _is_folder(rest: str, base: Path) -> bool:
    """Whether a data set is named by a folder: written as one, or there is one."""
    first = rest.partition(":")[0]
    return rest.startswith((".", "/", "~")) or path_here(first, base).is_dir()


def stores_named(
    keys: Sequence[str], values: Mapping[str, Any], known: Mapping[str, str]
) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Settings whose `keys` name corpora, with their stores instead; left out are keys with a name that is
    not `known`, and which these are comes behind."""
    found, unknown = dict(values), list[tuple[str, str]]()
    for key in keys:
        value = found.get(key)
        if isinstance(value, str):
            names = [part.strip() for part in value.split(",")] if key == "stores" else [value]
        elif isinstance(value, list) and all(isinstance(one, str) for one in value):
            names = value
        else:
            continue
        if none := [(key, name) for name in names if name not in known]:
            unknown += none
            del found[key]
        else:
            named = [known[name] for name in names]
            found[key] = named if isinstance(value, list) else ",".join(named)
    return found, unknown
