"""A note where rows come from too few groups of documents for a verdict, and none where they do not. What it
advises is followed, and is enough at the first try.
"""

import re
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from nearline.analyze.intervals import MIN_GROUPS
from nearline.collect.few_groups import ENOUGH_GROUPS, few_groups_note
from nearline.collect.planning import build_plan
from nearline.collect.windows import Cutting
from nearline.store.plan import PATTERN, SPLITS, Plan

FEW = "this store will have its fit rows from "


class Corpus:
    """Documents with as many tokens; `n_groups` of near-duplicates in all, each of one split."""

    def __init__(self, lengths: list[int], n_groups: int | None = None, window: int = 10) -> None:
        n, self.lengths = len(lengths), np.array(lengths, np.int32)
        self.splits = np.array([SPLITS.index(PATTERN[i % len(PATTERN)]) for i in range(n)], np.uint8)
        self.keys = [f"{index:032x}" for index in range(n)]
        self.groups = (np.arange(n) % (n_groups or n)).astype(np.int32)
        self.cutting = Cutting(sequence_length=window, min_length=1, batch_tokens=1000, seed=0, bos_id=None)
        self.n_plans = 0

    def plan(self, tokens: int, keep: Fraction | None = None) -> Plan:
        self.n_plans += 1
        cutting = replace(self.cutting, keep=keep)
        block = max(1, tokens // 50)
        return build_plan(
            self.lengths, self.splits, self.keys, tokens=tokens, block=block, cutting=cutting
        ).plan

    def note(self, tokens: int, keep: Fraction | None = None) -> str | None:
        return few_groups_note(self.plan(tokens, keep), self.groups, self.splits, self.plan, keep)

    def lack(self, tokens: int, keep: Fraction | None) -> bool:
        return self.note(tokens, keep) is not None


@pytest.mark.parametrize(
    ("tokens", "n_groups", "words"),
    [
        (1000, 100, None),
        (
            100,
            100,
            f"{FEW}4 of the corpus's 40 fit groups of documents and its test rows from 4 of the corpus's 40 "
            "test groups of documents; a verdict needs 20 groups: raise tokens to 496",
        ),
        (1000, 20, "a verdict needs 20 groups: take a corpus with more documents"),
    ],
)
def test_few_groups_are_said_with_what_to_do(tokens: int, n_groups: int, words: str | None) -> None:
    note = Corpus([10] * 100, n_groups).note(tokens)
    assert note is None if words is None else (note or "").endswith(words)
    assert ENOUGH_GROUPS == MIN_GROUPS


def test_a_sequence_of_one_row_brings_no_group() -> None:
    """Its only row is at position 0, which `fit` does not count as a row to fit."""
    assert Corpus([1] * 75 + [10] * 25).note(325) == (
        f"{FEW}10 of the corpus's 40 fit groups of documents and its test rows from 10 of the corpus's "
        "40 test groups of documents; a verdict needs 20 groups: take a corpus with more documents"
    )


@pytest.mark.parametrize(
    ("tokens", "keep", "window", "lengths"),
    [
        (6_000, None, 256, "skewed"),
        (60_000, None, 256, "skewed"),
        (6_000, Fraction(1, 4), 256, "skewed"),
        (6_000, None, 64, "skewed"),
        (500, None, 256, "alike"),
        (6_000, None, 64, "alike"),
        (20_000, Fraction(1, 4), 256, "alike"),
        (60_000, None, 256, "alike"),
        (2_000, Fraction(1, 100), 256, "alike"),
        (3_000, Fraction(1, 12), 1_000, "alike"),
    ],
)
def test_what_is_advised_is_enough_at_the_first_try(
    tokens: int, keep: Fraction | None, window: int, lengths: str
) -> None:
    """Every alternative of the sentence; and of tokens a tenth less is not. Skewed: as texts of a site are,
    from a hundred tokens to thirty thousand."""
    drawn = np.random.default_rng(0).lognormal(8, 1.5, 200).astype(int).clip(100, 30_000)
    corpus = Corpus([4_000] * 200 if lengths == "alike" else drawn.tolist(), window=window)
    note = corpus.note(tokens, keep) or ""
    assert corpus.n_plans < 60
    advice = note.partition("groups: ")[2]
    assert advice.startswith(("set keep", "raise tokens"))
    for one in advice.split(", or "):
        share = re.search(r"keep to (\S+)", one)
        raised = re.search(r"tokens (?:alone )?to ([\d,]+)", one)
        given = int(raised[1].replace(",", "")) if raised else tokens
        kept = Fraction(share[1]) if share else None if "leave keep out" in one else keep
        assert corpus.note(given, kept) is None
        assert corpus.plan(given, kept).n_tokens == given
        assert kept != keep or raised
        if raised and given > 10_000:
            assert corpus.lack(int(0.9 * given), kept)
