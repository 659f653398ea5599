"""Tiny hand-written decoders with blocks wired in every way: what a trace has to find, or to refuse.

A wiring is a function from a block and what enters it to what leaves it. All blocks hold the same modules, so
that only the wiring tells what is what; modules that a wiring leaves out never run.
"""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from helpers_models import D_MODEL, MAX_POSITIONS, N_LAYERS, VOCAB_SIZE, perturb
from torch import Tensor, nn
from transformers import LlamaConfig

MULTIPLIER = 0.7071067811865476


class WiredConfig(LlamaConfig):
    model_type = "wired"
    near_miss = 0.7  # near the multiplier, and not it


class Attention(nn.Module):
    """One causal head; gives a tuple, as many do."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({name: nn.Linear(D_MODEL, D_MODEL) for name in ("q", "k", "v", "o")})

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        q, k, v = (self.parts[name](hidden_states)[:, None] for name in ("q", "k", "v"))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0]
        return self.parts["o"](mixed), None


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D_MODEL, 2 * D_MODEL), nn.Linear(2 * D_MODEL, D_MODEL)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


class PeakNorm(nn.Module):
    """Neither LayerNorm nor RMSNorm."""

    eps = 1e-6

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(D_MODEL))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / x.abs().amax(-1, keepdim=True)


class Scale(nn.Module):
    """What vision models call LayerScale."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = nn.Parameter(0.5 + torch.rand(D_MODEL))

    def forward(self, x: Tensor) -> Tensor:
        return self.factors * x


class Block(nn.Module):
    def __init__(self, wiring: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.wiring = wiring
        self.n1, self.n2, self.n3, self.n4 = (nn.LayerNorm(D_MODEL) for _ in range(4))
        self.attn, self.attn2 = Attention(), Attention()
        self.ff, self.ff2, self.scale, self.peak = Feed(), Feed(), Scale(), PeakNorm()
        self.up, self.gate, self.down = (
            nn.Linear(D_MODEL, D_MODEL + 8),
            nn.Linear(D_MODEL, D_MODEL + 8),
            nn.Linear(D_MODEL + 8, D_MODEL),
        )
        self.drop, self.factors = nn.Dropout(0.5), nn.Parameter(0.5 + torch.rand(D_MODEL))

    def forward(self, hidden_states: Tensor, **_: Any) -> Tensor:
        return self.wiring(self, hidden_states)

    def attended(self, h: Tensor) -> Tensor:
        return h + self.drop(self.attn(hidden_states=self.n1(h))[0])


class Backbone(nn.Module):
    def __init__(self, wirings: Sequence[Callable[[Any, Tensor], Tensor]]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB_SIZE, D_MODEL)
        self.blocks = nn.ModuleList(Block(wiring) for wiring in wirings)
        self.last = nn.LayerNorm(D_MODEL)
        self.embedded: Callable[[Tensor], Tensor] = lambda ids: self.embed(ids)
        self.between: Callable[[Tensor], Tensor] = lambda hidden: hidden

    def forward(self, input_ids: Tensor, **_: Any) -> Any:
        hidden = self.embedded(input_ids)
        for block in self.blocks:
            hidden = self.between(block(hidden))
        return SimpleNamespace(last_hidden_state=self.last(hidden))


class Wired(nn.Module):
    """Enough of a transformers model: config, backbone, head."""

    def __init__(self, wirings: Sequence[Callable[[Any, Tensor], Tensor]]) -> None:
        super().__init__()
        self.config = WiredConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=D_MODEL,
            num_hidden_layers=len(wirings),
            num_attention_heads=1,
            max_position_embeddings=MAX_POSITIONS,
            bos_token_id=1,
            eos_token_id=[2, 3],
        )
        self.base_model, self.head = Backbone(wirings), nn.Linear(D_MODEL, VOCAB_SIZE)
        self.scored: Callable[[Tensor], Tensor] = lambda logits: logits

    def get_input_embeddings(self) -> nn.Module:
        return self.base_model.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor, **_: Any) -> Any:
        return SimpleNamespace(logits=self.scored(self.head(self.base_model(input_ids).last_hidden_state)))


def wired(*wirings: Callable[[Any, Tensor], Tensor], seed: int = 0) -> Any:
    """A model of three blocks, all wired alike when one wiring is given."""
    torch.manual_seed(seed)
    model = Wired(wirings * N_LAYERS if len(wirings) == 1 else wirings)
    perturb(model, seed=seed)
    return model.eval().requires_grad_(False)


def sequential(b: Any, h: Tensor) -> Tensor:
    r = b.attended(h)
    return r + b.drop(b.ff(b.n2(r)))


def parallel(b: Any, h: Tensor) -> Tensor:
    x = b.n1(h)
    return b.attn(x)[0] + b.ff(x) + h


def parallel_two_norms(b: Any, h: Tensor) -> Tensor:
    return h + b.attn(b.n1(h))[0] + b.ff(b.n2(h))


def sandwich(b: Any, h: Tensor) -> Tensor:
    r = h + b.n3(b.attn(b.n1(h))[0])
    return r + b.n4(b.ff(b.n2(r)))


