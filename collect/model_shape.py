"""The sizes of a decoder that plans go by: written down, or read from its config.

In: a config as a mapping. Out: a frozen `ModelShape`, None where the config does not say one of its sizes.
Cost: none; no torch is loaded.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Final

import pydantic
from pydantic import Field

Size = Annotated[int, Field(ge=1)]
# What families call them in their config.json, the usual name first.
_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "d_model": ("hidden_size", "n_embd", "d_model", "dim"),
    "d_ff": ("intermediate_size", "n_inner", "ffn_dim", "d_ff"),
    "vocabulary": ("vocab_size",),
}
_WIDE: Final = 4  # of GPT-2's kind, where `n_inner` is not said


class ModelShape(pydantic.BaseModel):
    """The sizes of a model, written down so that a study can be planned without it."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    layers: Size = Field(description="Decoder blocks.")
    d_model: Size = Field(description="Width of the residual stream.")
    d_ff: Size = Field(description="Inner width of an MLP.")
    vocabulary: Size = Field(description="Rows of the embedding.")


def shape_in(config: Mapping[str, Any]) -> ModelShape | None:
    """The sizes in a config."""
    inner = config.get("text_config")
    config = {**config, **inner} if isinstance(inner, Mapping) else config
    found: dict[str, Any] = {
        size: next((config[name] for name in names if _is_size(config.get(name))), None)
        for size, names in _NAMES.items()
    }
    if found["d_ff"] is None and found["d_model"] is not None:
        found["d_ff"] = _WIDE * found["d_model"]
    return None if None in found.values() else ModelShape(**found)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
