"""What a store is and how far it has come, as plain facts: `nearline info STORE [--json]`.

In: a store's folder or URL, sealed or not. Out: one JSON-ready dict: model, corpus, rows, splits, blocks,
bytes, value ranges, and whether it is sealed. Cost: reads the small files; no chunk is opened.
"""

from pathlib import Path
from typing import Any

from .attributes import Attributes
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
    store_place,
)
from .layout import CRC_BYTES
from .manifest import read_sealed_manifest
from .places import LocalPlace, Place
from .plan import SPLITS, Plan
from .records import BlockRecord, record_name


def info(where: str | Path | Place) -> dict[str, Any]:
    """Facts of a store; a damaged metadata file raises DamageError, an unsealed store does not."""
    place = store_place(where)
    manifest, digest = read_sealed_manifest(place)

    def small(name: str) -> bytes:
        return read_small(place, name, manifest)

    attributes = parse_group(small(f"{GROUP}/zarr.json"), place.where(f"{GROUP}/zarr.json"))
    plan = parse_plan(small(PLAN), attributes, place.where(PLAN))
    committed = sorted(committed_blocks(place) if manifest is None else range(plan.n_blocks))
    specs = specs_of(attributes, plan)
    names = [(block, record_name(block)) for block in committed]
    records = [load_record(small(name), plan, specs, block, place.where(name)) for block, name in names]
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
        "committed_rows": sum(record.row1 - record.row0 for record in records),
        "chunk_bytes": sum(chunk.size for record in records for chunk in record.chunks.values()),
        "planned_bytes": plan.n_blocks * sum(_array_bytes(spec) for spec in specs.values()),
        "n_objects": sum(len(record.chunks) for record in records),
        "n_runs": sum(name.endswith(".json") for name in place.list(f"{RUNS}/") or ()),
        "values": _values(records, attributes),
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


def _values(records: list[BlockRecord], attributes: Attributes) -> dict[str, dict[str, Any]]:
    """Per site, over the committed blocks: the largest |value|, and how many were not finite or too large."""
    found: dict[str, dict[str, Any]] = {}
    for site in attributes.storage.sites:
        named = [record.statistics[site] for record in records if site in record.statistics]
        largest = [value for values in named for value in values.get("max_abs", []) if value is not None]
        found[site] = {"max_abs": max(largest, default=None)}
        for count in ("n_nonfinite", "n_out_of_range"):
            found[site][count] = sum(int(value or 0) for values in named for value in values.get(count, []))
    return found
