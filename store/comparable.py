"""Whether stores may be opened together: one model, one way of harvesting, and no document on two sides.

In: readers by name, and the names of differences that the caller accepts. Out: nothing, or a UsageError that
names the stores, all that differs, and how to accept it by name. Cost: the attributes, and each store's
table of documents (2 s for two stores of a million documents each); no activation is read.

A document counts in a store when its group of near-duplicates has rows there, so a copy is found, too, whose
twin alone was stored. Near-duplicates that no document of the two corpora links are not found: only hashes
of whole texts are kept.
"""

import difflib
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pyarrow as pa

from .errors import UsageError
from .open import AUTO_BLOCKS
from .open import open as open_store
from .places import LocalPlace, Place, place_of, scheme_of
from .reader import Reader

if TYPE_CHECKING:
    import xarray as xr

DIFFERENCES = ("weights", "tokenizer", "sites", "norms", "policies", "numerics", "documents")
ROW_POLICIES = ("nonfinite", "packing", "padding", "groups", "exclude_tokens")
SHOWN = 3  # documents named in a refusal

logger = logging.getLogger("nearline")

_Where = TypeVar("_Where", bound=str | Path | Place | Reader)


def name_stores(stores: Mapping[str, _Where] | Sequence[_Where]) -> dict[str, _Where]:
    """Stores by name; those of a plain list are named by the last part of their path or URL."""
    if isinstance(stores, Mapping):
        return dict(stores)
    if isinstance(stores, str):
        raise UsageError(f"{stores!r} is one store: give a list of stores, or a mapping of names to stores")
    named: dict[str, _Where] = {}
    for where in stores:
        name = _last_part(where)
        if name in named:
            raise UsageError(_twins(name, named[name], where))
        named[name] = where
    return named


def _twins(name: str, first: str | Path | Place | Reader, second: str | Path | Place | Reader) -> str:
    one, two = (_spot(where) for where in (first, second))
    if one == two:
        return f"one store is given twice ({first} and {second}): give it once"
    return (
        f"two stores are called {name} ({first} and {second}): give them names, as in {{'one': …, 'two': …}} "
        f"or `nearline fit STUDY one={first} two={second}`"
    )


def _spot(where: str | Path | Place | Reader) -> str:
    """The same text for all ways to name one place."""
    place = place_of(where.place if isinstance(where, Reader) else where)
    return str(place.path.resolve()) if isinstance(place, LocalPlace) else place.url.rstrip("/")


def _last_part(where: str | Path | Place | Reader) -> str:
    place = where.place if isinstance(where, Reader) else where
    if isinstance(place, str | Path) and scheme_of(place) in (None, "file"):
        place = place_of(place)
    if isinstance(place, LocalPlace):
        return place.path.resolve().name
    url = str(place) if isinstance(place, str | Path) else place.url
    return url.rstrip("/").rpartition("/")[2]


def check_comparable(
    readers: Mapping[str, Reader],
    *,
    allow: Collection[str] = (),
    never: Collection[str] = (),
    sites: Collection[str] | None = None,
) -> None:
    """Refuse stores that must not be compared. `allow` names differences that are accepted, which are then
    logged; `never` those that cannot be; `sites`: what is needed (default: the stores have the same).
    """
    for name in allow:
        if name not in DIFFERENCES:
            near = difflib.get_close_matches(name, DIFFERENCES, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(DIFFERENCES)}."
            raise UsageError(f"allow={name!r} is no difference of stores: {hint}")
    found = dict(_differences(readers, sites))
    for name in [name for name in found if name in allow]:
        logger.warning("%s (accepted by name: %s)", found[name], name)
    refused = [name for name in found if name not in allow or name in never]
    if not refused:
        return
    listed = "; ".join(found[name] for name in refused)
    if fixed := [name for name in refused if name in never]:
        way = (
            f"stores that differ in {' and '.join(fixed)} have no place in one study; make one for each model"
        )
    else:
        way = f"to compare them all the same: allow={tuple(refused)!r}, or --allow {','.join(refused)}"
    raise UsageError(f"these stores must not be compared: {listed}. What to do: {way}")


def open_together(
    stores: Mapping[str, str | Path | Place | Reader] | Sequence[str | Path | Place | Reader],
    *,
    allow: Collection[str] = (),
    chunks: str | dict[str, int] | None = AUTO_BLOCKS,
) -> "dict[str, xr.Dataset]":
    """Open several stores by name, as `open` opens each, once it is sure that they may be compared. Of a list
    the last part of each path or URL is the name."""
    readers = {
        name: where if isinstance(where, Reader) else Reader.open(where)
        for name, where in name_stores(stores).items()
    }
    check_comparable(readers, allow=allow)
    return {name: open_store(reader, chunks=chunks) for name, reader in readers.items()}


