"""Words and numbers of the page: what cannot be seen is drawn, nothing breaks out, one rounding."""

import html
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nearline.reports import text


@pytest.mark.parametrize(
    ("stored", "shown"),
    [
        ("a\nb", "a↵b"),
        ("\tx\r", "⇥x␍"),
        ("\x00", "␀"),
        ("\x1b[31m", "␛[31m"),
        ("\x7f", "␡"),
        ("\x85", "⟨U+0085⟩"),
        ("evil\u202egnp.exe", "evil⟨U+202E⟩gnp.exe"),
        ("\u2066x\u2069", "⟨U+2066⟩x⟨U+2069⟩"),
        ("\u200f\ufeff", "⟨U+200F⟩⟨U+FEFF⟩"),
        ("\u00a0", "⟨U+00A0⟩"),
        ("\u2028", "⟨U+2028⟩"),
        ("\U000e0041", "⟨U+E0041⟩"),
        ("\ud800", "⟨U+D800⟩"),
        ("\ufffe", "⟨U+FFFE⟩"),
        ("e\u0301", "e\u0301"),
        ("Z" + "\u0334" * 500, "Z" + "\u0334" * 3),
        ("שלום 漢字 👩\u200d💻", "שלום 漢字 👩\u200d💻"),
    ],
)
def test_what_cannot_be_seen_is_written_out(stored: str, shown: str) -> None:
    assert text.visible(stored) == shown


@given(st.text())
def test_markup_holds_no_tag_but_its_own_and_keeps_the_text(stored: str) -> None:
    marked = text.markup(stored)
    assert html.unescape(re.sub(r"</?i>", "", marked)) == text.visible(stored)
    assert not re.search(r"<(?!/?i>)", marked)
    assert not re.search("[\x00-\x08\x0b-\x1f\u202a-\u202e\u2066-\u2069\ufffe\uffff]", marked)
    assert '"' not in marked


def test_blanks_of_a_token_are_drawn() -> None:
    assert text.markup(" the  x", spaces=True) == "<i>␣</i>the<i>␣</i><i>␣</i>x"


@given(st.text(), st.integers(3, 50))
def test_names_are_one_short_line(stored: str, limit: int) -> None:
    shown = text.name(stored, limit)
    assert len(shown) <= limit
    assert "\n" not in shown


def test_a_clipped_text_says_how_much_is_left_out() -> None:
    assert text.clip("x" * 10_000, 60) == "x" * 60 + "… (+9,940 characters)"
    assert text.clip("short", 60) == "short"
    assert text.clip_middle("abcdefghij", 7) == "abcd…ij"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.9314, "0.931"),
        (-0.5, "−0.500"),
        (-0.0001, "0.000"),
        (123.456, "123.5"),
        (-4567.8, "−4,568"),
        (9_999_999.0, "9,999,999"),
        (-3.2e7, "−3.2×10⁷"),
        (None, "–"),
        (math.nan, "–"),
        (math.inf, "∞"),
        (-math.inf, "−∞"),
        (1.0, "1.000"),
    ],
)
def test_numbers(value: float | None, shown: str) -> None:
    assert text.number(value) == shown


def test_intervals_and_shares() -> None:
    assert text.interval(0.9, 0.95) == "[0.900, 0.950]"
    assert text.interval(None, 0.95) == "–"
    assert text.percent(0.1234) == "12.3\xa0%"
    assert text.percent(None) == "–"
    assert text.percent_interval(0.1, 0.2) == "[10.0, 20.0]\xa0%"
    assert text.percent_interval(None, None) == "–"
    assert text.count(16_000) == "16,000"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (1e-5, "10⁻⁵"),
        (3.2e7, "3.2×10⁷"),
        (1.0, "10⁰"),
        (0.0, "0"),
        (None, "–"),
        (math.inf, "∞"),
        (2.4e-7, "2.4×10⁻⁷"),
    ],
)
def test_powers_of_ten(value: float | None, shown: str) -> None:
    assert text.scientific(value) == shown


@pytest.mark.parametrize(
    ("some", "n", "shown"),
    [(0, 3, "none of 3 layers"), (2, 3, "2 of 3 layers"), (3, 3, "all 3 layers"), (2, 2, "both layers"),
     (1, 1, "1 of 1 layer"), (0, 2, "none of 2 layers")],
)  # fmt: skip
def test_counts_out_of_some(some: int, n: int, shown: str) -> None:
    assert text.out_of(some, n, "layers") == shown
    assert text.every(1, "layers") == "the one layer"
    assert (text.every(2), text.out_of(4, 4)) == ("both", "all 4")


def test_an_estimate_has_its_interval_and_its_unit_once() -> None:
    assert text.estimate(text.change, 7.99, 6.64, 9.35) == "+7.99 [6.64, 9.35]\xa0%"
    assert text.estimate(text.percent, 0.1, 0.05, 0.2) == "10.0 [5.0, 20.0]\xa0%"
    assert text.estimate(text.number, 0.5, 0.4, 0.6) == "0.500 [0.400, 0.600]"
    assert text.estimate(text.percent, 0.1, None, 0.2) == "10.0\xa0%"


@pytest.mark.parametrize(
    ("numbers", "shown"),
    [
        ([3], "layer 3"),
        ([0, 1], "layers 0 and 1"),
        ([0, 1, 2, 3, 7], "layers 0–3 and 7"),
        ([5, 1, 9, 3], "layers 1, 3, 5 and 9"),
        ([], "layers none"),
    ],
)
def test_runs_of_layers_are_drawn_together(numbers: list[int], shown: str) -> None:
    assert text.layers(numbers) == shown
