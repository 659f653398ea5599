"""A note where rows come from too few groups of documents for a verdict, and none where they do not."""

from fractions import Fraction

import numpy as np
import pytest
from nearline.analyze.intervals import MIN_GROUPS
from nearline.collect.few_groups import ENOUGH_GROUPS, _more_groups, few_groups_note
from nearline.collect.planning import build_plan
from nearline.collect.windows import Cutting
from nearline.store.plan import PATTERN, SPLITS

N_DOCUMENTS = 100


@pytest.mark.parametrize(
    ("tokens", "n_groups", "words"),
    [
        (1000, N_DOCUMENTS, None),
        (
            100,
            N_DOCUMENTS,
            "this store will have its fit rows from 4 of the corpus's 40 fit groups of documents and its "
            "test rows from 4 of the corpus's 40 test groups of documents; a verdict needs 20 groups: raise "
            "tokens, or lower sequence_length: a window has one document, and there are too few windows",
        ),
        (
            400,
            N_DOCUMENTS,
            "raise tokens, or lower sequence_length: a window has one document, and there are "
            "too few windows",
        ),
        (1000, 20, "a verdict needs 20 groups: take a corpus with more documents"),
    ],
)
def test_few_groups_are_said_with_what_to_do(tokens: int, n_groups: int, words: str | None) -> None:
    splits = np.array([SPLITS.index(PATTERN[i % len(PATTERN)]) for i in range(N_DOCUMENTS)], np.uint8)
    keys = [f"{index:032x}" for index in range(N_DOCUMENTS)]
    lengths = np.full(N_DOCUMENTS, 10, np.int32)
    cutting = Cutting(sequence_length=10, min_length=1, batch_tokens=40, seed=0, bos_id=None)
    plan = build_plan(lengths, splits, keys, tokens=tokens, block=20, cutting=cutting).plan
    # Groups of one split, as near-duplicates are.
    groups = (np.arange(N_DOCUMENTS) % n_groups).astype(np.int32)
    note = few_groups_note(plan, groups, splits, int(lengths.sum()))
    assert note is None if words is None else (note or "").endswith(words)
    assert ENOUGH_GROUPS == MIN_GROUPS


@pytest.mark.parametrize(
    ("keep", "windows", "words"),
    [
        (Fraction(1), True, "raise tokens to 3,000 or so, or set keep to 1/8 of the sequences"),
        (Fraction(1, 4), True, "raise tokens to 3,000 or so, or set keep to 1/8 of the sequences"),
        (Fraction(1, 8), True, "raise tokens"),  # 3,000 are not there at this share, and no smaller one helps
        (Fraction(1), False, "raise tokens to 3,000 or so, or lower sequence_length"),
    ],
)
def test_a_share_is_advised_only_where_it_is_smaller_and_helps(
    keep: Fraction, windows: bool, words: str
) -> None:
    found = _more_groups(1_000, 3_000, 24_000, keep, windows=windows)
    assert found.partition(":")[0] == words
