"""Section "Which tokens need it": regression of need on features of tokens, and clusters of MLP inputs.

In: the tables `regression`, `regression_terms` and `clusters`, each optional. Out: HTML, empty without any
of them. Cost: two figures and three tables.
"""

from typing import Any

from . import findings, text, verdicts
from .figure import figure
from .layout import numbers, section
from .multiples import by_layer, cut, domain_of, panel
from .results import Results
from .sections import LAYER, NEED, grouping, ordered
from .tables import Column, Inner, Row, between, house, value

KEY, HEADING = "which", "Which tokens need it"
EXPLAINED = 0.1
"""Share of variance from which simple features of tokens count as an explanation."""

_REGRESSION = (
    "R² on test rows of a least-squares plane on features of the token that anyone can read off its text "
    "and place (length, function word, capital, digit, punctuation, frequency, position), learned on "
    f"fit and gate rows. Dashed: {EXPLAINED:g}, from which the claim holds that they explain the need. "
    "Bars or bands: 95 % intervals for all layers at once. Below 0: worse than the mean."
)
_CLUSTERS = (
    "AUC on test rows of the mean need of a token's cluster (k-means on principal components of the MLP's "
    "input, learned on fit rows) against being among the easier half. Dashed: 0.5, chance. Bars or "
    "bands: 95 % intervals for all layers at once."
)


def regression_claim(results: Results) -> str:
    need, rows = results.first("regression")
    return (
        f"Simple features of a token explain at least {100 * EXPLAINED:g}\N{NO-BREAK SPACE}% of the "
        f"variance of its {findings.need_name(need)} {verdicts.by_store(results, rows)}"
    )


def regression_finding(results: Results) -> str:
    ends = findings.ranges(
        results, results.first("regression")[1], "r2_test", text.number, ("r2_sim_lo", "r2_sim_hi")
    )
    return regression_claim(results) + (f"; their R² is {ends}" if ends else "")


def clusters_claim(results: Results) -> str:
    need, rows = results.first("clusters")
    return (
        f"The cluster of its input tells a token of low {findings.need_name(need)} from the others better "
        f"than chance {verdicts.by_store(results, rows)}"
    )


def clusters_finding(results: Results) -> str:
    ends = findings.ranges(
        results, results.first("clusters")[1], "auc", text.number, ("auc_sim_lo", "auc_sim_hi")
    )
    return clusters_claim(results) + (f"; the AUC is {ends}" if ends else "")


def answers(results: Results) -> list[str]:
    """A sentence for each analysis of this section that was run."""
    found = [regression_claim(results)] if results.has("regression") else []
    return found + ([clusters_finding(results)] if results.has("clusters") else [])


def _regression_figure(results: Results) -> str:
    need, rows = results.first("regression")
    panels = [
        panel(
            f"features of the token, for {findings.need_name(need)}",
            rows,
            "r2_test",
            ("r2_sim_lo", "r2_sim_hi"),
        )
    ]
    domain = domain_of(panels, (-0.25, 1.0), show=(0.0, 0.2))
    return figure(
        "regression",
        results,
        regression_finding(results),
        _REGRESSION,
        lambda size: by_layer(
            panels, axis="R² on test rows [1]", domain=domain, rule=EXPLAINED, columns=(1, 1), size=size
        ),
        "Values beyond the axis are drawn on its edge." if cut(panels, domain) else "",
    )


def _clusters_figure(results: Results) -> str:
    _, rows = results.first("clusters")
    panels = [panel("mean need of the cluster", rows, "auc", ("auc_sim_lo", "auc_sim_hi"))]
    domain = domain_of(panels, (0.2, 1.0), show=(0.45, 0.6), step=0.05)
    return figure(
        "clusters",
        results,
        clusters_finding(results),
        _CLUSTERS,
        lambda size: by_layer(panels, axis="AUC [1]", domain=domain, rule=0.5, columns=(1, 1), size=size),
        "Values beyond the axis are drawn on its edge." if cut(panels, domain) else "",
    )


def regression_table(results: Results) -> str:
    columns = [
        LAYER,
        NEED,
        Column("verdict", verdicts.cell, number=False, markup=True),
        Column("test", value("r2_test"), spanner="R²"),
        Column("95 % interval", between("r2_lo", "r2_hi"), spanner="R²"),
        Column("simultaneous", between("r2_sim_lo", "r2_sim_hi"), spanner="R²"),
        Column("fit", value("r2_fit"), spanner="R²"),
        Column("tokens", value("n_tokens", text.count)),
        Column("groups", value("n_groups", text.count)),
    ]
    rows = ordered(results, "regression").to_dicts()
    return house(
        rows,
        columns,
        key="table-regression",
        caption=regression_finding(results),
        group=grouping(results),
    )


def terms_table(results: Results) -> str:
    """Coefficients: one row a layer, a column a feature."""
    rows = results.first("regression_terms")[1]
    terms = rows["term"].unique(maintain_order=True).to_list()
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for row in rows.to_dicts():
        place = {"series": row["series"], "layer": row["layer"]}
        line = found.setdefault((row["series"], row["layer"]), place)
        line[f"term {terms.index(row['term'])}"] = row

    def coefficient(one: Row) -> str:
        ends = text.interval(one["lo"], one["hi"])
        return text.number(one["coefficient"]) + ("" if ends == text.NONE else f" {ends}")

    def alone(one: Row) -> str:
        return text.number(one["r"], 2)

    columns = [LAYER]
    for at, term in enumerate(terms):
        spanner = text.escape(text.name(term.replace("_", " "), 28))
        columns += [
            Column(
                "per sd",
                Inner(f"term {at}", coefficient, {"": "coefficient", " low": "lo", " high": "hi"}),
                spanner=spanner,
            ),
            Column("r", Inner(f"term {at}", alone, {"": "r"}), spanner=spanner),
        ]
    caption = "Coefficients of features of tokens, per standard deviation, and r of each by itself"
    return house(list(found.values()), columns, key="table-terms", caption=caption, group=grouping(results))


def clusters_table(results: Results) -> str:
    columns = [
        LAYER,
        NEED,
        Column("verdict", verdicts.cell, number=False, markup=True),
        Column("", value("auc"), spanner="AUC"),
        Column("95 % interval", between("auc_lo", "auc_hi"), spanner="AUC"),
        Column("simultaneous", between("auc_sim_lo", "auc_sim_hi"), spanner="AUC"),
        Column("p (Holm)", value("p_holm", text.p_value)),
        Column("of all", value("n_clusters", text.count), spanner="clusters"),
        Column("clean", value("clean_clusters", text.count), spanner="clusters"),
        Column("number", value("n_components", text.count), spanner="principal components"),
        Column("of the variance", value("variance_explained", text.percent), spanner="principal components"),
        Column("tokens", value("n_tokens", text.count)),
        Column("groups", value("n_groups", text.count)),
    ]
    rows = ordered(results, "clusters").to_dicts()
    return house(
        rows, columns, key="table-clusters", caption=clusters_finding(results), group=grouping(results)
    )


def render(results: Results) -> str:
    """The section; nothing where neither analysis was run."""
    parts: list[str] = []
    if results.has("regression"):
        parts += [
            _regression_figure(results),
            numbers("R² of every layer and need", regression_table(results)),
        ]
    if results.has("regression_terms"):
        parts.append(numbers("Coefficients", terms_table(results)))
    if results.has("clusters"):
        parts += [
            _clusters_figure(results),
            numbers("Clusters of every layer and need", clusters_table(results)),
        ]
    return section(KEY, HEADING, *parts) if parts else ""
