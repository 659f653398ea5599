"""Section "Token or context?": nested gates, shares of ŷ, what the token foretells, token identity.

In: the tables `gate_differences`, `decomposition`, `output_shares`, `variance`, each optional. Out: HTML,
empty without any of them. Cost: up to four figures and five tables.
"""

import polars as pl

from . import comparisons, findings, text
from . import context_findings as said
from . import context_tables as tables
from .figure import figure
from .layout import numbers, section
from .multiples import by_layer, cut, domain_of, panel
from .results import Results

KEY, HEADING = "context", "Token or context?"

_NESTED = (
    "What a gate gains when it sees the other side as well: AUC of both together less AUC of one side, "
    "paired over the same tokens. Dashed: 0. Bars or bands: 95 % intervals for all layers at once. The "
    "side of the context is <em>context_only</em>, what attention and earlier MLPs wrote less what "
    "follows from the token: a gate on the whole context part sees the token too, so its AUC says nothing "
    "about context. It may also hold a code of the token that is not linear: context adds only where it "
    "does so among occurrences of one token too. Where even both together do not beat chance, nothing can "
    "be told."
)
_FORETOLD = (
    "R² of a linear map from the token's embedding to the context part k, fitted on fit rows and scored "
    "on test rows, with 95 % intervals. x = β + t + p + k holds exactly: t, p and k are the token's own, "
    "the position's and the context's part of the MLP's input."
)
_SHARES = (
    "A part's share of the variance of ŷ: its own variance and half of what it shares with the others, "
    "summed over features; shares add up to 100 %, and a part that counteracts the others has a negative "
    "one. Above (<em>raw</em>) the exact parts; below (<em>replaced</em>) with what the token foretells "
    "of the context moved to the token. 95 % intervals of each layer."
)
_IDENTITY = (
    "Share of the variance of the need that goes with the identity of a token: mean product of centred "
    "needs of two occurrences of the same token in different groups of documents, over the variance. "
    "Noise is symmetric about 0, so a share may be negative; where its interval holds 0, nothing reliable "
    "was found, and neither token nor context can be credited. Dashed: one half. Bars or bands: 95 % "
    "intervals for all layers at once."
)


def _difference_figure(results: Results) -> str:
    ends = ("sim_lo", "sim_hi")
    panels = [panel(claim, rows, "difference", ends) for claim, rows in said.claims(results)]
    domain = domain_of(panels, (-1.0, 1.0), show=(-0.02, 0.05), step=0.05)
    return figure(
        "differences",
        results,
        said.differences(results),
        _NESTED,
        lambda size: by_layer(
            panels, axis="difference of AUC [1]", domain=domain, rule=0.0, columns=(2, 1), size=size
        ),
    )


def _foretold_figure(results: Results) -> str:
    frame = results.tables["decomposition"]
    ends = ("token_in_context_lo", "token_in_context_hi")
    panels = [panel("what the token foretells of k", frame, "token_in_context", ends)]
    domain = domain_of(panels, (-0.1, 1.0), show=(0.0, 1.0))
    return figure(
        "foretold",
        results,
        said.in_context(results),
        _FORETOLD,
        lambda size: by_layer(panels, axis="R² [%]", domain=domain, columns=(1, 1), percent=True, size=size),
    )


def _shares_figure(results: Results) -> str:
    frame = results.tables["output_shares"]
    parts = frame.select("split_by", "part").unique(maintain_order=True).to_dicts()
    panels = [
        panel(
            f"{text.name(one['split_by'], 12)}: {text.name(one['part'], 16)}",
            frame.filter((pl.col("split_by") == one["split_by"]) & (pl.col("part") == one["part"])),
            "share",
            ("share_lo", "share_hi"),
        )
        for one in parts
    ]
    domain = domain_of(panels, (-1.0, 2.0), show=(0.0, 1.0))
    across = max(1, len([one for one in parts if one["split_by"] == parts[0]["split_by"]]))
    return figure(
        "parts",
        results,
        said.output_shares(results),
        _SHARES,
        lambda size: by_layer(
            panels,
            axis="share of Var ŷ [%]",
            domain=domain,
            rule=0.0,
            columns=(across, min(2, across)),
            percent=True,
            size=size,
        ),
        "Values beyond the axis are drawn on its edge." if cut(panels, domain) else "",
    )


def _identity_figure(results: Results) -> str:
    need, _ = results.first("variance")
    panels = [
        panel(
            said.key_title(key), said.identity_rows(results, key), "share", ("share_sim_lo", "share_sim_hi")
        )
        for key in said.identity_keys(results)
    ]
    domain = domain_of(panels, (-0.5, 1.0), show=(0.0, 0.6))
    return figure(
        "identity",
        results,
        said.identity(results),
        f"{_IDENTITY} The need is <em>{text.escape(findings.need_name(need))}</em>.",
        lambda size: by_layer(
            panels,
            axis="share of the variance of need [%]",
            domain=domain,
            rule=0.5,
            columns=(2, 1),
            percent=True,
            size=size,
        ),
    )


def render(results: Results) -> str:
    """The section; nothing where none of its analyses was run."""
    parts: list[str] = []
    if results.has("gate_differences") and (claims := said.claims(results)):
        caption = said.differences(results)
        parts += [
            _difference_figure(results),
            numbers(
                "Verdicts",
                comparisons.verdict_table(results, claims, "table-difference-verdicts"),
                opened=True,
            ),
            numbers(
                "Differences of every layer and need",
                comparisons.table(results, list(said.NESTED), "table-differences", caption),
            ),
        ]
    if results.has("decomposition"):
        parts += [
            _foretold_figure(results),
            numbers("What the token foretells of the context part", tables.foretold(results)),
        ]
    if results.has("output_shares"):
        parts += [_shares_figure(results), numbers("Shares of ŷ", tables.output_shares(results))]
    if results.has("variance"):
        parts += [
            _identity_figure(results),
            numbers("Verdicts: identity explains at least half", tables.identity_verdicts(results)),
            numbers("Shares of token identity, every layer and need", tables.identity(results)),
        ]
    return section(KEY, HEADING, *parts) if parts else ""
