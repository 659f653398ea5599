"""What was harvested, in one row a store: a sealed store in, a row of the table `harvest` out. Cost: the
token columns, once.
"""

import json
from typing import Any, Final

import numpy as np

from ..store import SPLITS, Reader
from .examples import Texts
from .intervals import bounds, critical_value, ratios
from .population import FIT, TEST, Population

SAMPLE_CHARACTERS: Final = 300
_SAMPLE_ROWS: Final = 300  # a token has at least one character, but for pieces of characters


def harvest_row(name: str, reader: Reader, population: Population, texts: Texts) -> dict[str, Any]:
    """The row of one store."""
    facts = reader.attributes
    counts = np.bincount(population.split, minlength=len(SPLITS)).tolist()
    return {
        "store": name,
        "model": facts.model.name,
        "model_type": facts.model.model_type,
        "revision": facts.model.revision,
        "weights_hash": facts.model.weights_hash,
        "corpus": facts.corpus.spec,
        "n_tokens": reader.n_tokens,
        **{f"n_{split}": count for split, count in zip(SPLITS, counts, strict=True)},
        "n_documents": facts.corpus.n_documents,
        "n_groups": facts.corpus.n_groups,
        "n_groups_fit": population.n_groups(population.split == FIT),
        "n_groups_test": population.n_groups(population.split == TEST),
        "n_layers": facts.model.n_layers,
        "d_model": facts.model.d_model,
        "storage_dtype": facts.storage.dtype,
        "compute_dtype": facts.compute.dtype,
        "attention": facts.compute.attention,
        "sequence_length": facts.plan.sequence_length,
        "block": facts.plan.block,
        "bos": facts.plan.bos,
        "passages": facts.corpus.passages,
        **_perplexity(reader, population),
        "sample": texts.text(population.token_id[:_SAMPLE_ROWS])[:SAMPLE_CHARACTERS],
        "digest": reader.digest,
        "proof": json.dumps(dict(facts.proof), sort_keys=True),
    }


def tokenizer_facts(reader: Reader) -> dict[str, Any]:
    """What it takes to see new text as the store's text was seen, without the store."""
    facts = reader.attributes.tokenizer
    special = list(facts.special_ids)
    return {"fingerprint": facts.fingerprint, "bos_id": facts.bos_id, "special_ids": special}


def _perplexity(reader: Reader, population: Population) -> dict[str, Any]:
    """exp(mean nll) over all targets, and over those of test with an interval over groups."""
    nll = np.asarray(reader.column("nll"), np.float64)
    known = (population.target_id >= 0) & np.isfinite(nll)
    tested = known & (population.split == TEST)
    n_groups = int(population.group.max(initial=-1)) + 1
    sums = np.bincount(population.group[tested], nll[tested], n_groups)[:, None]
    counts = np.bincount(population.group[tested], minlength=n_groups)[:, None]
    mean = ratios(sums, counts)
    low, high = bounds(mean, critical_value(mean))
    return {
        "n_targets": int(known.sum()),
        "ppl": float(np.exp(nll[known].mean())) if known.any() else float("nan"),
        "ppl_test": float(np.exp(mean.estimate[0])),
        "ppl_test_lo": float(np.exp(low[0])),
        "ppl_test_hi": float(np.exp(high[0])),
    }
