"""Documents and corpora: what is read from anywhere, before any tokenizer sees it.

In: a key and either a text, token ids or the messages of a chat. Out: frozen values with content hashes.
Cost: hashing, 1 GB a second; memory: the texts, about 400 bytes a document beside them.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from blake3 import blake3
from jaxtyping import Int32

from ..store.errors import UsageError
from .groups import near_duplicate_groups

Kind = Literal["text", "ids", "chat"]
INT32_MAX = 2**31 - 1
# No text begins with this byte in UTF-8, so no text has the content of ids or of a chat.
NO_TEXT = b"\xff"


class Row(NamedTuple):
    """What a file or a data set holds for one document. `place` opens the sentence when it is refused."""

    key: str
    value: object
    place: str


@dataclass(frozen=True, slots=True, eq=False)
class Document:
    """A key that names it inside its corpus, and one of: a text, token ids, the messages of a chat."""

    key: str
    text: str = ""
    ids: Int32[np.ndarray, " token"] | None = None
    messages: tuple[dict[str, str], ...] | None = None

    def __post_init__(self) -> None:
        for name, value in (("key", self.key), ("text", self.text)):
            if not isinstance(value, str):
                raise UsageError(
                    f"the {name} of a document is {_article(type(value))}, not a string; ids and messages "
                    "have names of their own: Document(key, ids=...)."
                )
        if bool(self.text) + (self.ids is not None) + (self.messages is not None) > 1:
            raise UsageError(f"document {self.key!r}: give one of text, ids and messages.")

    @property
    def kind(self) -> Kind:
        """Which of the three it holds."""
        if self.ids is not None:
            return "ids"
        return "text" if self.messages is None else "chat"

    @property
    def content(self) -> bytes:
        """What the document says, the key apart, in bytes that no other document has."""
        if self.ids is not None:
            return NO_TEXT + b"ids" + self.ids.astype("<i4").tobytes()
        if self.messages is not None:
            spelled = json.dumps(self.messages, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
            return NO_TEXT + b"chat" + spelled.encode()
        return self.text.encode()

    @property
    def content_hash(self) -> str:
        """The first 128 bits of the content's BLAKE3 digest, in hex."""
        return blake3(self.content).hexdigest(length=16)

    @property
    def words(self) -> str:
        """The words by which near-duplicates are found; those of ids are their decimal numbers."""
        if self.ids is not None:
            return " ".join(map(str, self.ids.tolist()))
        if self.messages is not None:
            return "\n".join(message["content"] for message in self.messages)
        return self.text

    @property
    def empty(self) -> bool:
        """Whether there is nothing to tokenise."""
        return len(self.ids) == 0 if self.ids is not None else not self.words.strip()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Document):
            return NotImplemented
        return self.key == other.key and self.content == other.content

    def __hash__(self) -> int:
        return hash(self.key)


@dataclass(frozen=True)
class Corpus:
    """Documents of one kind in a fixed order. `spec` is portable: a local path appears by its name only.
    `policies` says what was done to the rows that they were made from."""

    spec: str
    documents: tuple[Document, ...]
    passages: bool
    content_hash: str
    known_groups: Int32[np.ndarray, " document"] | None = field(default=None, repr=False, compare=False)
    policies: dict[str, str] = field(default_factory=dict)

    @property
    def kind(self) -> Kind:
        """Whether the documents are texts, token ids or chats."""
        return self.documents[0].kind

    def groups(self) -> Int32[np.ndarray, " document"]:
        """The near-duplicate group of each document; computed here unless loading needed it already."""
        if self.known_groups is not None:
            return self.known_groups
        if self.kind == "ids":
            return near_duplicate_groups([one.ids for one in self.documents if one.ids is not None])
        return near_duplicate_groups([document.words for document in self.documents])


def hash_documents(documents: Iterable[Document]) -> str:
    """BLAKE3 over keys and contents, each behind its length, so that no two corpora spell the same bytes."""
    digest = blake3()
    for document in documents:
        for value in (document.key.encode(), document.content):
            digest.update(len(value).to_bytes(8, "little"))
            digest.update(value)
    return digest.hexdigest()


def document_of(key: str, value: object, place: str) -> Document:
    """A Document of what a row holds: a text, a list of integers, or a list of {"role", "content"} objects.
    Nothing at all is an empty text. `place` opens the sentence of a refusal."""
    document = _document(key, value, place)
    try:
        _ = (key.encode(), document.ids is None and document.content)
    except UnicodeEncodeError:
        raise UsageError(
            f"{place} holds half of a surrogate pair, which is no character and cannot be stored. Repair or "
            "leave out this text."
        ) from None
    return document


def _document(key: str, value: object, place: str) -> Document:
    if value is None or isinstance(value, str):
        return Document(key, value or "")
    if hasattr(value, "__array__"):
        return Document(key, ids=ids_of(np.asarray(value), place))
    if isinstance(value, list | tuple):
        if all(isinstance(item, int) and not isinstance(item, bool) for item in value):
            return Document(key, ids=ids_of(np.array(value, object), place))
        if all(isinstance(item, Mapping) for item in value):
            return Document(key, messages=messages_of(value, place))
    raise UsageError(
        f"{place} holds {_named(value)}. A document is a text, a list of token ids, or a list of objects "
        "with a role and a content."
    )


def _named(value: object) -> str:
    if isinstance(value, list | tuple):
        strange = next((i for i in value if not isinstance(i, int | Mapping) or isinstance(i, bool)), None)
        kinds = [type(strange)] if strange is not None else sorted({type(i) for i in value}, key=str)
        return f"a list that holds {' and '.join(map(_article, kinds))}"
    return _article(type(value))


def _article(kind: type) -> str:
    return f"{'an' if kind.__name__[0] in 'aeiou' else 'a'} {kind.__name__}"


def ids_of(values: np.ndarray, place: str) -> Int32[np.ndarray, " token"]:
    """Token ids as a read-only int32 array; numbers that are no ids are refused."""
    if values.ndim != 1 or (values.dtype != object and not np.issubdtype(values.dtype, np.integer)):
        raise UsageError(
            f"{place} holds an array of {values.ndim} dimensions and dtype {values.dtype}; token ids are one "
            "row of integers."
        )
    if len(values) and not (0 <= values.min() and values.max() <= INT32_MAX):
        wrong = values.min() if values.min() < 0 else values.max()
        raise UsageError(f"{place} holds the number {wrong}, which is no token id: they are 0 to 2^31 - 1.")
    ids = values.astype(np.int32, copy=values.flags.writeable)
    ids.flags.writeable = False
    return ids


def messages_of(values: Sequence[Mapping[str, object]], place: str) -> tuple[dict[str, str], ...]:
    """The messages of a chat; fields that hold nothing are left out, since tables fill them in."""
    messages = []
    for number, value in enumerate(values):
        message = {name: content for name, content in value.items() if content is not None}
        for name in ("role", "content"):
            if name not in message:
                found = ", ".join(map(repr, message)) or "none"
                raise UsageError(
                    f"{place}, message {number}: no {name!r} (its fields are {found}); each message of a "
                    "chat has a role and a content."
                )
        for name, content in message.items():
            if not isinstance(content, str):
                raise UsageError(
                    f"{place}, message {number}: {name!r} holds a {type(content).__name__}; the parts of a "
                    "message are texts."
                )
        messages.append({name: str(content) for name, content in message.items()})
    return tuple(messages)
