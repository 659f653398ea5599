"""Small complete synthetic stores for tests, written through the public writer.

In: sizes, dtype, seed, and per layer the share of the MLP output's variance that is linear in
norm(residual). Out: a sealed store, or its inputs as arrays to compare with. The planted linear share is
what a good surrogate's R² must find.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from blake3 import blake3
from nearline.store import (
    LAYER_SITES,
    SPLITS,
    Attributes,
    ComputeFacts,
    CorpusFacts,
    ModelFacts,
    NormFacts,
    Plan,
    PlanFacts,
    StorageFacts,
    StoreWriter,
    TokenizerFacts,
    encode,
)

BOS_ID = 0
EPSILON = 1e-5


@dataclass(frozen=True, repr=False)
class Synthetic:
    """Everything that goes into a store."""

    plan: Plan
    attributes: Attributes
    layers: list[int]
    d: int
    storage_dtype: str
    columns: dict[str, np.ndarray]  # (token,)
    sites: dict[str, np.ndarray]  # float32, (layer, token, feature) or (token, feature)
    stored: dict[str, np.ndarray]  # the same in storage dtype
    affine: dict[str, np.ndarray]
    position_embedding: np.ndarray | None
    documents: pa.Table
    vocabulary: pa.Table
    compressor: str | None
    linear: list[float]

    def block(self, block: int) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Columns and stored sites of one block."""
        row0, row1 = self.plan.block_range(block)
        columns = {name: values[row0:row1] for name, values in self.columns.items()}
        return columns, {name: values[..., row0:row1, :] for name, values in self.stored.items()}


def make_store(
    path: Path, *, seal: bool = True, blocks: Iterable[int] | None = None, **settings: Any
) -> Path:
    """Write a synthetic store (see `synthetic` for the settings) and return its folder."""
    data = synthetic(**settings)
    writer = begin(path, data)
    for block in range(data.plan.n_blocks) if blocks is None else blocks:
        commit(writer, data, block)
    if seal:
        writer.seal()
    return Path(path)


def begin(path: Path, data: Synthetic) -> StoreWriter:
    return StoreWriter.begin(
        path,
        plan=data.plan,
        attributes=data.attributes,
        layers=data.layers,
        d_model=data.d,
        storage_dtype=data.storage_dtype,
        sites=list(data.sites),
        documents=data.documents,
        vocabulary=data.vocabulary,
        affine=data.affine,
        position_embedding=data.position_embedding,
        compressor=data.compressor,
    )


def commit(writer: StoreWriter, data: Synthetic, block: int) -> None:
    columns, sites = data.block(block)
    row0, row1 = data.plan.block_range(block)
    values = {site: data.sites[site][..., row0:row1, :] for site in data.sites}
    writer.commit(block, columns, sites, {site: statistics(found) for site, found in values.items()})


def write_all(path: Path, data: Synthetic) -> str:
    """Begin the store or go on with it, commit what is missing, seal; the digest of the seal."""
    writer = begin(path, data)
    for block in sorted(set(range(data.plan.n_blocks)) - writer.committed):
        commit(writer, data, block)
    return writer.seal()


def tree(path: Path) -> dict[str, bytes]:
    """Every file of a store by its name, but for the facts of runs."""
    files = {file.relative_to(path).as_posix(): file for file in path.rglob("*") if file.is_file()}
    return {name: file.read_bytes() for name, file in sorted(files.items()) if not name.startswith("runs/")}


def statistics(values: np.ndarray) -> dict[str, list]:
    by_layer = values if values.ndim == 3 else values[None]
    return {
        "max_abs": [float(np.abs(layer).max()) for layer in by_layer],
        "mean_square": [float(np.square(layer, dtype=np.float64).mean()) for layer in by_layer],
        "n_nonfinite": [int((~np.isfinite(layer)).sum()) for layer in by_layer],
        "n_out_of_range": [0 for _ in by_layer],
    }


