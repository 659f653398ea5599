"""Which tokens count as easy: needs of a store's gate rows in, the cut at or below which a token is easy out.

Each store has its own cut, its own easier half: a gate that was learned elsewhere is asked to order tokens,
not to know another corpus's level.
"""

from typing import Final, Literal

import numpy as np
from jaxtyping import Float

MEDIAN: Final = 0.5
LOWER_QUARTER: Final = 0.25
FEW_NEGATIVE: Final = 0.05


def easy_cut(need: Float[np.ndarray, "token"], rule: Literal["paper"] | float) -> float:
    """The quantile `rule` of the needs that are there; "paper": their median, or the lower quartile where
    fewer than 5 % are negative. NaN, which no token is at or below, without any need.
    """
    values = need[np.isfinite(need)]
    if not values.size:
        return float("nan")
    if rule == "paper":
        rule = LOWER_QUARTER if np.mean(values < 0) < FEW_NEGATIVE else MEDIAN
    # float32 needs keep their type: a token at the quantile itself is at or below it.
    return float(np.quantile(values, rule))
