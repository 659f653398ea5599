"""Token or context: what nested gates, parts of ŷ and token identity show, in sentences.

In: the tables `gate_differences`, `decomposition`, `output_shares` and `variance`. Out: plain text, frames.
Nothing is concluded from what a gate on the context part alone can do: that part holds the token as well.
Cost: nothing to speak of.
"""

import polars as pl

from . import comparisons, findings, text, verdicts
from .results import Results

KEYS = {"input": "the token that enters", "target": "the token that comes next"}
"""What a share of token identity goes by."""


NESTED = {"context adds": "context adds to the token", "token adds": "the token adds to context"}
"""Claims of the table that this section is about."""


def _known(name: str, words: dict[str, str]) -> str:
    return words.get(name, text.name(name, 40))


def claims(results: Results) -> list[tuple[str, pl.DataFrame]]:
    """The nested comparisons of token and context, in the order of the table, and the rows of each."""
    found = comparisons.of(results)
    return [(NESTED[claim], rows) for claim, rows in found if claim in NESTED]


def differences(results: Results) -> str:
    """In how many layers each side adds to the other."""
    need, _ = results.first("gate_differences")
    parts = [f"{claim} {verdicts.by_store(results, rows)}" for claim, rows in claims(results)]
    return f"In gates for {findings.need_name(need)}, {'; '.join(parts)}"


def in_context(results: Results) -> str:
    """How much of the context part the token foretells."""
    frame = results.tables["decomposition"]
    ends = findings.ranges(
        results, frame, "token_in_context", text.percent, ("token_in_context_lo", "token_in_context_hi")
    )
    if not ends:
        return "The context part does not vary"
    return (
        "Of the variance of what attention and earlier MLPs wrote, the token's embedding alone foretells "
        f"{ends}"
    )


def output_shares(results: Results) -> str:
    """What the token contributes to the linear map's output, counted with what the context repeats of it."""
    frame = results.tables["output_shares"]
    rows = frame.filter((pl.col("split_by") == "replaced") & (pl.col("part") == "token_full"))
    ends = findings.ranges(results, rows, "share", text.percent, ("share_lo", "share_hi"))
    if not ends:
        return "Shares of the variance of ŷ"
    return f"Of the variance of ŷ, the token with all that follows from it contributes {ends}"


def identity_keys(results: Results) -> list[str]:
    """`input`, `target`, in the order shown."""
    there = results.first("variance")[1]["key"].unique(maintain_order=True).to_list()
    return [key for key in KEYS if key in there] + [key for key in there if key not in KEYS]


def identity_rows(results: Results, key: str) -> pl.DataFrame:
    return results.first("variance")[1].filter(pl.col("key") == key)


def identity_claim(results: Results) -> str:
    """Where token identity explains half of the need."""
    need, _ = results.first("variance")
    first = identity_keys(results)[0]
    return (
        f"Which {_token(first)} it is explains at least half of the variance of {findings.need_name(need)} "
        f"{verdicts.by_store(results, identity_rows(results, first))}"
    )


def identity(results: Results) -> str:
    """The claim, and the shares."""
    rows = identity_rows(results, identity_keys(results)[0])
    ends = findings.ranges(results, rows, "share", text.percent, ("share_sim_lo", "share_sim_hi"))
    return identity_claim(results) + (f"; its share is {ends}" if ends else "")


def _token(key: str) -> str:
    return {"input": "token", "target": "token comes next,"}.get(key, text.name(key, 20))


def key_title(key: str) -> str:
    return _known(key, KEYS)


def answers(results: Results) -> list[str]:
    """A sentence for each analysis of this section that was run."""
    found = []
    if results.has("gate_differences") and claims(results):
        found.append(differences(results))
    if results.has("variance"):
        found.append(identity_claim(results))
    if results.has("decomposition"):
        found.append(in_context(results))
    return found
