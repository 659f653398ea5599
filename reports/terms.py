"""What the terms of the analyses mean: entries of "How to read this page", each with the table that it is
for.

In: nothing. Out: HTML of ours, without stored strings. An entry is shown where its table is there.
"""

from .results import Results

_TERMS = (
    (
        "gates",
        "Gate",
        "A logistic regression that says before the MLP runs whether a token is easy, that is, whether "
        "its need is among the lower half by default (the label, cut on gate rows). It learns on gate "
        "rows and is scored on test "
        "rows. <em>Easy</em> tokens could take the linear map.",
    ),
    (
        "gates",
        "AUC",
        "The chance that an easy token scores above one that is not; 0.5 is chance, 1 perfect. It asks "
        "for the order alone; whether the probabilities can be taken at their word is asked by the Brier "
        "score (mean squared distance from the label, beside that of the base rate) and by the "
        "calibration slope (1: "
        "neither too sure nor too timid).",
    ),
    (
        "gate_differences",
        "Nested difference",
        "AUC of a gate on two sets of features less AUC of a gate on one of them, over the same tokens. "
        "The smaller gate is contained in the larger one, so a gain is what the other set adds. Sets that "
        "overlap, as the context part does with the token, are made disjoint first. What no linear map takes "
        "out of the context, a code of a rare token say, is met by the same difference among pairs of rows "
        "of one token (<em>within one token</em>), where a function of the token is worth nothing: “context "
        "adds” must hold there too. A verdict is given only where the larger gate beats chance; <em>not "
        "supported</em> says that the gain is below the margin of the settings.",
    ),
    (
        "variance",
        "Identity share",
        "The share of the variance of a need that goes with the identity of the token: mean product of "
        "centred needs over pairs of the same token in different groups, weighted by occurrences, over "
        "the variance. <em>Coverage</em>: tokens that stand in two groups or more. ε² is the textbook's "
        "estimate, which counts documents as tokens; <em>types weighed alike</em> gives a rare token the "
        "weight of a frequent "
        "one.",
    ),
    (
        "nofly",
        "Reliability and ceiling",
        "The reliability of token means is the part of their variance that occurrences in other documents "
        "confirm. Two series of means cannot correlate above the ceiling √(reliability of A · "
        "reliability of "
        "B), however stable the tokens are.",
    ),
    (
        "nofly",
        "r, disattenuated",
        "The covariance of the means of two corpora over the variances that each corpus confirms by "
        "itself: the correlation of what is not noise. Its estimate may leave [−1, 1]; where a confirmed "
        "variance is not told from 0, there is no interval and the verdict is <em>cannot tell</em>. "
        "<em>Supported</em>: above "
        "0, by the interval for all layers at once and against needs that were shuffled within documents.",
    ),
    (
        "nofly",
        "Regression to the mean",
        "Whatever was chosen for being extreme is less so when it is measured again, because chance "
        "helped to choose it. So a list of tokens with the highest mean need must be judged on "
        "occurrences that did not "
        "choose it.",
    ),
    (
        "clusters",
        "Clean cluster",
        "A cluster of MLP inputs in which nearly all tokens, or nearly none, are easy.",
    ),
    (
        "interventions",
        "Cost",
        "What a replacement adds to the mean loss of the live model, Δ in nats a token, over the same test "
        "tokens with and without it; in percent of perplexity 100 · (exp Δ − 1), bounds transformed. The "
        "claim judged is that it is above 0: <em>not supported</em> says that the whole interval "
        "lies below 0.",
    ),
    (
        "routers",
        "Gain at equal share",
        "What random routing would cost at the share of tokens that a router sent to the linear map, less "
        "what the router cost; two routers are compared by their gains. <em>Shares differ</em>: too far "
        "apart for that.",
    ),
    (
        "losses",
        "δ",
        "The need of the paper: the loss of a token's target with the layer linearised at all positions that "
        "the fit covers, less its loss before.",
    ),
)


def entries(results: Results) -> list[tuple[str, str]]:
    """Terms and meanings of the analyses that were run."""
    return [(term, meaning) for table, term, meaning in _TERMS if results.has(table)]
