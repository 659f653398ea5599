"""Where each family keeps its parts, written down by hand and not looked up, and one plain forward pass.

In: a tiny model and the ids of one sequence. Out: what hooks written out here saw, as float32 arrays, and how
a block makes its output of residual and MLP output. The slow twin of anatomy, adapters, capture and forward.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


def _added(block: Any, residual: Tensor, y: Tensor, attention: Tensor) -> Tensor:
    return residual + y


def _parallel(block: Any, residual: Tensor, y: Tensor, attention: Tensor) -> Tensor:
    return residual + attention + y


def _granite(block: Any, residual: Tensor, y: Tensor, attention: Tensor) -> Tensor:
    return residual + 0.4 * y


def _post_norm(block: Any, residual: Tensor, y: Tensor, attention: Tensor) -> Tensor:
    return residual + block.post_feedforward_layernorm(y)


def _norm_of_sum(block: Any, residual: Tensor, y: Tensor, attention: Tensor) -> Tensor:
    return block.final_layer_norm(residual + y)


@dataclass(frozen=True, slots=True)
class Place:
    """Blocks; then, inside a block, what reads the residual, what gives the MLP's output, the attention."""

    blocks: str
    reads: str
    gives: str
    attention: str
    whole: Callable[[Any, Tensor, Tensor, Tensor], Tensor] = _added


_LLAMA = Place("model.layers", "post_attention_layernorm", "mlp", "self_attn")
_ONE_NORM = Place("model.layers", "input_layernorm", "mlp", "self_attn", _parallel)
_NO_NORM = Place("model.layers", "mlp", "mlp", "self_attn", _post_norm)

PLACES = {
    "bloom": Place("transformer.h", "post_attention_layernorm", "mlp.dense_4h_to_h", "self_attention"),
    "bloom_of_norm": Place("transformer.h", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h", "self_attention"),
    "cohere": _ONE_NORM,
    "cohere2": _ONE_NORM,
    "falcon_7b": Place("transformer.h", "input_layernorm", "mlp", "self_attention", _parallel),
    "falcon_11b": Place("transformer.h", "input_layernorm", "mlp", "self_attention", _parallel),
    "falcon_40b": Place("transformer.h", "ln_mlp", "mlp", "self_attention", _parallel),
    "falcon_rw": Place("transformer.h", "post_attention_layernorm", "mlp", "self_attention"),
    "gemma": _LLAMA,
    "gptj": Place("transformer.h", "ln_1", "mlp", "attn", _parallel),
    "granite": Place("model.layers", "post_attention_layernorm", "mlp", "self_attn", _granite),
    "mixtral": _LLAMA,
    "mpt": Place("transformer.blocks", "norm_2", "ffn.down_proj", "attn"),
    "olmo": _LLAMA,
    "olmo2": _NO_NORM,
    "olmo3": _NO_NORM,
    "opt": Place("model.decoder.layers", "final_layer_norm", "fc2", "self_attn"),
    "opt_350m": Place("model.decoder.layers", "fc1", "fc2", "self_attn", _norm_of_sum),
    "phi": _ONE_NORM,
    "qwen2_moe": _LLAMA,
    "qwen3_moe": _LLAMA,
    "stablelm": _LLAMA,
    "stablelm_parallel": _ONE_NORM,
}


def plain_pass(family: str, model: Any, ids: np.ndarray) -> dict[str, np.ndarray]:
    """One sequence, unbatched: residual, mlp_output, embedding, attention, block_output, log_p."""
    place = PLACES[family]
    seen: dict[str, list[Tensor]] = {}
    handles = []

    def note(name: str, value: Any) -> None:
        hidden = value[0] if isinstance(value, tuple) else value
        # One sequence: (1, position, feature), or already flat as in OPT.
        seen.setdefault(name, []).append(hidden.reshape(-1, hidden.shape[-1]).clone().float())

    def before(name: str, module: Any) -> None:
        def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            note(name, args or kwargs["hidden_states"])

        handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def after(name: str, module: Any) -> None:
        handles.append(module.register_forward_hook(lambda _, args, output: note(name, output)))

    layers = model.get_submodule(place.blocks)
    before("embedding", layers[0])
    for layer in layers:
        before("residual", layer.get_submodule(place.reads))
        after("mlp_output", layer.get_submodule(place.gives))
        after("attention", layer.get_submodule(place.attention))
        after("block_output", layer)
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(ids).long()[None]).logits[0]
    for handle in handles:
        handle.remove()
    found = {name: torch.stack(rows).numpy() for name, rows in seen.items()}
    return found | {"log_p": torch.log_softmax(logits.double(), -1).numpy()}