def _differences(readers: Mapping[str, Reader], sites: Collection[str] | None) -> Iterator[tuple[str, str]]:
    """Each kind of difference once, in the words of the first two stores that show it."""
    checks = {"weights": _weights, "tokenizer": _tokenizer, "norms": _norms}
    checks |= {"policies": _policies, "numerics": _numerics}
    pairs = list(combinations(readers.items(), 2))
    for kind, facts in checks.items():
        for (name, reader), (other_name, other) in pairs:
            ours, theirs = facts(reader, other), facts(other, reader)
            if ours != theirs:
                yield kind, f"{name} and {other_name} differ in {kind} ({_unlike(ours, theirs)})"
                break
    if words := _sites(readers, sites):
        yield "sites", words
    if words := _documents(readers):
        yield "documents", words


def _weights(reader: Reader, _: Reader) -> dict[str, Any]:
    model = reader.attributes.model
    return {"digest": model.weights_hash, "d_model": model.d_model}


def _tokenizer(reader: Reader, _: Reader) -> dict[str, Any]:
    return {"fingerprint": reader.attributes.tokenizer.fingerprint}


def _norms(reader: Reader, other: Reader) -> dict[str, Any]:
    """Of the layers that both stores have."""
    norm, layers = reader.attributes.norm, reader.layers
    common = [layer for layer in layers if layer in other.layers]
    return {
        f"layer {layer}": (
            norm.kinds[index],
            norm.epsilons[index],
            norm.post_kinds[index],
            norm.post_epsilons[index],
            norm.multipliers[index],
        )
        for layer, index in zip(common, map(layers.index, common), strict=True)
    }


def _policies(reader: Reader, _: Reader) -> dict[str, Any]:
    """How rows were made. What was chosen of a corpus, or joined in it, tells corpora apart, not rows. BOS as
    it was resolved: "auto" may mean either."""
    policies = reader.attributes.policies
    found = {name: policies[name] for name in ROW_POLICIES if name in policies}
    return {**found, "bos": reader.attributes.plan.bos}


def _numerics(reader: Reader, _: Reader) -> dict[str, Any]:
    compute = reader.attributes.compute
    return {"compute dtype": compute.dtype, "attention": compute.attention}


def _unlike(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """The first fact that differs: what it is called, and both values."""
    name = next(name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name))
    shown = [str(values.get(name, "none"))[:60] for values in (ours, theirs)]
    if all(len(text) > 40 and " " not in text for text in shown):  # digests
        shown = [text[:12] for text in shown]
    return f"{name}: {shown[0]} and {shown[1]}"


def _sites(readers: Mapping[str, Reader], needed: Collection[str] | None) -> str | None:
    wanted = set().union(*(reader.sites for reader in readers.values())) if needed is None else set(needed)
    for name, reader in readers.items():
        if lacking := sorted(wanted - set(reader.sites)):
            return f"{name} has no `{lacking[0]}`, its sites are {', '.join(reader.sites)}"
    return None


def _documents(readers: Mapping[str, Reader]) -> str | None:
    """The documents that stand in another split in another store."""
    tables = [_held(reader, number) for number, reader in enumerate(readers.values())]
    held = pa.concat_tables([table.drop_columns("key") for table in tables])
    sides = held.group_by("content_hash", use_threads=False).aggregate([("split", "count_distinct")])
    torn = sides.filter(np.asarray(sides["split_count_distinct"]) > 1)
    if not torn.num_rows:
        return None
    shown = torn["content_hash"].slice(0, SHOWN).to_pylist()
    examples = [_one_document(digest, tables, list(readers)) for digest in shown]
    more = ", ..." if torn.num_rows > SHOWN else ""
    stand = "1 document stands" if torn.num_rows == 1 else f"{torn.num_rows:,} documents stand"
    return (
        f"{stand} in different splits ({'; '.join(examples)}{more}), so that what is fitted on one store "
        "would be tested on itself: harvest all of them with the same seed and group rule"
    )


def _held(reader: Reader, number: int) -> pa.Table:
    """Content hash, key, split and store of each document whose group has rows in the store."""
    documents = reader.documents
    _, group = np.unique(np.asarray(documents["group"]), return_inverse=True)
    has_rows = np.bincount(group, weights=np.asarray(documents["n_tokens"])) > 0
    table = documents.select(["content_hash", "key", "split"])
    return table.append_column("store", pa.array(np.full(len(group), number, np.int32))).filter(
        has_rows[group]
    )


def _one_document(digest: str, tables: list[pa.Table], names: list[str]) -> str:
    """`'key', fit in a and test in b`."""
    import pyarrow.compute as pc  # costs an import that `import nearline.store` need not pay

    found = [table.filter(pc.field("content_hash") == digest).slice(0, 1) for table in tables]
    rows = [row for table in found for row in table.to_pylist()]
    sides = " and ".join(f"{row['split']} in {names[row['store']]}" for row in rows)
    return f"{rows[0]['key']!r}, {sides}"
