"""Where the parts of a decoder block lie, per model family: one row of names for each `config.model_type`.

In: a model type. Out: module names inside the backbone and inside a block. Cost: none, this is a table. A row
only *claims* an anatomy; the start-up proof decides on real tokens whether the claim holds. A new family is a
new row.
"""

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..store.errors import UsageError


def _never(config: Any) -> bool:
    return False


def _neox_parallel(config: Any) -> bool:
    return bool(config.use_parallel_residual)


def _one(config: Any) -> float:
    return 1.0


@dataclass(frozen=True, slots=True)
class Adapter:
    """Names of one family. The MLP is the span from `mlp_first` to `mlp_last`, inside the block."""

    blocks: str
    norm: str
    attention: str
    final_norm: str
    mlp_first: str = "mlp"
    mlp_last: str = "mlp"
    post_norm: str | None = None
    positions: str | None = None
    parallel: Callable[[Any], bool] = _never
    multiplier: Callable[[Any], float] = _one


_LLAMA = Adapter(blocks="layers", norm="post_attention_layernorm", attention="self_attn", final_norm="norm")
_GEMMA = Adapter(
    blocks="layers",
    norm="pre_feedforward_layernorm",
    attention="self_attn",
    final_norm="norm",
    post_norm="post_feedforward_layernorm",
)

ADAPTERS: dict[str, Adapter] = {
    "gpt2": Adapter(blocks="h", norm="ln_2", attention="attn", final_norm="ln_f", positions="wpe"),
    "gpt_neox": Adapter(
        blocks="layers",
        norm="post_attention_layernorm",
        attention="attention",
        final_norm="final_layer_norm",
        parallel=_neox_parallel,
    ),
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
}


def adapter_for(model_type: str) -> Adapter:
    """The row of a family; an unknown one is refused with the families that are known."""
    if model_type in ADAPTERS:
        return ADAPTERS[model_type]
    near = difflib.get_close_matches(model_type, ADAPTERS, n=1)
    hint = f" The nearest known name is {near[0]!r}." if near else ""
    raise UsageError(
        f"model family {model_type!r} is not known here. Known families: "
        f"{', '.join(sorted(ADAPTERS))}.{hint} Use a model of one of these, or add a row to "
        "nearline/collect/adapters.py; the start-up proof checks it."
    )
