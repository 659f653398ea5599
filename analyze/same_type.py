"""How much of a quantity's variance over token occurrences the token's type explains.

In: values, types and groups of rows. Out: a share, with the influence of each group. Two occurrences of one
type in *different* groups have the type in common and nothing else, neither document nor neighbourhood. So A,
their mean product within types, weighted by occurrences, holds the square of the types' means and no noise;
B, the mean product of any two occurrences in different groups, is the square of the overall mean; and the
share is (A − B)/(V − B), V the mean square. No mean is taken out, so no noise of one has to be put back: the
textbook's estimators credit types with the effects of documents, or charge them for these. Negative shares
are kept, as noise scatters to both sides of 0.

Only types that stand in two groups or more can say anything: A, B and V are of their rows alone. The
influence of a group is what leaving it out changes, exactly, from sums over (type, group) pairs. Cost:
O(rows) for the sums of a quantity, O(pairs) for all groups together; memory about 40 bytes a row.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float64, Int

from .influences import leave_one_out
from .intervals import Estimates


@dataclass(frozen=True, slots=True, eq=False)
class Occurrences:
    """Rows of types that stand in at least two groups, sorted out once for any number of quantities."""

    rows: Int[np.ndarray, "row"]  # which of the rows given
    pair: Int[np.ndarray, "row"]  # the (type, group) pair of each
    type: Int[np.ndarray, "pair"]
    group: Int[np.ndarray, "pair"]
    count: Float64[np.ndarray, "pair"]
    n_types: int
    n_groups: int  # of all rows given, covered or not: the same groups for whatever quantity
    coverage: float  # share of the rows given

    def sums(self, values: Float[np.ndarray, "row"]) -> Float64[np.ndarray, "pair"]:
        return _summed(self.pair, values, self.count.size)

    def by_type(self, values: Float64[np.ndarray, "pair"]) -> Float64[np.ndarray, "type"]:
        return _summed(self.type, values, self.n_types)

    def by_group(self, values: Float64[np.ndarray, "pair"]) -> Float64[np.ndarray, "group"]:
        return _summed(self.group, values, self.n_groups)

    @property
    def n_covered_groups(self) -> int:
        """Groups with any of these rows."""
        return int(np.unique(self.group).size)


def occurrences(type_id: Int[np.ndarray, "row"], group: Int[np.ndarray, "row"], n_groups: int) -> Occurrences:
    """Sort rows by type and group; groups are numbered 0 … n_groups − 1."""
    types, of_type = np.unique(type_id, return_inverse=True)
    keys, of_pair, count = np.unique(
        of_type.astype(np.int64) * n_groups + group, return_inverse=True, return_counts=True
    )
    n_held = np.bincount(keys // n_groups, minlength=types.size)  # groups of each type
    kept = n_held[keys // n_groups] >= 2
    rows = np.flatnonzero(kept[of_pair])
    new_pair = np.cumsum(kept) - 1
    new_type = np.cumsum(n_held >= 2) - 1
    keys = keys[kept]
    return Occurrences(
        rows,
        new_pair[of_pair[rows]],
        new_type[keys // n_groups],
        keys % n_groups,
        count[kept].astype(np.float64),
        int((n_held >= 2).sum()),
        n_groups,
        rows.size / max(1, type_id.size),
    )


def type_share(values: Float[np.ndarray, "row"], seen: Occurrences) -> Estimates:
    """The share of variance, jackknifed over groups. `values`: of `seen.rows`."""
    centred = _centred(values)
    s, q = seen.sums(centred), seen.sums(centred**2)
    whole, without = _cross_sums(s, q, seen)
    weight = seen.by_group(seen.count)
    return leave_one_out(whole.share, without.share[:, None], weight)


@dataclass(frozen=True, slots=True)
class _Sums:
    """Everything that a share is made of; each entry (item) is one set of groups."""

    product: np.ndarray  # Σ over types of n · mean product of its pairs in different groups
    n: np.ndarray  # rows
    square: np.ndarray  # Σ z²
    total: np.ndarray  # Σ z
    total_square: np.ndarray  # Σ over groups of (Σ z)²
    n_square: np.ndarray  # Σ over groups of n²

    @property
    def share(self) -> np.ndarray:
        with np.errstate(invalid="ignore", divide="ignore"):
            same, mean_square = self.product / self.n, self.square / self.n
            any_two = (self.total**2 - self.total_square) / (self.n**2 - self.n_square)
            return (same - any_two) / (mean_square - any_two)


def _cross_sums(s: np.ndarray, q: np.ndarray, seen: Occurrences) -> tuple[_Sums, _Sums]:
    """The sums of all groups, and those without each group; s, q: Σ z and Σ z² of each (type, group) pair."""
    n, of_type = seen.count, seen.type
    n_all, s_all, q_all = (seen.by_type(values)[of_type] for values in (n, s, q))
    nn_all, ss_all = seen.by_type(n**2)[of_type], seen.by_type(s**2)[of_type]
    product = n_all * (s_all**2 - ss_all) / (n_all**2 - nn_all)
    n_left, s_left = n_all - n, s_all - s
    # A type of two groups says nothing without one of them: its rows in the other one go as well.
    lost = seen.by_type(np.ones(n.size))[of_type] == 2
    with np.errstate(invalid="ignore", divide="ignore"):
        left = n_left * (s_left**2 - (ss_all - s**2)) / (n_left**2 - (nn_all - n**2))
    gone = seen.by_group(product - np.where(lost, 0.0, left))
    n_gone, s_gone, q_gone = (
        seen.by_group(np.where(lost, whole, own)) for whole, own in ((n_all, n), (s_all, s), (q_all, q))
    )
    first = np.unique(of_type, return_index=True)[1]
    whole = _Sums(
        np.array([product[first].sum()]),
        np.array([n.sum()]),
        np.array([q.sum()]),
        np.array([s.sum()]),
        np.array([(seen.by_group(s) ** 2).sum()]),
        np.array([(seen.by_group(n) ** 2).sum()]),
    )
    without = _Sums(
        whole.product - gone,
        whole.n - n_gone,
        whole.square - q_gone,
        whole.total - s_gone,
        _squares_without(s, lost, seen),
        _squares_without(n, lost, seen),
    )
    return whole, without


def _squares_without(
    sums: np.ndarray, lost: np.ndarray, seen: Occurrences
) -> Float64[np.ndarray, "left_out"]:
    """Σ over groups of the square of their sums, without each group and without the types lost with it."""
    by_group = seen.by_group(sums)
    found = (by_group**2).sum() - by_group**2
    # Pairs are sorted by type: the two of a lost type stand side by side, and each loses the other's rows.
    pairs = np.flatnonzero(lost)
    partner = pairs.reshape(-1, 2)[:, ::-1].ravel()
    keys, index = np.unique(seen.group[pairs] * seen.n_groups + seen.group[partner], return_inverse=True)
    other = by_group[keys % seen.n_groups]
    less = np.bincount(index, sums[partner], keys.size)
    return found + np.bincount(keys // seen.n_groups, (other - less) ** 2 - other**2, seen.n_groups)


def type_weighted_share(values: Float[np.ndarray, "row"], seen: Occurrences) -> float:
    """As `type_share`, each type counted once however often it occurs; not corrected by the jackknife."""
    if not values.size:
        return float("nan")
    centred = _centred(values)
    n, s, q = seen.count, seen.sums(centred), seen.sums(centred**2)
    n_t, s_t = seen.by_type(n), seen.by_type(s)
    same = ((s_t**2 - seen.by_type(s**2)) / (n_t**2 - seen.by_type(n**2))).mean()
    weight = 1.0 / n_t[seen.type]
    s_g, w_g = seen.by_group(s * weight), seen.by_group(n * weight)
    with np.errstate(invalid="ignore", divide="ignore"):
        any_two = (s_g.sum() ** 2 - (s_g**2).sum()) / (w_g.sum() ** 2 - (w_g**2).sum())
        return float((same - any_two) / ((seen.by_type(q) / n_t).mean() - any_two))


def epsilon_squared(values: Float[np.ndarray, "row"], seen: Occurrences) -> float:
    """ε² of a one-way analysis of variance by type (Kelley 1935): 1 less the ratio of the variance within
    types to that of all rows, each over its degrees of freedom. Occurrences pass for independent in it, so
    types are credited with the documents that they are bound to.
    """
    centred = _centred(values)
    total, n = float(centred @ centred), values.size
    within = total - float((seen.by_type(seen.sums(centred)) ** 2 / seen.by_type(seen.count)).sum())
    freedom = n - seen.n_types
    if freedom < 1 or total <= 0:
        return float("nan")
    return 1.0 - (within / freedom) / (total / (n - 1))


def _centred(values: np.ndarray) -> Float64[np.ndarray, "row"]:
    """About their mean, against cancellation only: no result depends on it otherwise."""
    wide = values.astype(np.float64)
    return wide - wide.mean() if wide.size else wide


def _summed(index: np.ndarray, values: np.ndarray, n: int) -> np.ndarray:
    """Sums of values by index; of float64 also where there is no value."""
    return np.bincount(index, values, n).astype(np.float64, copy=False)
