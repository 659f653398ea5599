"""How badly the unmodified model predicted each row's target, exact, without ever holding all logits.

In: final hidden states (what the language model head reads) and one target per row, best on the host. Out:
nats per row, NaN exactly where there is no target (-1). The head runs on a few hundred rows at a time with
its soft-cap and scale, the log-softmax in float32. Cost: one head product; memory: about twice `limit_bytes`,
whatever the vocabulary.
"""

import torch
from jaxtyping import Float, Float32, Int
from torch import Tensor

from .anatomy import Anatomy, logits
from .lanes import moved

NO_TARGET = -1
LIMIT_BYTES = 64 * 2**20


def token_nll(
    anatomy: Anatomy,
    hidden: Float[Tensor, "row feature"],
    target: Int[Tensor, "row"],
    *,
    limit_bytes: int = LIMIT_BYTES,
) -> Float32[Tensor, "row"]:
    """-log p(target) of each row under the model, in nats."""
    nll = torch.full(target.shape, float("nan"), dtype=torch.float32, device=hidden.device)
    # Counting those that have a target waits for them: on the host, where a harvest has them, for nothing.
    wanted = moved(torch.nonzero(target != NO_TARGET).flatten(), hidden.device)
    target = moved(target.long(), hidden.device)
    for rows in wanted.split(rows_per_chunk(anatomy.vocab_size, limit_bytes)):
        scores = logits(anatomy, hidden.index_select(0, rows)).float()
        goal = target.index_select(0, rows).to(scores.device)
        nll[rows] = torch.nn.functional.cross_entropy(scores, goal, reduction="none").to(nll.device)
    return nll


def token_nll_and_slope(
    anatomy: Anatomy,
    hidden: Float[Tensor, "row feature"],
    target: Int[Tensor, "row"],
    *,
    limit_bytes: int = LIMIT_BYTES,
) -> tuple[Float32[Tensor, "row"], Float[Tensor, "row feature"]]:
    """As `token_nll`, from the same chunks by the same operations, and ∂(Σ nll)/∂hidden, zero where there is
    no target. Cost: the head's product three times; memory: about twice that of `token_nll`."""
    nll = torch.full(target.shape, float("nan"), dtype=torch.float32, device=hidden.device)
    slope = torch.zeros_like(hidden, requires_grad=False)
    wanted = moved(torch.nonzero(target != NO_TARGET).flatten(), hidden.device)
    target = moved(target.long(), hidden.device)
    for rows in wanted.split(rows_per_chunk(anatomy.vocab_size, limit_bytes)):
        part = hidden.detach().index_select(0, rows).requires_grad_()
        with torch.enable_grad():
            scores = logits(anatomy, part).float()
            goal = target.index_select(0, rows).to(scores.device)
            losses = torch.nn.functional.cross_entropy(scores, goal, reduction="none")
        (slope[rows],) = torch.autograd.grad([losses], [part], [torch.ones_like(losses)])
        nll[rows] = losses.detach().to(nll.device)
    return nll, slope


def rows_per_chunk(vocab_size: int, limit_bytes: int = LIMIT_BYTES) -> int:
    """Rows whose float32 logits fit `limit_bytes`; at least one."""
    return max(1, limit_bytes // (4 * vocab_size))
