"""The page itself: sections in the order a reader asks, filled into `page.html` with `page.css` inside.

In: `Results`. Out: one HTML document as text, with no reference to anything outside itself and one script,
which sorts tables: the page's own policy lets no other one run, and nothing is lost without it.
Every stored string has passed `text.escape` or `text.markup`; every figure has its sentence above it, as
its alternative text and as the caption of its table. Same results, same bytes. Cost: one to
four seconds, nearly all of it drawing.
"""

from base64 import b64encode
from hashlib import sha256
from importlib import resources
from string import Template

import polars as pl

from . import (
    analyses,
    charts,
    examples,
    findings,
    fit_section,
    harvested,
    overview,
    provenance,
    reading,
    sections,
    sinks_findings,
    text,
)
from .chart_style import largest
from .figure import figure
from .layout import numbers, section
from .results import Results


def answers(results: Results) -> str:
    """The answer: a paragraph on the corpus that was fitted, and one on the maps elsewhere."""
    return "\n".join(
        f'<p class="answer"><b>{text.escape(opening)}</b> {text.escape(words)}</p>'
        for opening, words in overview.paragraphs(results)
    )


def _lines(sample: str) -> str:
    """The sample with its line ends both drawn and kept."""
    return text.markup(text.clip(sample, 300)).replace("<i>↵</i>", "<i>↵</i>\n")


def _harvest(results: Results) -> str:
    samples = [
        f"<h3>First rows of {text.escape(findings.label(results, at))}, "
        f"decoded</h3><pre><bdi>{_lines(sample or '')}</bdi></pre>"
        for at, sample in enumerate(results.harvest["sample"].to_list())
    ]
    return section("harvest", "What was harvested", harvested.table(results), *samples)


def _linear(results: Results) -> str:
    frame = results.surrogates
    floor = charts.floor_of(frame, results.claim_at)
    below = frame.filter(pl.min_horizontal("r2_test", "r2_sim_lo") < floor).sort(
        "r2_test", maintain_order=True
    )
    where = [f" on {name}" if len(results.stores) > 1 else "" for name in findings.labels(results)]
    named = [
        f"layer {row['layer']}{where[row['series']]} ({findings.r2_words(row)})" for row in below.to_dicts()
    ]
    note = f"Cut at the lower edge of the axis: {text.some(named)}." if named else ""
    drawn = figure(
        "r2",
        results,
        findings.r2(results),
        reading.R2,
        lambda size: charts.held_out_r2(frame, claim_at=results.claim_at, size=size),
        note,
    )
    table = numbers("R², penalty and condition of every layer", sections.surrogates(results), opened=True)
    return section(
        "linear", "How linear each MLP is", drawn, table, f'<p class="note">{reading.SURROGATE_COLUMNS}</p>'
    )


def _need(results: Results) -> str:
    frame = results.errors()
    return section(
        "need",
        "How much tokens need the nonlinearity",
        f"<p>{reading.MOVED}</p>" if findings.moved(results) else "",
        figure(
            "need",
            results,
            findings.need(results),
            reading.QUANTILES,
            lambda size: charts.need_quantiles(frame, size=size),
        ),
        numbers("Quantiles of error", sections.quantiles(results)),
        figure(
            "shares",
            results,
            findings.shares(results),
            reading.SHARES,
            lambda size: charts.shares_below(frame, size=size),
        ),
        numbers("Shares and skew", sections.shares(results)),
        numbers(
            "The other needs: absolute, relative to ‖y‖, relative to the residual stream",
            sections.other_needs(results),
        ),
    )


def _panels(results: Results) -> list[tuple[int, str]]:
    """The most, the middle and the least linear layer where maps were fitted, in the order of layers."""
    rows = results.surrogates.filter(pl.col("series") == next(iter(findings.at_home(results)), 0))
    low, high = findings.extremes(rows, "r2_test") or ({}, {})
    words = {low.get("layer"): ", the least linear", high.get("layer"): ", the most linear"}
    layers = findings.representatives(rows, "r2_test")
    return [(layer, f"layer {layer}{words.get(layer, '')}") for layer in layers]


