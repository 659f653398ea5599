"""The sections of the analyses and of a measurement in their order, what each adds to the opening, and what
was not run.

In: `Results`. Out: HTML. A section of what was not run is left out; a line at the end says which, and the
command that runs them. Cost: that of the sections.
"""

from collections.abc import Callable, Sequence

from . import (
    budget_section,
    context_findings,
    context_section,
    costs_section,
    fit_section,
    gates_findings,
    gates_section,
    losses_section,
    nofly_findings,
    nofly_section,
    sets_section,
    text,
    tuning_section,
    which_section,
)
from .columns import MEASURE
from .layout import note
from .results import Results

_ALWAYS_BEFORE = (("harvest", "Harvest"), ("linear", "R² by layer"))
_CONTEXT = ("gate_differences", "decomposition", "output_shares", "variance")
_ALWAYS = (("need", "Need of tokens"), ("skew", "Skew"), ("sinks", "Sinks"), ("tokens", "Tokens"))
_MEASURED = (costs_section, sets_section, budget_section, losses_section, tuning_section)
_SHORT = {
    "costs": "Cost of a layer",
    "sets": "Cost of several",
    "budget": "Time",
    "losses": "Loss",
    "tuning": "Training",
}
_ALWAYS_AFTER = (("reading", "How to read"), ("provenance", "Provenance"))


def _gates(results: Results) -> list[str]:
    return [gates_findings.auc(results)] if results.has("gates") else []


def _nofly(results: Results) -> list[str]:
    return [nofly_findings.correlation(results)] if results.has("nofly") else []


_ANSWERS: tuple[tuple[str, str, Callable[[Results], list[str]]], ...] = (
    (gates_section.KEY, gates_section.HEADING, _gates),
    (context_section.KEY, context_section.HEADING, context_findings.answers),
    (nofly_section.KEY, nofly_section.HEADING, _nofly),
    (which_section.KEY, which_section.HEADING, which_section.answers),
    *((one.KEY, one.HEADING, one.answers) for one in _MEASURED),
)


def _sentences(found: list[str]) -> str:
    return "".join(f"<span>{text.escape(sentence)}.</span>" for sentence in found)


def said(results: Results) -> list[tuple[str, str, list[str]]]:
    """Key, question and sentences of the analyses that were run."""
    return [(key, heading, found) for key, heading, say in _ANSWERS if (found := say(results))]


def answers(results: Results) -> str:
    """The sentences of the analyses that were run, each under its question."""
    items = [
        f'<li><a href="#{key}">{heading}</a>{_sentences(found)}</li>' for key, heading, found in said(results)
    ]
    return f'<ul class="further">{"".join(items)}</ul>' if items else ""


def render(results: Results) -> list[str]:
    """The sections of the analyses, and the line on those that were not run."""
    sections = (gates_section, context_section, nofly_section, which_section, *_MEASURED)
    return [*(one.render(results) for one in sections), not_run(results)]


def links(results: Results) -> list[tuple[str, str]]:
    """Keys of the sections that are there, and their names in the list of contents."""
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
    links += [(one.KEY, _SHORT[one.KEY]) for one in _MEASURED if one.is_there(results)]
    return [*links, *_ALWAYS_AFTER]


def contents(results: Results) -> str:
    """Links to the sections that are there."""
    return linked(links(results))


def linked(found: Sequence[tuple[str, str]]) -> str:
    """Links to sections."""
    return " ".join(f'<a href="#{key}">{words}</a>' for key, words in found)


def not_run(results: Results) -> str:
    """Which analyses were not run, whether the model was not visited again, and what does it."""
    missing, said = results.missing, ""
    if missing:
        said = (
            f"Not run on this study: {text.listing(missing)}. <code>nearline analyze STUDY --only "
            f"{','.join(missing)}</code> runs {'it' if len(missing) == 1 else 'them'}."
        )
    if MEASURE not in results.analyses:
        measured = "Not measured: what replacing an MLP costs the model itself."
        said += f"{' ' if said else ''}{measured} <code>nearline measure STUDY</code> visits it again."
    return note(said)
