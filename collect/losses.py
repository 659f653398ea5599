"""Loss and divergence of each row under a changed model, beside those of the unchanged one.

In: final hidden states of both (what the head reads), the rows' targets. Out: per row, in float32, NLL in
nats and KL(unchanged ‖ changed) in nats, from the model's own logits, soft-cap and scale included, taken to
float32 before the log-softmax. The head runs on a few rows at once, in the same portions both times, so that
a model that was changed into itself gives the same bits and a KL of 0. Log-probabilities of the unchanged
model are kept while there is room, and made again from its hidden states where there is none: one more head
product for these rows, the same numbers. Cost: one head product, and passes over logits that stay in the
cache; memory: about three times `limit_bytes`.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Float32, Int
from torch import Tensor

from .anatomy import Anatomy, logits
from .lanes import moved
from .nll import LIMIT_BYTES, NO_TARGET, rows_per_chunk

CACHE_BYTES = 2 * 2**20


@dataclass(frozen=True, slots=True, eq=False)
class BaseScores:
    """What rows scored under the unchanged model; `log_p` of each portion of rows, None where it is not kept
    and made again from `hidden`."""

    nll: Float32[Tensor, "row"]
    target: Int[Tensor, "row"]
    hidden: Float[Tensor, "row feature"]
    log_p: list[Float32[Tensor, "portion vocabulary"] | None]
    portion: int

    @property
    def kept_bytes(self) -> int:
        return sum(one.nbytes for one in self.log_p if one is not None)

    def release(self) -> None:
        """Keep no log-probabilities any more."""
        self.log_p[:] = [None] * len(self.log_p)


def base_scores(
    anatomy: Anatomy,
    hidden: Float[Tensor, "row feature"],
    target: Int[Tensor, "row"],
    *,
    keep_bytes: int,
    limit_bytes: int = LIMIT_BYTES,
) -> BaseScores:
    """NLL of each row under the unmodified model, in nats, NaN where `target` is -1; at most `keep_bytes` of
    log-probabilities stay in memory."""
    target = moved(target.long(), hidden.device)
    portion = rows_per_chunk(anatomy.vocab_size, limit_bytes)
    nll: list[Tensor] = []
    log_p: list[Tensor | None] = []
    for rows, goal in zip(hidden.split(portion), target.split(portion), strict=True):
        found = _log_p(logits(anatomy, rows))
        nll.append(_nll(found, goal).to(hidden.device))
        fits = found.nbytes <= keep_bytes
        keep_bytes -= found.nbytes if fits else 0
        log_p.append(found if fits else None)
    return BaseScores(_joined(nll, hidden), target, hidden, log_p, portion)


def loss_and_kl(
    anatomy: Anatomy, hidden: Float[Tensor, "row feature"], base: BaseScores
) -> tuple[Float32[Tensor, "row"], Float32[Tensor, "row"]]:
    """(NLL of each row in nats, NaN without a target; KL of the changed model's next token from that of the
    unchanged one, in nats) for the same rows as `base`.

    A KL is the sum of p·(log p - log q). What is rounded in log q is of the order of 1e-6, and so is the KL
    of two models that are all but equal, of either sign."""
    nll: list[Tensor] = []
    kl: list[Tensor] = []
    portions = (values.split(base.portion) for values in (hidden, base.target, base.hidden))
    for rows, goal, before, kept in zip(*portions, base.log_p, strict=True):
        scores = logits(anatomy, rows)
        known = kept if kept is not None else logits(anatomy, before)
        size = _rows_at_once(scores)
        for part, aim, other in zip(scores.split(size), goal.split(size), known.split(size), strict=True):
            log_q = _log_p(part)
            nll.append(_nll(log_q, aim).to(hidden.device))
            kl.append(_kl(other if kept is not None else _log_p(other), log_q).to(hidden.device))
    return _joined(nll, hidden), _joined(kl, hidden)


def _rows_at_once(scores: Float[Tensor, "row vocabulary"]) -> int:
    """Rows that go through log-softmax and divergence together: on a CPU few enough for its cache (1.8 to 2.7
    times as fast with 49,152 tokens), elsewhere all."""
    return rows_per_chunk(scores.shape[1], CACHE_BYTES) if scores.device.type == "cpu" else len(scores)


def _log_p(scores: Float[Tensor, "row vocabulary"]) -> Float32[Tensor, "row vocabulary"]:
    return torch.log_softmax(scores.float(), dim=-1)


def _nll(log_p: Float32[Tensor, "row vocabulary"], target: Int[Tensor, "row"]) -> Float32[Tensor, "row"]:
    goal = target.to(log_p.device)
    nll = -log_p.gather(1, goal.clamp(min=0)[:, None])[:, 0]
    return nll.masked_fill(goal == NO_TARGET, float("nan"))


def _kl(
    log_p: Float32[Tensor, "row vocabulary"], log_q: Float32[Tensor, "row vocabulary"]
) -> Float32[Tensor, "row"]:
    """`log_q` is overwritten."""
    gap = torch.sub(log_p, log_q, out=log_q)
    return gap.mul_(log_p.exp()).sum(dim=1)


def _joined(parts: list[Tensor], like: Tensor) -> Tensor:
    return torch.cat(parts) if parts else torch.zeros(0, device=like.device)
