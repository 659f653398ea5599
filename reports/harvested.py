"""The table of what was harvested: model, corpus, tokens, perplexity and start-up proof, stores across.

In: the table `harvest`. Out: HTML. The proof's fields are named in plain words; one that this version does
not know is shown under its own name. Cost: a millisecond.
"""

from collections.abc import Callable, Mapping

from ..store import FormatError
from ..store.parsing import parse_json
from . import findings, text
from .results import Results
from .tables import Column, Row, house, value

PROOF = {
    "norm_error": "norm(residual) against what the MLP received",
    "identity_error": "residual + contribution against the block's output",
    "identity_error_without_mlp": "the same with the MLP left out, for comparison",
    "positions_error": "one token at two positions against the table of positions",
    "batch_error": "a batch of one against a batch of many",
    "isolation_error": "movement of a text when another one changes",
    "logits_error": "logits in chunks against the whole model's",
    "nll_error": "next-token loss in chunks against the whole model's",
    "n_sequences": "sequences checked",
    "n_rows": "token rows checked",
}
"""Fields of the start-up proof in plain words, in the order shown."""


def proof(found: object) -> str:
    """The errors of the start-up proof in words, one a line, each with what was tolerated."""
    try:
        fields = parse_json(found.encode(errors="replace"), "proof") if isinstance(found, str) else found
    except FormatError:
        return text.name(str(found))
    if not isinstance(fields, dict):
        return text.NONE
    limits = {name for name in fields if str(name).endswith("_tolerance")}
    others = sorted(name for name in fields if name not in PROOF and name not in limits)
    return "\n".join(_line(name, fields) for name in [*(name for name in PROOF if name in fields), *others])


def _line(name: str, fields: Mapping[str, object]) -> str:
    limit = fields.get(name.replace("_error", "_tolerance")) if name.endswith("_error") else None
    tolerated = "" if limit is None else f" (tolerated {_written(limit)})"
    return f"{PROOF.get(name, text.name(name))}: {_written(fields[name])}{tolerated}"


def _written(found: object) -> str:
    if isinstance(found, bool) or not isinstance(found, int | float):
        return text.name(str(found))
    return text.count(found) if float(found).is_integer() else text.scientific(found)


def table(results: Results) -> str:
    """What was harvested: facts down, stores across."""

    def tokens(row: Row) -> str:
        parts = (f"{text.count(row[f'n_{split}'])} {split}" for split in ("fit", "gate", "test"))
        return f"{text.count(row['n_tokens'])}: {', '.join(parts)}"

    def documents(row: Row) -> str:
        kind = "passages (the corpus has few, long texts)" if row["passages"] else "documents"
        return (
            f"{text.count(row['n_documents'])} {kind} in {text.count(row['n_groups'])} groups of "
            f"near-duplicates; rows from {text.count(row['n_groups_fit'])} fit and "
            f"{text.count(row['n_groups_test'])} test groups"
        )

    def perplexity(row: Row) -> str:
        ends = text.interval(row["ppl_test_lo"], row["ppl_test_hi"], 2)
        held_out = "" if row["ppl_test"] is None else f"; test rows {text.number(row['ppl_test'], 2)}"
        return f"{text.number(row['ppl'], 2)} over {text.count(row['n_targets'])} targets{held_out}" + (
            "" if ends == text.NONE else f" {ends}"
        )

    def model(row: Row) -> str:
        revision = f", revision {text.name(row['revision'], 24)}" if row["revision"] else ""
        return text.name(row["model"]) + revision

    def dtype(row: Row) -> str:
        computed, stored, attention = (
            text.name(row[key]) for key in ("compute_dtype", "storage_dtype", "attention")
        )
        return f"computed in {computed} ({attention} attention), stored in {stored}"

    def architecture(row: Row) -> str:
        return f"{text.name(row['model_type'])}: {row['n_layers']} layers, d = {text.count(row['d_model'])}"

    facts: list[tuple[str, Callable[[Row], str]]] = [
        ("store", lambda row: text.name(row["store"])),
        ("model", model),
        ("architecture", architecture),
        ("corpus", lambda row: text.name(row["corpus"])),
        ("token rows", tokens),
        ("documents", documents),
        ("perplexity", perplexity),
        (
            "windows",
            lambda row: f"{text.count(row['sequence_length'])} tokens; BOS: {text.name(str(row['bos']))}",
        ),
        ("dtype", dtype),
        ("start-up proof", lambda row: proof(row["proof"])),
    ]
    stores = results.harvest.to_dicts()
    rows = [{"fact": fact, **{str(at): write(row) for at, row in enumerate(stores)}} for fact, write in facts]
    columns = [Column("", value("fact", str), number=False)] + [
        Column(text.escape(findings.label(results, at)), value(str(at), str), number=False)
        for at in range(len(stores))
    ]
    return house(rows, columns, key="table-harvest", caption="What was harvested")
