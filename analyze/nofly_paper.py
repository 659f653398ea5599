"""The procedure of arXiv 2603.03459 for No-Fly tokens, and how much of its result is regression to the mean:
token means of two corpora in, list, persistence, flips and r out.

The paper lists the tokens with a high mean need in one corpus and looks them up in another: found with 3
occurrences, persisted if the mean is high there too, flipped if it is negative. A list that is chosen by
noisy means is chosen for its noise too, so its mean falls in *any* second sample: `halves` makes the list on
one half of the first corpus's groups and looks it up in the other half. What is lost there is no lack of
transfer.

The paper's need is `loss`, with a threshold of 0.05 nats and 0 as the line between need and no need. A need
that is never negative is taken less the corpus's median, and its threshold is the 90th percentile of the
list corpus's token means. Cost: O(cells).
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Bool, Float64, Int

from .token_means import Cells

LISTED_FROM: Final = 10  # occurrences
FOUND_FROM: Final = 3
SHARE_ABOVE: Final = 0.6
THRESHOLD: Final = 0.05  # nats
QUANTILE: Final = 0.9
SIGNED: Final = ("loss", "loss_single", "loss_estimate")  # in nats; below 0 where the linear map is better


@dataclass(frozen=True, slots=True, eq=False)
class Observed:
    """Token means in one corpus or half of one, over all types that occur; needs less the corpus's line."""

    types: Int[np.ndarray, "type"]
    count: Float64[np.ndarray, "type"]
    mean: Float64[np.ndarray, "type"]  # NaN without an occurrence
    share_above: Float64[np.ndarray, "type"]  # of occurrences above 0

    def high(self, threshold: float) -> Bool[np.ndarray, "type"]:
        with np.errstate(invalid="ignore"):
            return (self.mean > threshold) & (self.share_above > SHARE_ABOVE)


@dataclass(frozen=True, slots=True, eq=False)
class Carried:
    """A list that was looked up: `types` are those found."""

    list_size: int
    types: Int[np.ndarray, "found"]
    mean_listed: Float64[np.ndarray, "found"]
    mean_found: Float64[np.ndarray, "found"]
    persisted: int
    flipped: int

    @property
    def r(self) -> float:
        """The paper's r: over the tokens that were selected; NaN for fewer than three."""
        if self.types.size < 3 or not (np.ptp(self.mean_listed) > 0 and np.ptp(self.mean_found) > 0):
            return float("nan")
        return float(np.corrcoef(self.mean_listed, self.mean_found)[0, 1])


def line_of(need: str, values: Float64[np.ndarray, "token"]) -> float:
    """Between need and no need."""
    return 0.0 if need in SIGNED or not values.size else float(np.median(values))


def threshold_of(need: str, observed: Observed) -> float:
    """What a listed token's mean exceeds; NaN where no token occurs often enough."""
    if need in SIGNED:
        return THRESHOLD
    often = observed.mean[observed.count >= LISTED_FROM]
    return float(np.quantile(often, QUANTILE)) if often.size else float("nan")


def observe(
    cells: Cells,
    total: Float64[np.ndarray, "cell"],
    above: Float64[np.ndarray, "cell"],
    line: float,
    groups: Bool[np.ndarray, "group"] | None = None,
) -> Observed:
    """Token means from sums of a need and counts of needs above the line, over these groups or all."""
    kept = np.ones(cells.type.size) if groups is None else groups[cells.group].astype(np.float64)
    count = cells.over_groups(cells.count * kept)
    with np.errstate(invalid="ignore"):
        mean = cells.over_groups(total * kept) / count - line
        share_above = cells.over_groups(above * kept) / count
    return Observed(cells.types, count, mean, share_above)


def look_up(listed: Observed, elsewhere: Observed, threshold: float) -> Carried:
    """Make the list in one corpus and look it up in another."""
    members = np.flatnonzero(listed.high(threshold) & (listed.count >= LISTED_FROM))
    place = np.searchsorted(elsewhere.types, listed.types[members])
    place = np.minimum(place, max(elsewhere.types.size - 1, 0))
    found = np.zeros(members.size, bool)
    if elsewhere.types.size:
        there = elsewhere.types[place] == listed.types[members]
        found = there & (elsewhere.count[place] >= FOUND_FROM)
    members, there = members[found], place[found]
    mean = elsewhere.mean[there]
    return Carried(
        list_size=int(found.size),
        types=listed.types[members],
        mean_listed=listed.mean[members],
        mean_found=mean,
        persisted=int(elsewhere.high(threshold)[there].sum()),
        flipped=int((mean < 0).sum()),
    )


def random_half(n_groups: int, seed: tuple[int, ...]) -> Bool[np.ndarray, "group"]:
    """Half of the groups."""
    chosen = np.zeros(n_groups, bool)
    chosen[np.random.default_rng(seed).permutation(n_groups)[: n_groups // 2]] = True
    return chosen


def paper_columns(
    need: str, whole: Observed, elsewhere: Observed, halves: tuple[Observed, Observed]
) -> dict[str, float | int]:
    """Columns of the table `nofly`: the paper's procedure from `whole` to `elsewhere`, and the same from
    either half to the other. Of the halves, counts are sums and means are over the members of both lists that
    were found in the other half and elsewhere: one set of tokens in three samples.
    """
    carried = look_up(whole, elsewhere, threshold := threshold_of(need, whole))
    both = [(one, other, threshold_of(need, one)) for one, other in (halves, halves[::-1])]
    within = [look_up(one, other, level) for one, other, level in both]
    across = [look_up(one, elsewhere, level) for one, _, level in both]
    means = [_in_three(inner, outer) for inner, outer in zip(within, across, strict=True)]
    listed, held_out, other = np.concatenate(means, axis=1)
    return {
        "threshold": threshold,
        "list_size": carried.list_size,
        "found": carried.types.size,
        "persisted": carried.persisted,
        "flipped": carried.flipped,
        "list_mean_a": _mean(carried.mean_listed),
        "list_mean_b": _mean(carried.mean_found),
        "paper_r": carried.r,
        "half_list_size": sum(one.list_size for one in within),
        "found_heldout": sum(one.types.size for one in within),
        "persisted_heldout": sum(one.persisted for one in within),
        "flipped_heldout": sum(one.flipped for one in within),
        "half_list_mean": _mean(listed),
        "list_mean_a_heldout": _mean(held_out),
        "half_list_mean_b": _mean(other),
        "paper_r_heldout": _mean(np.array([one.r for one in within if np.isfinite(one.r)])),
    }


def _in_three(within: Carried, across: Carried) -> np.ndarray:
    """Means where the list was made, in the other half and elsewhere, of the tokens found in all three."""
    _, here, there = np.intersect1d(within.types, across.types, return_indices=True)
    return np.stack([within.mean_listed[here], within.mean_found[here], across.mean_found[there]])


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if values.size else float("nan")
