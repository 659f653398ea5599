"""Several studies on one page: each question once, and under it what each model answers.

In: `Results` of two or more studies, in the order given. Out: one HTML document. It opens with every model's
answer, a table of all models and corpora side by side, and a figure over depth; then come the sections of a
page of one study, model by model under each heading. Every caption names its model, every id its study. Cost:
that of the single pages.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from . import analyses, findings, gathered, models_section, page, provenance, reading, sections, text
from .layout import parted, section
from .results import Results

_SLUG = re.compile(r"[^A-Za-z0-9]+")


@dataclass(frozen=True, slots=True)
class Part:
    """What one study adds to the page."""

    label: str
    answers: str
    verdicts: str
    body: list[str]
    footer: str
    kept: gathered.Gathered


def labels(studies: Sequence[Results]) -> list[str]:
    """The name of each study on the page: its model, and its own name where models repeat."""
    models = [findings.model(one) for one in studies]
    return [
        model if models.count(model) == 1 else f"{model} ({text.name(one.study, 40)})"
        for model, one in zip(models, studies, strict=True)
    ]


def tags(studies: Sequence[Results]) -> list[str]:
    """What tells the ids of each study apart: its name, in letters that an id and a folder may have."""
    found: list[str] = []
    for one in studies:
        slug = _SLUG.sub("-", one.study).strip("-").lower()[:40] or "study"
        found.append(f"{slug}-{len(found) + 1}" if slug in found else slug)
    return found


def _part(results: Results, tag: str, label: str) -> Part:
    with gathered.gathering(tag, label) as kept:
        return Part(
            label,
            page.answers(results).replace("<b>", f"<b>{text.escape(label)}. ", 1),
            sections.verdicts(results),
            page.body(results),
            provenance.footer(results),
            kept,
        )


def _headed(label: str, body: str, ident: str = "") -> str:
    """The part of one study below a heading; its own headings move down by one."""
    lower = body
    for level in (4, 3):
        lower = lower.replace(f"<h{level}>", f"<h{level + 1}>").replace(f"</h{level}>", f"</h{level + 1}>")
    opened = f'<div id="{ident}">' if ident else "<div>"
    return f'{opened}\n<h3 class="model">{text.escape(label)}</h3>\n{lower}\n</div>'


def _sections(parts: Sequence[Part]) -> list[str]:
    """Each question once, in the order of the first study that asks it."""
    headings: dict[str, str] = {}
    bodies: dict[str, list[str]] = {}
    rest: list[str] = []
    for part in parts:
        for whole in part.body:
            found = parted(whole)
            if found is None:
                rest.append(_headed(part.label, whole))
                continue
            key, heading, inner = found
            headings.setdefault(key, heading)
            bodies.setdefault(key, []).append(_headed(part.label, inner, f"{part.kept.tag}-{key}"))
    asked = [section(key, heading, *bodies[key]) for key, heading in headings.items()]
    return [*asked, section("missing", "What was not run", *rest)] if rest else asked


def _further(studies: Sequence[Results], parts: Sequence[Part]) -> str:
    """Each question of the analyses once, with every model's sentences."""
    headings: dict[str, str] = {}
    answers: dict[str, list[str]] = {}
    for results, part in zip(studies, parts, strict=True):
        for key, heading, found in analyses.said(results):
            headings.setdefault(key, heading)
            words = " ".join(f"{text.escape(one)}." for one in found)
            answers.setdefault(key, []).append(f"<span><b>{text.escape(part.label)}:</b> {words}</span>")
    items = [f'<li><a href="#{key}">{headings[key]}</a>{"".join(answers[key])}</li>' for key in headings]
    return f'<ul class="further">{"".join(items)}</ul>' if items else ""


def _contents(studies: Sequence[Results], there: Sequence[str]) -> str:
    """Links in the order of the page."""
    words = {key: name for results in studies for key, name in analyses.links(results)}
    order = [match[1] for whole in there if (match := re.match(r'<section id="([a-z]+)"', whole))]
    known = [(key, words[key]) for key in [*order, "reading", "provenance"] if key in words]
    return analyses.linked([(models_section.KEY, "Side by side"), *known])


def render(studies: Sequence[Results]) -> tuple[str, list[gathered.Gathered]]:
    """The whole page, and what stands on it: first what compares the models, then study by study."""
    names = labels(studies)
    parts = [_part(*one) for one in zip(studies, tags(studies), names, strict=True)]
    with gathered.gathering() as shared:
        compared = models_section.render(studies, names)
    questions = _sections(parts)
    listed, named = text.escape(text.listing(names)), [text.name(one.study) for one in studies]
    # The definitions are those of the study with most analyses; the threshold may differ from study to study.
    fullest = max(studies, key=lambda results: len(results.tables))
    said = dict.fromkeys(findings.claim(results) for results in studies)
    # That of a study of one corpus is the beginning of the others'.
    claims = [one for one in said if not any(other != one and other.startswith(one) for other in said)]
    document = page.fill(
        title=f"Which MLPs of {listed} are nearly linear?",
        heading=f'Which MLPs of <span class="name">{listed}</span> are nearly linear?',
        study=f"{len(studies)} studies: {text.escape(text.listing(named))}",
        answers="\n".join(part.answers for part in parts),
        further=_further(studies, parts),
        verdicts="",
        claim=text.escape(" ".join(claims)),
        contents=_contents(studies, questions),
        sections="\n".join([compared, *questions]),
        reading=reading.definitions(fullest),
        provenance="\n".join(_headed(part.label, part.footer) for part in parts),
    )
    return document, [shared, *(part.kept for part in parts)]
