"""Words and numbers as the page prints them: stored strings made safe, values rounded in one place.

In: any string of a study (tokens, document keys, names of models and corpora) or any number. Out: text that
a browser shows as it is. Characters that nobody can see, or that reorder their neighbours (controls, bidi
overrides, unassigned and private code points), are written out, so that a token cannot forge the page
around it. One rounding for sentences and tables alike: a number in a sentence is found again in its table.
Cost: linear in the characters shown.
"""

import html
import math
import re
import unicodedata
from collections.abc import Callable

NONE = "–"
"""What stands for a value that does not exist (no sink, too few documents)."""

LARGE = 1e7
"""From here on digits say less than the power of ten."""

PERCENT = "\N{NO-BREAK SPACE}%"

_PICTURES = {"\n": "↵", "\t": "⇥", "\r": "␍", "\x7f": "␡"}
# Joiners build letters and emoji, the ideographic space is ordinary Chinese and Japanese: they stay.
_KEPT = frozenset("\u200c\u200d\u3000 ")
_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs"})
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
# More marks than any script stacks on one letter: the rest would be drawn over the neighbouring lines.
_STACKED_MARKS = re.compile(
    r"([\u0300-\u036f\u0483-\u0489\u1ab0-\u1aff\u1dc0-\u1dff\u20d0-\u20ff\ufe20-\ufe2f]{3})"
    r"[\u0300-\u036f\u0483-\u0489\u1ab0-\u1aff\u1dc0-\u1dff\u20d0-\u20ff\ufe20-\ufe2f]+"
)


def _picture(character: str) -> str | None:
    """What to show for a character that cannot be seen; None when it can be shown as it is."""
    if character in _KEPT or unicodedata.category(character) not in _HIDDEN:
        return None
    if character in _PICTURES:
        return _PICTURES[character]
    if ord(character) < 0x20:
        return chr(0x2400 + ord(character))
    return f"⟨U+{ord(character):04X}⟩"


def visible(text: str) -> str:
    """The text with every unseen character written out; stacks of combining marks are cut at three."""
    return "".join(_picture(character) or character for character in _STACKED_MARKS.sub(r"\1", text))


def clip(text: str, limit: int) -> str:
    """At most `limit` characters; what was left out is counted, so a cut is never taken for the end."""
    return text if len(text) <= limit else f"{text[:limit]}… (+{len(text) - limit:,} characters)"


def clip_middle(text: str, limit: int) -> str:
    """At most `limit` characters with both ends kept: names tend to differ at their end."""
    if len(text) <= limit:
        return text
    head = (limit - 1) * 2 // 3
    return f"{text[:head]}…{text[len(text) - (limit - 1 - head) :]}"


def name(text: str, limit: int = 80) -> str:
    """A name as plain text: visible, on one line, clipped in the middle."""
    # What the second cut takes lies within the first: no need to look at all of a very long name.
    return clip_middle(visible(clip_middle(str(text), 4 * limit)), limit)


def escape(text: str) -> str:
    """Text that is safe between tags and inside double-quoted attributes."""
    return html.escape(text, quote=True)


def markup(text: str, *, spaces: bool = False) -> str:
    """Escaped text in which characters written out are muted; with `spaces`, blanks are drawn as well."""
    parts: list[str] = []
    for character in _STACKED_MARKS.sub(r"\1", text):
        shown = "␣" if spaces and character == " " else _picture(character)
        parts.append(escape(character) if shown is None else f"<i>{shown}</i>")
    return "".join(parts)


def number(value: float | None, digits: int = 3) -> str:
    """A value for sentences and tables: fixed digits, fewer where it is large, a true minus sign; from LARGE
    on a power of ten, as a bound of twenty digits would make its column as wide as the page.
    """
    if value is None or math.isnan(value):
        return NONE
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if abs(value) >= LARGE:
        return scientific(value)
    kept = digits if abs(value) < 100 else (1 if abs(value) < 1000 else 0)
    text = f"{value:,.{kept}f}"
    negative = text.startswith("-") and any(character in "123456789" for character in text)
    return ("−" if negative else "") + text.lstrip("-")


def p_value(value: float | None) -> str:
    """A p-value; one that three digits would round to nothing is said to be below them."""
    return "< 0.001" if value is not None and value < 0.0005 else number(value)


