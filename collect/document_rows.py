"""Rows of any origin as a corpus: rows or a program's documents in, a frozen `Corpus` out.

What a row holds decides what the documents are: texts, token ids or chats, and a corpus is of one kind. Empty
documents are left out, those chosen are taken, a few long texts may be cut into passages. Cost: one look at
each row, not one read more than is wanted.
"""

import logging
from collections.abc import Iterable, Mapping

from ..store.errors import UsageError
from .choosing import Choice
from .documents import Corpus, Document, Row, document_of, hash_documents
from .passages import cut_keyed, few_long_texts
from .wording import counted, is_or_are

logger = logging.getLogger("nearline")


def from_documents(documents: Iterable[object], spec: str = "documents", *, cut: bool = False) -> Corpus:
    """A corpus of texts, of lists or arrays of token ids, of chats (lists of objects with role and content),
    (key, any of these) pairs or Documents; empty ones are left out. `cut` allows passages."""
    if isinstance(documents, str):
        raise UsageError("documents is one string: give a list of texts, one for each document.")
    if not _lists(documents):
        raise UsageError(
            f"documents is a {type(documents).__name__}: give a list of documents; of a dict its items(), of "
            "a table one column."
        )
    rows = (row_of(entry, number) for number, entry in enumerate(documents))
    return corpus_of(rows, spec, Choice(), {}, cut=cut)


def _lists(documents: object) -> bool:
    """Whether it gives documents when it is gone through; dicts and tables give names."""
    if isinstance(documents, Mapping) or hasattr(documents, "columns"):
        return False
    return isinstance(documents, Iterable) or hasattr(documents, "__getitem__")


def row_of(entry: object, number: int) -> Row:
    """A row of any form of document that a program may give."""
    place = f"document {number}"
    if isinstance(entry, Document):
        return Row(entry.key, entry, f"{place} ({entry.key!r})")
    if isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str):
        return Row(entry[0], entry[1], f"{place} ({entry[0]!r})")
    if isinstance(entry, str | list | tuple) or hasattr(entry, "__array__"):
        return Row(f"{number:06d}", entry, place)
    raise UsageError(
        f"{place} is a {type(entry).__name__}: documents are texts, (key, text) pairs, lists of token ids or "
        "Documents; of rows such as {'text': ...}, give row['text']."
    )


def corpus_of(
    rows: Iterable[Row], spec: str, choice: Choice, policies: dict[str, str], *, cut: bool
) -> Corpus:
    full, known = _taken(rows, spec, choice)
    n_texts = len(full)
    if cut and full[0].kind == "text" and few_long_texts([document.text for document in full]):
        full = [Document(*passage) for document in full for passage in cut_keyed(document.key, document.text)]
    passages = len(full) > n_texts
    if passages:
        texts, pieces = counted(n_texts, "text"), counted(len(full), "passage")
        logger.info("%s: %s cut into %s that count as documents", spec, texts, pieces)
    if known is not None:
        choice.require_known(spec, known | {document.key for document in full})
    if "join" in policies:
        logger.info("%s: rows of WikiText joined into %s", spec, counted(n_texts, "article"))
    chosen = choice.among(spec, full)
    policies = policies | choice.policies()
    return Corpus(spec, chosen, passages, hash_documents(chosen), policies=policies)


def _taken(rows: Iterable[Row], spec: str, choice: Choice) -> tuple[list[Document], set[str] | None]:
    """The documents that may be wanted, not one read more than needed, and all keys where all were read."""
    full: list[Document] = []
    known: set[str] = set()
    waiting = set(choice.named)
    n_read = n_empty = 0
    all_read = True
    for row in rows:
        n_read += 1
        if choice.named:
            known.add(row.key)
            waiting.discard(row.key)
        if choice.may_take(row.key):
            document = document_in(row)
            if document.empty:
                n_empty += 1
            else:
                _require_kind(document, full, row.place)
                full.append(document)
        if len(full) == choice.most or (choice.include is not None and not waiting):
            all_read = False
            break
    if n_empty:
        of = f"{n_empty:,} of {counted(n_read, 'document')} {is_or_are(n_empty)}"
        logger.warning("%s: %s empty and left out", spec, of)
    if not full:
        if choice.named:
            choice.require_known(spec, known)
            raise UsageError(f"{spec}: include and exclude leave no document with text in it.")
        raise no_text(spec)
    return full, known if all_read else None


def no_text(spec: str) -> UsageError:
    return UsageError(f"{spec}: the corpus holds no text; give at least one document that is not empty.")


def document_in(row: Row) -> Document:
    given = row.value
    if isinstance(given, Document):
        given = {"text": given.text, "ids": given.ids, "chat": given.messages}[given.kind]
    return document_of(row.key, given, row.place)


def _require_kind(document: Document, before: list[Document], place: str) -> None:
    if before and before[0].kind != document.kind:
        words = {"text": "a text", "ids": "token ids", "chat": "a chat"}
        raise UsageError(
            f"{place} holds {words[document.kind]}, the documents before it {words[before[0].kind]}: a "
            "corpus is of one kind."
        )
