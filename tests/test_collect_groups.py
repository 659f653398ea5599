"""Near-duplicate groups: the fast way agrees with comparing all pairs of sets, and the rules hold."""

import itertools
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nearline.collect import groups as groups_module
from nearline.collect.groups import near_duplicate_groups

few_words = st.lists(st.sampled_from("abcd"), max_size=12).map(" ".join)


def slow_groups(texts: list[str], n: int, threshold: float) -> list[int]:
    """The definition, spelled out: sets of n-grams, all pairs, merge until nothing moves."""
    grams = []
    for text in texts:
        words = re.findall(r"\w+", text.lower())
        window = min(n, max(len(words), 1))
        grams.append({tuple(words[i : i + window]) for i in range(max(len(words), 1) - window + 1)})
    group = list(range(len(texts)))
    for a, b in itertools.combinations(range(len(texts)), 2):
        if len(grams[a] & grams[b]) > threshold * min(len(grams[a]), len(grams[b])):
            group = [group[a] if value == group[b] else value for value in group]
    order = list(dict.fromkeys(group))
    return [order.index(value) for value in group]


def prose(seed: int, n_words: int) -> list[str]:
    generator = np.random.default_rng(seed)
    return [f"w{number}" for number in generator.integers(0, 5000, n_words)]


@given(st.lists(few_words, max_size=12), st.sampled_from([1, 2, 3]), st.sampled_from([0.0, 0.2, 0.5, 0.9]))
def test_same_partition_as_comparing_all_pairs(texts: list[str], n: int, threshold: float) -> None:
    assert near_duplicate_groups(texts, n, threshold).tolist() == slow_groups(texts, n, threshold)


def test_slices_of_the_overlap_matrix_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [" ".join(prose(seed % 40, 60)[: 20 + seed]) for seed in range(100)]
    whole = near_duplicate_groups(texts)
    monkeypatch.setattr(groups_module, "ROWS_AT_ONCE", 7)
    assert near_duplicate_groups(texts).tolist() == whole.tolist()


def test_numbers_are_int32_in_order_of_first_appearance() -> None:
    found = near_duplicate_groups(["one", "two", "one", "three", "two"])
    assert found.dtype == np.int32
    assert found.tolist() == [0, 1, 0, 2, 1]


@pytest.mark.parametrize("texts", [[], [""], ["", ""], ["", "a"]])
def test_empty_texts(texts: list[str]) -> None:
    assert near_duplicate_groups(texts).tolist() == slow_groups(texts, 13, 0.2)


def test_case_layout_and_punctuation_hide_no_copy() -> None:
    words = prose(0, 40)
    assert near_duplicate_groups([" ".join(words), ",\n  ".join(words).upper() + "!"]).tolist() == [0, 0]


def test_short_texts_match_only_when_equal() -> None:
    assert near_duplicate_groups(["see numpy.abs", "See numpy.abs.", "see numpy.sin"]).tolist() == [0, 0, 1]


@pytest.mark.parametrize(("n_shared", "together"), [(32, False), (33, True), (34, True)])
def test_threshold_is_a_share_of_the_smaller_text(n_shared: int, together: bool) -> None:
    """100 n-grams in the smaller text: 32 words in common are 20 of them, which is not above 20 %."""
    small = prose(1, 112)
    large = small[:n_shared] + prose(2, 1000)
    found = near_duplicate_groups([" ".join(small), " ".join(large)])
    assert (found[0] == found[1]) == together


def test_groups_chain() -> None:
    a, b = prose(3, 80), prose(4, 80)
    middle = a[:40] + b[:40]
    assert near_duplicate_groups([" ".join(a), " ".join(b), " ".join(middle)]).tolist() == [0, 0, 0]


def test_boilerplate_below_the_threshold_joins_nothing() -> None:
    """A licence paragraph in every one of many documents is no reason to call them copies."""
    licence = prose(5, 30)
    texts = [" ".join(licence + prose(100 + i, 200)) for i in range(300)]
    assert len(set(near_duplicate_groups(texts).tolist())) == 300