def synthetic(
    *,
    n_layers: int = 2,
    d: int = 16,
    n_tokens: int = 2000,
    block: int = 160,
    storage_dtype: str = "float32",
    seed: int = 0,
    linear: float | Sequence[float] | None = None,
    layers: Sequence[int] | None = None,
    sequence_length: int = 32,
    bos: bool = True,
    vocab_size: int = 60,
    documents_per_group: float = 1.2,
    norm_kind: str = "layernorm",
    post_norm: bool = False,
    sink_scale: float = 20.0,
    noise: float = 0.0,
    with_positions: bool = True,
    compressor: str | None = None,
    model_name: str = "synthetic",
    weights_seed: int = 0,
    with_gradient: bool = False,
) -> Synthetic:
    """Inputs of a store. `linear[i]`: share of var(mlp_output) that is linear in norm(residual).

    `seed` moves the corpus, `weights_seed` the model: two stores of one model share `weights_seed`.
    """
    rng, weights = np.random.default_rng(seed), np.random.default_rng(1000 + weights_seed)
    chosen = list(layers) if layers is not None else list(range(n_layers))
    depth = max(n_layers, chosen[-1] + 1)
    if linear is None:
        shares = [float(share) for share in np.linspace(0.95, 0.5, len(chosen))]
    else:
        shares = (
            [float(linear)] * len(chosen) if isinstance(linear, (int, float)) else [float(s) for s in linear]
        )
    plan, groups, splits = _plan(rng, n_tokens, block, sequence_length, bos, documents_per_group)
    columns = _columns(rng, plan, vocab_size)
    table = weights.standard_normal((vocab_size, d))
    positions = 0.3 * weights.standard_normal((sequence_length, d)) if with_positions else None
    embedding = table[columns["token_id"]]
    if positions is not None:
        embedding = embedding + positions[columns["position"]]
    affine = _affine(weights, len(chosen), d, norm_kind, post_norm)
    residual = np.stack(
        [embedding + rng.standard_normal(embedding.shape) * (1 + 0.2 * layer) for layer in chosen]
    )
    residual[:, columns["position"] == 0] *= sink_scale
    output = np.stack(
        [
            _mlp(weights, normalise(residual[i], norm_kind, affine, i), shares[i], noise, rng)
            for i in range(len(chosen))
        ]
    )
    sites = {"residual": residual, "mlp_output": output, "embedding": embedding}
    if with_gradient:
        sites["mlp_output_grad"] = 0.1 * rng.standard_normal(output.shape)
    sites = {site: np.ascontiguousarray(values, dtype=np.float32) for site, values in sites.items()}
    return Synthetic(
        plan=plan,
        attributes=_attributes(
            plan,
            chosen,
            depth,
            d,
            storage_dtype,
            list(sites),
            groups,
            vocab_size,
            norm_kind,
            post_norm,
            compressor,
            model_name,
            seed,
            weights_seed,
            bos,
        ),
        layers=chosen,
        d=d,
        storage_dtype=storage_dtype,
        columns=columns,
        sites=sites,
        stored={site: encode(values, storage_dtype) for site, values in sites.items()},
        affine=affine,
        position_embedding=None if positions is None else positions.astype(np.float32),
        documents=_documents(plan, groups, splits, seed),
        vocabulary=_vocabulary(columns["token_id"]),
        compressor=compressor,
        linear=shares,
    )


def normalise(residual: np.ndarray, kind: str, affine: dict[str, np.ndarray], index: int) -> np.ndarray:
    """norm(residual) in float64, of one layer."""
    x = residual.astype(np.float64)
    if kind == "none":
        return x
    if kind == "layernorm":
        x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + EPSILON) * affine["norm_weight"][index]
    return x + affine["norm_bias"][index] if "norm_bias" in affine else x


def _mlp(
    weights: np.random.Generator, x: np.ndarray, share: float, noise: float, rng: np.random.Generator
) -> np.ndarray:
    """Linear part plus products of pairs of features, which no linear map sees, at the shares asked for."""
    d = x.shape[1]
    straight = x @ weights.standard_normal((d, d)) / np.sqrt(d)
    a, b = x @ weights.standard_normal((d, d)) / np.sqrt(d), x @ weights.standard_normal((d, d)) / np.sqrt(d)
    bent = a * b
    bent = bent - bent.mean(0)
    y = np.sqrt(share) * straight / straight.std() + np.sqrt(1 - share) * bent / bent.std()
    return y + noise * rng.standard_normal(y.shape) + weights.standard_normal(d)


