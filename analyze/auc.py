"""Areas under ROC curves with intervals by group: scores, labels and groups of tokens in, `Estimates` out.

The area is the share of pairs of a positive and a negative token that the score puts in order, ties counting
half. Leaving a group out takes its structural components (DeLong, DeLong and Clarke-Pearson 1988; of
clusters, Obuchowski 1997) from the sum of pairs and gives back the pairs inside the group, which both of its
classes have taken: so each group's influence is exact, where the components alone would be right to first
order in one over the number of groups. Cost: two sorts, no loop over groups.
"""

import numpy as np
from jaxtyping import Bool, Float, Int

from .influences import from_influence
from .intervals import Estimates


def auc(
    score: Float[np.ndarray, "token"],
    positive: Bool[np.ndarray, "token"],
    group: Int[np.ndarray, "token"],
) -> Estimates:
    """Area under the ROC curve of `score` for `positive`, one item; groups in the order of np.unique(group),
    so that scores of the same rows can be compared pairwise. NaN where one class is missing or a score is
    NaN; no interval where one group holds all of a class.
    """
    groups, index = np.unique(group, return_inverse=True)
    n_positive = np.bincount(index, positive, groups.size)
    n_negative = np.bincount(index, ~positive, groups.size)
    m, n = n_positive.sum(), n_negative.sum()
    wins, lost, inside = _pairs(score, positive, index, groups.size)
    with np.errstate(invalid="ignore", divide="ignore"):
        value = np.where(np.isnan(score).any(), np.nan, wins.sum() / (m * n))
        left = (wins.sum() - wins - lost + inside) / ((m - n_positive) * (n - n_negative))
        # What a group weighs: its share of either class, so that few groups with positives count as few.
        weight = n_positive / m + n_negative / n
    return from_influence(value[None], (value - left)[:, None], weight)


def auc_within(
    score: Float[np.ndarray, "token"],
    positive: Bool[np.ndarray, "token"],
    group: Int[np.ndarray, "token"],
    stratum: Int[np.ndarray, "token"],
) -> Estimates:
    """The area over pairs of one stratum (one token type): 0.5 for whatever is a function of the stratum,
    linear or not, learned well or badly. A stratum of c tokens weighs its pairs by 1/c (van Elteren 1960), so
    that the most frequent does not decide alone. NaN where no stratum has both classes.
    """
    groups, index = np.unique(group, return_inverse=True)
    _, kind = np.unique(stratum, return_inverse=True)
    values, rank = np.unique(score, return_inverse=True)
    cells, cell = np.unique(kind.astype(np.int64) * max(groups.size, 1) + index, return_inverse=True)
    of_cell, owner = cells // max(groups.size, 1), cells % max(groups.size, 1)
    below, above = _beside(rank, values.size, positive, kind)
    # Of each (stratum, group) cell: pairs in order that its tokens take part in, and its tokens.
    wins, lost, inside, m, n = (
        np.bincount(cell, counted, cells.size)
        for counted in (
            np.where(positive, below, 0.0),
            np.where(positive, 0.0, above),
            np.where(positive, _beside(rank, values.size, positive, cell)[0], 0.0),
            positive,
            ~positive,
        )
    )
    whole_m, whole_n, whole_wins = (np.bincount(of_cell, one)[of_cell] for one in (m, n, wins))

    def weighted(pairs: np.ndarray, m: np.ndarray, n: np.ndarray) -> np.ndarray:
        return pairs / np.maximum(m + n, 1.0)

    first = np.unique(of_cell, return_index=True)[1]
    ordered, pairs = (weighted(one, whole_m, whole_n) for one in (whole_wins, whole_m * whole_n))
    left_m, left_n = whole_m - m, whole_n - n
    less_ordered = ordered - weighted(whole_wins - wins - lost + inside, left_m, left_n)
    less_pairs = pairs - weighted(left_m * left_n, left_m, left_n)
    taken = weighted(m * whole_n + n * whole_m, whole_m, whole_n)
    # Of no token at all, numpy would give whole numbers.
    of_group = [
        np.bincount(owner, one, groups.size).astype(np.float64) for one in (less_ordered, less_pairs, taken)
    ]
    with np.errstate(invalid="ignore", divide="ignore"):
        value = np.where(np.isnan(score).any(), np.nan, ordered[first].sum() / pairs[first].sum())
        left = (ordered[first].sum() - of_group[0]) / (pairs[first].sum() - of_group[1])
    return from_influence(value[None], (value - left)[:, None], of_group[2])


def _pairs(
    score: np.ndarray, positive: np.ndarray, index: np.ndarray, n_groups: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pairs in order, of each group: with its positive tokens, with its negative ones, with both."""
    values, rank = np.unique(score, return_inverse=True)
    below, above = _beside(rank, values.size, positive, np.zeros_like(index))
    inside, _ = _beside(rank, values.size, positive, index)
    wins, lost, both = (
        np.bincount(index, np.where(mask, counted, 0.0), n_groups)
        for mask, counted in ((positive, below), (~positive, above), (positive, inside))
    )
    return wins, lost, both


def _beside(
    rank: np.ndarray, n_ranks: int, positive: np.ndarray, owner: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Of each token: negative ones below it and positive ones above it of its owner, ties counting half."""
    keys, place = np.unique(owner.astype(np.int64) * max(n_ranks, 1) + rank, return_inverse=True)
    positives, negatives = (np.bincount(place, mask, keys.size) for mask in (positive, ~positive))
    # Keys of one owner follow those of the owner before it.
    starts = np.searchsorted(keys // max(n_ranks, 1), owner, "left")
    ends = np.searchsorted(keys // max(n_ranks, 1), owner, "right")
    up_to, above = np.append(0.0, np.cumsum(negatives)), np.append(0.0, np.cumsum(positives))
    below = up_to[place] + 0.5 * negatives[place] - up_to[starts]
    return below, above[ends] - above[place] - 0.5 * positives[place]


def average_precision(score: Float[np.ndarray, "token"], positive: Bool[np.ndarray, "token"]) -> float:
    """Σ (recall gained at a threshold) · (precision there), over the distinct scores from the highest down;
    NaN without both classes.
    """
    if positive.all() or not positive.any() or np.isnan(score).any():
        return float("nan")
    values, rank = np.unique(-score, return_inverse=True)
    positives = np.bincount(rank, positive, values.size)
    found, taken = np.cumsum(positives), np.cumsum(np.bincount(rank, minlength=values.size))
    return float(np.sum(positives * found / taken) / positives.sum())
