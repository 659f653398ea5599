"""Which documents of a corpus are taken: include and exclude files, and the first so many.

In: documents in order, and the options. Out: those that are taken, in the same order. A file holds keys, one
a line (a `#` begins the number of a passage, so there are no comments); the key of a text that was cut into
passages means all of them. A key that is not there is a mistake and named, unless max_documents stopped the
reading before. Cost: the keys of the files.
"""

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from blake3 import blake3

from ..store.errors import UsageError
from .documents import Document
from .local_texts import read_file
from .wording import is_or_are

_PASSAGE = re.compile(r"#\d{4,}$")
COMPARED_KEYS = 10_000  # among so many the nearest to a wrong one is looked for


@dataclass(frozen=True, slots=True)
class Choice:
    """Keys to take (None: all) and to leave out, and how many documents at most."""

    include: frozenset[str] | None = None
    exclude: frozenset[str] = frozenset()
    most: int | None = None
    _texts: frozenset[str] | None = None

    @classmethod
    def of(cls, include: str | None, exclude: str | None, most: int | None) -> "Choice":
        """The choice that these files and this number make."""
        taken = None if include is None else _keys_of(Path(include), "include")
        left_out = frozenset() if exclude is None else _keys_of(Path(exclude), "exclude")
        texts = None if taken is None else taken | {text_key(key) for key in taken}
        return cls(taken, left_out, most, texts)

    @property
    def named(self) -> frozenset[str]:
        """All keys that are named."""
        return self.exclude | (self.include or frozenset())

    def may_take(self, key: str) -> bool:
        """Whether a text is read: it, or a passage that it may be cut into, is taken."""
        return key not in self.exclude and (self._texts is None or key in self._texts)

    def takes(self, key: str) -> bool:
        """Whether a document is taken, by its own key or that of the text it was cut from."""
        keys = {key, text_key(key)}
        return not keys & self.exclude and (self.include is None or bool(keys & self.include))

    def require_known(self, spec: str, known: Iterable[str]) -> None:
        """Refuse keys that the corpus has not got."""
        here = {name for key in known for name in (key, text_key(key))}
        if unknown := sorted(self.named - here):
            near = difflib.get_close_matches(unknown[0], list(islice(here, COMPARED_KEYS)), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            few = f"{len(unknown)} of the {len(self.named)} keys" if len(self.named) > 1 else "the only key"
            raise UsageError(
                f"{spec}: {few} in the files of include and exclude {is_or_are(len(unknown))} not in the "
                f"corpus, such as {unknown[0]!r}{hint}. The column key of a store's documents.parquet shows "
                "what there is."
            )

    def among(self, spec: str, documents: Iterable[Document]) -> tuple[Document, ...]:
        """The documents that are taken, in their order."""
        taken = (document for document in documents if self.takes(document.key))
        if not (chosen := tuple(islice(taken, self.most))):
            raise UsageError(f"{spec}: include and exclude leave no document.")
        return chosen

    def policies(self) -> dict[str, str]:
        """What a store says about the choice."""
        files = {"include": self.include, "exclude": self.exclude or None}
        said = {name: _digest(keys) for name, keys in files.items() if keys is not None}
        return said | ({} if self.most is None else {"documents": f"first {self.most}"})


def text_key(key: str) -> str:
    """The key of the text that a passage was cut from; any other key as it is."""
    return _PASSAGE.sub("", key)


def _keys_of(path: Path, what: str) -> frozenset[str]:
    if not path.is_file():
        raise UsageError(f"{what}={path}: no such file; give a file with the keys of documents, one a line.")
    keys = frozenset(line for line in (line.rstrip("\r") for line in read_file(path).split("\n")) if line)
    if not keys:
        raise UsageError(f"{what}={path}: names no key; give the keys of documents, one a line.")
    return keys


def _digest(keys: Iterable[str]) -> str:
    keys = sorted(keys)
    return f"{len(keys)} keys, {blake3(chr(10).join(keys).encode()).hexdigest(length=8)}"
