"""What a store is and how far it has come, as plain facts: `nearline info STORE [--json]`.

In: a store's folder or URL, sealed or not. Out: one JSON-ready dict: model, corpus, rows, splits, blocks,
bytes, value ranges, and whether it is sealed. Cost: reads the small files; no chunk is opened.
"""

from pathlib import Path
from typing import Any

from .attributes import Attributes
from .dtypes import GRADIENT
from .finding import store_place
from .folder import (
    GROUP,
    PLAN,
    RUNS,
    committed_blocks,
    load_record,
    parse_group,
    parse_plan,
    read_small,
    show_numbers,
    specs_of,
)
from .incomplete import begun_copy
from .layout import CRC_BYTES
from .manifest import read_sealed_manifest
from .places import LocalPlace, Place
from .plan import SPLITS, Plan
from .records import BlockRecord, record_name

_COUNTS = ("n_nonfinite", "n_out_of_range")
_GRADIENT_COUNTS = (*_COUNTS, "n_underflow")


def info(where: str | Path | Place) -> dict[str, Any]:
    """Facts of a store. A damaged metadata file raises DamageError and a copy in the making StoreNotSealed; a
    harvest that is not finished does not."""
    place = store_place(where)
    manifest, digest = read_sealed_manifest(place)
    if manifest is None and (unfinished := begun_copy(place)) is not None:
        raise unfinished

    def small(name: str) -> bytes:
        return read_small(place, name, manifest)

    attributes = parse_group(small(f"{GROUP}/zarr.json"), place.where(f"{GROUP}/zarr.json"))
    plan = parse_plan(small(PLAN), attributes, place.where(PLAN))
    committed = sorted(committed_blocks(place) if manifest is None else range(plan.n_blocks))
    specs = specs_of(attributes, plan)
    totals = _Totals(attributes)
    for block in committed:
        name = record_name(block)
        totals.add(load_record(small(name), plan, specs, block, place.where(name)))
    missing = sorted(set(range(plan.n_blocks)) - set(committed))
    return {
        "store": _name(place),
        "sealed": manifest is not None,
        "digest": digest,
        **_identity(attributes),
        **_rows(plan),
        "n_blocks": plan.n_blocks,
        "n_committed": len(committed),
        "missing_blocks": show_numbers(missing),
        "committed_rows": totals.rows,
        "chunk_bytes": totals.chunk_bytes,
        "planned_bytes": plan.n_blocks * sum(_array_bytes(spec) for spec in specs.values()),
        "n_objects": totals.n_objects,
        "n_runs": sum(name.endswith(".json") for name in place.list(f"{RUNS}/") or ()),
        "values": totals.values(attributes),
        "proof": attributes.proof,
        "versions": attributes.versions,
        "lineage": list(attributes.lineage),
    }


def _name(place: Place) -> str:
    return place.path.resolve().name if isinstance(place, LocalPlace) else place.url


def _identity(attributes: Attributes) -> dict[str, Any]:
    model, corpus, storage, compute = (
        attributes.model,
        attributes.corpus,
        attributes.storage,
        attributes.compute,
    )
    return {
        "model": model.name,
        "model_type": model.model_type,
        "revision": model.revision,
        "weights_hash": model.weights_hash,
        "corpus": corpus.spec,
        "n_documents": corpus.n_documents,
        "n_groups": corpus.n_groups,
        "passages": corpus.passages,
        "n_layers": len(storage.layers),
        "layers": show_numbers(list(storage.layers)),
        "d_model": model.d_model,
        "sites": list(storage.sites),
        "storage_dtype": storage.dtype,
        "compressor": storage.compressor,
        **({"gradient_exponents": list(storage.gradient_exponents)} if storage.gradient_exponents else {}),
        "compute_dtype": compute.dtype,
        "attention": compute.attention,
        "device": compute.device_type,
    }


def _rows(plan: Plan) -> dict[str, Any]:
    counts = {
        f"n_{name}": int(plan.block_rows[plan.block_split == code].sum()) for code, name in enumerate(SPLITS)
    }
    return {
        "n_tokens": plan.n_tokens,
        **counts,
        "n_sequences": plan.n_sequences,
        "sequence_length": plan.sequence_length,
        "block": plan.block,
    }


def _array_bytes(spec: Any) -> int:
    """Bytes of one array in one block, uncompressed."""
    n_layers = spec.shape[0] if spec.dims[0] == "layer" else 1
    return n_layers * (spec.chunk_bytes + CRC_BYTES)


class _Totals:
    """Sums over block records, taken one by one: all of them together may be a million chunks."""

    def __init__(self, attributes: Attributes) -> None:
        self._factors = [2.0**-exponent for exponent in attributes.storage.gradient_exponents]
        self.rows = self.chunk_bytes = self.n_objects = 0
        self._largest: dict[str, int | float] = {}
        self._counts: dict[tuple[str, str], int] = {}

    def add(self, record: BlockRecord) -> None:
        self.rows += record.row1 - record.row0
        self.n_objects += len(record.chunks)
        self.chunk_bytes += sum(chunk.size for chunk in record.chunks.values())
        for site, found in record.statistics.items():
            sizes = found.get("max_abs", [])
            if site == GRADIENT and self._factors:  # as it is, not as it is stored
                pairs = zip(sizes, self._factors, strict=True)
                sizes = [None if size is None else size * factor for size, factor in pairs]
            largest = [value for value in sizes if value is not None]
            if largest:
                self._largest[site] = max(max(largest), self._largest.get(site, 0))
            for count in _counts_of(site):
                more = sum(int(value or 0) for value in found.get(count, []))
                self._counts[site, count] = self._counts.get((site, count), 0) + more

    def values(self, attributes: Attributes) -> dict[str, dict[str, Any]]:
        """Per site: the largest |value|, and how many were not finite or too large; of a gradient also how
        many became zero as they were stored."""
        return {
            site: {
                "max_abs": self._largest.get(site),
                **{count: self._counts.get((site, count), 0) for count in _counts_of(site)},
            }
            for site in attributes.storage.sites
        }


def _counts_of(site: str) -> tuple[str, ...]:
    return _GRADIENT_COUNTS if site == GRADIENT else _COUNTS
