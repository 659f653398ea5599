"""What a store says about itself: root attributes, the documents table, the affine parts of its norms.

In: a prepared harvest, the loaded model and the proof's errors. Out: the values that the store's writer
takes. Only what the settings determine goes in, so that the same settings give the same bytes. Cost: none.
"""

import platform
from collections.abc import Sequence
from importlib.metadata import version

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Float32

from ..store.attributes import (
    Attributes,
    ComputeFacts,
    CorpusFacts,
    ModelFacts,
    NormFacts,
    PlanFacts,
    StorageFacts,
    TokenizerFacts,
)
from ..store.plan import SPLITS
from .models import LoadedModel
from .needs import working_device
from .norm_parameters import NormParameters, norm_parameters
from .preparing import Prepared
from .rows import block_columns
from .settings import HarvestSettings

PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "zarr", "nearline")


def attributes_of(
    prepared: Prepared,
    loaded: LoadedModel,
    settings: HarvestSettings,
    proof: dict[str, float],
    exponents: Sequence[int] = (),
) -> Attributes:
    """The root attributes. `exponents`: of the powers of two that gradients are stored with."""
    anatomy, tokens, corpus = prepared.anatomy, prepared.tokens, prepared.corpus
    norms, post_norms = norms_of(prepared)
    return Attributes(
        model=ModelFacts(
            name=loaded.name,
            model_type=anatomy.model_type,
            revision=loaded.revision,
            config_hash=loaded.config_hash,
            weights_hash=loaded.weights_hash,
            n_layers=anatomy.n_layers,
            d_model=anatomy.d_model,
            vocab_size=anatomy.vocab_size,
            parallel=anatomy.parallel,
            span=anatomy.span,
            quantization=loaded.quantization,
            adapters=loaded.adapters,
        ),
        tokenizer=TokenizerFacts(
            fingerprint=tokens.fingerprint,
            sentence=tokens.sentence,
            ids=tuple(int(token) for token in tokens.sentence_ids),
            bos_id=tokens.bos_id,
            special_ids=tuple(sorted(int(token) for token in tokens.special_ids)),
        ),
        corpus=CorpusFacts(
            spec=corpus.spec,
            content_hash=corpus.content_hash,
            n_documents=len(corpus.documents),
            n_groups=len(np.unique(prepared.groups)),
            passages=corpus.passages,
        ),
        plan=PlanFacts.of(prepared.planned.plan, "never" if tokens.bos_id is None else "always"),
        norm=NormFacts(
            kinds=tuple(norm.kind for norm in norms),
            epsilons=tuple(norm.eps for norm in norms),
            post_kinds=tuple(norm.kind for norm in post_norms),
            post_epsilons=tuple(norm.eps for norm in post_norms),
            multipliers=tuple(float(anatomy.layers[layer].multiplier) for layer in prepared.shape.layers),
        ),
        storage=StorageFacts(
            dtype=prepared.shape.storage_dtype,
            sites=prepared.shape.sites,
            layers=prepared.shape.layers,
            compressor=settings.compressor,
            gradient_exponents=tuple(exponents),
        ),
        compute=ComputeFacts(
            dtype=str(anatomy.dtype).removeprefix("torch."),
            attention=loaded.attention,
            device_type=working_device(anatomy).type,
            torch_threads=torch.get_num_threads(),
        ),
        proof=proof,
        policies={
            "bos": settings.bos,
            "nonfinite": settings.on_nonfinite,
            "packing": "one document per sequence",
            "padding": "right",
            "groups": "13-gram overlap above 0.2",
            **corpus.policies,
        },
        versions={"python": platform.python_version()} | {package: version(package) for package in PACKAGES},
    )


def norms_of(prepared: Prepared) -> tuple[list[NormParameters], list[NormParameters]]:
    """The norm in front of each stored MLP and the one behind it."""
    layers = [prepared.anatomy.layers[layer] for layer in prepared.shape.layers]
    return [norm_parameters(layer.norm) for layer in layers], [
        norm_parameters(layer.post_norm) for layer in layers
    ]


def affine_of(prepared: Prepared) -> dict[str, Float32[np.ndarray, "layer feature"]]:
    """`norm_weight` and its kin, each only where some stored layer has one; ones and zeros where another
    has not."""
    norms, post_norms = norms_of(prepared)
    affine = {}
    for prefix, found in (("norm", norms), ("post_norm", post_norms)):
        for part, neutral in (("weight", 1.0), ("bias", 0.0)):
            rows = [getattr(norm, part) for norm in found]
            if any(row is not None for row in rows):
                missing = np.full(prepared.anatomy.d_model, neutral, np.float32)
                affine[f"{prefix}_{part}"] = np.stack([missing if row is None else row for row in rows])
    return affine


def position_embedding_of(prepared: Prepared) -> Float32[np.ndarray, "position feature"] | None:
    """The table of an absolute-position model."""
    positions = prepared.anatomy.positions
    return None if positions is None else positions.detach().float().cpu().numpy().copy()


def documents_table(prepared: Prepared) -> pa.Table:
    """One row per document of the corpus, also where nothing of it was stored."""
    documents, planned = prepared.corpus.documents, prepared.planned
    return pa.table(
        {
            "document": pa.array(np.arange(len(documents)), pa.int32()),
            "key": pa.array([document.key for document in documents], pa.string()),
            "content_hash": pa.array(prepared.content_hashes, pa.string()),
            "group": pa.array(prepared.groups, pa.int32()),
            "split": pa.array([SPLITS[split] for split in prepared.splits], pa.string()),
            "n_tokens": pa.array(planned.rows, pa.int32()),
            "n_dropped": pa.array(planned.dropped, pa.int32()),
        }
    )


def vocabulary_of(prepared: Prepared) -> pa.Table:
    """The ids that occur as a token or as a target, and in how many rows each is the token."""
    plan, tokens = prepared.planned.plan, prepared.tokens
    rows, targets = np.zeros(0, np.int64), np.zeros(0, np.int64)
    for block in range(plan.n_blocks):
        columns = block_columns(plan, block, tokens.ids, tokens.special_ids)
        rows = _add_counts(rows, columns["token_id"])
        targets = _add_counts(targets, columns["target_id"])
    size = max(len(rows), len(targets))
    rows, targets = (np.pad(counts, (0, size - len(counts))) for counts in (rows, targets))
    ids = np.flatnonzero((rows > 0) | (targets > 0))
    return tokens.vocabulary(ids, rows[ids])


def _add_counts(counts: np.ndarray, ids: np.ndarray) -> np.ndarray:
    more = np.bincount(ids[ids >= 0], minlength=len(counts))
    more[: len(counts)] += counts
    return more
