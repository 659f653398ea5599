"""What gates look at: the named feature sets of a layer, and how each is made of the parts of a block of
rows.

A feature set is one or several *pieces* side by side. A wide piece has as many features as the model and is
made of the parts of x (`Parts`) and the context map; a narrow one is one number a row, and those marked
`by_need` are another number for each need. `available` is False for what nobody has at the moment of routing:
the target, the MLP's output, the need itself. Cost: a pass over the rows for each wide piece, a product of d²
for k̂.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Float32, Float64, Int, Int64

from ..store import UsageError
from ..store.settings import nearest_known
from .context_map import ContextMap
from .parts import Parts

Rows = Float32[np.ndarray, "token feature"]

WIDE: Final = ("x", "token", "t", "k", "p", "token_full", "context_only")
NARROW: Final = ("position", "norm", "output_norm", "random")
BY_NEED: Final = ("token_type", "target_type", "oracle")


@dataclass(frozen=True, slots=True)
class FeatureSet:
    """The pieces of one feature set."""

    pieces: tuple[str, ...]
    available: bool = True

    @property
    def by_need(self) -> bool:
        return any(piece in BY_NEED for piece in self.pieces)


FEATURES: Final[Mapping[str, FeatureSet]] = {
    "input": FeatureSet(("x",)),
    "token": FeatureSet(("token",)),
    "token_scaled": FeatureSet(("t",)),
    "token_full": FeatureSet(("token_full",)),
    "context": FeatureSet(("k",)),
    "context_only": FeatureSet(("context_only",)),
    "position_part": FeatureSet(("p",)),
    "token_type": FeatureSet(("token_type",)),
    "target_type": FeatureSet(("target_type",), available=False),
    "position": FeatureSet(("position",)),
    "norm": FeatureSet(("norm",)),
    "output_norm": FeatureSet(("output_norm",), available=False),
    "random": FeatureSet(("random",)),
    "oracle": FeatureSet(("oracle",), available=False),
    # All that is known of the token: what a linear map finds, and the mean need of its type.
    "token_all": FeatureSet(("token_full", "token_type")),
    "token_all+context_only": FeatureSet(("token_full", "token_type", "context_only")),
}


def choose_features(asked: Sequence[str], has_positions: bool) -> tuple[str, ...]:
    """The feature sets asked for, in the order of `FEATURES`; all that the model has by default."""
    there = [name for name in FEATURES if has_positions or name != "position_part"]
    for name in asked:
        if name not in FEATURES:
            hint = nearest_known(name, FEATURES)
            raise UsageError(f"features={name}: unknown; choose from {', '.join(FEATURES)}{hint}")
        if name not in there:
            raise UsageError(
                f"features={name}: this model adds no position embedding to its input; leave it out"
            )
    return tuple(name for name in there if not asked or name in asked)


def wide_pieces(parts: Parts, context_map: ContextMap, names: Sequence[str]) -> dict[str, Rows]:
    """The named wide pieces of a block of rows."""
    found: dict[str, Rows] = {}
    predicted = None
    for name in names:
        if name in ("token_full", "context_only"):
            predicted = context_map.predict(parts.embedding) if predicted is None else predicted
            found[name] = parts.t + predicted if name == "token_full" else parts.k - predicted
        elif name == "token":
            found[name] = parts.token
        elif name == "p" and parts.p is None:
            raise ValueError("no position embedding: `choose_features` leaves position_part out")
        else:
            found[name] = getattr(parts, name)
    return found


def random_scores(rows: Int64[np.ndarray, "token"], seed: int) -> Float32[np.ndarray, "token"]:
    """A uniform number in [0, 1) for each row number: SplitMix64 (Steele, Lea and Flood 2014), so that it
    does not depend on which other rows are asked for.
    """
    with np.errstate(over="ignore"):
        state = (rows.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        state += np.uint64(seed % 2**64) * np.uint64(0xD1342543DE82EF95)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state ^= state >> np.uint64(31)
    return (state >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


@dataclass(frozen=True, slots=True, eq=False)
class TypeMeans:
    """Mean need of each token type over `fit` rows, drawn towards the grand mean; types that were not seen
    get the grand mean itself. No gate or test row enters, so for these rows it is out of fold.
    """

    types: Int64[np.ndarray, "type"]  # token ids, increasing
    mean: Float32[np.ndarray, "type"]
    grand: np.float32

    def of(self, ids: Int[np.ndarray, "token"]) -> Float32[np.ndarray, "token"]:
        if not self.types.size:
            return np.full(ids.size, self.grand, np.float32)
        place = np.minimum(np.searchsorted(self.types, ids), self.types.size - 1)
        return np.where(self.types[place] == ids, self.mean[place], self.grand).astype(np.float32)


def type_means(
    ids: Int[np.ndarray, "token"], need: Float32[np.ndarray, "token"] | Float64[np.ndarray, "token"]
) -> TypeMeans:
    """grand + n/(n + κ)·(mean − grand), κ = σ²/τ²: the best linear predictor of a type's mean (Searle,
    Casella and McCulloch 1992, §3.4) with the analysis-of-variance estimates of the variance within types,
    σ², and between them, τ². Where types do not differ beyond chance, τ² = 0 and all get the grand mean.
    """
    kept = np.isfinite(need) & (ids >= 0)
    types, index, count = np.unique(ids[kept].astype(np.int64), return_inverse=True, return_counts=True)
    if not types.size:
        return TypeMeans(types, np.zeros(0, np.float32), np.float32(0.0))
    values = need[kept].astype(np.float64)
    grand, mean = float(values.mean()), np.bincount(index, values) / count
    n, freedom = values.size, max(1, values.size - types.size)
    within = float(np.sum((values - mean[index]) ** 2)) / freedom
    spread = float(np.sum(count * (mean - grand) ** 2)) - (types.size - 1) * within
    between = max(0.0, spread) / max(n - float(np.sum(count.astype(np.float64) ** 2)) / n, 1.0)
    # n/(n + σ²/τ²), written so that neither variance may be 0.
    weight = count * between / np.maximum(count * between + within, np.finfo(np.float64).tiny)
    return TypeMeans(types, (grand + weight * (mean - grand)).astype(np.float32), np.float32(grand))


def held_out_means(
    ids: Int[np.ndarray, "token"],
    need: Float32[np.ndarray, "token"],
    fold: Int[np.ndarray, "token"],
    n_folds: int,
) -> Float32[np.ndarray, "token"]:
    """The mean need of each row's type over the rows of the other folds: what a row's own fold holds does
    not enter.
    """
    found = np.empty(need.size, np.float32)
    for one in range(n_folds):
        held = fold == one
        found[held] = type_means(ids[~held], need[~held]).of(ids[held])
    return found
