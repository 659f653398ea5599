"""PEFT adapters on tiny models, without a warning of peft's own."""

import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch


def with_lora(model: Any, *, seed: int = 5, **options: Any) -> Any:
    """`model` wrapped, with a LoRA adapter that changes what attention and MLP give."""
    return with_adapter(model, lora_config(**options), seed=seed)


def with_adapter(model: Any, config: Any, *, seed: int = 5) -> Any:
    peft = quiet_peft()
    torch.manual_seed(seed)
    with quiet():
        return peft.get_peft_model(model, config).eval().requires_grad_(False)


def lora_config(**options: Any) -> Any:
    given = {"r": 4, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}
    return quiet_peft().LoraConfig(**{**given, "task_type": "CAUSAL_LM", **options})


def reloaded(model: Any, folder: Path, name: str = "default") -> Any:
    """`model` wrapped, with the adapter of a folder."""
    with quiet():
        return quiet_peft().PeftModel.from_pretrained(model, str(folder), adapter_name=name)


def quiet_peft() -> Any:
    """peft, whose import looks at whatever else is installed, and warns."""
    with quiet():
        import peft
    return peft


@contextmanager
def quiet() -> Generator[None]:
    """peft reads a property that transformers has given another name since."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
