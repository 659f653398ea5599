"""Documents, harvests of tiny models, and a second, plainer way to see what a model does on one sequence."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from helpers_models import tiny_model, tiny_tokenizer
from nearline.collect.harvesting import harvest

WORDS = "the quick brown fox jumps over lazy dog a model reads text and store keeps what it saw again".split()
SMALL: dict[str, Any] = {
    "tokens": 900,
    "sequence_length": 24,
    "min_length": 4,
    "batch_tokens": 96,
    "block": 90,
}

# Module paths of each family: blocks, the norm in front of the MLP, the MLP. Written down, not looked up.
PATHS = {
    "gpt2": ("transformer.h", "ln_2"),
    "gpt_neox": ("gpt_neox.layers", "post_attention_layernorm"),
    "gpt_neox_sequential": ("gpt_neox.layers", "post_attention_layernorm"),
    "llama": ("model.layers", "post_attention_layernorm"),
    "mistral": ("model.layers", "post_attention_layernorm"),
    "qwen2": ("model.layers", "post_attention_layernorm"),
    "qwen3": ("model.layers", "post_attention_layernorm"),
    "gemma2": ("model.layers", "pre_feedforward_layernorm"),
    "gemma3": ("model.layers", "pre_feedforward_layernorm"),
}


def texts(n_documents: int = 60, *, seed: int = 0) -> list[str]:
    """Documents of 8 to 40 random words, no two alike."""
    random = np.random.default_rng(seed)
    return [" ".join(random.choice(WORDS, size=random.integers(8, 40))) for _ in range(n_documents)]


def harvested(path: Path, family: str = "llama", *, model: Any = None, **overrides: Any) -> Path:
    """A small store of a tiny model."""
    return harvest(model or tiny_model(family)[0], tiny_tokenizer(), texts(), path, **{**SMALL, **overrides})


def plain_forward(family: str, model: Any, ids: np.ndarray) -> dict[str, np.ndarray]:
    """One sequence, unbatched, seen by hooks written out here: the three sites and all log-probabilities."""
    blocks, norm = PATHS[family]
    layers = model.get_submodule(blocks)
    seen: dict[str, list[np.ndarray]] = {"residual": [], "mlp_output": [], "embedding": []}
    handles = [
        layers[0].register_forward_pre_hook(
            lambda module, args, kwargs: seen["embedding"].append(
                (args[0] if args else kwargs["hidden_states"])[0].clone().float().numpy()
            ),
            with_kwargs=True,
        )
    ]
    for layer in layers:
        handles += [
            layer.get_submodule(norm).register_forward_pre_hook(
                lambda module, args: seen["residual"].append(args[0][0].clone().float().numpy())
            ),
            layer.mlp.register_forward_hook(
                lambda module, args, output: seen["mlp_output"].append(output[0].clone().float().numpy())
            ),
        ]
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(ids).long()[None]).logits[0]
    for handle in handles:
        handle.remove()
    found = {site: np.stack(tensors) for site, tensors in seen.items()}
    return found | {"log_p": torch.log_softmax(logits.double(), -1).numpy()}


def files_of(folder: Path, *, without: tuple[str, ...] = ()) -> dict[str, bytes]:
    """Every file of a folder by its relative path, but for the top-level names in `without`."""
    names = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {str(name): (folder / name).read_bytes() for name in names if name.parts[0] not in without}


class Planted:
    """A tiny model whose MLP of one layer gives `value` in one feature wherever one token id stands."""

    def __init__(self, value: float, token: int, layer: int = 1) -> None:
        self.model, _ = tiny_model("llama")
        self.value, self.token, self.ids = value, token, torch.zeros(0)
        self.model.model.register_forward_pre_hook(self._look, with_kwargs=True)
        self.model.model.layers[layer].mlp.register_forward_hook(self._plant)

    def _look(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]

    def _plant(self, module: Any, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        planted = output.clone()
        planted[..., 3] = torch.where(self.ids == self.token, self.value, output[..., 3])
        return planted
