"""The object a user calls a model: what is inside a wrapper, its config, its backbone and its head.

In: a live model. Out: its parts, or a UsageError that says what it is and what to give instead: compiled
models are refused, because hooks inside compiled code may silently never fire, and so are models without a
language-model head. Cost: attribute look-ups only.
"""

from typing import Any

from torch import nn

from ..store.errors import UsageError


def unwrapped(model: Any) -> Any:
    """The transformers model inside a PEFT wrapper, with its adapters in place; any other model as it is."""
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"a live model is expected, and {type(model).__name__} was given. Give a causal language model "
            "of transformers; `nearline.collect.models.load` loads one by its name, folder or hub id."
        )
    get_base = getattr(model, "get_base_model", None)
    if not callable(get_base):
        return model
    settings = getattr(model, "active_peft_config", None)
    if getattr(settings, "is_prompt_learning", False):
        raise UsageError(
            "this PEFT model learns a prompt, which lies outside the wrapped model: its activations would "
            "be those of the model without the prompt. Allowed are adapters inside the layers (LoRA and "
            "its kin), or a plain model."
        )
    return get_base()


def refuse_compiled(model: nn.Module) -> None:
    """Raise UsageError when the model or one of its modules goes through torch.compile."""
    for name, module in model.named_modules():
        if _is_compiled(module):
            where = f"its module {name!r}" if name else "the model"
            raise UsageError(
                f"{where} is compiled (torch.compile), and hooks inside compiled code may never fire. Give "
                "the uncompiled model; nearline needs no compilation."
            )


def _is_compiled(module: nn.Module) -> bool:
    # Names, not types: importing torch._dynamo costs seconds and is needed by nothing else here.
    return (
        type(module).__name__ == "OptimizedModule"
        or getattr(module, "_compiled_call_impl", None) is not None
        or hasattr(module.forward, "_torchdynamo_orig_callable")
    )


def config_of(model: nn.Module) -> Any:
    """The model's transformers config."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        raise UsageError(
            f"{type(model).__name__} has no transformers config. Give a causal language model of Hugging "
            "Face transformers (for example from AutoModelForCausalLM.from_pretrained)."
        )
    return config


def max_positions_of(config: Any) -> int | None:
    """The longest sequence that the model takes, where it says so."""
    return getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None)


def backbone_and_head(model: Any) -> tuple[nn.Module, nn.Module]:
    """The model without its head, and the head."""
    head = head_of(model)
    backbone = model.base_model
    if backbone is model:
        raise _no_head(model)
    return backbone, head


def head_of(model: Any) -> nn.Module:
    """What makes logits of the last hidden states."""
    head = model.get_output_embeddings()
    if head is None:
        raise _no_head(model)
    return head


def _no_head(model: Any) -> UsageError:
    return UsageError(
        f"{type(model).__name__} has no language-model head, and the loss of a token needs one. Load it with "
        "AutoModelForCausalLM instead of AutoModel."
    )
