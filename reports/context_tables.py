"""Tables of the section on token and context.

In: the tables `decomposition`, `output_shares`, `variance`. Out: HTML tables, every
number of the section's figures among them. Cost: milliseconds a table.
"""

import polars as pl

from . import context_findings as said
from . import findings, text, verdicts
from .results import Results
from .sections import LAYER, NEED, grouping, ordered
from .tables import Column, between, house, value


def foretold(results: Results) -> str:
    columns = [
        LAYER,
        Column("R²", value("token_in_context", text.percent), spanner="context part foretold by the token"),
        Column(
            "95 % interval",
            between("token_in_context_lo", "token_in_context_hi", text.percent_interval),
            spanner="context part foretold by the token",
        ),
        Column("alpha", value("alpha", text.scientific)),
        Column("|x − (β + t + p + k)|, largest", value("identity_error", text.scientific)),
        Column("tokens", value("n_tokens", text.count)),
        Column("groups", value("n_groups", text.count)),
    ]
    rows = results.tables["decomposition"].to_dicts()
    return house(
        rows, columns, key="table-foretold", caption=said.in_context(results), group=grouping(results)
    )


def output_shares(results: Results) -> str:
    columns = [
        LAYER,
        Column("split", lambda row: text.name(row["split_by"], 20), number=False),
        Column("part", lambda row: text.name(row["part"], 28), number=False),
        Column("share", value("share", text.percent), spanner="of the variance of ŷ"),
        Column(
            "95 % interval",
            between("share_lo", "share_hi", text.percent_interval),
            spanner="of the variance of ŷ",
        ),
        Column("own variance", value("variance", text.percent), spanner="of the variance of ŷ"),
        Column(
            "covariance with the others", value("covariance", text.percent), spanner="of the variance of ŷ"
        ),
    ]
    rows = results.tables["output_shares"].to_dicts()
    return house(
        rows, columns, key="table-parts", caption=said.output_shares(results), group=grouping(results)
    )


def identity_verdicts(results: Results) -> str:
    families = [
        ({"corpus": findings.label(results, at), "by": said.key_title(key)}, chosen)
        for key in said.identity_keys(results)
        for at in range(len(results.stores))
        if not (chosen := said.identity_rows(results, key).filter(pl.col("series") == at)).is_empty()
    ]
    return verdicts.table(
        families,
        key="table-identity-verdicts",
        caption="Layers in which token identity explains at least half of the need",
    )


def identity(results: Results) -> str:
    columns = [
        LAYER,
        NEED,
        Column("by", lambda row: said.key_title(row["key"]), number=False),
        Column("verdict", verdicts.cell, number=False, markup=True),
        Column("share", value("share", text.percent), spanner="token identity"),
        Column(
            "95 % interval", between("share_lo", "share_hi", text.percent_interval), spanner="token identity"
        ),
        Column(
            "simultaneous",
            between("share_sim_lo", "share_sim_hi", text.percent_interval),
            spanner="token identity",
        ),
        Column("ε²", value("epsilon_squared", text.percent)),
        Column("types weighed alike", value("type_weighted_share", text.percent)),
        Column("coverage", value("coverage", text.percent)),
        Column("tokens", value("n_tokens", text.count)),
        Column("types", value("n_types", text.count)),
        Column("groups", value("n_groups", text.count)),
    ]
    rows = ordered(results, "variance").to_dicts()
    return house(rows, columns, key="table-identity", caption=said.identity(results), group=grouping(results))
