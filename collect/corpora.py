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
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal

import numpy as np

from ..store.errors import EnvironmentFault, UsageError
from .built_in import RESERVED, built_in_texts, reserved_texts
from .choosing import Choice
from .document_rows import corpus_of, document_in, no_text
from .document_rows import from_documents as from_documents
from .documents import Corpus as Corpus
from .documents import Document as Document
from .documents import Row, hash_documents
from .groups import near_duplicate_groups
from .local_texts import read_jsonl, read_text
from .settings import HarvestSettings
from .specs import portable, split_dataset, split_field, split_spec
from .wikitext import articles, articles_in_texts

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
        return corpus_of(joined, portable(spec), options.choice, policies, cut=True)


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
        raise no_text(portable(spec))
    if options.include is None and options.exclude is None:  # which may leave this row out
        document_in(first)


def _of_ids(spec: str, options: CorpusOptions) -> Corpus:
    """A corpus of token ids. Where the documents of a stream end, only its tokenizer may say
    (token_files.bounded): it is whole here, and the choice is made among the documents found in it."""
    from .token_files import read_ids

    _, documents = read_ids(Path(split_spec(spec)[1]))
    return select(from_documents(documents, portable(spec)), options)


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
