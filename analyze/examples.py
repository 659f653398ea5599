"""Tokens of highest and of lowest need in their context: needs of one layer and a vocabulary in, rows of a
table out.

At most two tokens of a document are shown, so that one odd document does not fill the list. Text is put
together from the bytes of neighbouring tokens of the same sequence, so that a character cut between two
tokens is whole again in the context.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
from jaxtyping import Float32

from ..store import Reader
from .population import TEST, Population

BEFORE: Final = 12
AFTER: Final = 6
PER_DOCUMENT: Final = 2
NEED: Final = "error"


class Texts:
    """The bytes of each token id of a store, and the keys of its documents."""

    def __init__(self, reader: Reader) -> None:
        vocabulary = reader.vocabulary
        self._bytes: dict[int, bytes] = dict(
            zip(vocabulary["token_id"].to_pylist(), vocabulary["bytes"].to_pylist(), strict=True)
        )
        self.keys: list[str] = reader.documents["key"].to_pylist()

    def text(self, ids: np.ndarray) -> str:
        if not any(self._bytes.values()):  # a store that was made without a tokenizer
            return "".join(f"⟨{int(i)}⟩" for i in ids)
        return b"".join(self._bytes.get(int(i)) or b"" for i in ids).decode("utf-8", errors="replace")


def example_rows(
    needs: Mapping[str, Float32[np.ndarray, "token"]], population: Population, texts: Texts, n_examples: int
) -> Iterator[dict[str, Any]]:
    """Rows of the table `examples`, without store and layer: test body rows, by `error`."""
    rows = population.rows(TEST)
    values = needs[NEED][rows]
    rows, values = rows[np.isfinite(values)], values[np.isfinite(values)]
    for kind, order in (
        ("highest", np.argsort(-values, kind="stable")),
        ("lowest", np.argsort(values, kind="stable")),
    ):
        for rank, row in enumerate(_spread(rows[order], population, n_examples), start=1):
            yield {"need": NEED, "kind": kind, "rank": rank, "value": float(needs[NEED][row])} | _context(
                row, population, texts
            )


def _spread(rows: np.ndarray, population: Population, n_examples: int) -> list[int]:
    """The first rows, no more than `PER_DOCUMENT` of one document."""
    chosen: list[int] = []
    seen: dict[int, int] = {}
    for row in rows:
        if len(chosen) == n_examples:
            break
        document = int(population.document[row])
        if seen.get(document, 0) < PER_DOCUMENT:
            seen[document] = seen.get(document, 0) + 1
            chosen.append(int(row))
    return chosen


def _context(row: int, population: Population, texts: Texts) -> dict[str, Any]:
    start, stop = max(0, row - BEFORE), min(population.sequence.size, row + AFTER + 1)
    same = population.sequence[start:stop] == population.sequence[row]
    ids = population.token_id[start:stop]
    here = row - start
    return {
        "before": texts.text(ids[:here][same[:here]]),
        "token": texts.text(ids[here : here + 1]),
        "after": texts.text(ids[here + 1 :][same[here + 1 :]]),
        "document_key": texts.keys[int(population.document[row])],
        "position": int(population.position[row]),
    }
