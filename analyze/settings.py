"""What steers a fit: one flat frozen value, every field with a default and a sentence.

In: keyword arguments, a TOML table or flags under the same names. Out: `FitSettings`, or a UsageError that
names the nearest known field. `results()` holds the fields that the numbers depend on; how many workers
computed them is not one of these.
"""

from collections.abc import Mapping
from typing import Any, Literal

import pydantic
from pydantic import Field

from ..store.errors import UsageError
from ..store.settings import layers_as_text, parse_layers, parse_settings
from .compute_settings import MACHINE_FIELDS, ComputeSettings


class FitSettings(ComputeSettings):
    """Settings of `nearline fit`."""

    linear_at: float = Field(
        default=0.9, gt=0, lt=1, description="An MLP counts as nearly linear from this held-out R² on."
    )
    alpha: Literal["cv", "paper"] | float = Field(
        default="cv",
        description="Ridge: cv chooses from `alphas`, paper takes λ = 0.01 on sums, a number is used as is.",
    )
    alphas: tuple[float, ...] = Field(
        default=(1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 1e1, 1e2),
        min_length=1,
        description="Grid that alpha=cv chooses from, and not given with another alpha; the penalty is "
        "alpha times the mean variance of the features.",
    )
    folds: int = Field(default=5, ge=2, le=100, description="Folds over groups of documents.")
    seed: int = Field(default=0, ge=0, description="Of folds and of simultaneous intervals.")
    layers: str = Field(default="all", description='"all", or layers and ranges such as "0-5,8".')
    fit_on: str | None = Field(
        default=None, description="Store the surrogates are fitted on; the first one by default."
    )
    allow: tuple[Literal["norms", "policies", "numerics", "documents"], ...] = Field(
        default=(),
        description="Differences of the stores to accept, such as numerics,documents; default: none.",
    )
    histogram_bins: int = Field(default=40, ge=4, le=1000, description="Bins of each histogram of a need.")
    examples: int = Field(
        default=10, ge=0, le=1000, description="Tokens of highest and of lowest need to show for a layer."
    )

    keep_moments: bool = Field(
        default=False,
        description="Keep the moments in the study, so that later fits need not read the store again.",
    )

    @pydantic.field_validator("alphas", "allow", mode="before")
    @classmethod
    def _split_at_commas(cls, values: object) -> object:
        return [part.strip() for part in values.split(",")] if isinstance(values, str) else values

    @pydantic.field_validator("alphas")
    @classmethod
    def _check_alphas(cls, alphas: tuple[float, ...], info: Any) -> tuple[float, ...]:
        if any(not 0 < a < float("inf") for a in alphas) or list(alphas) != sorted(set(alphas)):
            raise ValueError("must be positive, finite and increasing, such as 1e-6, 1e-3, 1")
        alpha = info.data.get("alpha", "cv")
        # Settings that are written out and read again hold the default grid beside any alpha.
        if alpha != "cv" and alphas != cls.model_fields["alphas"].default:
            grid = ",".join(f"{one:g}" for one in alphas)
            raise UsageError(
                f"alphas={grid}: alpha=cv chooses from a grid, and alpha={alpha} is given too: leave one out"
            )
        return alphas

    @pydantic.field_validator("allow")
    @classmethod
    def _sort_allowed(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(sorted(set(names)))

    @pydantic.field_validator("alpha")
    @classmethod
    def _check_alpha(cls, alpha: str | float) -> str | float:
        if not isinstance(alpha, str) and not 0 < alpha < float("inf"):
            raise ValueError('must be "cv", "paper" or a positive number')
        return alpha

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

    @property
    def rules(self) -> tuple[float | str, ...]:
        """The alphas to compare: the grid, or the one that is given."""
        return self.alphas if self.alpha == "cv" else (self.alpha,)

    def results(self) -> dict[str, Any]:
        """The fields that results depend on, as plain values; what was allowed, where something was."""
        unused = set() if self.allow else {"allow"}
        return self.model_dump(mode="json", exclude={*MACHINE_FIELDS, "keep_moments", *unused})


def parse(data: Mapping[str, Any]) -> FitSettings:
    """Settings from named values; an unknown key or a wrong value is one sentence with what is allowed."""
    return parse_settings(FitSettings, data)
