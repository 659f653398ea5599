"""The sections of the analyses in their order, what each adds to the opening, and what was not run.

In: `Results`. Out: HTML. A section of an analysis that was not run is left out; one line at the end says
which, and the command that runs them. Cost: that of the sections.
"""

from collections.abc import Callable

from . import (
    context_findings,
    context_section,
    fit_section,
    gates_findings,
    gates_section,
    nofly_findings,
    nofly_section,
    text,
    which_section,
)
from .layout import note
from .results import Results

_ALWAYS_BEFORE = (("harvest", "Harvest"), ("linear", "R² by layer"))
_CONTEXT = ("gate_differences", "decomposition", "output_shares", "variance")
_ALWAYS = (("need", "Need of tokens"), ("skew", "Skew"), ("sinks", "Sinks"), ("tokens", "Tokens"))
_ALWAYS_AFTER = (("reading", "How to read"), ("provenance", "Provenance"))


def _gates(results: Results) -> list[str]:
    return [gates_findings.claim(results)] if results.has("gates") else []


def _nofly(results: Results) -> list[str]:
    return [nofly_findings.claim(results)] if results.has("nofly") else []


_ANSWERS: tuple[tuple[str, str, Callable[[Results], list[str]]], ...] = (
    (gates_section.KEY, gates_section.HEADING, _gates),
    (context_section.KEY, context_section.HEADING, context_findings.answers),
    (nofly_section.KEY, nofly_section.HEADING, _nofly),
    (which_section.KEY, which_section.HEADING, which_section.answers),
)


def _sentences(found: list[str]) -> str:
    return "".join(f"<span>{text.escape(sentence)}.</span>" for sentence in found)


def answers(results: Results) -> str:
    """The sentences of the analyses that were run, each under its question."""
    items = [
        f'<li><a href="#{key}">{heading}</a>{_sentences(found)}</li>'
        for key, heading, say in _ANSWERS
        if (found := say(results))
    ]
    return f'<ul class="further">{"".join(items)}</ul>' if items else ""


def render(results: Results) -> list[str]:
    """The sections of the analyses, and the line on those that were not run."""
    sections = (gates_section, context_section, nofly_section, which_section)
    return [*(one.render(results) for one in sections), not_run(results)]


def contents(results: Results) -> str:
    """Links to the sections that are there."""
    links = list(_ALWAYS_BEFORE)
    if results.has("learning_curve") or results.has("ranks") or results.has("variants"):
        links.append((fit_section.KEY, "Text and rank"))
    links += _ALWAYS
    links += [(gates_section.KEY, "Gates")] if results.has("gates") else []
    if any(results.has(name) for name in _CONTEXT):
        links.append((context_section.KEY, "Token or context"))
    links += [(nofly_section.KEY, "Other corpora")] if "nofly" in results.tables else []
    if any(results.has(name) for name in ("regression", "regression_terms", "clusters")):
        links.append((which_section.KEY, "Which tokens"))
    return " ".join(f'<a href="#{key}">{words}</a>' for key, words in [*links, *_ALWAYS_AFTER])


def not_run(results: Results) -> str:
    """Which analyses were not run, and what runs them."""
    missing = results.missing
    if not missing:
        return ""
    study = text.escape(text.name(results.study))
    return note(
        f"Not run on this study: {text.listing(missing)}. <code>nearline analyze {study} --only "
        f"{','.join(missing)}</code> runs {'it' if len(missing) == 1 else 'them'}."
    )
