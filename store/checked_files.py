"""The files of a store that is opened, each checked before it is believed: metadata against the manifest,
chunks against their block records.

In: a store's folder or URL. Out: its facts, block records, chunks of an array and small arrays as a whole; a
file that should be there and is not, or is another one, is an error that names it. Cost: opening reads a
handful of small files; block records are read once and kept.
"""

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .attributes import Attributes
from .chunks import read_chunk
from .errors import DamageError, IncompleteError, StoreNotSealed
from .finding import store_place
from .folder import (
    GROUP,
    PLAN,
    check_group,
    load_record,
    parse_group,
    parse_plan,
    parse_whole,
    read_small,
    specs_of,
)
from .incomplete import incomplete_copy
from .manifest import MANIFEST, Manifest, read_sealed_manifest
from .metadata import ArraySpec
from .parsing import readable
from .places import LocalPlace, Place
from .plan import Plan
from .records import BlockRecord, record_name
from .replacing import READY
from .sealing import check_all_committed


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class CheckedFiles:
    """A store that is opened, and its files by name; safe to share between threads."""

    place: Place
    attributes: Attributes
    plan: Plan
    manifest: Manifest | None  # None: the store is not sealed
    digest: str | None  # of the seal
    _specs: dict[str, ArraySpec]
    _records: dict[int, BlockRecord] = field(default_factory=dict)
    _lock: Any = field(default_factory=threading.Lock)

    def record(self, block: int) -> BlockRecord:
        """Digests and statistics of a block; read once, then kept."""
        found = self._records.get(block)
        if found is None:
            found = self._load_record(block)
            with self._lock:
                self._records[block] = found
        return found

    def _load_record(self, block: int) -> BlockRecord:
        name = record_name(block)
        row0, row1 = self.plan.block_range(block)
        spot = self.place.where(name)
        try:
            content = self.place.read(name)
        except FileNotFoundError:
            kind = IncompleteError if self.manifest is None else DamageError
            raise kind(f"{spot}: tokens {row0}-{row1 - 1} have no block record") from None
        if self.manifest is not None:
            self.manifest.check(name, content, spot)
        return load_record(content, self.plan, self._specs, block, spot)

    def _small(self, name: str) -> bytes:
        """Content of a metadata file, checked against the manifest where there is one."""
        content = read_small(self.place, name)
        return (
            content if self.manifest is None else self.manifest.check(name, content, self.place.where(name))
        )

    def _read_block(self, name: str, spec: ArraySpec, index: int | None, block: int, out: np.ndarray) -> None:
        rest = [0] * (len(spec.dims) - 1)
        key = spec.key(block, *rest) if index is None else spec.key(index, block, 0)
        row0, row1 = self.plan.block_range(block)
        layer = "" if index is None else f" layer {self.attributes.storage.layers[index]}"
        file = f"{GROUP}/{key}"
        spot = f"`{name}`{layer}, tokens {row0}-{row1 - 1} ({self.place.where(file)})"
        record = self.record(block).chunks[key]
        read_chunk(self.place, file, spec, self.attributes.storage.compressor, out, spot, record)

    def _whole(self, name: str) -> np.ndarray | None:
        file = f"{GROUP}/{name}/zarr.json"
        known = None if self.manifest is None else file in self.manifest.files
        if known is False or (known is None and self.place.size(file) is None):
            return None
        spot = self.place.where(file)
        spec = parse_whole(self._small(file), name, self.attributes, spot)
        parts: list[np.ndarray] = []
        for index, row in enumerate(range(0, spec.shape[0], spec.chunks[0])):
            key = f"{GROUP}/{spec.key(index, *([0] * (len(spec.dims) - 1)))}"
            self._small(key)  # it is there, before memory is taken for it
            rows = min(spec.chunks[0], spec.shape[0] - row)
            parts.append(np.empty((rows, *spec.shape[1:]), dtype=spec.dtype))
            compressor = self.attributes.storage.compressor
            read_chunk(self.place, key, spec, compressor, parts[-1], f"`{name}` ({self.place.where(key)})")
        return np.concatenate(parts)


def opened(
    where: str | Path | Place, *, require_seal: bool
) -> tuple[Place, Attributes, Plan, Manifest | None, str | None, dict[str, ArraySpec]]:
    """The facts of a store, in the order of the fields of `CheckedFiles`."""
    place = store_place(where)
    if isinstance(place, LocalPlace) and place.size(READY) is not None:
        raise StoreNotSealed(
            f"{place.url}: a repair or a shortening was interrupted; run `nearline repair` again, or "
            "`nearline seal --partial` for a store that was not sealed"
        )
    manifest, digest = read_sealed_manifest(place)
    if manifest is None and require_seal and (cut_short := incomplete_copy(place)) is not None:
        raise cut_short

    def small(name: str) -> bytes:
        return read_small(place, name, manifest)

    group = f"{GROUP}/zarr.json"
    attributes = parse_group(content := small(group), place.where(group))
    plan = parse_plan(small(PLAN), attributes, place.where(PLAN))
    check_group(content, attributes, plan, place.where(group))
    if manifest is not None:
        manifest.check_plan(plan.digest, plan.n_tokens, plan.n_blocks, place.where(MANIFEST))
    if manifest is None and require_seal:
        check_all_committed(place, plan)
        raise StoreNotSealed(f"{place.url} has all {plan.n_blocks} blocks but no seal: run `nearline seal`")
    specs = specs_of(attributes, plan)
    for spec in specs.values():
        name = f"{GROUP}/{spec.name}/zarr.json"
        if small(name) != readable(spec.to_metadata(attributes.storage.compressor)):
            raise DamageError(f"{place.where(name)}: the metadata of the array does not fit the attributes")
    return place, attributes, plan, manifest, digest, specs
