"""The tables beside the arrays: documents, groups and splits, vocabulary.

In: the bytes of documents.parquet and vocabulary.parquet, the plan. Out: problems: a group in two splits, a
document whose rows stand in a block of another split, counts that do not add up. Cost: one pass over each
table.
"""

import numpy as np
import pyarrow as pa

from .errors import FormatError
from .folder import DOCUMENTS, VOCABULARY
from .plan import SPLITS, Plan
from .tables import DOCUMENTS as DOCUMENTS_SCHEMA
from .tables import VOCABULARY as VOCABULARY_SCHEMA
from .tables import parse_table
from .verify_findings import Findings, reason
from .verify_ground import Ground, Vocabulary


def check_tables(ground: Ground, findings: Findings, contents: dict[str, bytes | None]) -> Vocabulary | None:
    """Both tables, as far as they may be relied on; the vocabulary is returned."""
    documents = _table(findings, DOCUMENTS, contents[DOCUMENTS], DOCUMENTS_SCHEMA)
    vocabulary = _table(findings, VOCABULARY, contents[VOCABULARY], VOCABULARY_SCHEMA)
    if documents is not None:
        splits = _check_documents(ground, findings, documents)
        if splits is not None and ground.plan is not None:
            _check_against_plan(ground.plan, findings, documents, splits)
    return None if vocabulary is None else _check_vocabulary(ground, findings, vocabulary)


def _table(findings: Findings, name: str, content: bytes | None, schema: pa.Schema) -> pa.Table | None:
    if content is None:
        return None
    where = findings.place.where(name)
    try:
        return parse_table(content, schema, where)
    except FormatError as error:
        findings.add("unreadable", name, reason(error, where))
    return None


def _check_documents(ground: Ground, findings: Findings, table: pa.Table) -> np.ndarray | None:
    """Documents count from 0, and each group is of one split. Returns the split of each document."""
    document, group = table["document"].to_numpy(), table["group"].to_numpy()
    names = table["split"].to_pylist()
    if unknown := sorted(set(names) - set(SPLITS)):
        findings.add("metadata", DOCUMENTS, f"split {unknown[0]!r} is none of {', '.join(SPLITS)}")
        return None
    if not np.array_equal(document, np.arange(len(document))):
        findings.add("metadata", DOCUMENTS, "column `document` does not count 0, 1, 2, ...")
        return None
    if ground.attributes is not None and len(document) != ground.attributes.corpus.n_documents:
        text = f"it has {len(document)} documents, the attributes say {ground.attributes.corpus.n_documents}"
        findings.add("metadata", DOCUMENTS, text)
    splits = np.array([SPLITS.index(name) for name in names], np.uint8)
    order = np.lexsort((splits, group))
    same = (np.diff(group[order]) == 0) & (np.diff(splits[order]) != 0)
    if same.any():
        first, second = order[np.flatnonzero(same)[0] :][:2]
        findings.add(
            "metadata",
            DOCUMENTS,
            f"group {group[first]} stands in two splits: document {first} in {names[first]}, "
            f"document {second} in {names[second]}",
        )
    return splits


def _check_against_plan(plan: Plan, findings: Findings, table: pa.Table, splits: np.ndarray) -> None:
    """Every sequence stands in a block of its document's split; rows per document are as stated."""
    if int(plan.document.max()) >= len(splits):
        text = f"the plan names document {plan.document.max()}, the table has {len(splits)}"
        findings.add("metadata", DOCUMENTS, text)
        return
    block_split = plan.block_split[plan.sequence_block]
    wrong = np.flatnonzero(splits[plan.document] != block_split)
    if wrong.size:
        sequence = int(wrong[0])
        document, row0 = int(plan.document[sequence]), int(plan.row_offsets[sequence])
        findings.add(
            "metadata",
            DOCUMENTS,
            f"document {document} is of split {SPLITS[splits[document]]}, but block "
            f"{plan.sequence_block[sequence]} holds rows of it and is of {SPLITS[block_split[sequence]]}",
            tokens=(row0, row0 + int(plan.length[sequence])),
        )
    held = np.bincount(plan.document, weights=plan.length, minlength=len(splits)).astype(np.int64)
    stated = table["n_tokens"].to_numpy().astype(np.int64)
    wrong = np.flatnonzero(held != stated)
    if wrong.size:
        document = int(wrong[0])
        text = f"document {document} has {stated[document]} tokens, {held[document]} in the plan"
        findings.add("metadata", DOCUMENTS, text)


def _check_vocabulary(ground: Ground, findings: Findings, table: pa.Table) -> Vocabulary | None:
    token_id, counts = table["token_id"].to_numpy(), table["count"].to_numpy()
    order = np.argsort(token_id)
    if (np.diff(token_id[order]) == 0).any() or (token_id < 0).any() or (counts < 0).any():
        text = "a token id stands twice or is negative, or a count is negative"
        findings.add("metadata", VOCABULARY, text)
        return None
    if ground.plan is not None and int(counts.sum()) != ground.plan.n_tokens:
        text = f"its counts sum to {int(counts.sum())}, the plan has {ground.plan.n_tokens} tokens"
        findings.add("metadata", VOCABULARY, text)
        return None
    return token_id[order], counts[order]
