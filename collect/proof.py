"""The start-up proof: on real tokens, the captured tensors are what they are called, or no run starts.

In: an `Anatomy` and a few sequences of token ids (BOS included, where the plan adds one). Out: the errors
found, as plain numbers for the store's attributes; `ProofFailed` with layer, identity and both magnitudes
otherwise. Cost: three passes over at most `MAX_SEQUENCES` × `MAX_LENGTH` tokens (in a batch, alone, with
document 1 changed), and the embedding of `MAX_LENGTH` more; memory: seven tensors per layer of them.

What is proved, for every layer:
  hooks      each fired exactly once per forward pass; a block's output is the next block's input
  parts      no norm begins or ends the MLP; every site has the width of the stream
  dtype      the residual stream has the dtype that the anatomy names
  norm       norm(residual), by the formula used offline, is what the MLP received
  identity   residual + contribution is the block's output; in parallel blocks, the residual is the
             block's input and residual + attention output + contribution is the block's output; where a norm
             follows the sum, it read that sum and gave the block's output
  batch      a sequence alone gives the rows it gives in a padded batch
  isolation  changing the end of document 1 moves neither its beginning nor the other documents (in 16
             bits, rounding decides between experts that score alike; behind the first layer that has them,
             these two checks therefore go by the median row of each document, and say nothing about less
             than half of its rows)
  logits     the head on chunks of final hidden states gives the model's own logits
  positions  one token at two positions enters block 0 as different as their rows of the positions' table,
             or alike where there is none
"""

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from ..store.errors import UsageError
from . import proof_checks as checks
from .anatomy import Anatomy
from .capture import SITES
from .norm_parameters import NormParameters, norm_parameters
from .proof_passes import Seen, embedding_pass, padded_pass, plain_pass

MAX_SEQUENCES = 3
MAX_LENGTH = 64
STORED_SITES = ("residual", "mlp_output")


@dataclass(frozen=True, slots=True)
class Tolerances:
    """Largest error allowed, per check."""

    norm: float
    identity: float
    batch: float
    isolation: float
    logits: float
    positions: float


# norm, identity: terms rounded to the dtype stay within one unit roundoff u of their magnitudes (bfloat16
#   u = 2^-8, float16 u = 2^-11); in float32, two formulas sum over features in another order, which gives up
#   to about √d · 6e-8. Measured on SmolLM2-135M (30 layers): 0 and 1.3e-8 in float32, 1.5e-3 and 9e-4 in
#   bfloat16. Planted there in bfloat16: the next layer's norm weight 0.05, a norm weight 2 % too large 0.01,
#   a multiplier of 0.98 0.007.
# batch: other matrix shapes round differently, and the layers amplify it. Measured on SmolLM2-135M: 6e-7 in
#   float32, 0.01 in bfloat16; a padding that is attended to gives 0.3 or more.
# isolation: the same shapes, hence the same operations; the measured difference is exactly 0. With experts,
#   other rows of document 1 give their products other shapes: then as for the batch.
# with experts, in bfloat16 (8 layers, 4 of 32 experts, random weights): between the batch and alone, 1 to 3 %
#   of the rows had gone to another expert and were up to 1.2 off; the median row was not off at all.
# logits: relative to whole rows; another chunk size may round single logits the other way.
# positions: two sums rounded to the dtype, and their difference, as for the identity.
TOLERANCES = {
    torch.float32: Tolerances(1e-5, identity=1e-5, batch=1e-3, isolation=1e-5, logits=1e-4, positions=1e-5),
    torch.bfloat16: Tolerances(
        2**-8, identity=2**-8, batch=0.1, isolation=2**-8, logits=2**-7, positions=2**-8
    ),
    torch.float16: Tolerances(
        2**-11, identity=2**-11, batch=0.02, isolation=2**-11, logits=2**-10, positions=2**-11
    ),
}


def prove(
    anatomy: Anatomy,
    sequences: Sequence[Int[np.ndarray, "_"] | Int[Tensor, "_"]],
    *,
    norms: Sequence[NormParameters] | None = None,
    post_norms: Sequence[NormParameters] | None = None,
) -> dict[str, float]:
    """Errors and tolerances of all checks. `norms`, `post_norms`: what will be stored, one for each layer."""
    if anatomy.model.training:
        raise UsageError(
            "the model is in training mode, where dropout changes activations: call model.eval() first"
        )
    limits = tolerances(anatomy.dtype)
    ids = short_sequences(sequences, anatomy.vocab_size)
    norms = norms or [norm_parameters(layer.norm) for layer in anatomy.layers]
    post_norms = post_norms or [norm_parameters(layer.post_norm) for layer in anatomy.layers]
    with torch.no_grad():  # whoever calls decides about inference mode
        seen = padded_pass(anatomy, ids, SITES)
        checks.check_parts(anatomy)
        checks.check_width(anatomy, seen)
        checks.check_finite(anatomy, seen)
        checks.check_dtype(anatomy, seen)
        checks.check_chain(anatomy, seen)
        norm = checks.check_norms(anatomy, seen, norms, limits.norm)
        identity, without_mlp = checks.check_identities(anatomy, seen, post_norms, limits.identity)
        batch = {key: rows for key, rows in seen.items() if key[0] in STORED_SITES}
        free = _may_switch(anatomy, batch)
        batch_error, logits_error, nll_error = _prove_alone(anatomy, ids, batch, limits, free)
        isolation = _prove_isolation(anatomy, ids, batch, limits, free)
        if free:
            limits = replace(limits, isolation=limits.batch)
        positions = _prove_positions(anatomy, int(ids[0][-1]), limits.positions)
    return {
        "norm_error": norm,
        "identity_error": identity,
        "identity_error_without_mlp": without_mlp,
        "batch_error": batch_error,
        "isolation_error": isolation,
        "logits_error": logits_error,
        "nll_error": nll_error,
        **({} if positions is None else {"positions_error": positions}),
        **{
            f"{check}_tolerance": float(limit)
            for check, limit in asdict(limits).items()
            if check != "positions" or positions is not None
        },
        "n_sequences": float(len(ids)),
        "n_rows": float(sum(len(one) for one in ids)),
    }


