"""Whether rows come from enough groups of documents to be judged by: a plan in, a note or None out.

A verdict on a layer is of the independent groups that its test rows come from, not of rows: long windows of
a few documents give many rows and no verdict. What the note advises was tried: the corpus is planned again
with it, by the function that plans a harvest, so that whoever follows the advice gets no other note. Cost:
one pass over the plan's sequences; where there are too few groups, about a dozen plans of up to twice as many
rows as are advised.
"""

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
from jaxtyping import Int32, UInt8

from ..store.errors import UsageError
from ..store.plan import SPLITS, Plan

ENOUGH_GROUPS = 20  # of documents; under this an analysis gives no verdict
KEEP_PARTS = (8, 4, 2)  # the first one that is enough is advised: the more groups, the narrower intervals
DIGITS = 3  # of an advised number of tokens
FEWER = 0.7  # of the tokens without a share: a smaller saving is not worth a second setting
CLOSE = 1.05  # an advised number may be so much more than needed

# Plans the same corpus and settings with other tokens and another share of the sequences (None: all).
Replan = Callable[[int, Fraction | None], Plan]


def few_groups_note(
    plan: Plan,
    groups: Int32[np.ndarray, "document"],
    splits: UInt8[np.ndarray, "document"],
    replan: Replan,
    keep: Fraction | None = None,
) -> str | None:
    """A sentence with what to do where rows to fit, or to test, come from too few groups. `keep`: the share
    of the sequences that are kept now.
    """
    found: list[str] = []
    enough_are_there = True
    for split, stored in _stored_groups(plan, groups).items():
        there = np.unique(groups[splits == SPLITS.index(split)]).size
        if stored < ENOUGH_GROUPS:
            found.append(
                f"its {split} rows from {stored} of the corpus's {there} {split} groups of documents"
            )
        enough_are_there &= there >= ENOUGH_GROUPS
    if not found:
        return None
    advice = _advice(plan.n_tokens, groups, replan, keep) if enough_are_there else None
    advice = advice or "take a corpus with more documents"
    return f"this store will have {' and '.join(found)}; a verdict needs {ENOUGH_GROUPS} groups: {advice}"


def _stored_groups(plan: Plan, groups: Int32[np.ndarray, "document"]) -> dict[str, int]:
    """How many groups of documents the rows to fit and to test come from. The first row of a sequence is a
    sink and counts nowhere: one that was cut after it brings no group.
    """
    of_sequence, counts = plan.block_split[plan.sequence_block], plan.length > 1
    return {
        split: np.unique(groups[plan.document[counts & (of_sequence == SPLITS.index(split))]]).size
        for split in ("fit", "test")
    }


def _advice(n_tokens: int, groups: np.ndarray, replan: Replan, keep: Fraction | None) -> str | None:
    """A smaller share alone where it has as many rows; else more tokens, with a share where that takes fewer;
    with a larger share where the corpus runs out at this one. None: nothing of this is enough.
    """
    known = [Fraction(1, part) for part in KEEP_PARTS]
    shares = [share for share in known if share < (keep or 1)]
    alone = next((one for one in shares if _tried(n_tokens, groups, replan, one) == (n_tokens, True)), None)
    raised = _enough_tokens(n_tokens, groups, replan, keep)
    if alone is not None:
        more = "" if raised is None else f", or raise tokens to {raised:,}"
        return f"set keep to {alone} of the sequences{more}"
    for share in shares:
        tokens = _enough_tokens(n_tokens, groups, replan, share)
        if tokens is not None and (raised is None or tokens <= FEWER * raised):
            more = "" if raised is None else f", or tokens alone to {raised:,}"
            return f"raise tokens to {tokens:,} and set keep to {share} of the sequences{more}"
    if raised is not None:
        return f"raise tokens to {raised:,}"
    larger = [*(share for share in known if share > keep), None] if keep is not None else []
    for share in larger:
        if (tokens := _enough_tokens(n_tokens, groups, replan, share)) is not None:
            words = "leave keep out" if share is None else f"set keep to {share} of the sequences"
            return f"raise tokens to {tokens:,} and {words}"
    return None


def _enough_tokens(n_tokens: int, groups: np.ndarray, replan: Replan, keep: Fraction | None) -> int | None:
    """Tokens above `n_tokens` that are there and enough, and few more than needed: twice as many until they
    are, then between the last two. More than the corpus has are none.
    """
    low, high = n_tokens, _rounded(2 * n_tokens)
    rows, enough = _tried(high, groups, replan, keep)
    while rows == high and not enough:
        low, high = high, 2 * high
        rows, enough = _tried(high, groups, replan, keep)
    if rows < high and enough:  # all that there are
        high = rows
        rows, enough = _tried(high, groups, replan, keep)
    if not enough or rows < high or high <= low:
        return None
    while high > CLOSE * low and (middle := _rounded(math.isqrt(low * high))) < high:
        if _tried(middle, groups, replan, keep) == (middle, True):
            high = middle
        else:
            low = middle
    return high


def _tried(tokens: int, groups: np.ndarray, replan: Replan, keep: Fraction | None) -> tuple[int, bool]:
    """Rows of a plan, and whether they come from groups enough."""
    try:
        plan = replan(tokens, keep)
    except UsageError:  # too few tokens for a block of each split
        return 0, False
    return plan.n_tokens, min(_stored_groups(plan, groups).values()) >= ENOUGH_GROUPS


def _rounded(tokens: int) -> int:
    """Up, to so many digits."""
    step = 10 ** max(0, len(str(tokens)) - DIGITS)
    return math.ceil(tokens / step) * step