def interval(low: float | None, high: float | None, digits: int = 3) -> str:
    """`[low, high]`, or the sign for nothing where there is no interval."""
    ends = (number(low, digits), number(high, digits))
    return NONE if NONE in ends else f"[{ends[0]}, {ends[1]}]"


def percent(share: float | None) -> str:
    """A share in percent with one decimal."""
    return NONE if share is None or math.isnan(share) else f"{number(100 * share, 1)}\N{NO-BREAK SPACE}%"


def percent_interval(low: float | None, high: float | None) -> str:
    """`[12.1, 13.4] %`: the unit is written once."""
    text = interval(None if low is None else 100 * low, None if high is None else 100 * high, 1)
    return text if text == NONE else f"{text}\N{NO-BREAK SPACE}%"


def change(percent: float | None) -> str:
    """A change that is in percent already, with its sign: `+1.58 %`."""
    shown = number(percent, 2)
    sign = "+" if percent is not None and percent > 0 and shown != number(0.0, 2) else ""
    return shown if shown == NONE else f"{sign}{shown}{PERCENT}"


def change_interval(low: float | None, high: float | None) -> str:
    """`[0.91, 2.30] %` of what is in percent already."""
    shown = interval(low, high, 2)
    return shown if shown == NONE else f"{shown}\N{NO-BREAK SPACE}%"


def nats(value: float | None) -> str:
    """A loss, or a difference of losses: four digits, as a hundredth of a percent of perplexity matters."""
    return number(value, 4)


def nats_interval(low: float | None, high: float | None) -> str:
    return interval(low, high, 4)


def count(value: float | None) -> str:
    """A whole number with separators."""
    return NONE if value is None or math.isnan(value) else f"{int(value):,}"


def scientific(value: float | None) -> str:
    """`3.2×10⁷`, a bare power of ten where the mantissa is one: for condition numbers and penalties."""
    if value is None or math.isnan(value):
        return NONE
    if value == 0 or math.isinf(value):
        return "0" if value == 0 else "∞"
    mantissa, exponent = f"{value:.1e}".split("e")
    power = f"10{str(int(exponent)).translate(_SUPERSCRIPT)}"
    return power if mantissa == "1.0" else f"{mantissa.replace('-', '−')}×{power}"


_ENDS = {
    number: interval,
    percent: percent_interval,
    change: change_interval,
    nats: nats_interval,
}


def estimate(show: Callable[[float], str], value: float, low: float | None, high: float | None) -> str:
    """`+7.99 [6.64, 9.35] %`: a value as `show` writes it and its interval, the unit once, behind both."""
    shown, ends = show(value), _ENDS[show](low, high)
    return shown if ends == NONE else f"{shown.removesuffix(PERCENT)} {ends}"


def every(n: int, noun: str = "") -> str:
    """`all 3 layers`, `both layers`, `the one layer`: `noun` in the plural, or nothing where it was said."""
    if n == 1:
        return f"the one {noun.removesuffix('s')}".rstrip()
    return f"{'both' if n == 2 else f'all {n}'} {noun}".rstrip()


def out_of(some: int, n: int, noun: str = "") -> str:
    """`2 of 3 layers`, `none of 3 layers`, and `all 3 layers` where it is all of several."""
    if some == n > 1:
        return every(n, noun)
    return f"{some or 'none'} of {n} {noun.removesuffix('s') if n == 1 else noun}".rstrip()


def listing(items: list[str]) -> str:
    """`a, b and c`."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}" if items else "none"


def some(items: list[str], most: int = 6) -> str:
    """`a, b and 7 more`: a list that stays short."""
    return listing(items if len(items) <= most else [*items[: most - 1], f"{len(items) - most + 1} more"])


def layers(numbers: list[int]) -> str:
    """`layers 0–3 and 7`: runs of three or more are drawn together."""
    runs: list[list[int]] = []
    for value in sorted(numbers):
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    parts = [part for run in runs for part in ([f"{run[0]}–{run[-1]}"] if len(run) > 2 else map(str, run))]
    return f"{'layer' if len(numbers) == 1 else 'layers'} {listing(parts)}"
