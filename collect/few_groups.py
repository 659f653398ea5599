"""Whether rows come from enough groups of documents to be judged by: a plan in, a note or None out.

A verdict on a layer is of the independent groups that its test rows come from, not of rows: long windows of
a few documents give many rows and no verdict. Cost: one pass over the plan's sequences.
"""

import math
from fractions import Fraction

import numpy as np
from jaxtyping import Int32, UInt8

from ..store.plan import SPLITS, Plan

ENOUGH_GROUPS = 20  # of documents; under this an analysis gives no verdict
KEEP_PARTS = (8, 4, 2)
USABLE = 0.75  # of a corpus's tokens: short windows drop out, and one split is used up before the others
# More windows of one share bring groups that are there already, so that they grow a little slower than rows.
SLOWER = 1.25


def few_groups_note(
    plan: Plan,
    groups: Int32[np.ndarray, "document"],
    splits: UInt8[np.ndarray, "document"],
    n_corpus_tokens: int,
    keep: Fraction | None = None,
) -> str | None:
    """A sentence with what to do where rows to fit, or to test, come from too few groups. `keep`: the share
    of the sequences that are kept now.
    """
    found: list[str] = []
    more_are_there, windows, least = False, True, ENOUGH_GROUPS
    of_sequence = plan.block_split[plan.sequence_block]
    for split in ("fit", "test"):
        code = SPLITS.index(split)
        stored = np.unique(groups[plan.document[of_sequence == code]]).size
        there = np.unique(groups[splits == code]).size
        if stored < ENOUGH_GROUPS:
            found.append(
                f"its {split} rows from {stored} of the corpus's {there} {split} groups of documents"
            )
            more_are_there |= stored < there
            least = min(least, max(1, stored))
            windows = windows and int(np.count_nonzero(of_sequence == code)) >= ENOUGH_GROUPS
    if not found:
        return None
    advice = "take a corpus with more documents"
    if more_are_there:
        tokens = math.ceil(plan.n_tokens * ENOUGH_GROUPS / least * SLOWER / 1000) * 1000
        advice = _more_groups(plan.n_tokens, tokens, n_corpus_tokens, keep or Fraction(1), windows=windows)
    return f"this store will have {' and '.join(found)}; a verdict needs {ENOUGH_GROUPS} groups: {advice}"


def _more_groups(n_tokens: int, tokens: int, n_corpus_tokens: int, keep: Fraction, *, windows: bool) -> str:
    """Rows from more of the corpus: `keep` only where there are windows enough for as many groups, and as
    small as leaves enough tokens for as many rows. `tokens`: as many as may be enough.
    """
    advice = "raise tokens"
    if tokens <= USABLE * keep * n_corpus_tokens:
        advice += f" to {tokens:,} or so"
    shares = [
        f"1/{part}"
        for part in KEEP_PARTS
        if part * n_tokens <= USABLE * n_corpus_tokens and Fraction(1, part) < keep
    ]
    if not windows:
        return f"{advice}, or lower sequence_length: a window has one document, and there are too few windows"
    return advice + (f", or set keep to {shares[0]} of the sequences" if shares else "")
