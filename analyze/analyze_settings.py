"""What steers the analyses: one flat frozen value, every field with a default and a sentence.

In: keyword arguments, a TOML table or flags under the same names. Out: `AnalyzeSettings`, or a UsageError
that names the nearest known field. Each analysis depends on the fields that `ANALYSIS_FIELDS` gives it, and
is done again only when one of these changed.
"""

from collections.abc import Mapping
from typing import Any, Final, Literal

from pydantic import Field, field_validator

from ..store.settings import layers_as_text, parse_layers, parse_settings
from .compute_settings import ComputeSettings

# In the order in which they run: an analysis uses what those before it wrote.
ANALYSES: Final = ("decomposition", "identity", "gates", "nofly", "clusters", "regression")
Analysis = Literal["decomposition", "identity", "gates", "nofly", "clusters", "regression"]


class AnalyzeSettings(ComputeSettings):
    """Settings of `nearline analyze`."""

    only: tuple[Analysis, ...] = Field(
        default=(), description="Analyses to run, such as gates,nofly; default: all of them."
    )
    need: tuple[str, ...] = Field(
        default=("error",), min_length=1, description="Needs to analyse, such as error,error_stream."
    )
    layers: str = Field(
        default="all", description='"all" that were fitted, or layers and ranges such as "0-5,8".'
    )
    seed: int = Field(
        default=0, ge=0, description="Of folds, permutations, clusters and simultaneous intervals."
    )
    folds: int = Field(default=5, ge=2, le=100, description="Folds over groups of documents, of gates.")
    label: Literal["paper"] | float = Field(
        default=0.5,
        description="Tokens count as easy up to this quantile of their need on the gate split; paper takes "
        "the median, or the lower quarter where fewer than 5 % of needs are negative.",
    )
    c_grid: tuple[float, ...] = Field(
        default=(1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0),
        min_length=1,
        description="Inverse penalties of gates that cross-validation chooses from.",
    )
    features: tuple[str, ...] = Field(
        default=(), description="Feature sets of gates, such as input,token_type; default: all of them."
    )
    target_share: float | None = Field(
        default=None, gt=0, lt=1, description="Choose each gate's threshold so that this share goes linear."
    )
    target_cost: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="Choose each gate's threshold so that what goes linear carries this share of all need.",
    )
    margin: float = Field(
        default=0.01, ge=0, lt=0.5, description="Differences of AUC below this are of no interest."
    )
    occurrences: int = Field(
        default=10, ge=2, description="Least occurrences of a token in each store, in `nofly`."
    )
    permutations: int = Field(
        default=199,
        ge=19,
        description="Shuffles of needs within documents for the null of `nofly`; at least 20 a layer.",
    )
    clusters: int = Field(default=20, ge=2, le=1000, description="Clusters of MLP inputs.")
    components: int = Field(default=50, ge=1, le=1000, description="Principal components that are clustered.")

    @field_validator("only", "need", "c_grid", "features", mode="before")
    @classmethod
    def _split_at_commas(cls, values: object) -> object:
        if isinstance(values, str):
            return [part.strip() for part in values.split(",")]
        return [values] if isinstance(values, int | float) else values

    @field_validator("only")
    @classmethod
    def _in_order(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name for name in ANALYSES if name in names)

    @field_validator("need", "features")
    @classmethod
    def _once(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(names))

    @field_validator("c_grid")
    @classmethod
    def _check_grid(cls, grid: tuple[float, ...]) -> tuple[float, ...]:
        if any(not 0 < one < float("inf") for one in grid) or list(grid) != sorted(set(grid)):
            raise ValueError("must be positive, finite and increasing, such as 1e-4, 1e-2, 1")
        return grid

    @field_validator("label")
    @classmethod
    def _check_label(cls, label: str | float) -> str | float:
        if not isinstance(label, str) and not 0 < label < 1:
            raise ValueError('must be "paper" or a quantile between 0 and 1')
        return label

    @field_validator("target_cost")
    @classmethod
    def _check_targets(cls, cost: float | None, info: Any) -> float | None:
        """`info`: pydantic's ValidationInfo, a protocol that cannot be checked at run time."""
        if cost is not None and info.data.get("target_share") is not None:
            raise ValueError("chooses the threshold, and so does target_share: leave one out")
        return cost

    @field_validator("layers", mode="before")
    @classmethod
    def _write_layers(cls, layers: object) -> object:
        return layers_as_text(layers)

    @field_validator("layers")
    @classmethod
    def _check_layers(cls, layers: str) -> str:
        if layers != "all":
            parse_layers(layers)
        return layers

    @property
    def analyses(self) -> tuple[str, ...]:
        """The analyses asked for, in the order in which they run."""
        return self.only or ANALYSES

    def results(self, analysis: str) -> dict[str, Any]:
        """The fields that one analysis depends on, as plain values."""
        chosen = {"need", *ANALYSIS_FIELDS[analysis]} - ({"need"} if analysis == "decomposition" else set())
        return self.model_dump(mode="json", include=chosen)


ANALYSIS_FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    "decomposition": (),  # k̂ takes the folds and the grid of alphas of the fit
    "identity": ("seed",),
    "gates": ("seed", "folds", "label", "c_grid", "features", "target_share", "target_cost", "margin"),
    "nofly": ("seed", "occurrences", "permutations"),
    "clusters": ("seed", "label", "margin", "clusters", "components"),
    "regression": ("seed",),
}


def parse(data: Mapping[str, Any]) -> AnalyzeSettings:
    """Settings from named values; an unknown key or a wrong value is one sentence with what is allowed."""
    return parse_settings(AnalyzeSettings, data)
