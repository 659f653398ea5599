"""What steers a measurement: one flat frozen value, every field with a default and a sentence.

In: keyword arguments, a TOML table or flags under the same names. Out: `MeasureSettings`, or a UsageError
that names the nearest known field. What depends on the study (layers, stores, what gates there are) stays
open here and is resolved by `measure`, so that a settings file stays valid for another study. Cost: none; no
torch is loaded.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

import pydantic
from pydantic import Field

from ..store.settings import layers_as_text, parse_bytes, parse_layers, parse_settings
from .live_settings import PLACE_FIELDS, Count, LiveModelSettings

Share = Annotated[float, Field(gt=0, lt=1)]

# Fields that change how fast results come and where, never the results (beyond the rounding of a device).
MACHINE_FIELDS: Final = PLACE_FIELDS | {"memory_limit"}
_LISTS = ("stores", "interventions", "shares", "sequence_length", "compound", "compound_with", "splits")
_CHOSEN = re.compile(r"(cheapest|paper)@([1-9]\d*)")
_SET = re.compile(r"\d+(-\d+)?(\+\d+(-\d+)?)*")


class MeasureSettings(LiveModelSettings):
    """Settings of `nearline measure`."""

    stores: tuple[str, ...] = Field(
        default=(), description="Stores of the study to measure on; default: all of them."
    )
    layers: str = Field(
        default="all", description='"all" that were fitted, or layers and ranges such as "0-5,8".'
    )
    interventions: tuple[str, ...] = Field(
        default=(),
        description="Replacements of one MLP, such as linear,mean,gated@input,random@0.5; default: linear, "
        "linear@all, mean, zero, gated@input, and at each of `shares` every router that there is.",
    )
    need: str = Field(
        default="error", description="The need whose gates, token lists and oracle route the tokens."
    )
    shares: tuple[Share, ...] = Field(
        default=(0.5,),
        min_length=1,
        description="Shares of tokens that go linear where routers are compared at equal share.",
    )
    draws: Count = Field(default=5, description="Draws of each random@SHARE.")
    compound: tuple[str, ...] = Field(
        default=("cheapest@5",),
        description="Sets of layers replaced together: cheapest@5 (chosen on gate rows), paper@5 (chosen on "
        "the test rows it is scored on, as the paper does), 2+5+7, 4-8, or all; none: no set.",
    )
    compound_with: tuple[str, ...] = Field(
        default=("linear",), description="What replaces the MLPs of a set, such as linear,gated@input."
    )
    progressive: Literal["none", "order", "greedy"] = Field(
        default="none",
        description="Linearise one layer after the other: in the order of their own cost on gate rows, or "
        "each time the one that costs least beside those before it (a pass per layer that is left).",
    )
    progressive_steps: Count | None = Field(
        default=None, description="Layers at most on the progressive curve; default: all that were fitted."
    )
    sequence_length: tuple[Annotated[int, Field(ge=2)], ...] = Field(
        default=(),
        description="Measure with windows of these lengths too, such as 128,512,1024; default: only those "
        "that were harvested.",
    )
    splits: tuple[Literal["gate", "test"], ...] = Field(
        default=("test",),
        description="Rows that every intervention is scored on; linear has gate and test rows in any case.",
    )
    validate_estimate: bool = Field(
        default=False,
        description="Patch single positions exactly and compare them with loss_estimate; needs stores with "
        "the site mlp_output_grad.",
    )
    patches: Count = Field(
        default=200, description="With validate_estimate: positions to patch in each layer and store."
    )
    noise_floor: bool = Field(
        default=True,
        description="Measure a few batches in a finer dtype too: how much of a loss is rounding.",
    )
    timing: bool = Field(
        default=False, description="Time the original, linearised and gated model: prefill and decode."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="Compute dtype; auto is that of the harvest."
    )
    batch_tokens: Count | None = Field(
        default=None,
        description="Padded tokens of one forward pass where windows are cut anew; default: that of the "
        "harvest. Harvested windows keep their batches.",
    )
    memory_limit: str = Field(
        default="4 GiB", description="Bound of what is kept of the base pass, beside the model."
    )
    seed: int = Field(
        default=0, ge=0, description="Of random routing, of patched positions and simultaneous intervals."
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

    @pydantic.field_validator("shares", "sequence_length")
    @classmethod
    def _in_order(cls, values: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(sorted(values))

    @pydantic.field_validator("splits")
    @classmethod
    def _test_is_scored(cls, splits: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(split for split in ("gate", "test") if split in {*splits, "test"})

    @pydantic.field_validator("compound")
    @classmethod
    def _check_compound(cls, sets: tuple[str, ...]) -> tuple[str, ...]:
        if sets == ("none",):
            return ()
        for one in sets:
            if one != "all" and not _CHOSEN.fullmatch(one) and not _SET.fullmatch(one):
                raise ValueError(f"{one!r} is no set of layers: write cheapest@5, paper@5, 2+5+7, 4-8 or all")
            layers_of_set(one)
        return sets

    @pydantic.field_validator("layers", mode="before")
    @classmethod
    def _write_layers(cls, layers: object) -> object:
        return layers_as_text(layers)

    @pydantic.field_validator("layers")
    @classmethod
    def _check_layers(cls, layers: str) -> str:
        if layers != "all":
            parse_layers(layers)
        return layers

    @pydantic.field_validator("memory_limit")
    @classmethod
    def _check_memory(cls, limit: str) -> str:
        parse_bytes(limit)
        return limit

    @property
    def memory_limit_bytes(self) -> int:
        return parse_bytes(self.memory_limit)

    def results(self) -> dict[str, Any]:
        """The fields that results depend on, as plain values; those that are unset are left out."""
        return self.model_dump(mode="json", exclude=set(MACHINE_FIELDS), exclude_none=True)


def chosen_set(name: str) -> tuple[str, int] | None:
    """`cheapest@5` as ("cheapest", 5); None for a set that is named by its layers."""
    match = _CHOSEN.fullmatch(name)
    return None if match is None else (match[1], int(match[2]))


def layers_of_set(name: str) -> list[int] | None:
    """`2+5-7` as [2, 5, 6, 7]; None for a set that has to be chosen first, or is all layers."""
    if name == "all" or _CHOSEN.fullmatch(name):
        return None
    return parse_layers(name.replace("+", ","))


def parse(data: Mapping[str, Any]) -> MeasureSettings:
    """Settings from named values; an unknown key or a wrong value is one sentence with what is allowed."""
    return parse_settings(MeasureSettings, data)
