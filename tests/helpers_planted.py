"""Stores whose every token's need is known: by token, by context, by chance, or a mixture of these.

In: for each layer the shares of the need's variance that the token's type and the context carry. Out: a store
whose MLP output is a linear map of the MLP's input plus an error in a random direction, of length
√d · LEVEL · (1 + SPREAD · z), where z = √token · f(type) + √context · h(context) + √rest · noise. f and h
have mean 0 and variance 1 over the stored occurrences, so that the realised share of the types is as planted,
up to the chance correlation of the three. The context also carries a copy of the token, as earlier MLPs write
it there: a feature made of it knows the type without being asked.

The need that is as planted is `error_norm`. `error` divides it by a norm of y, which the input predicts: it
has AUC .57 where the length of the error is nothing but chance.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from helpers_store import Synthetic, normalise, synthetic, write_all
from nearline.store import encode

LEVEL = 0.5  # of the error, where the linear part has variance 1 a feature
SPREAD = 0.3
PURE_TOKEN, PURE_CONTEXT, PURE_NOISE, MIXTURE = (1.0, 0.0), (0.0, 1.0), (0.0, 0.0), (0.4, 0.4)
KINDS = {"token": PURE_TOKEN, "context": PURE_CONTEXT, "noise": PURE_NOISE, "mixture": MIXTURE}


def planted(
    shares: Sequence[tuple[float, float]] = tuple(KINDS.values()),
    *,
    seed: int = 0,
    d: int = 12,
    n_tokens: int = 6000,
    copied: float = 0.8,
    shuffled: bool = False,
    weights_seed: int = 0,
    vocab_size: int = 40,
    norm_kind: str = "none",
) -> Synthetic:
    """`shares[i]`: of token and of context in layer i. `copied`: how strongly the context repeats the token.
    `shuffled`: each row gets the error of another one, so that nothing predicts it. `norm_kind`: through a
    norm the token tells a little of each row's scale, and no share is quite pure.
    """
    data = synthetic(
        n_layers=len(shares),
        d=d,
        n_tokens=n_tokens,
        seed=seed,
        weights_seed=weights_seed,
        vocab_size=vocab_size,
        norm_kind=norm_kind,
        block=max(160, n_tokens // 20),
    )
    rng, weights = np.random.default_rng([seed, 7]), np.random.default_rng([weights_seed, 11])
    residual, output = data.sites["residual"].astype(np.float64), data.sites["mlp_output"].astype(np.float64)
    embedding = data.sites["embedding"].astype(np.float64)
    assert data.position_embedding is not None
    token = embedding - data.position_embedding[data.columns["position"]]
    body = ~data.columns["special"] & (data.columns["position"] != 0)
    for layer, (by_token, by_context) in enumerate(shares):
        copy = np.linalg.qr(weights.standard_normal((d, d)))[0]
        context = rng.standard_normal(token.shape)
        sinks = residual[layer][~body]
        residual[layer] = embedding + context + copied * token @ copy
        residual[layer][~body] = sinks
        f = _standard(token @ weights.standard_normal(d), body)
        h = _standard(context @ weights.standard_normal(d), body)
        noise = _standard(rng.standard_normal(len(token)), body)
        rest = 1.0 - by_token - by_context
        z = np.sqrt(by_token) * f + np.sqrt(by_context) * h + np.sqrt(rest) * noise
        if shuffled:
            z[body] = rng.permutation(z[body])
        direction = rng.standard_normal(token.shape)
        direction *= np.sqrt(d) / np.linalg.norm(direction, axis=1, keepdims=True)
        x = normalise(residual[layer], norm_kind, data.affine, layer)
        straight = x @ weights.standard_normal((d, d)) / np.sqrt(d)
        size = LEVEL * np.maximum(1.0 + SPREAD * z, 0.05)
        output[layer] = straight / straight[body].std() + size[:, None] * direction
    return with_sites(data, {"residual": residual, "mlp_output": output})


def with_sites(data: Synthetic, sites: Mapping[str, np.ndarray]) -> Synthetic:
    """The store with other activations."""
    changed = {site: np.ascontiguousarray(values, dtype=np.float32) for site, values in sites.items()}
    stored = {site: encode(values, data.storage_dtype) for site, values in changed.items()}
    return dataclasses.replace(data, sites=data.sites | changed, stored=data.stored | stored)


def planted_store(
    path: Path, shares: Sequence[tuple[float, float]] = tuple(KINDS.values()), **more: Any
) -> Path:
    """Write a planted store (see `planted`); its folder."""
    write_all(path, planted(shares, **more))
    return path


def leak(data: Synthetic, kind: str) -> Synthetic:
    """One document of `fit` once more in `test`: the same text ("document"), or as a near-duplicate of the
    same group ("group").
    """
    documents = data.documents.to_pydict()
    # Documents that hold rows, the first of each split.
    of = {
        split: next(d for d in data.plan.document.tolist() if documents["split"][d] == split)
        for split in ("fit", "test")
    }
    column = {"document": "content_hash", "group": "group"}[kind]
    documents[column][of["test"]] = documents[column][of["fit"]]
    return dataclasses.replace(data, documents=pa.table(documents, schema=data.documents.schema))


def _standard(values: np.ndarray, body: np.ndarray) -> np.ndarray:
    """Mean 0 and variance 1 over body rows."""
    return (values - values[body].mean()) / values[body].std()


def without_embedding(data: Synthetic) -> Synthetic:
    """As harvested without the site `embedding`."""
    storage = data.attributes.storage
    sites = tuple(site for site in storage.sites if site != "embedding")
    attributes = dataclasses.replace(data.attributes, storage=dataclasses.replace(storage, sites=sites))
    return dataclasses.replace(
        data,
        attributes=attributes,
        sites={site: data.sites[site] for site in sites},
        stored={site: data.stored[site] for site in sites},
    )
