"""Moments as a value that merges: what a surrogate is fitted on, without the rows.

In: the moments of the layers of a store, and its documents with their folds. Out: a `MomentsSource`, which
stands where a store to be fitted on stands. Moments of further stores are added layer by layer: documents
keep their folds, so surrogates are those of reading all stores again, up to rounding in the last places of a
float64 sum. Cost of a layer of width d with K folds: 2·(K + 3)·8·d² bytes while it is at work.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import pyarrow as pa
from jaxtyping import Int

from ..store import Attributes, Reader, UsageError
from ..store.comparable import check_comparable
from .population import LEFT_OUT, UNSEEN
from .surrogates import LayerMoments, merge_layers

COLUMNS: Final = pa.schema(
    [
        ("key", pa.string()),
        ("content_hash", pa.string()),
        ("group", pa.int32()),
        ("split", pa.string()),
        ("fold", pa.int32()),  # of the surrogate that leaves the document out; -1: none has seen it
        ("n_tokens", pa.int32()),
        ("n_fit", pa.int32()),  # rows in the moments of that fold
    ]
)


@dataclass(frozen=True, slots=True, eq=False)
class MomentsSource:
    """Moments of all layers of one store, or of several together, and of what they are.

    `load` gives the moments of one layer; those of a folder are read when they are asked for.
    """

    name: str
    attributes: Attributes  # of the store; of the first one where there are several
    sources: tuple[dict[str, Any], ...]  # of each store: corpus, n_tokens, and its digest if it had one
    documents: pa.Table
    n_folds: int
    seed: int
    layers: tuple[int, ...]
    load: Callable[[int], LayerMoments]
    path: Path | None = None
    digest: str | None = None  # of moments.json; None: not saved

    @property
    def sites(self) -> tuple[str, ...]:
        return self.attributes.storage.sites

    @property
    def d_model(self) -> int:
        return self.attributes.model.d_model

    @property
    def seals(self) -> set[str]:
        """Digests of the stores that are in it, as far as their rows were ever stored."""
        return {str(one["digest"]) for one in self.sources if one.get("digest")}

    @property
    def folds(self) -> dict[str, int]:
        """Content hash → fold, of the documents of fitted groups; `LEFT_OUT` where one store says so."""
        found: dict[str, int] = {}
        hashes, folds = (self.documents[name].to_pylist() for name in ("content_hash", "fold"))
        for content_hash, fold in zip(hashes, folds, strict=True):
            if fold != UNSEEN:
                found[content_hash] = LEFT_OUT if found.get(content_hash) == LEFT_OUT else fold
        return found

    def layer(self, layer: int) -> LayerMoments:
        if layer not in self.layers:
            raise UsageError(f"{self.name} has no moments of layer {layer}; it has {list(self.layers)}")
        return self.load(layer)

    def n_fit_groups(self, n_folds: int | None = None) -> int:
        """How many groups were fitted; of the first `n_folds` folds only, where that is given."""
        fold, rows = (self.documents[name].to_numpy() for name in ("fold", "n_fit"))
        chosen = (rows > 0) & (fold < (self.n_folds if n_folds is None else n_folds))
        return int(np.unique(self.documents["group"].to_numpy()[chosen]).size)


def merge_sources(a: MomentsSource, b: MomentsSource, allow: Collection[str] = ()) -> MomentsSource:
    """The rows of both. The folds must fit together: those of `b` are made with `a.folds` as given. `allow`:
    differences of the stores behind them that are accepted by name.
    """
    if (a.n_folds, a.seed, a.layers) != (b.n_folds, b.seed, b.layers):
        raise UsageError(
            f"moments of {a.name} ({_how(a)}) and of {b.name} ({_how(b)}) cannot be added: sum both over the "
            "same layers and folds"
        )
    other = b.name if b.name != a.name else f"{b.name} (added)"
    # Both say what they are of in the words of a store.
    both = cast("dict[str, Reader]", {a.name: a, other: b})
    check_comparable(
        both, allow=allow, sites=("residual", "mlp_output"), never=("weights", "tokenizer", "norms")
    )
    known, more = a.folds, b.folds
    if torn := [h for h in known.keys() & more.keys() if known[h] != more[h] != LEFT_OUT]:
        raise UsageError(
            f"moments of {a.name} and of {b.name} cannot be added: document {min(torn)[:16]} is in fold "
            f"{known[min(torn)]} of one and {more[min(torn)]} of the other; sum {b.name} with the folds of "
            f"{a.name}"
        )
    if twice := a.seals & b.seals:
        raise UsageError(
            f"moments of {a.name} and of {b.name} cannot be added: both have the rows of the store with seal "
            f"{min(twice)[:12]}…, which would count twice"
        )
    return MomentsSource(
        name=a.name,
        attributes=a.attributes,
        sources=(*a.sources, *b.sources),
        documents=pa.concat_tables([a.documents, _renumbered(a.documents, b.documents)]),
        n_folds=a.n_folds,
        seed=a.seed,
        layers=a.layers,
        load=lambda layer: merge_layers(a.layer(layer), b.layer(layer)),
    )


def _how(source: MomentsSource) -> str:
    return f"layers {list(source.layers)}, {source.n_folds} folds, seed {source.seed}"


def _renumbered(before: pa.Table, after: pa.Table) -> pa.Table:
    """Groups of another store get numbers of their own; one with a document of an earlier store keeps that
    one's, so that it is counted once."""
    known = dict(zip(before["content_hash"].to_pylist(), before["group"].to_pylist(), strict=True))
    first = max(before["group"].to_pylist(), default=-1) + 1
    groups, hashes = after["group"].to_pylist(), after["content_hash"].to_pylist()
    joined = {g: known[h] for g, h in zip(groups, hashes, strict=True) if h in known}
    numbers = pa.array([joined.get(group, first + group) for group in groups], pa.int32())
    return after.set_column(after.column_names.index("group"), "group", numbers)


def document_table(
    documents: pa.Table, folds: Mapping[str, int], n_fit: Int[np.ndarray, "document"]
) -> pa.Table:
    """The documents of moments: those of a store with their folds and how many rows of each were fitted."""
    found = documents.select(["key", "content_hash", "group", "split", "n_tokens"])
    fold = [folds.get(h, UNSEEN) for h in documents["content_hash"].to_pylist()]
    return (
        found.append_column("fold", pa.array(fold, pa.int32()))
        .append_column("n_fit", pa.array(n_fit, pa.int32()))
        .select(COLUMNS.names)
        .cast(COLUMNS)
    )


def with_layers(attributes: Attributes, layers: Sequence[int]) -> Attributes:
    """The attributes of a store as if it held these layers only."""
    index = [attributes.storage.layers.index(layer) for layer in layers]
    norm = {
        field.name: tuple(getattr(attributes.norm, field.name)[i] for i in index)
        for field in fields(attributes.norm)
    }
    return replace(
        attributes,
        norm=replace(attributes.norm, **norm),
        storage=replace(attributes.storage, layers=tuple(layers)),
    )


def store_facts(reader: Reader) -> dict[str, Any]:
    """What moments say of the store whose rows they sum."""
    return {"corpus": reader.attributes.corpus.spec, "n_tokens": reader.n_tokens, "digest": reader.digest}
