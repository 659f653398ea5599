"""What gates are worth as tables: worths of all layers in, rows with simultaneous bounds and verdicts out.

The layers of one store, need and gate are one family: simultaneous intervals, Holm, one verdict a layer. A
difference is paired over the same rows. That a second part adds to a first can only be seen where both
together see anything: while the larger gate's own area may be 0.5, nothing is concluded from a difference.
The context also holds the token in ways that no linear map of the embedding finds, and tells tokens apart
that were seen too seldom for a mean of their own. So it is credited only with what it adds among tokens of
one type, where whatever is the token's has an area of 0.5; and where the token alone does tell needs apart,
that it adds little to a context which may hold a copy of it is no finding against the token.
Cost: one set of random signs a family.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from .gate_scores import SHARES, Worth
from .influences import difference, holm, intervals, p_values, verdict_above
from .intervals import MIN_GROUPS, Estimates, stack

CHANCE: Final = 0.5
# claim, larger, smaller: the claim is that AUC(larger) − AUC(smaller) is above 0.
CLAIMS: Final = (
    ("context adds", "token_all+context_only@linear", "token_all@linear"),
    ("token adds", "token_all+context_only@linear", "context_only@linear"),
    ("input beats token_type", "input@linear", "token_type@linear"),
    ("input beats norm", "input@linear", "norm@linear"),
    ("input beats position", "input@linear", "position@linear"),
)


# Gates that know nothing but the token.
OF_TOKEN: Final = ("token_all",)
# Gates that may hold the token without being told, and the one that says what the token is worth alone.
COPIES: Final = ("context_only",)
TOKEN_ALONE: Final = "token_all@linear"


@dataclass(frozen=True, slots=True, eq=False)
class Family:
    """One gate in one store for one need, over layers."""

    store: str
    need: str
    features: str
    size: str
    layers: Sequence[int]
    worths: Sequence[Worth]
    extra: Sequence[Mapping[str, Any]]  # of each layer: what its row of `gates` holds of the gate rows

    @property
    def areas(self) -> Estimates:
        return stack([worth.area for worth in self.worths])


def gate_table(families: Sequence[Family], seed: int) -> Iterator[dict[str, Any]]:
    """Rows of `gates`."""
    for family in families:
        areas = family.areas
        found = intervals(areas, seed, "logit")
        adjusted = holm(p_values(areas, CHANCE, one_sided=True))
        for index, (layer, worth) in enumerate(zip(family.layers, family.worths, strict=True)):
            low, high = float(found["sim_lo"][index]), float(found["sim_hi"][index])
            yield {
                **family.extra[index],
                **worth.row,
                "store": family.store,
                "layer": layer,
                "need": family.need,
                "features": family.features,
                "size": family.size,
                "auc_lo": float(found["lo"][index]),
                "auc_hi": float(found["hi"][index]),
                "auc_sim_lo": low,
                "auc_sim_hi": high,
                "p_holm": float(adjusted[index]),
                "verdict": verdict_above(low, high, CHANCE, worth.area.n_groups),
            }


def difference_table(families: Sequence[Family], seed: int, margin: float) -> Iterator[dict[str, Any]]:
    """Rows of `gate_differences`: every claim whose two gates are there."""
    by_key = {(one.store, one.need, f"{one.features}@{one.size}"): one for one in families}
    for store, need in dict.fromkeys((one.store, one.need) for one in families):
        for claim, first, second in CLAIMS:
            larger, smaller = by_key.get((store, need, first)), by_key.get((store, need, second))
            if larger is not None and smaller is not None:
                key = {"store": store, "need": need, "claim": claim}
                alone = by_key.get((store, need, TOKEN_ALONE)) if smaller.features in COPIES else None
                for row in compare(larger, smaller, seed, margin, alone):
                    yield key | row


def compare(
    larger: Family, smaller: Family, seed: int, margin: float, alone: Family | None = None
) -> Iterator[dict[str, Any]]:
    """Paired differences of areas, a row a layer, without store, need and claim. `alone`: what the larger
    gate has beside the smaller one, by itself, where the smaller one may hold a copy of it.
    """
    pairs = list(zip(larger.worths, smaller.worths, strict=True))
    differences = stack([difference(one.area, two.area) for one, two in pairs])
    found, seen = intervals(differences, seed), intervals(larger.areas, seed, "logit")["sim_lo"]
    inside = stack([difference(one.within, two.within) for one, two in pairs])
    within = intervals(inside, seed)
    copied = None if alone is None else intervals(alone.areas, seed, "logit")["sim_lo"] > CHANCE
    adjusted = holm(p_values(differences, one_sided=True))
    for index, (layer, (one, two)) in enumerate(zip(larger.layers, pairs, strict=True)):
        bounds = {name: float(values[index]) for name, values in found.items()}
        value = float(differences.estimate[index])
        yield {
            "layer": layer,
            "larger": f"{larger.features}@{larger.size}",
            "smaller": f"{smaller.features}@{smaller.size}",
            "n_tokens": one.row["n_tokens"],
            "n_groups": one.area.n_groups,
            "auc_larger": float(one.area.estimate[0]),
            "auc_smaller": float(two.area.estimate[0]),
            "difference": value,
            **bounds,
            "within": float(inside.estimate[index]),
            "within_sim_lo": float(within["sim_lo"][index]),
            "within_sim_hi": float(within["sim_hi"][index]),
            "p_holm": float(adjusted[index]),
            "verdict": nested_verdict(
                float(seen[index]),
                value,
                bounds["sim_lo"],
                bounds["sim_hi"],
                one.area.n_groups,
                margin,
                float(within["sim_lo"][index]) if smaller.features in OF_TOKEN else np.inf,
                copied is not None and bool(copied[index]),
            ),
        }


def nested_verdict(
    seen: float,
    value: float,
    low: float,
    high: float,
    n_groups: int,
    margin: float,
    within_low: float = np.inf,
    copied: bool = False,
) -> str:
    """Whether the larger gate is better by a difference that is of interest. `seen`: the lower bound of its
    own area; while that may be chance, nothing can be told of what its parts add. A difference that the
    interval shows to be below the margin does not support the claim, also where it is surely above 0.
    `within_low`: the lower bound of the difference among tokens of one type, where the claim needs one.
    `copied`: the smaller gate may owe what it sees to a copy of what is added, which alone sees something.
    """
    if n_groups < MIN_GROUPS:
        return "too few documents"
    if not seen > CHANCE:
        return "cannot tell"
    if high < margin:
        return "cannot tell" if copied else "not supported"
    return "supported" if low > 0.0 and value >= margin and within_low > 0.0 else "cannot tell"


def curve_table(families: Sequence[Family]) -> Iterator[dict[str, Any]]:
    """Rows of `gate_curves`."""
    for key, worth in _by_layer(families):
        for share, need_share in zip(SHARES, worth.curve.tolist(), strict=True):
            yield key | {"share": share, "need_share": need_share}


def calibration_table(families: Sequence[Family]) -> Iterator[dict[str, Any]]:
    """Rows of `gate_calibration`."""
    for key, worth in _by_layer(families):
        for row in worth.calibration:
            yield key | row


def _by_layer(families: Sequence[Family]) -> Iterator[tuple[dict[str, Any], Worth]]:
    for family in families:
        for layer, worth in zip(family.layers, family.worths, strict=True):
            yield (
                {
                    "store": family.store,
                    "layer": layer,
                    "need": family.need,
                    "features": family.features,
                    "size": family.size,
                },
                worth,
            )
