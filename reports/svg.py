"""A chart as one static, accessible piece of SVG, ready to stand in a page.

In: an Altair chart and the sentence it shows. Out: `<svg role="img" aria-label=…><title>…` without scripts,
sizes in CSS, or references to anything outside it. Same chart, same bytes. Cost: vl-convert takes about
half a second for the first chart of a process, 0.05–0.15 s for each further one.
"""

import re
from collections.abc import Mapping

import altair as alt
import vl_convert

from .text import escape

_OPENING = re.compile(r'<svg [^>]*?width="(?P<width>[\d.]+)" height="(?P<height>[\d.]+)"[^>]*>')
_NOISE = re.compile(
    r' (?:aria-hidden|aria-roledescription|pointer-events|stroke-miterlimit|role|font-family)="[^"]*"'
    r'|<path class="(?:background|foreground)"[^>]*(?:d="M0,0h0v0h0Z"|display="none")[^>]*/>'
)
_LONG_DECIMAL = re.compile(r"(?<=\d)\.(\d{2})\d+")
_TAG = re.compile(r"<[^>]*>")
_UNSAFE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff\ud800-\udfff]")


def _checked(value: object) -> None:
    """Refuse text that XML cannot hold: vl-convert would end the whole process, not raise."""
    if isinstance(value, Mapping):
        for part in value.values():
            _checked(part)
    elif isinstance(value, list | tuple):
        for part in value:
            _checked(part)
    elif isinstance(value, str) and _UNSAFE.search(value):
        raise ValueError(
            f"a chart holds the text {value!r}, which SVG cannot: pass it through text.visible first"
        )


def _shorter(tag: re.Match[str]) -> str:
    """A tag with its coordinates to a hundredth of a pixel; the numbers that are shown keep their digits."""
    return _LONG_DECIMAL.sub(r".\1", tag[0])


def render(chart: alt.TopLevelMixin, sentence: str) -> str:
    """The chart as inline SVG that scales to its box and is read out as `sentence`."""
    spec = chart.to_dict(validate=False)  # the tests validate every chart of the page
    _checked(spec)
    drawn = vl_convert.vegalite_to_svg(spec)
    opening = _OPENING.match(drawn)
    if opening is None:
        raise RuntimeError(f"vl-convert returned no SVG but {drawn[:80]!r}")
    width, height = float(opening["width"]), float(opening["height"])
    body = _TAG.sub(_shorter, _NOISE.sub("", drawn[opening.end() :]))
    label = escape(sentence)
    return (
        f'<svg role="img" aria-label="{label}" viewBox="0 0 {width:g} {height:g}"'
        f' style="max-width:{width:g}px"><title>{label}</title>{body}'
    )