def tolerances(dtype: torch.dtype) -> Tolerances:
    """The limits for a compute dtype."""
    if dtype not in TOLERANCES:
        known = ", ".join(str(one).removeprefix("torch.") for one in TOLERANCES)
        raise UsageError(
            f"the model computes in {dtype}; allowed are {known}. Load it with one of these dtypes."
        )
    return TOLERANCES[dtype]


def short_sequences(sequences: Sequence[np.ndarray | Tensor], vocab_size: int) -> list[Tensor]:
    """At most MAX_SEQUENCES short sequences, of at least two lengths, the longest first."""
    ids = [torch.tensor(np.asarray(one)[:MAX_LENGTH], dtype=torch.long) for one in sequences if len(one) >= 2]
    if not ids:
        raise UsageError(
            "the start-up proof needs a sequence of at least two tokens; all of these are shorter"
        )
    ids = ids[:MAX_SEQUENCES]
    for one in ids:
        if int(one.max()) >= vocab_size or int(one.min()) < 0:
            raise UsageError(
                f"token id {int(one.max())} is outside the model's vocabulary of {vocab_size}: tokenizer "
                "and model do not belong together. Give the tokenizer that was made for this model."
            )
    if len(ids) == 1:
        ids.append(ids[0].clone())
    if len({len(one) for one in ids}) == 1:
        ids[-1] = ids[-1][: max(1, len(ids[-1]) // 2)]
    return sorted(ids, key=len, reverse=True)


def _may_switch(anatomy: Anatomy, seen: Seen) -> frozenset[tuple[str, int]]:
    """The sites where rounding may have sent single rows to other experts: in 16 bits, all behind the first
    layer that routes. What lies before them is held to every row."""
    first = anatomy.routes_from
    if first is None or anatomy.dtype == torch.float32:
        return frozenset()
    return frozenset(key for key in seen if key[1] > first or key == ("mlp_output", first))


def _prove_alone(
    anatomy: Anatomy,
    ids: Sequence[Tensor],
    batch: Seen,
    limits: Tolerances,
    free: Collection[tuple[str, int]],
) -> tuple[float, float, float]:
    passes = [plain_pass(anatomy, one, STORED_SITES) for one in ids]
    alone = [seen for seen, _, _ in passes]
    batch_error = max(
        checks.check_batch({key: rows}, alone, limits.batch, typical=key in free)
        for key, rows in batch.items()
    )
    _, hidden, logits = passes[0]
    logits_error, nll_error = checks.check_logits(anatomy, hidden, logits, ids[0], limits.logits)
    return batch_error, logits_error, nll_error


def _prove_isolation(
    anatomy: Anatomy,
    ids: Sequence[Tensor],
    batch: Seen,
    limits: Tolerances,
    free: Collection[tuple[str, int]],
) -> float:
    half = len(ids[0]) // 2
    changed = ids[0].clone()
    changed[half:] = (changed[half:] + 1) % anatomy.vocab_size
    after = padded_pass(anatomy, [changed, *ids[1:]], STORED_SITES)
    ends = np.cumsum([len(one) for one in ids]).tolist()
    untouched = [slice(0, half), *(slice(start, end) for start, end in pairwise(ends))]
    return max(
        checks.check_isolation(
            batch, {key: rows}, untouched, limits.batch if key in free else limits.isolation, key in free
        )
        for key, rows in after.items()
    )


def _prove_positions(anatomy: Anatomy, token: int, limit: float) -> float | None:
    """None where positions have no table; then one token enters block 0 alike at all of them."""
    if anatomy.positions is None:
        length = min(MAX_LENGTH, anatomy.max_positions or MAX_LENGTH)
        entered = embedding_pass(anatomy, torch.full((length,), token))
        checks.check_no_positions(entered, limit)
        return None
    table = anatomy.positions[:MAX_LENGTH].float().cpu()
    entered = embedding_pass(anatomy, torch.full((len(table),), token))
    return checks.check_positions(entered, table, limit)
