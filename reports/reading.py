"""The words that explain the page: captions and definitions, in the terms of the project's design.

In: the threshold and coverage of the study. Out: HTML of ours, without stored strings. No numbers but those
that define something.
"""

from . import findings, terms
from .results import Results

R2 = (
    "Points: R² on test documents. Thick bar: 95 % interval of this layer. Thin bar: 95 % interval "
    "for all layers at once, on which the verdict rests. 1 is an MLP that is exactly linear, 0 one "
    "that the map explains no better than its mean output."
)
SURROGATE_COLUMNS = (
    "<em>Maps</em> that were <em>moved</em> come from another corpus: their R² says how well they transfer. "
    "<em>Simultaneous</em> intervals hold for all layers at once; <em>fit</em> is in-sample; "
    "<em>folds</em> is cross-validated over groups of documents and chose alpha (both only where the "
    "maps were fitted); <em>contribution</em> is R² of what the MLP adds to the residual stream "
    "(after a post-norm, where the model has one); <em>largest token</em> is the share of Σ‖y − ȳ‖² that "
    "one test token carries: near 100 %, R² and error speak of it alone. A high condition number or few "
    "tokens per feature say that the fit, not the MLP, may be the limit. The same numbers, and the tokens "
    "and groups behind them: <code>tables/surrogates.parquet</code>."
)
MOVED = (
    "On corpora that the maps were not fitted on, <em>error</em> is that of the move as well: a map fitted "
    "there may do better."
)
QUANTILES = (
    "Point: median over test tokens. Thick bar: middle half. Thin bar: 5 % to 95 %. Dashed: 0.5 and "
    "1, the two levels whose shares come next."
)
SHARES = "Share of test tokens for which the map is that good, with 95 % intervals over groups of documents."
CARRIED = (
    "Above: share of Σ error² that belongs to the 5 % of tokens with the highest error. Below: "
    "skewness, 0 for a symmetric distribution."
)
HISTOGRAMS = (
    "One outline a corpus; the axis ends at the 99 % quantile. Counts of every layer: "
    "<code>tables/need_histogram.parquet</code>."
)
SKEW = (
    "Gating can only pay if need is uneven: if most tokens pass through the linear map unharmed and a "
    "few carry the cost. The paper reports this for the change in loss; here it is the error of the "
    "MLP's output, which needs no second run of the model."
)
SINKS = (
    "Sinks are position 0 of every window and special tokens: their activations can be hundreds of "
    "times larger than all others, so they are left out of fits, statistics and verdicts, and shown "
    "here."
)
TOKENS = (
    "Test tokens with the highest and the lowest error, at most two a document, in their context. The "
    "marked token is the one that enters the MLP; ␣ is a blank inside it, ↵ a line end, ⇥ a tab. The "
    "most and the least linear layer are unfolded. All of them: <code>tables/examples.parquet</code>."
)


def tokens_shown(most: int) -> str:
    """Says so where a page of many layers and stores has shorter lists."""
    return f" Of each list the first {most} are shown."


NO_TOKENS = "<p>The study was fitted without examples.</p>"

_DEFINITIONS = (
    (
        "Surrogate",
        "The linear map ŷ = Wx + b that stands in for one MLP: x is the MLP's input after the norm, y "
        "its output before it is added to the residual stream. Closed form, ridge penalty alpha "
        "relative to the mean variance of the inputs, chosen by cross-validation over groups of "
        "documents. The method is that of arXiv 2603.03459; the penalty and the held-out scores are "
        "ours.",
    ),
    (
        "R²",
        "1 − Σ‖y − ŷ‖² / Σ‖y − ȳ‖², summed over test tokens and all features, ȳ the mean output of "
        "the rows fitted. On a store that was not fitted a shift of that mean counts as variance too: a map "
        "that follows the shift is credited with it.",
    ),
    (
        "Need",
        "How much a token needs the nonlinearity of a layer. Here the <em>error</em> ‖y − ŷ‖ / √(‖y − "
        "ȳ‖² + τ²), τ² being the mean of ‖y − ȳ‖² on the rows fitted, so that tokens with a small "
        "output do not blow it up. error_raw is ‖y − ŷ‖ / ‖y‖; error_norm is ‖y − ŷ‖; error_stream is "
        "the error of the contribution relative to the norm of the residual stream.",
    ),
    (
        "Group",
        "Documents that are near-duplicates of one another. Splits, folds and intervals go by group, "
        "so that no test document has a twin among the documents fitted.",
    ),
    (
        "Interval",
        "Cluster-t over groups at 95 %, linearised or jackknifed. <em>All layers at once</em>: wide enough "
        "to hold for every layer together, by the smallest p over layers under random signs of the groups "
        "(min-p of Westfall and Young).",
    ),
)


def definitions(results: Results) -> str:
    """What the terms mean, and when which verdict is given."""
    claim = f"R² ≥ {results.claim_at:g}"
    verdicts = "; ".join(f"<em>{verdict}</em>: {findings.MEANING[verdict]}" for verdict in findings.VERDICTS)
    others = " The claims of the analyses stand with their figures and in the terms above."
    entries = [
        *_DEFINITIONS,
        *(further := terms.entries(results)),
        (
            "Verdict",
            f"On the claim {claim}, by the interval for all layers at once. {verdicts}. Sentences count "
            "layers by verdict, that is by two-sided intervals; p (Holm) is another test, one-sided where a "
            f"claim names a side: counts by the two may differ.{others if further else ''}",
        ),
        (
            "Tables",
            "Press a heading to sort by it, up, down and back (with a keyboard: Tab, then Enter). As files, "
            "with every digit: <code>nearline report STUDY --tables DIR</code>, figures with "
            "<code>--figures DIR</code>.",
        ),
        ("Sink", "Position 0 of a window, or a special token."),
    ]
    return "<dl>" + "".join(f"<dt>{term}</dt><dd>{meaning}</dd>" for term, meaning in entries) + "</dl>"