def _densities(results: Results) -> pl.DataFrame:
    """Bins of the need `error` as percent of tokens per 0.1 of error."""
    bins = results.histogram.filter(pl.col("need") == "error")
    share = pl.col("count") / pl.col("count").sum().over("series", "layer")
    width = pl.col("bin_hi") - pl.col("bin_lo")
    return bins.with_columns(density=10 * share / width).filter(pl.col("density").is_finite())


def _skew(results: Results) -> str:
    frame, panels = results.errors(), _panels(results)
    shown = frame.filter(pl.col("layer").is_in([layer for layer, _ in panels]))
    upto = largest(shown, "q99", at_least=0.5)
    bins = _densities(results).filter(pl.col("layer").is_in([layer for layer, _ in panels]))
    small = (
        ""
        if bins.is_empty()
        else figure(
            "histograms",
            results,
            findings.histogram(results),
            reading.HISTOGRAMS,
            lambda size: charts.histograms(bins, panels, upto=upto, size=size),
        )
    )
    return section(
        "skew",
        "How unevenly need is spread",
        f"<p>{reading.SKEW}</p>",
        figure(
            "skew",
            results,
            findings.skew(results),
            reading.CARRIED,
            lambda size: charts.skew(frame, size=size),
        ),
        small,
    )


def _tokens(results: Results) -> str:
    """Examples of every layer, store by store; the most and the least linear layer start unfolded."""
    parts, most, away = [], examples.each(results.examples), findings.moved(results)
    longest = results.examples.filter(pl.col("need") == "error")["rank"].max()
    shown = reading.tokens_shown(most) if isinstance(longest, int) and longest > most else ""
    for at in range(len(results.stores)):
        rows = results.surrogates.filter(pl.col("series") == at)
        low, high = findings.extremes(rows, "r2_test") or ({}, {})
        ends = (
            (", the lowest", ", the highest") if at in away else (", the least linear", ", the most linear")
        )
        words = dict(zip((low.get("layer"), high.get("layer")), ends, strict=True))
        titles = {
            row[
                "layer"
            ]: f"Layer {row['layer']}: R² {text.number(row['r2_test'])}{words.get(row['layer'], '')}"
            for row in rows.to_dicts()
        }
        found = examples.by_layer(
            results.examples.filter(pl.col("series") == at), titles, opened=frozenset(words), most=most
        )
        parts += [f"<h3>{text.escape(findings.label(results, at))}</h3>", found] if found else []
    return section(
        "tokens",
        "Tokens of highest and lowest need",
        f"<p>{reading.TOKENS}{shown}</p>",
        *(parts or [reading.NO_TOKENS]),
    )


def body(results: Results) -> list[str]:
    """The sections, in the order a reader asks."""
    found = [
        _harvest(results),
        _linear(results),
        fit_section.render(results),
        _need(results),
        _skew(results),
        section(
            "sinks",
            "Sinks apart",
            f"<p>{text.escape(sinks_findings.finding(results))}. {reading.SINKS}</p>",
            sections.sinks(results),
        ),
        _tokens(results),
        *analyses.render(results),
    ]
    return [part for part in found if part]


def fill(**parts: str) -> str:
    """The template with its style and its one script, which the page's own policy allows by its hash."""
    folder = resources.files(__package__ or "nearline.reports")
    script = (folder / "page.js").read_text(encoding="utf-8")
    allowed = b64encode(sha256(f"\n{script}".encode()).digest()).decode()
    style = (folder / "page.css").read_text(encoding="utf-8")
    template = Template((folder / "page.html").read_text(encoding="utf-8"))
    return template.substitute(parts, style=style, script=script, allowed=allowed)


def render(results: Results) -> str:
    """The whole page of one study."""
    model = text.escape(findings.model(results))
    return fill(
        title=f"Which MLPs of {model} are nearly linear?",
        heading=f'Which MLPs of <span class="name">{model}</span> are nearly linear?',
        study=f"the study {text.escape(text.name(results.study))}",
        answers=answers(results),
        further=analyses.answers(results),
        verdicts=sections.verdicts(results),
        claim=text.escape(findings.claim(results)),
        contents=analyses.contents(results),
        sections="\n".join(body(results)),
        reading=reading.definitions(results),
        provenance=provenance.footer(results),
    )