def behind_only(b: Any, h: Tensor) -> Tensor:
    r = h + b.n3(b.attn(h)[0])
    return r + b.n4(b.ff(r))


def multiplied(b: Any, h: Tensor) -> Tensor:
    r = h + MULTIPLIER * b.attn(b.n1(h))[0]
    return r + MULTIPLIER * b.ff(b.n2(r))


def sum_normed(b: Any, h: Tensor) -> Tensor:
    r = b.n1(h + b.attn(h)[0])
    return b.n2(r + b.ff(r))


def flat_span(b: Any, h: Tensor) -> Tensor:
    """Gate and up both read the input, in the block itself, on rows without sequences."""
    r = b.attended(h)
    x = b.n2(r).flatten(0, 1)
    return r + b.down(torch.sigmoid(b.gate(x)) * b.up(x)).reshape(r.shape)


def scaled_by_module(b: Any, h: Tensor) -> Tensor:
    r = b.attended(h)
    return r + b.scale(b.ff(b.n2(r)))


def biased_attention(b: Any, h: Tensor) -> Tensor:
    r = b.attended(h) + b.factors
    return r + b.ff(b.n2(r))


def in_place(b: Any, h: Tensor) -> Tensor:
    x = b.n1(h)
    attended = b.attn(x)[0]
    out = b.ff(x)
    out += attended
    out += h
    return out


def no_mlp(b: Any, h: Tensor) -> Tensor:
    return b.attended(h)


def no_attention(b: Any, h: Tensor) -> Tensor:
    return h + b.ff(b.n2(h))


def attention_last(b: Any, h: Tensor) -> Tensor:
    r = h + b.ff(b.n2(h))
    return b.attended(r)


def attention_twice(b: Any, h: Tensor) -> Tensor:
    r = b.attended(h)
    r = r + b.ff(b.n2(r))
    return r + b.attn2(b.n3(r))[0]


def mlp_twice(b: Any, h: Tensor) -> Tensor:
    r = b.attended(h)
    r = r + b.ff(b.n2(r))
    return r + b.ff(b.n3(r))


def two_mlps_added(b: Any, h: Tensor) -> Tensor:
    r = b.attended(h)
    x = b.n2(r)
    return r + b.ff(x) + b.ff2(x)


def two_mlps_after_another(b: Any, h: Tensor) -> Tensor:
    r = b.attended(h)
    r = r + b.ff2(b.n3(r))
    return r + b.ff(b.n2(r))


def scaled_by_vector(b: Any, h: Tensor) -> Tensor:
    r = b.attended(h)
    return r + b.factors * b.ff(b.n2(r))


def scaled_stream(b: Any, h: Tensor) -> Tensor:
    r = b.attended(h)
    return 0.9 * r + b.ff(b.n2(r))


def unknown_norm(b: Any, h: Tensor) -> Tensor:
    r = b.attended(h)
    return r + b.ff(b.peak(r))


def halved_input(b: Any, h: Tensor) -> Tensor:
    """Between norm and MLP lies what is no module: the norm must not pass for the MLP's beginning."""
    r = b.attended(h)
    return r + b.ff(0.5 * b.n2(r))


def halved_output(b: Any, h: Tensor) -> Tensor:
    r = b.attended(h)
    return r + b.n4(0.5 * b.ff(b.n2(r)))


def unknown_norm_halved(b: Any, h: Tensor) -> Tensor:
    r = b.attended(h)
    return r + b.ff(0.5 * b.peak(r))


def unknown_norm_behind(b: Any, h: Tensor) -> Tensor:
    r = b.attended(h)
    return r + b.peak(b.ff(b.n2(r)))


def mean_of_all(b: Any, h: Tensor) -> Tensor:
    """An MLP that sees the mean of its whole input: the same under any order of the rows."""
    r = b.attended(h)
    x = b.n2(r)
    return r + b.down(torch.relu(b.up(x)) + b.gate(x).mean((0, 1)))


def gated_by_position(b: Any, h: Tensor) -> Tensor:
    r = b.attended(h)
    steps = torch.linspace(0.5, 1.5, h.shape[1])[:, None]
    return r + b.down(torch.relu(b.up(b.n2(r))) * steps)


def used_again(b: Any, h: Tensor) -> Tensor:
    """The output of the MLP decides on the size of the stream too: 1 unless the MLP reads other rows."""
    r = b.attended(h)
    x = b.n2(r)
    y = b.ff(x)
    undisturbed = torch.equal(y, b.ff.forward(x))
    return (r if undisturbed else 1.1 * r) + y


def two_readings(b: Any, h: Tensor) -> Tensor:
    """r + ff(n2(r)) = u + ff2(n3(u)), by a fixed point that is found without calling the modules."""
    r = b.attended(h)
    out = r + b.ff(b.n2(r))
    u = out.clone()
    for _ in range(200):
        u = out - b.ff2.forward(b.n3.forward(u))
    b.ff2(b.n3(u))
    return out