def _plan(
    rng: np.random.Generator,
    n_tokens: int,
    block: int,
    sequence_length: int,
    bos: bool,
    documents_per_group: float,
) -> tuple[Plan, list[int], list[int]]:
    """Documents are made up as they are needed: each of a group, each group of one split."""
    pattern, groups, splits = ("fit", "test", "gate", "fit", "test"), [], []
    rows: dict[str, list] = {name: [] for name in ("document", "start", "length", "bos", "batch", "block")}
    queues: dict[int, list[tuple[int, int, int]]] = {0: [], 1: [], 2: []}  # document, start, tokens left
    n_blocks, batch = -(-n_tokens // block), -1
    sizes = [min(block, n_tokens - b * block) for b in range(n_blocks)]
    of_block = [SPLITS.index(pattern[b % len(pattern)]) for b in range(n_blocks)]
    for b, size in enumerate(sizes):
        left, queue, first = size, queues[of_block[b]], True
        while left:
            if not queue:
                same = groups and splits[-1] == of_block[b] and rng.random() > 1 / documents_per_group
                groups.append(groups[-1] if same else max(groups, default=-1) + 1)
                splits.append(of_block[b])
                queue.append(
                    (len(groups) - 1, 0, int(rng.integers(sequence_length // 2, 2 * sequence_length)))
                )
            document, start, tokens = queue.pop(0)
            room = min(left, sequence_length) - int(bos)
            if room < 1:
                room, bos_here = left, False
            else:
                bos_here = bos
            take = min(tokens, room)
            batch += 1 if first or len(rows["length"]) % 4 == 0 else 0
            first = False
            for name, value in zip(rows, (document, start, take + bos_here, bos_here, batch, b), strict=True):
                rows[name].append(value)
            left -= take + bos_here
            if tokens > take:
                queue.insert(0, (document, start + take, tokens - take))
    ints = {name: np.array(values, dtype=np.int32) for name, values in rows.items() if name != "bos"}
    plan = Plan(
        n_tokens=n_tokens,
        block=block,
        sequence_length=sequence_length,
        min_length=4,
        batch_tokens=4 * sequence_length,
        seed=0,
        bos_id=BOS_ID if bos else None,
        document=ints["document"],
        start=ints["start"],
        length=ints["length"],
        bos=np.array(rows["bos"], dtype=bool),
        sequence_batch=ints["batch"],
        sequence_block=ints["block"],
        block_split=np.array(of_block, dtype=np.uint8),
        block_rows=np.array(sizes, dtype=np.int32),
    )
    return plan, groups, splits


def _columns(rng: np.random.Generator, plan: Plan, vocab_size: int) -> dict[str, np.ndarray]:
    n, lengths, offsets = plan.n_tokens, plan.length, plan.row_offsets
    zipf = 1 / np.arange(1, vocab_size)
    token_id = rng.choice(np.arange(1, vocab_size), size=n, p=zipf / zipf.sum()).astype(np.int32)
    firsts = offsets[:-1][plan.bos]
    token_id[firsts] = BOS_ID
    target_id = np.append(token_id[1:], -1).astype(np.int32)
    target_id[offsets[1:] - 1] = -1
    position = (np.arange(n) - np.repeat(offsets[:-1], lengths)).astype(np.int32)
    special = np.zeros(n, dtype=bool)
    special[firsts] = True
    nll = rng.gamma(2.0, 1.5, size=n).astype(np.float32)
    nll[target_id < 0] = np.nan
    return {
        "token_id": token_id,
        "target_id": target_id,
        "position": position,
        "sequence": np.repeat(np.arange(plan.n_sequences, dtype=np.int32), lengths),
        "document": np.repeat(plan.document, lengths),
        "split": np.repeat(plan.block_split, plan.block_rows),
        "special": special,
        "valid": np.ones(n, dtype=bool),
        "nll": nll,
    }


def _affine(
    weights: np.random.Generator, n_layers: int, d: int, kind: str, post_norm: bool
) -> dict[str, np.ndarray]:
    names = {"layernorm": ["norm_weight", "norm_bias"], "rmsnorm": ["norm_weight"], "none": []}[kind]
    names = names + (["post_norm_weight"] if post_norm else [])
    made = {name: 0.1 * weights.standard_normal((n_layers, d)) + ("weight" in name) for name in names}
    return {name: values.astype(np.float32) for name, values in made.items()}


def _attributes(
    plan: Plan,
    layers: list[int],
    n_layers: int,
    d: int,
    dtype: str,
    sites: list[str],
    groups: list[int],
    vocab_size: int,
    norm_kind: str,
    post_norm: bool,
    compressor: str | None,
    name: str,
    seed: int,
    weights_seed: int,
    bos: bool,
) -> Attributes:
    count = len(layers)
    return Attributes(
        model=ModelFacts(
            name=name,
            model_type="gpt2",
            revision=None,
            config_hash=_digest(f"config {n_layers} {d}"),
            weights_hash=_digest(f"weights {weights_seed} {n_layers} {d}"),
            n_layers=n_layers,
            d_model=d,
            vocab_size=vocab_size,
            parallel=False,
            span="h.{i}.mlp",
            quantization=None,
            adapters=(),
        ),
        tokenizer=TokenizerFacts(
            _digest("tokenizer"), "A fixed sentence.", (1, 2, 3), BOS_ID if bos else None, (0,)
        ),
        corpus=CorpusFacts(
            f"synthetic:{seed}", _digest(f"corpus {seed}"), len(groups), max(groups) + 1, False
        ),
        plan=PlanFacts.of(plan, "always" if bos else "never"),
        norm=NormFacts(
            kinds=(norm_kind,) * count,
            epsilons=(EPSILON,) * count,
            post_kinds=("rmsnorm" if post_norm else "none",) * count,
            post_epsilons=(EPSILON,) * count,
            multipliers=(1.0,) * count,
        ),
        storage=StorageFacts(dtype, tuple(sites), tuple(layers), compressor),
        compute=ComputeFacts("float32", "eager", "cpu", 1),
        proof={"norm_error": 0.0, "identity_error": 1e-7, "tolerance": 1e-5, "n_sequences": 4},
        policies={"bos": "always" if bos else "never", "nonfinite": "stop"},
        versions={"nearline": "0.1.0", "numpy": "2"},
    )


def _documents(plan: Plan, groups: list[int], splits: list[int], seed: int) -> pa.Table:
    held = np.bincount(plan.document, weights=plan.length, minlength=len(groups)).astype(np.int32)
    keys = [f"doc {index:04d}" for index in range(len(groups))]
    return pa.table(
        {
            "document": np.arange(len(groups), dtype=np.int32),
            "key": keys,
            "content_hash": [_digest(f"{seed} {key}")[:32] for key in keys],
            "group": np.array(groups, dtype=np.int32),
            "split": [SPLITS[split] for split in splits],
            "n_tokens": held,
            "n_dropped": np.zeros(len(groups), dtype=np.int32),
        }
    )


def _vocabulary(token_id: np.ndarray) -> pa.Table:
    ids, counts = np.unique(token_id, return_counts=True)
    texts = ["<bos>" if token == BOS_ID else f" w{token}" for token in ids]
    return pa.table(
        {
            "token_id": ids.astype(np.int32),
            "bytes": pa.array([text.encode() for text in texts], pa.binary()),
            "text": texts,
            "count": counts.astype(np.int64),
        }
    )


def _digest(text: str) -> str:
    return blake3(text.encode()).hexdigest()


__all__ = [
    "LAYER_SITES",
    "Synthetic",
    "begin",
    "commit",
    "make_store",
    "normalise",
    "statistics",
    "synthetic",
    "tree",
    "write_all",
]
