"""Corpora: where the documents come from.

In: a spec: `text:PATH` (a file, or a folder of .txt and .md files, one document each), `jsonl:PATH[:FIELD]`,
`parquet:PATH[:COLUMN]` (a file or a folder), `hf:NAME[:CONFIG[:SPLIT[:COLUMN]]]` (what the `datasets` library
reads: a folder or a Hub id), `ids:PATH` (token ids), or a built-in that every installation has: `docs:python`
(the language reference), `docs:scientific` (docstrings of numpy, scipy and scikit-learn), `docs:stdlib`
(docstrings of the standard library). What a row holds decides what the documents are: texts, token ids or
chats.
Out: a frozen Corpus of keyed documents with a content hash. Rows that are lines of WikiText are joined into
articles; a corpus of a few long texts is cut at paragraph bounds into passages that count as documents; the
corpus says so. Each built-in sets a fixed part aside (`part="train"`) on which the bundled models were
trained; what users harvest never holds it.
Cost: one read of the files, as far as documents are wanted; memory: the documents, and little else.
"""

import logging
from collections.abc import Generator, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal

import numpy as np

from ..store.errors import EnvironmentFault, UsageError
from .built_in import RESERVED, built_in_texts, reserved_texts
from .choosing import Choice
from .documents import Corpus as Corpus
from .documents import Document as Document
from .documents import Row, document_of, hash_documents
from .groups import near_duplicate_groups
from .local_texts import read_jsonl, read_text
from .passages import cut_keyed, few_long_texts
from .settings import HarvestSettings
from .specs import portable, split_dataset, split_field, split_spec
from .wikitext import articles, articles_in_texts
from .wording import counted, is_or_are

Join = Literal["auto", "never", "wikitext"]

logger = logging.getLogger("nearline")


@dataclass(frozen=True, slots=True)
class CorpusOptions:
    """How a corpus is read: the settings of a harvest that concern it."""

    join: Join = "auto"
    streaming: bool = False
    max_documents: int | None = None
    include: str | None = None
    exclude: str | None = None

    @classmethod
    def of(cls, settings: HarvestSettings) -> "CorpusOptions":
        """The options among the settings."""
        return cls(**{part.name: getattr(settings, part.name) for part in fields(cls)})

    @property
    def choice(self) -> Choice:
        """Which documents are taken; the files of keys are read here."""
        return Choice.of(self.include, self.exclude, self.max_documents)


def load(spec: str, part: str = "harvest", options: CorpusOptions | None = None) -> Corpus:
    """The corpus that a spec names. `part="train"` gives the reserved part of a built-in."""
    options = options or CorpusOptions()
    if part not in ("harvest", "train"):
        raise UsageError(f"part {part!r} of a corpus: it is 'harvest' or 'train'.")
    kind = "docs" if spec in RESERVED else split_spec(spec)[0]
    if options.streaming and kind != "hf":
        raise UsageError(f"streaming concerns hf: data sets only, and the corpus is {spec}. Leave it out.")
    if spec in RESERVED:
        return select(load_built_in(spec, part), options)
    if part != "harvest":
        raise UsageError(f"{spec}: only built-in corpora have a part {part!r}.")
    if kind == "ids":
        return _of_ids(spec, options)
    policies: dict[str, str] = {}
    join = articles_in_texts if kind == "text" else articles
    with closing(_rows_of(spec, options)) as rows:  # what is open, is closed also where reading stops early
        joined = join(rows, options.join, policies)
        return _from_rows(joined, portable(spec), options.choice, policies, cut=True)


def _rows_of(spec: str, options: CorpusOptions) -> Generator[Row]:
    """The rows that a spec names, read while they are taken. Libraries that only one kind of corpus needs
    are loaded here."""
    kind, rest = split_spec(spec)
    if kind == "text":
        return read_text(Path(rest))
    if kind == "jsonl":
        return read_jsonl(*split_field(rest))
    if kind == "parquet":
        from .tables import read_parquet

        return read_parquet(*split_field(rest))
    from .datasets_rows import read_dataset

    found = split_dataset(rest)
    if options.streaming and options.max_documents is None and not found.local:
        logger.warning("%s: read as a stream to its end; max_documents stops it sooner", spec)
    return read_dataset(found, streaming=options.streaming)


def require_readable(spec: str, options: CorpusOptions) -> None:
    """Refuse, as a harvest would, a corpus in a file here whose first row is none: no such field or column,
    nothing that a document can be. Costs that row, or the head of an array; a look at text files and data
    sets costs more, and is left to the harvest."""
    kind, rest = ("docs", "") if spec in RESERVED else split_spec(spec)
    if kind == "ids":
        from .token_files import open_ids

        open_ids(Path(rest))
    if kind not in ("jsonl", "parquet"):
        return
    with closing(_rows_of(spec, options)) as rows:
        first = next(rows, None)
    if first is None:
        raise _no_text(portable(spec))
    if options.include is None and options.exclude is None:  # which may leave this row out
        _document(first)


def _of_ids(spec: str, options: CorpusOptions) -> Corpus:
    """A corpus of token ids. Where the documents of a stream end, only its tokenizer may say
    (token_files.bounded): it is whole here, and the choice is made among the documents found in it."""
    from .token_files import read_ids

    _, documents = read_ids(Path(split_spec(spec)[1]))
    return select(from_documents(documents, portable(spec)), options)


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
    return _from_rows(rows, spec, Choice(), {}, cut=cut)


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


def select(corpus: Corpus, options: CorpusOptions) -> Corpus:
    """The documents of a corpus that include, exclude and max_documents leave. One from which they were
    chosen already is returned as it is; so is a stream of token ids, whose documents are yet to be found."""
    choice = options.choice
    policies = choice.policies()
    stream = corpus.kind == "ids" and len(corpus.documents) == 1
    if stream or policies.items() <= corpus.policies.items():
        return corpus
    choice.require_known(corpus.spec, (document.key for document in corpus.documents))
    chosen = choice.among(corpus.spec, corpus.documents)
    return replace(
        corpus,
        documents=chosen,
        content_hash=hash_documents(chosen),
        known_groups=None,
        policies=corpus.policies | policies,
    )


def _from_rows(
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
            document = _document(row)
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
        raise _no_text(spec)
    return full, known if all_read else None


def _no_text(spec: str) -> UsageError:
    return UsageError(f"{spec}: the corpus holds no text; give at least one document that is not empty.")


def _document(row: Row) -> Document:
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


def load_built_in(spec: str, part: str) -> Corpus:
    """One part of a built-in; a group lies in one part as a whole."""
    try:
        documents = [Document(key, text) for key, text in built_in_texts(spec)]
    except ModuleNotFoundError as error:
        raise EnvironmentFault(
            f"{spec}: {error.name} is not installed; install nearline's dependencies."
        ) from None
    if not documents:
        raise EnvironmentFault(f"{spec}: this installation holds no docstrings; use text:PATH or jsonl:PATH.")
    groups = near_duplicate_groups([document.text for document in documents])
    reserved = reserved_texts([document.key for document in documents], groups, RESERVED[spec])
    kept = np.flatnonzero(reserved if part == "train" else ~reserved)
    chosen = tuple(documents[index] for index in kept)
    _, renumbered = np.unique(groups[kept], return_inverse=True)  # keeps the order of first appearance
    return Corpus(
        spec, chosen, spec == "docs:python", hash_documents(chosen), known_groups=renumbered.astype(np.int32)
    )
