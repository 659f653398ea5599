"""What steers a fine-tuning experiment: one flat frozen value, every field with a default and a sentence.

In: keyword arguments, a TOML table or flags under the same names. Out: `FinetuneSettings`, or a UsageError
that names the nearest known field. What depends on the study (layers, stores) stays open here and is resolved
by `finetune`. Cost: none; no torch is loaded.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

import pydantic
from pydantic import Field

from ..store.settings import parse_layers, parse_settings
from .live_settings import PLACE_FIELDS, Count, LiveModelSettings
from .measure_settings import chosen_set
from .tuning_arms import ARMS, with_controls

Rate = Annotated[float, Field(gt=0, le=1)]

# Fields that change how fast results come and where, never the results (beyond the rounding of a device).
MACHINE_FIELDS: Final = PLACE_FIELDS | {"gradient_checkpointing", "timing"}
_LISTS = ("arms", "seeds", "learning_rates", "gate_learning_rates", "stores", "keep")


class FinetuneSettings(LiveModelSettings):
    """Settings of `nearline finetune`."""

    arms: tuple[str, ...] = Field(
        default=tuple(ARMS),
        description="Arms to train, such as linear,gated; what they are compared with comes with them. "
        f"Known: {', '.join(ARMS)}.",
    )
    layers: str = Field(
        default="cheapest@4",
        description="Layers whose MLPs are replaced: cheapest@4 (by their cost on gate rows in `measure`) or "
        'layers and ranges such as "0-5,8".',
    )
    schedule: Literal["at_once", "cheapest", "given", "random"] = Field(
        default="at_once",
        description="Replace all layers before the first step, or one after the other with `stage_steps` "
        "after each: cheapest first, in the given order, or in a random one.",
    )
    stage_steps: Count = Field(
        default=50,
        description="Steps after each replaced layer but the last, where `schedule` is not at_once.",
    )
    steps: Count = Field(
        default=200, description="Steps with all layers replaced: all of them, or the final pass."
    )
    gate_steps: Count = Field(default=100, description="Further steps in which gates alone are trained.")
    refit: bool = Field(
        default=False,
        description="With a schedule: fit the surrogate of each layer (or its mean output) anew, in the "
        "model as it is then, before it is replaced.",
    )
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        default=(0, 1, 2), min_length=1, description="Seeds of data order, dropout and gates, such as 0,1,2."
    )
    learning_rates: tuple[Rate, ...] = Field(
        default=(3e-5, 1e-4, 3e-4),
        min_length=1,
        description="Each arm is trained with all of them at the first seed; the best on gate rows is used.",
    )
    gate_learning_rates: tuple[Rate, ...] = Field(
        default=(1e-3, 1e-2), min_length=1, description="The same, where gates are trained."
    )
    batch_sequences: Count = Field(default=8, description="Windows of one forward pass in training.")
    accumulate: Count = Field(default=1, description="Forward passes of one step.")
    warmup: int = Field(default=10, ge=0, description="Steps in which the learning rate rises to its value.")
    weight_decay: float = Field(default=0.0, ge=0, description="Of AdamW.")
    gate: Literal["linear", "mlp"] = Field(
        default="linear", description="A gate of d + 1 parameters, or the paper's d → 32 → 1."
    )
    gate_start: Annotated[float, Field(gt=0, lt=1)] = Field(
        default=0.05, description="Share of the MLP's own output that gates start with."
    )
    sparsity: float = Field(
        default=0.02,
        ge=0,
        description="Nats that a mean gate of 1 costs in the loss that gates are trained on.",
    )
    points: Annotated[int, Field(ge=1, le=100)] = Field(
        default=4, description="How often each phase is evaluated, its end included."
    )
    keep: tuple[str, ...] = Field(
        default=(),
        description="Arms whose trained model of the first seed is kept, in STUDY/tuned/ARM, such as linear.",
    )
    timing: bool = Field(
        default=False,
        description="Time the model with its MLPs, with them linear, and behind soft and hard gates. Asked "
        "for later it trains that model alone, and nothing where gated was kept.",
    )
    train_on: str | None = Field(
        default=None, description="Store whose fit rows are trained on; default: the one that was fitted."
    )
    stores: tuple[str, ...] = Field(
        default=(), description="Stores whose test rows are scored; default: all of the study."
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="Of the products; weights and optimiser stay in float32 (bfloat16: mixed precision).",
    )
    gradient_checkpointing: bool = Field(
        default=False, description="Compute activations twice instead of keeping them."
    )

    @pydantic.field_validator(*_LISTS, mode="before")
    @classmethod
    def _split_at_commas(cls, values: object) -> object:
        if isinstance(values, str):
            return [part.strip() for part in values.split(",") if part.strip()]
        return [values] if isinstance(values, int | float) else values

    @pydantic.field_validator(*_LISTS)
    @classmethod
    def _once(cls, values: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(dict.fromkeys(values))

    @pydantic.field_validator("arms")
    @classmethod
    def _check_arms(cls, arms: tuple[str, ...]) -> tuple[str, ...]:
        if unknown := [name for name in arms if name not in ARMS]:
            raise ValueError(f"{unknown[0]!r} is no arm; known are {', '.join(ARMS)}")
        return arms

    @pydantic.field_validator("keep")
    @classmethod
    def _check_kept(cls, arms: tuple[str, ...], info: Any) -> tuple[str, ...]:
        """`info`: pydantic's ValidationInfo, a protocol that cannot be checked at run time."""
        trained = with_controls(info.data.get("arms", tuple(ARMS)))
        if unknown := [name for name in arms if name not in trained]:
            raise ValueError(f"{unknown[0]!r} is not trained here; trained are {', '.join(trained)}")
        return arms

    @pydantic.field_validator("layers")
    @classmethod
    def _check_layers(cls, layers: str) -> str:
        chosen = chosen_set(layers)
        if chosen is not None and chosen[0] != "cheapest":
            raise ValueError(
                "layers are never chosen on test rows: write cheapest@4, or layers such as 0-5,8"
            )
        if chosen is None:
            parse_layers(layers)
        return layers

    def results(self) -> dict[str, Any]:
        """The fields that results depend on, as plain values; those that are unset are left out."""
        return self.model_dump(mode="json", exclude=set(MACHINE_FIELDS), exclude_none=True)


def parse(data: Mapping[str, Any]) -> FinetuneSettings:
    """Settings from named values; an unknown key or a wrong value is one sentence with what is allowed."""
    return parse_settings(FinetuneSettings, data)
