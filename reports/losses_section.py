"""Section "What does the loss itself say?": the paper's δ, its expectation, and how the needs agree.

In: the tables `losses`, `loss_histogram`, `kl_loss`, `need_agreement`, `estimate` and `noise_floor`, each
optional. Out: HTML, empty without any of them. Sentences are in `losses_findings`. Cost: up to
four figures.
"""

import polars as pl

from . import charts, findings, text
from . import losses_findings as said
from . import losses_tables as tables
from .axes import beyond, ends_of
from .figure import figure
from .layout import layer_titles, note, numbers, section
from .multiples import by_layer, panel
from .results import Results

KEY, HEADING = "losses", "What does the loss itself say?"
PAIRS = 6
"""Pairs of needs that are drawn; all of them are in the table."""
_TABLES = ("losses", "kl_loss", "need_agreement", "estimate", "noise_floor")

_LOSSES = (
    "δ, the paper's need: the loss of a token's target with the layer linearised less its loss before, in "
    "nats; negative where the linear map did better. One outline a corpus; the axis ends at the 1 % and 99 % "
    "quantiles. Shown: the layers of lowest, middle and highest mean. Counts of every layer: "
    "<code>tables/loss_histogram.parquet</code>."
)
_KL = (
    "Mean δ less mean KL(before, after), in nats a token: KL is what the model itself expects δ to be, the "
    "mean over targets drawn from its own beliefs. Dashed: 0, where it is right about what is lost. Bars or "
    "bands: 95 % intervals for all layers at once. Where the whole interval of R² of δ on KL lies below 0.5, "
    "most of δ is the luck of the target, and no gate can know it."
)
_AGREEMENT = (
    "Spearman's ρ of two needs over test tokens: 1 where they put tokens in the same order, 0 where they "
    "have nothing to do with one another. Dashed: 0. Bars or bands: 95 % intervals for all layers at once."
)
_ESTIMATE = (
    "<em>loss_estimate</em> is the first-order effect of linearising one position on all later targets, from "
    "the harvested gradient, without a second visit; here it is set against exact patches of single "
    "positions. Within like positions: what is left where both do not simply grow with the rest of the "
    "window. Dashed: 0. Bars or bands: 95 % intervals (first panel: for all layers at once)."
)


def _loss_figure(results: Results) -> str:
    frame = results.tables["losses"].filter(pl.col("need") == "loss")
    layers = findings.representatives(frame, "mean")
    shown = frame.filter(pl.col("layer").is_in(layers))
    bins = _densities(results).filter(pl.col("layer").is_in(layers))
    ends = [shown["q01"].min(), shown["q99"].max()]
    if bins.is_empty() or not all(isinstance(end, float) for end in ends) or not ends[0] < ends[1]:  # type: ignore[operator]
        return ""
    low, high = (float(end) for end in ends)  # type: ignore[arg-type]
    return figure(
        "losses",
        results,
        said.loss_finding(results),
        _LOSSES,
        lambda size: charts.histograms(
            bins,
            list(layer_titles(layers).items()),
            start=low,
            upto=high,
            axes=("δ of a token [nats]", "tokens per 0.1 nats [%]"),
            size=size,
        ),
    )


def _densities(results: Results) -> pl.DataFrame:
    """Bins of δ as percent of tokens per 0.1 nats."""
    if not results.has("loss_histogram"):
        return pl.DataFrame(schema={"layer": pl.Int64, "series": pl.Int64})
    bins = results.tables["loss_histogram"].filter(pl.col("need") == "loss")
    share = pl.col("count") / pl.col("count").sum().over("series", "layer")
    width = pl.col("bin_hi") - pl.col("bin_lo")
    return bins.with_columns(density=10 * share / width).filter(pl.col("density").is_finite())


def _kl_figure(results: Results) -> str:
    rows = results.tables["kl_loss"]
    panels = [panel("mean δ − mean KL", rows, "difference", ("difference_sim_lo", "difference_sim_hi"))]
    domain = ends_of(panels)
    return figure(
        "kl",
        results,
        said.kl_finding(results),
        _KL,
        lambda size: by_layer(
            panels, axis="difference [nats a token]", domain=domain, rule=0.0, columns=(1, 1), size=size
        ),
        beyond(panels, domain, text.nats, findings.labels(results)),
    )


def _agreement_figure(results: Results) -> str:
    pairs = said.pairs(results)
    panels = [
        panel(
            f"{findings.need_name(one)} and {findings.need_name(other)}",
            rows,
            "spearman",
            ("sim_lo", "sim_hi"),
        )
        for one, other, rows in pairs[:PAIRS]
    ]
    more = len(pairs) - len(panels)
    domain = said.correlations(panels)
    return figure(
        "agreement",
        results,
        said.agreement_finding(results),
        _AGREEMENT,
        lambda size: by_layer(
            panels, axis="Spearman's ρ [1]", domain=domain, rule=0.0, columns=(3, 1), size=size
        ),
        f"{more} more pairs are in the table." if more > 0 else "",
    )


def _estimate_figure(results: Results) -> str:
    rows = results.tables["estimate"]
    panels = [
        panel("against exact patches", rows, "spearman", ("spearman_sim_lo", "spearman_sim_hi")),
        panel(
            "the same within like positions",
            rows,
            "within_position",
            ("within_position_lo", "within_position_hi"),
        ),
    ]
    domain = said.correlations(panels)
    return figure(
        "estimate",
        results,
        said.estimate_finding(results),
        _ESTIMATE,
        lambda size: by_layer(
            panels, axis="Spearman's ρ [1]", domain=domain, rule=0.0, columns=(2, 1), size=size
        ),
    )


def is_there(results: Results) -> bool:
    """Whether there is anything to show."""
    return any(results.has(name) for name in _TABLES)


def answers(results: Results) -> list[str]:
    """What δ looks like, and whether the offline need says the same."""
    found = [said.loss_finding(results)] if results.has("losses") else []
    if results.has("need_agreement") and (sentence := said.opening(results)):
        found.append(sentence)
    return found


def render(results: Results) -> str:
    """The section; nothing where no loss was brought home."""
    parts: list[str] = []
    if results.has("losses"):
        parts += [_loss_figure(results), numbers("Quantiles of δ and KL", tables.losses(results))]
    if results.has("noise_floor"):
        parts.append(note(f"<b>{text.escape(said.noise_finding(results))}.</b> {said.NOISE}"))
        parts.append(numbers("Rounding, every layer", tables.noise(results)))
    if results.has("kl_loss"):
        parts += [_kl_figure(results), numbers("δ against KL, every layer", tables.kl(results))]
    if results.has("need_agreement"):
        parts += [_agreement_figure(results), numbers("Every pair of needs", tables.agreement(results))]
    if results.has("estimate"):
        parts += [_estimate_figure(results), numbers("The estimate, every layer", tables.estimate(results))]
    return section(KEY, HEADING, *parts) if parts else ""
