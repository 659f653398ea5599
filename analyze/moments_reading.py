"""Moments of whole stores, and of further stores added to moments that are there: readers in, a
`MomentsSource` out.

One pass over the fit and test rows of the new store only; what was summed before is not read again. Cost: a
read of the store and 3·d² flops a row; memory: all moments of the new store, 2·(K + 3)·8·d² bytes a layer.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from ..store import Reader, UsageError
from .layers import layer_source
from .moments import MomentBuffers
from .moments_source import MomentsSource, document_table, merge_sources, store_facts, with_layers
from .population import FIT, fold_of_documents, folds_beside, load_population
from .surrogates import LayerMoments, merge_layers
from .tasks import SINK_BUFFER_ROWS, block_ranges, range_moments


def read_moments(
    reader: Reader,
    name: str,
    *,
    folds: int = 5,
    seed: int = 0,
    layers: Sequence[int] | None = None,
    given: Mapping[str, int] | None = None,
) -> MomentsSource:
    """The moments of a store's rows. `given`: folds of documents, by content hash, that are settled already
    (those of another source); the others get theirs beside them.
    """
    chosen = tuple(reader.layers if layers is None else layers)
    if missing := sorted(set(chosen) - set(reader.layers)):
        raise UsageError(f"store {name} has no layer {missing[0]}; it has {list(reader.layers)}")
    if given is None:
        by_document = fold_of_documents(reader, folds, seed)
    else:
        by_document = folds_beside(reader, given, folds, seed)
    population = load_population(reader, by_document, name)
    width = reader.d_model
    buffers = MomentBuffers(width, width, folds + 1), MomentBuffers(width, width, 2, SINK_BUFFER_ROWS)
    found: dict[int, LayerMoments] = {}
    for layer in chosen:
        source = layer_source(reader, layer)
        parts = [
            range_moments(source, blocks, population, population.fold, *buffers)
            for blocks in block_ranges(reader.n_tokens, reader.n_blocks, width)
        ]
        total = parts[0]
        for part in parts[1:]:
            total = merge_layers(total, part)
        found[layer] = total
    rows = np.bincount(
        population.document[population.body & (population.split == FIT)], minlength=len(reader.documents)
    )
    return MomentsSource(
        name=name,
        attributes=with_layers(reader.attributes, chosen),
        sources=(store_facts(reader),),
        documents=document_table(reader.documents, by_document, rows),
        n_folds=folds,
        seed=seed,
        layers=chosen,
        load=found.__getitem__,
    )


def add_store(source: MomentsSource, reader: Reader, name: str) -> MomentsSource:
    """`source` with the rows of one more store; documents that stand in both keep their fold."""
    more = read_moments(
        reader, name, folds=source.n_folds, seed=source.seed, layers=source.layers, given=source.folds
    )
    return merge_sources(source, more)
