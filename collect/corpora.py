"""Corpora: where the texts come from.

In: a spec, `text:PATH` (a file, or a folder of .txt and .md files, one document each), `jsonl:PATH[:FIELD]`,
or a built-in that every installation has: `docs:python` (the language reference), `docs:scientific`
(docstrings of numpy, scipy and scikit-learn), `docs:stdlib` (docstrings of the standard library).
Out: a frozen Corpus of keyed documents with a content hash. A corpus of a few long texts is cut at paragraph
bounds into passages that count as documents; the corpus says so. Each built-in sets a fixed part aside
(`part="train"`) on which the bundled models were trained; what users harvest never holds it.
Cost: one read of the files; a built-in takes 0.1 to 3 s, its near-duplicates included.
"""

import difflib
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from blake3 import blake3
from jaxtyping import Int32

from ..store.errors import EnvironmentFault, UsageError
from .built_in import RESERVED, built_in_texts, reserved_texts
from .groups import near_duplicate_groups
from .local_texts import read_jsonl, read_text, split_field
from .passages import cut_keyed, few_long_texts

SPEC_FORMS = ("text:PATH", "jsonl:PATH[:FIELD]")

logger = logging.getLogger("nearline")


@dataclass(frozen=True, slots=True)
class Document:
    """One text and the key that names it inside its corpus."""

    key: str
    text: str

    @property
    def content_hash(self) -> str:
        """The first 128 bits of the text's BLAKE3 digest, in hex."""
        return blake3(self.text.encode()).hexdigest(length=16)


@dataclass(frozen=True)
class Corpus:
    """Documents in a fixed order. `spec` is portable: a local path appears by its name only."""

    spec: str
    documents: tuple[Document, ...]
    passages: bool
    content_hash: str
    known_groups: Int32[np.ndarray, " document"] | None = field(default=None, repr=False, compare=False)

    def groups(self) -> Int32[np.ndarray, " document"]:
        """The near-duplicate group of each document; computed here unless loading needed it already."""
        if self.known_groups is not None:
            return self.known_groups
        return near_duplicate_groups([document.text for document in self.documents])


def load(spec: str, part: str = "harvest") -> Corpus:
    """The corpus that a spec names. `part="train"` gives the reserved part of a built-in."""
    if part not in ("harvest", "train"):
        raise UsageError(f"part {part!r} of a corpus: it is 'harvest' or 'train'.")
    if spec in RESERVED:
        return load_built_in(spec, part)
    kind, colon, rest = spec.partition(":")
    if kind not in ("text", "jsonl") or not colon or not rest:
        raise UsageError(unknown_spec(spec))
    if part != "harvest":
        raise UsageError(f"{spec}: only built-in corpora have a part {part!r}.")
    name, texts = read_text(Path(rest)) if kind == "text" else read_jsonl(*split_field(rest))
    return from_documents(texts, f"{kind}:{name}", cut=True)


def from_documents(
    documents: Iterable[str | tuple[str, str] | Document], spec: str = "documents", *, cut: bool = False
) -> Corpus:
    """A corpus of texts, (key, text) pairs or Documents; empty ones are left out. `cut` allows passages."""
    if isinstance(documents, str):
        raise UsageError("documents is one string: give a list of texts, one for each document.")
    named = [named_document(entry, number) for number, entry in enumerate(documents)]
    full = [document for document in named if document.text.strip()]
    if n_empty := len(named) - len(full):
        logger.warning("%s: %d of %d documents are empty and left out", spec, n_empty, len(named))
    if not full:
        raise UsageError(f"{spec}: the corpus holds no text; give at least one document that is not empty.")
    n_texts = len(full)
    if cut and few_long_texts([document.text for document in full]):
        full = [Document(*passage) for document in full for passage in cut_keyed(document.key, document.text)]
    passages = len(full) > n_texts
    if passages:
        logger.info("%s: %d texts cut into %d passages that count as documents", spec, n_texts, len(full))
    return Corpus(spec, tuple(full), passages, hash_documents(full))


def named_document(entry: object, number: int) -> Document:
    """A Document from any form that is allowed; what is no text that can be stored is refused."""
    if isinstance(entry, str):
        entry = Document(f"{number:06d}", entry)
    elif isinstance(entry, tuple) and len(entry) == 2:
        entry = Document(*entry)
    if not isinstance(entry, Document) or not all(isinstance(part, str) for part in (entry.key, entry.text)):
        raise UsageError(
            f"document {number} is a {type(entry).__name__}: documents are texts, (key, text) pairs or "
            "Documents; of rows such as {'text': ...}, give row['text']."
        )
    try:
        (entry.key + entry.text).encode()
    except UnicodeEncodeError:
        raise UsageError(
            f"document {number} ({entry.key!r}) holds half of a surrogate pair, which is no character and "
            "cannot be stored. Repair or leave out this text."
        ) from None
    return entry


def hash_documents(documents: Iterable[Document]) -> str:
    """BLAKE3 over keys and texts, each behind its length, so that no two corpora spell the same bytes."""
    digest = blake3()
    for document in documents:
        for value in (document.key.encode(), document.text.encode()):
            digest.update(len(value).to_bytes(8, "little"))
            digest.update(value)
    return digest.hexdigest()


def unknown_spec(spec: str) -> str:
    known = [*RESERVED, *SPEC_FORMS]
    near = difflib.get_close_matches(spec, known, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]}?" if near else ""
    return f"corpus {spec!r}: unknown. Corpora are {', '.join(known)}.{hint}"


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
