"""A *moments folder*: a `MomentsSource` saved, and opened again.

One Zarr group a layer (`moments_arrays`), the table of documents with their folds, and moments.json, which
says of what they are. That file names the digests of all others and is written last: a folder without it is
not whole. `nearline collect --moments-only` writes the same folder. Loaded moments give the bytes that those
before gave. What comes from elsewhere is checked before a number of it is used. Cost: 2·(K + 3)·8·d² bytes a
layer on disk, and in memory while the layer is at work.
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
from blake3 import blake3

from ..store import SPLITS, DamageError, FormatError, IncompleteError, UsageError, durable, in_place
from ..store.attributes import parse_attributes
from ..store.folder import MOMENTS, RUNS
from ..store.parsing import (
    SMALL_JSON_BYTES,
    get_hex,
    get_int,
    get_ints,
    get_list,
    get_object,
    get_str,
    parse_json,
    readable,
)
from ..store.places import LocalPlace, scheme_of
from ..store.tables import read_table, write_table
from ..store.whole import digest_of, write_arrays
from .moments_arrays import layer_arrays, read_layer
from .moments_source import COLUMNS, MomentsSource
from .population import LEFT_OUT
from .surrogates import LayerMoments

SCHEMA: Final = 1
DOCUMENTS: Final = "documents.parquet"
_KEYS: Final = ("schema", "attributes", "sources", "folds", "seed", "layers", "files")


def is_moments_folder(where: str | Path) -> bool:
    """Whether a folder on this machine holds moments instead of rows, whole or torn."""
    if scheme_of(where) is not None:
        return False
    return (Path(where) / MOMENTS).is_file() or any(Path(where).glob("layer=*.zarr"))


def save_moments(folder: str | Path, source: MomentsSource) -> MomentsSource:
    """Write a moments folder; what comes back is opened from it. What a run that was stopped left there is
    replaced; a folder that is whole, or holds anything else, is refused."""
    path = claim_moments(folder)
    if (path / MOMENTS).exists():
        raise UsageError(f"{path} holds moments already; name a new or an empty folder")
    remove_moments(path)
    digests: dict[str, str] = {}
    write_table(path / DOCUMENTS, source.documents.cast(COLUMNS))
    digests[DOCUMENTS] = digest_of(path / DOCUMENTS)
    for layer in source.layers:
        group = path / _group(layer)
        write_arrays(group, *layer_arrays(source.layer(layer)))
        digests[group.name] = digest_of(group)
    content = readable(
        {
            "schema": SCHEMA,
            "attributes": source.attributes.to_dict(),
            "sources": list(source.sources),
            "folds": source.n_folds,
            "seed": source.seed,
            "layers": list(source.layers),
            "files": digests,
        }
    )
    durable.write_file(path / MOMENTS, content)
    return open_moments(path, source.name)


def claim_moments(folder: str | Path) -> Path:
    """A folder that moments can be written into, or stand in: new, empty, or with nothing but moments, whole
    or as a run left them that was stopped while it wrote them.
    """
    path = Path(folder)
    if path.exists() and not path.is_dir():
        raise UsageError(f"{path} is a file; name a new or an empty folder")
    found = sorted(entry.name for entry in path.iterdir()) if path.exists() else []
    if foreign := [name for name in found if not is_ours(name) and name != RUNS]:
        shown = ", ".join(foreign[:3]) + (", ..." if len(foreign) > 3 else "")
        raise UsageError(f"{path} is not empty (it holds {shown}); name a new or an empty folder")
    durable.make_folder(path)
    durable.check_writable(path)
    return path


def is_ours(name: str) -> bool:
    """Whether this may be the name of a part of a moments folder."""
    group = name.startswith("layer=") and name.endswith(".zarr")
    return group or name in (DOCUMENTS, MOMENTS) or durable.is_temporary(name)


def remove_moments(path: Path) -> None:
    """Remove every part of a moments folder; the folder itself and what else is in it stay."""
    for entry in [entry for entry in path.iterdir() if is_ours(entry.name)]:
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            in_place.unlink_file(entry)


def open_moments(folder: str | Path, name: str | None = None) -> MomentsSource:
    """The moments in a folder; every part is there, and the table of documents is as it was written. Layers
    are read, and their digests checked, when they are asked for.
    """
    path = Path(folder)
    where = str(path / MOMENTS)
    try:
        content = LocalPlace(path).read(MOMENTS, limit=SMALL_JSON_BYTES)
    except FileNotFoundError:
        raise IncompleteError(
            f"{path} holds no whole moments: {MOMENTS} is missing, which is written last; "
            "sum them again (`nearline collect MODEL CORPUS OUT --moments-only`)"
        ) from None
    found = get_object(parse_json(content, where), where, keys=_KEYS)
    get_int(found, "schema", where, SCHEMA, SCHEMA)
    attributes = parse_attributes(found["attributes"], f"{where}: attributes")
    sources = get_list(found, "sources", where, dict)
    for source in sources:
        _check_source(source, f"{where}: sources")
    layers = tuple(get_ints(found, "layers", where))
    if layers != attributes.storage.layers:
        raise FormatError(f"{where}: `layers` are not those of the attributes")
    files = get_object(found["files"], f"{where}: files", keys=[DOCUMENTS, *map(_group, layers)])
    digests = {file: get_hex(files, file, f"{where}: files") for file in files}
    n_folds = get_int(found, "folds", where, 2, 100)
    for file in files:
        _check_there(path, file)
    _check_digest(path, DOCUMENTS, digests)
    documents = read_table(path / DOCUMENTS, COLUMNS)
    rows = _rows_of_folds(documents, n_folds, str(path / DOCUMENTS))
    with_contribution = {
        layer: kind != "none" for layer, kind in zip(layers, attributes.norm.post_kinds, strict=True)
    }
    return MomentsSource(
        name=name or path.resolve().name,
        attributes=attributes,
        sources=tuple(sources),
        documents=documents,
        n_folds=n_folds,
        seed=get_int(found, "seed", where),
        layers=layers,
        load=_Loader(path, digests, rows, attributes.model.d_model, with_contribution),
        path=path,
        digest=blake3(content).hexdigest(),
    )


@dataclass(frozen=True, slots=True)
class _Loader:
    """Reads the moments of a layer; can be pickled."""

    path: Path
    digests: Mapping[str, str]
    n_fit: tuple[int, ...]  # rows of each fold, as the table of documents has them
    width: int
    with_contribution: Mapping[int, bool]

    def __call__(self, layer: int) -> LayerMoments:
        group = _group(layer)
        _check_there(self.path, group)
        _check_digest(self.path, group, self.digests)
        found = read_layer(
            self.path / group, len(self.n_fit), self.width, with_contribution=self.with_contribution[layer]
        )
        if (rows := tuple(part.n for part in found.folds)) != self.n_fit:
            raise FormatError(
                f"{self.path / group}: sums of {list(rows)} rows in folds where {DOCUMENTS} has "
                f"{list(self.n_fit)}; sum the moments again"
            )
        return found


def _check_source(source: object, where: str) -> None:
    found = get_object(source, where, keys=("corpus", "n_tokens", "digest"))
    get_str(found, "corpus", where)
    get_int(found, "n_tokens", where)
    if found["digest"] is not None:
        get_hex(found, "digest", where)


def _rows_of_folds(documents: pa.Table, n_folds: int, where: str) -> tuple[int, ...]:
    """How many rows each fold has, from documents that moments can be of; FormatError where they cannot."""
    fold, group, n_tokens, n_fit = (
        documents[name].to_numpy() for name in ("fold", "group", "n_tokens", "n_fit")
    )
    if unknown := sorted(set(documents["split"].unique().to_pylist()) - set(SPLITS)):
        raise FormatError(f"{where}: split {unknown[0][:20]!r} is none of {', '.join(SPLITS)}")
    wrong = {
        "fold": (fold < LEFT_OUT) | (fold >= n_folds),
        "group": group < 0,
        "n_fit": (n_fit < 0) | (n_fit > n_tokens) | ((n_fit > 0) & (fold < 0)),
    }
    for name, rows in wrong.items():
        if (at := np.flatnonzero(rows)).size:
            value = documents[name][int(at[0])].as_py()
            raise FormatError(
                f"{where}: document {at[0]} has {name}={value}, which moments in {n_folds} folds cannot have"
            )
    fitted = n_fit > 0
    return tuple(np.bincount(fold[fitted], n_fit[fitted], n_folds).astype(np.int64).tolist())


def _group(layer: int) -> str:
    return f"layer={layer:02d}.zarr"


def _check_there(path: Path, name: str) -> None:
    if not (path / name).exists():
        raise DamageError(f"{path / name} is missing: fetch it from a copy, or sum the moments again")


def _check_digest(path: Path, name: str, digests: Mapping[str, str]) -> None:
    if digest_of(path / name) != digests[name]:
        raise DamageError(
            f"{path / name} is not what {MOMENTS} says: fetch it from a copy, or sum the moments again"
        )
