"""Where the parts of a decoder block lie, per model family: one row of names for each `config.model_type`.

In: a model's config. Out: module names inside the backbone and inside a block, and the factors a family
multiplies by. Cost: none, this is a table; a row that depends on the config is a function of it. A row only
*claims* an anatomy; the start-up proof decides on real tokens whether the claim holds. A new family is a new
row (docs/architectures.md); a family without one is traced.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from .refused_families import refuse_family as refuse_family


@dataclass(frozen=True, slots=True)
class Adapter:
    """Names and factors of one family. The MLP is the span from `mlp_first` to `mlp_last`, inside the block.

    `backbone` lies inside the model's base model (empty: it is the base model); `blocks` and `positions` lie
    in the backbone; all other names in a block.
    """

    blocks: str
    norm: str | None  # in front of the MLP; None: the MLP reads the stream itself
    attention: str
    mlp_first: str = "mlp"
    mlp_last: str = "mlp"
    post_norm: str | None = None  # of the MLP's output, before it is added
    sum_norm: str | None = None  # of residual + contribution, before they leave the block
    parallel: bool = False  # attention and MLP read the same stream
    multiplier: float = 1.0  # of what the MLP adds
    backbone: str = ""
    positions: str | None = None  # the module whose weight, or the tensor that, is a table of positions
    position_offset: int = 0  # its row for position 0
    logit_scale: float = 1.0  # of what the head gives


Row = Adapter | Callable[[Any], Adapter]

_LLAMA = Adapter(blocks="layers", norm="post_attention_layernorm", attention="self_attn")
_GEMMA2 = replace(_LLAMA, norm="pre_feedforward_layernorm", post_norm="post_feedforward_layernorm")
_OLMO2 = replace(_LLAMA, norm=None, post_norm="post_feedforward_layernorm")
_PARALLEL = replace(_LLAMA, norm="input_layernorm", parallel=True)
_GPT2 = Adapter(blocks="h", norm="ln_2", attention="attn", positions="wpe")
_GPTJ = Adapter(blocks="h", norm="ln_1", attention="attn", parallel=True)
_OPT = replace(
    _LLAMA,
    norm="final_layer_norm",
    mlp_first="fc1",
    mlp_last="fc2",
    positions="embed_positions",
    position_offset=2,
)


def _neox(config: Any) -> Adapter:
    return replace(_LLAMA, attention="attention", parallel=bool(config.use_parallel_residual))


def _stablelm(config: Any) -> Adapter:
    return _PARALLEL if config.use_parallel_residual else _LLAMA


def _opt(config: Any) -> Adapter:
    """Around fc1 … fc2, hidden states are flat: (rows, d). The 350m layout has its norm behind the sum."""
    row = replace(_OPT, backbone="decoder")
    return row if config.do_layer_norm_before else replace(row, norm=None, sum_norm="final_layer_norm")


def _falcon(config: Any) -> Adapter:
    """40B: parallel with a norm each; 7B and 11B: parallel with one; RW: one after the other."""
    two_norms = config.new_decoder_architecture and config.num_ln_in_parallel_attn in (None, 2)
    parallel = bool(config.new_decoder_architecture or config.parallel_attn)
    norm = "ln_mlp" if two_norms else "input_layernorm" if parallel else "post_attention_layernorm"
    return Adapter(blocks="h", norm=norm, attention="self_attention", parallel=parallel)


def _bloom(config: Any) -> Adapter:
    """The MLP module adds the residual itself, so the span ends at its last projection. Where the stream is
    what the norm gave, the norm is a part of the stream and the MLP has none of its own."""
    of_norm = config.apply_residual_connection_post_layernorm
    return Adapter(
        blocks="h",
        norm=None if of_norm else "post_attention_layernorm",
        attention="self_attention",
        mlp_first="mlp.dense_h_to_4h",
        mlp_last="mlp.dense_4h_to_h",
    )


def _granite(config: Any) -> Adapter:
    scale = 1.0 / config.logits_scaling
    return replace(_LLAMA, multiplier=float(config.residual_multiplier), logit_scale=scale)


def _granitemoe(config: Any) -> Adapter:
    return replace(_granite(config), mlp_first="block_sparse_moe", mlp_last="block_sparse_moe")


def _cohere(config: Any) -> Adapter:
    return replace(_PARALLEL, logit_scale=float(config.logit_scale))


_LIKE_LLAMA = (
    "arcee bitnet cwm deepseek_v2 deepseek_v3 diffllama dots1 ernie4_5 ernie4_5_moe exaone exaone_moe gemma "
    "glm glm4_moe glm4_moe_lite gpt_oss helium hunyuan_v1_dense hunyuan_v1_moe internlm3 jais2 llama "
    "minimax_m2 ministral ministral3 mistral mixtral nemotron olmo olmoe persimmon phi3 phimoe "
    "qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 solar_open starcoder2"
).split()

ADAPTERS: dict[str, Row] = {
    **dict.fromkeys(_LIKE_LLAMA, _LLAMA),
    **dict.fromkeys(("exaone4", "flex_olmo", "olmo2", "olmo3"), _OLMO2),
    **dict.fromkeys(("gemma2", "gemma3_text"), _GEMMA2),
    **dict.fromkeys(("gpt2", "gpt_bigcode", "gpt_neo"), _GPT2),
    **dict.fromkeys(("codegen", "gptj"), _GPTJ),
    **dict.fromkeys(("cohere", "cohere2"), _cohere),
    **dict.fromkeys(("granite", "granite_swa"), _granite),
    **dict.fromkeys(("granitemoe", "granitemoe_swa"), _granitemoe),
    "apertus": replace(_LLAMA, norm="feedforward_layernorm"),
    "biogpt": _OPT,
    "bloom": _bloom,
    "ctrl": Adapter(
        "h",
        "layernorm2",
        "multi_head_attention",
        mlp_first="ffn",
        mlp_last="ffn",
        positions="pos_encoding",
    ),
    "dbrx": Adapter(
        "blocks", "norm_attn_norm.norm_2", "norm_attn_norm.attn", mlp_first="ffn", mlp_last="ffn"
    ),
    "falcon": _falcon,
    "glm4": replace(_LLAMA, post_norm="post_mlp_layernorm"),
    "gpt_neox": _neox,
    "mpt": Adapter("blocks", "norm_2", "attn", mlp_first="ffn.up_proj", mlp_last="ffn.down_proj"),
    "openai-gpt": replace(_GPT2, norm=None, sum_norm="ln_2", positions="positions_embed"),
    "opt": _opt,
    "phi": _PARALLEL,
    "stablelm": _stablelm,
    "xglm": replace(_OPT, positions="embed_positions.weights"),
}


def adapter_of(config: Any) -> Adapter | None:
    """The row of a config's family; None where there is none."""
    row = ADAPTERS.get(config.model_type)
    return row if row is None or isinstance(row, Adapter) else row(config)
