"""Rows of one batch, surrogates that nobody fitted, and the slow way to replace an MLP: hooks that let it run
on every row and then exchange rows of what it gave.
"""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from helpers_models import VOCAB_SIZE
from nearline.collect.anatomy import Anatomy
from nearline.collect.capture import first_tensor
from nearline.collect.forward import final_hidden, inputs_of
from nearline.collect.interventions import parse_intervention
from nearline.collect.row_routers import RandomRouter, RowRouter
from nearline.collect.substitutes import LinearMap, Substitute
from nearline.collect.substitution import BatchRows, Substitution
from torch import Tensor, nn

SHAPE = (3, 11)
MASK = np.ones(SHAPE, bool)
MASK[1, 7:] = False
IDS = np.random.default_rng(0).integers(3, VOCAB_SIZE, SHAPE).astype(np.int64)
INPUTS = inputs_of(IDS, MASK, torch.device("cpu"))
_POSITION = np.broadcast_to(np.arange(SHAPE[1]), SHAPE)
_SPECIAL = IDS == IDS[2, 4]
ROWS = BatchRows(
    token_id=IDS,
    position=_POSITION,
    covered=MASK & (_POSITION > 0) & ~_SPECIAL,
    row=np.where(MASK, np.cumsum(MASK).reshape(SHAPE) - 1, -1),
)


def linear_map(d: int, *, seed: int = 1, dtype: torch.dtype = torch.float32) -> LinearMap:
    """A surrogate as large as an MLP of the tiny models, and as bad as chance."""
    generator = torch.Generator().manual_seed(seed)
    weight, bias = (0.1 * torch.randn(*shape, generator=generator) for shape in ((d, d), (d,)))
    return LinearMap(weight.to(dtype), bias.to(dtype))


def substitute(name: str, layer: int, linear: LinearMap, router: Any = None) -> Substitute:
    """By the name of an intervention; random ones get their router."""
    one = parse_intervention(name)
    if one.kind == "random" and router is None:
        router = RandomRouter(one.share or 0.0, 7 + layer)
    return Substitute(one, layer, None if one.kind == "none" else linear, router)


def hidden_of(
    found: Anatomy, substitutes: dict[int, Substitute], rows: BatchRows | None = ROWS
) -> tuple[Tensor, Substitution]:
    """Final hidden states under a substitution, and what is left of it."""
    with torch.inference_mode(), Substitution(found, substitutes) as live:
        live.rows = rows
        return final_hidden(found, INPUTS), live


def exchanged(found: Anatomy, layer: int, linear: LinearMap, weight: Tensor) -> Tensor:
    """Final hidden states, the slow way: the MLP runs on all rows, and then each row of its output is
    (1 - weight)·MLP + weight·surrogate."""
    parts, seen = found.layers[layer], list[Tensor]()

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append(first_tensor(args or tuple(kwargs.values())).clone())

    def after(_: nn.Module, __: tuple[Any, ...], output: Any) -> Any:
        y, x = first_tensor(output), seen[0]
        made = (x.float() @ linear.weight.float().T + linear.bias.float()).reshape(y.shape)
        share = weight.reshape(*y.shape[:-1], 1)
        mixed = ((1 - share) * y.float() + share * made).to(y.dtype)
        return mixed if isinstance(output, Tensor) else (mixed, *output[1:])

    handles = [
        parts.mlp_first.register_forward_pre_hook(before, with_kwargs=True),
        parts.mlp_last.register_forward_hook(after),
    ]
    try:
        with torch.inference_mode():
            return final_hidden(found, INPUTS)
    finally:
        for handle in handles:
            handle.remove()


def covered_weight(router: RowRouter | None = None) -> Tensor:
    """1 for covered rows that a router sends, 0 for the others."""
    chosen = ROWS.covered if router is None else ROWS.covered & router.linear(ROWS)
    return torch.from_numpy(chosen.astype(np.float32))


def other_rows(**changes: Any) -> BatchRows:
    return replace(ROWS, **changes)


def traces(model: nn.Module) -> dict[str, Any]:
    """What a module may keep beside its weights: attributes of its own, hooks, and whose forward runs."""
    return {
        name: (
            sorted(vars(module)),
            vars(module).get("forward"),
            list(module._forward_hooks.values()),
            list(module._forward_pre_hooks.values()),
        )
        for name, module in model.named_modules()
    }


@contextmanager
def unchanged(model: nn.Module) -> Generator[None]:
    """Nothing is left on the model afterwards, and no weight is another."""
    before, weights = traces(model), {name: one.clone() for name, one in model.state_dict().items()}
    try:
        yield
    finally:
        assert traces(model) == before
        assert all(torch.equal(one, weights[name]) for name, one in model.state_dict().items())
