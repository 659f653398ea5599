"""What random routing would cost at any share: its cost at a few measured shares in, the curve out.

A token goes linear by the toss of a coin with P = s. The mean cost over tosses is then a polynomial in s
whose term of degree m holds the interactions of m tokens (the multilinear extension of the cost): no share
costs nothing, single tokens add s, pairs s². So the curve runs through (0, 0), the measured shares and (1,
cost of `linear`), as the parabola through 0 and the two knots around s; it is a straight line from 0 where
one knot alone is there, and only near that knot.
Shares are what was realised on the rows, and their own spread over groups moves the curve: with R the curve
and q its slope,
    dR(s) = Σ_k w_k (dc_k − q(r_k) dr_k) + q(s) ds,
w the weights of the costs c_k at the knots r_k. Cost: nothing to speak of.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Float64

from .intervals import Estimates
from .measured import Scored, Scores

# Without a knot on either side, random routing at this much another share stands for it, in proportion.
NEAR: Final = 0.02


@dataclass(frozen=True, slots=True, eq=False)
class RandomCurve:
    """Knots by increasing share, over the same groups. The one at 0 is not among them."""

    share: Float64[np.ndarray, "knot"]
    cost: Float64[np.ndarray, "knot"]
    share_influence: Float64[np.ndarray, "group knot"]
    cost_influence: Float64[np.ndarray, "group knot"]
    n_effective: float

    def at(self, share: float, influence: Float64[np.ndarray, "group"]) -> Estimates:
        """The cost of random routing at a realised share, which has this influence of its own; NaN where the
        knots do not reach.
        """
        used = self._knots(share)
        if used:
            r, c = self.share[used], self.cost[used]
            weights, slope = _lagrange(share, r), _slope(share, r) @ c
            slopes = np.array([_slope(at, r) @ c for at in r])
            moved = self.cost_influence[:, used] - slopes * self.share_influence[:, used]
            value, found = weights @ c, moved @ weights + slope * influence
        else:
            value, found = np.nan, np.full(influence.shape, np.nan)
        n_effective = np.array([self.n_effective])
        return Estimates(np.array([value]), found[:, None], n_effective, int(influence.size))

    def _knots(self, share: float) -> list[int]:
        """The two around this share, of those there are, or a single one that lies near."""
        n_knots = self.share.size
        if n_knots < 2:
            return [0] if n_knots and abs(self.share[0] - share) <= NEAR else []
        above = int(np.clip(np.searchsorted(self.share, share), 1, n_knots - 1))
        within = share <= self.share[-1] + NEAR
        return [above - 1, above] if within else []


def random_curve(scored: Scored, items: Sequence[Scores]) -> RandomCurve | None:
    """Of the interventions on one set of layers; None where no random routing was measured."""
    drawn = [item for item in items if item.kind == "random"]
    if not drawn:
        return None
    knots = drawn + [item for item in items if item.name == "linear"]
    costs, shares = scored.costs(knots), scored.shares(knots)
    order = np.argsort(shares.estimate, kind="stable")
    # Two names of one share (a draw apart, say) are one knot: a parabola through both would be wild.
    order = order[np.diff(shares.estimate[order], prepend=-1.0) > 1e-9]
    return RandomCurve(
        shares.estimate[order],
        costs.estimate[order],
        shares.influence[:, order],
        costs.influence[:, order],
        float(costs.n_effective[0]),
    )


def _lagrange(s: float, r: np.ndarray) -> np.ndarray:
    """Weights at s of the polynomial through (0, 0) and the knots r."""
    weights = np.empty(r.size)
    for k in range(r.size):
        others = np.delete(r, k)
        weights[k] = s / r[k] * np.prod((s - others) / (r[k] - others))
    return weights


def _slope(s: float, r: np.ndarray) -> np.ndarray:
    """Derivatives of these weights at s."""
    if r.size == 1:
        return 1.0 / r
    b, c = r
    return np.array([(2 * s - c) / (b * (b - c)), (2 * s - b) / (c * (c - b))])
