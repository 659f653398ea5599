"""The frame of a traced model: its list of blocks and the backbone around it, positions, and head.

In: a trace. Out: the blocks that pass the stream on; the module that can be run without the head; the table
whose row p is what position p adds to the embedding (None where positions add nothing); the scale and soft
cap between head and logits. A UsageError where there is no such thing. Cost: arithmetic on twenty rows.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..store.errors import UsageError
from .agreement import componentwise_error, row_error
from .proof import tolerances
from .residence import in_memory
from .trace_recording import Call, Trace, shown

# Tables may keep rows for padding in front of that of position 0.
MOST_OFFSET = 8


def find_blocks(trace: Trace, model: nn.Module, config: Any) -> tuple[Call, ...]:
    """The numbered list of modules that pass the stream on, each called once: the one that does most."""
    once = trace.once()
    found: list[tuple[int, tuple[Call, ...]]] = []
    complaint = "no numbered list of modules in it passes tensors of the model's width on"
    for path, module in model.named_modules():
        names = list(module._modules)
        if not names or names != [str(number) for number in range(len(names))]:
            continue
        where = [f"{path}.{name}" if path else name for name in names]
        calls = [once[one] for one in where if one in once]
        broken = _why_no_chain(where, calls)
        if broken is None:
            found.append(
                (sum(calls[0].start < one.start < calls[-1].end for one in trace.calls), tuple(calls))
            )
        elif len(names) == getattr(config, "num_hidden_layers", None):
            complaint = broken
    n_calls, blocks = max(found, key=lambda one: one[0], default=(0, ()))
    wanted = getattr(config, "num_hidden_layers", None)
    if 2 * n_calls < len(trace.calls) or (wanted is not None and len(blocks) != wanted):
        if blocks:
            listed = f"`{blocks[0].path}` … `{blocks[-1].path}`"
            complaint += f" (the longest chain is {listed}; the config speaks of {wanted} layers)"
        raise UsageError(
            f"{type(model).__name__}: the decoder blocks were not found by running the model: {complaint}. "
            "No row of nearline/collect/adapters.py fits it; docs/architectures.md tells how to add "
            "one, where the model is one residual stream through numbered blocks."
        )
    return blocks


def _why_no_chain(where: Sequence[str], calls: Sequence[Call]) -> str | None:
    """What keeps these modules from being a chain of blocks; None if nothing does."""
    ran = {call.path for call in calls}
    missing = [one for one in where if one not in ran]
    if missing:
        return f"{shown(missing)} did not run exactly once"
    for call in calls:
        if call.given is None or call.made is None:
            return f"what `{call.path}` reads or gives is not one row of the model's width per token"
    for one, following in pairwise(calls):
        if one.made is not following.given or not one.before(following):
            return f"what `{following.path}` reads is not what `{one.path}` gave"
    return None


def backbone_path(trace: Trace, blocks: Sequence[Call]) -> str:
    """The innermost module around the blocks that ran once and read the token ids."""
    around = [path for path, call in trace.once().items() if path in trace.outputs and call.holds(blocks[0])]
    inner = [path for path in around if path]
    if not inner:
        raise UsageError(
            f"no module around `{blocks[0].path}` reads the token ids and can be run without the head, so "
            "the loss of a token cannot be computed row by row. docs/architectures.md tells how to add a row."
        )
    return max(inner, key=len)


def position_table(
    model: nn.Module, blocks: Sequence[Call], ids: Int[Tensor, "2 position"]
) -> tuple[Float[Tensor, "position feature"] | None, str | None]:
    """(table, its path) by which the embedding of one token at two positions differs."""
    entered = blocks[0].given
    assert entered is not None
    limit = tolerances(entered.dtype).identity
    there, back = entered.double().unflatten(0, tuple(ids.shape))
    if bool((row_error(there, back.flip(0)) <= limit).all()):
        return None, None
    length = ids.shape[1]
    for path, table in _tables(model, entered.shape[1], length, within=blocks):
        for offset in range(min(MOST_OFFSET, len(table) - length) + 1):
            rows = table[offset : offset + length].detach().cpu().double()
            left, right = there - rows, (back - rows).flip(0)
            if bool(
                (componentwise_error(left - right, there, back.flip(0), rows, rows.flip(0)) <= limit).all()
            ):
                return table[offset:], path
    raise UsageError(
        f"{type(model).__name__}: what enters block 0 depends on a token's position or on its neighbours, "
        "and no table of positions is added that would explain it. Token, position and context could not be "
        "told apart, so this family cannot be traced; docs/architectures.md tells how to add a row."
    )


def _tables(
    model: nn.Module, width: int, length: int, within: Sequence[Call]
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor outside the blocks that could hold positions, with its path."""
    inside = {id(module) for block in within for module in block.module.modules()}
    for path, module in model.named_modules():
        if id(module) in inside:
            continue
        plain = {name: value for name, value in vars(module).items() if isinstance(value, Tensor)}
        for name in (*module._parameters, *module._buffers, *plain):
            value = getattr(module, name, None)
            if isinstance(value, Tensor) and value.ndim == 2 and value.shape[1] == width:
                if len(value) >= length and value.is_floating_point():
                    yield f"{path}.{name}".removeprefix("."), in_memory(module, name)


def logit_factors(
    head: nn.Module, outputs: Mapping[str, Any], backbone: str, config: Any
) -> tuple[float, float | None]:
    """(scale, soft cap) for which cap · tanh(scale · head(hidden) / cap) are the model's logits."""
    wanted = getattr(outputs[""], "logits", None)
    if not isinstance(wanted, Tensor):
        raise UsageError("the model's answer has no `logits`, so the loss of a token could not be checked")
    wanted = wanted[0].float().cpu()
    hidden = getattr(outputs[backbone], "last_hidden_state", None)
    hidden = outputs[backbone][0] if hidden is None else hidden
    scores = head(hidden[0]).float().cpu()
    limit = 4 * tolerances(hidden.dtype).identity
    numbers = [value for value in config.to_dict().values() if isinstance(value, float | int) and value > 0]
    ratio = float((scores.flatten() @ wanted.flatten()) / scores.square().sum())
    near = [
        number for number in (*numbers, *(1.0 / one for one in numbers)) if abs(number / ratio - 1) < limit
    ]
    for scale in (1.0, *near, ratio, *numbers):
        for cap in (None, *numbers):
            told = scores * scale if cap is None else torch.tanh(scores * scale / cap) * cap
            if bool((row_error(told, wanted) <= limit).all()):
                return float(scale), None if cap is None else float(cap)
    raise UsageError(
        f"the logits of {type(head).__name__} on the last hidden states are not the model's logits, nor is "
        "one a scaled or softly capped form of the other by a number of the config. The loss of a token "
        "could not be computed; docs/architectures.md tells how to add a row."
    )
