"""A chart as one static, accessible piece of SVG, ready to stand in a page.

In: an Altair chart and the sentence it shows. Out: `<svg role="img" aria-label=…><title>…` without scripts,
sizes in CSS, or references to anything outside it. Same chart, same bytes. Cost: vl-convert takes about
half a second for the first chart of a process, 0.05–0.15 s for each further one.
"""

import re
from collections.abc import Mapping

import altair as alt
import vl_convert

from .compact import compact
from .text import escape

_OPENING = re.compile(r'<svg [^>]*?width="(?P<width>[\d.]+)" height="(?P<height>[\d.]+)"[^>]*>')
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


def drawn(chart: alt.TopLevelMixin) -> tuple[float, float, str]:
    """Width, height and content of the drawing, in pixels and in as few bytes as it takes."""
    spec = chart.to_dict(validate=False)  # the tests validate every chart of the page
    _checked(spec)
    whole = vl_convert.vegalite_to_svg(spec)
    opening = _OPENING.match(whole)
    if opening is None:
        raise RuntimeError(f"vl-convert returned no SVG but {whole[:80]!r}")
    return float(opening["width"]), float(opening["height"]), compact(whole[opening.end() :])


def render(chart: alt.TopLevelMixin, sentence: str) -> str:
    """The chart as inline SVG that scales to its box and is read out as `sentence`."""
    width, height, body = drawn(chart)
    label = escape(sentence)
    return (
        f'<svg role="img" aria-label="{label}" viewBox="0 0 {width:g} {height:g}"'
        f' style="max-width:{width:g}px"><title>{label}</title>{body}</svg>'
    )
