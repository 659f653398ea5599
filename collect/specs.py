"""How a corpus is named on the command line, and what a store calls it.

In: a spec, such as `jsonl:my/data.jsonl:body`. Out: its parts, and its portable form: a local path by its
last name only, every default spelled out. Cost: a look at which folders there are, since names may hold
colons.
"""

import difflib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from ..store.errors import UsageError
from .built_in import RESERVED

DATASET_FORM = "hf:NAME[:CONFIG[:SPLIT[:COLUMN]]]"
SPEC_FORMS = ("text:PATH", "jsonl:PATH[:FIELD]", "parquet:PATH[:COLUMN]", DATASET_FORM, "ids:PATH")
KINDS = tuple(form.partition(":")[0] for form in SPEC_FORMS)
KIND_OF_SUFFIX = {".jsonl": "jsonl", ".parquet": "parquet", ".npy": "ids"}
DEFAULT_FIELD = "text"
DEFAULT_SPLIT = "train"
_COLON = re.compile(r":(?![^\[\]]*\])")  # one inside of brackets belongs to a slice
_SPLIT = re.compile(r"(?P<name>[^\[\]+]+)(\[(?P<start>\d*):(?P<stop>\d*)\])?")


@dataclass(frozen=True, slots=True)
class DatasetSpec:
    """What `datasets` reads: a local folder or a Hub id, and rows from `start` to `stop` of a split."""

    name: str
    local: bool
    config: str
    split: str
    start: int
    stop: int | None
    column: str


def split_spec(spec: str) -> tuple[str, str]:
    """The kind of a spec that is no built-in, and what follows; the ~ of a home folder, which a shell leaves
    alone behind a colon, is put in full."""
    kind, colon, rest = spec.partition(":")
    if kind not in KINDS or not colon or not rest:
        raise UsageError(_unknown(spec))
    return kind, os.path.expanduser(rest)  # noqa: PTH111 (Path's raises where there is no such user)


def split_field(rest: str) -> tuple[Path, str]:
    """PATH[:FIELD] as path and field; a path that exists as it stands is a path, colons included."""
    head, colon, tail = rest.rpartition(":")
    if not colon or not head or not tail or "/" in tail or "\\" in tail or Path(rest).exists():
        return Path(rest), DEFAULT_FIELD
    return Path(head), tail


def split_dataset(rest: str) -> DatasetSpec:
    """NAME[:CONFIG[:SPLIT[:COLUMN]]]; the longest part that is a folder here is the name, colons included."""
    ends = [*(colon.start() for colon in _COLON.finditer(rest)), len(rest)]
    folder = next((end for end in reversed(ends) if Path(rest[:end]).is_dir()), None)
    if folder is None:  # no name of a configuration, split or column holds a slash
        ends = [end for end in ends if end > rest.rfind("/")]
    end = ends[0] if folder is None else folder
    parts = _COLON.split(rest[end + 1 :]) if end < len(rest) else []
    if len(parts) > 3 or not rest[:end]:
        raise UsageError(f"corpus 'hf:{rest}': a data set is named {DATASET_FORM}.")
    config, split, column = (*parts, "", "", "")[:3]
    found = _SPLIT.fullmatch(split or DEFAULT_SPLIT)
    if found is None:
        raise UsageError(
            f"corpus 'hf:{rest}': the split {split!r} is neither the name of one nor NAME[FROM:TO], with row "
            "numbers from 0 (no percentages, no sums of splits)."
        )
    start, stop = (int(found[part]) if found[part] else None for part in ("start", "stop"))
    return DatasetSpec(
        rest[:end], folder is not None, config, found["name"], start or 0, stop, column or DEFAULT_FIELD
    )


def portable(spec: str) -> str:
    """What a store calls this corpus: the same for the same files in any place."""
    if spec in RESERVED:
        return spec
    kind, rest = split_spec(spec)
    if kind in ("jsonl", "parquet"):
        path, field = split_field(rest)
        return f"{kind}:{portable_name(path)}:{field}"
    if kind != "hf":
        return f"{kind}:{portable_name(Path(rest))}"
    found = split_dataset(rest)
    bounds = f"[{found.start or ''}:{'' if found.stop is None else found.stop}]"
    split = found.split + (bounds if bounds != "[:]" else "")
    return f"hf:{dataset_name(found)}:{found.config}:{split}:{found.column}"


def portable_name(path: Path) -> str:
    """The last name of a path, which `.` and `..` have not got."""
    return path.resolve().name if path.is_dir() else path.name


def dataset_name(spec: DatasetSpec) -> str:
    """A Hub id as it is, a folder by its last name; so, too, where the folder is no more."""
    by_path = spec.local or spec.name.startswith((".", "/", "~")) or spec.name.count("/") > 1
    return portable_name(Path(spec.name)) if by_path else spec.name


def _unknown(spec: str) -> str:
    known = [*RESERVED, *SPEC_FORMS]
    near = _nearest(spec)
    hint = f" Did you mean {near}?" if near else ""
    return f"corpus {spec!r}: unknown. Corpora are {', '.join(known)}.{hint}"


def _nearest(spec: str) -> str | None:
    """What was meant: a path that is there lacks its kind; else a kind or a built-in with a slip in it."""
    if Path(spec).exists():
        return f"{KIND_OF_SUFFIX.get(Path(spec).suffix, 'text')}:{spec}"
    kind, colon, rest = spec.partition(":")
    if colon and rest and kind != "docs" and (near := difflib.get_close_matches(kind, KINDS, n=1)):
        return f"{near[0]}:{rest}"
    return next(iter(difflib.get_close_matches(spec, RESERVED, n=1, cutoff=0.5)), None)
