"""Token ids in files of the user's, and where documents end in them.

In: a .npy file of integers, of any width: one row of numbers is a stream, two dimensions are one document a
row. Out: Documents of ids. A corpus of ids that is one document is a stream, and documents are found in it:
they end at a separator, which stays their last token, or where none stands, every PIECE tokens. Rows that
were padded are taken as they are: what is padding and what is text, only their maker knows.
Cost: one read of the file, never by pickle; 4 bytes a token.
"""

import dataclasses
import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from jaxtyping import Int32
from numpy.lib.format import open_memmap
from transformers import PreTrainedTokenizerBase

from ..store.errors import EnvironmentFault, UsageError
from .documents import INT32_MAX, Corpus, Document
from .passages import FEW_TEXTS, LARGE_SHARE
from .wording import counted

# The default window without its BOS row, so that a piece is one window with BOS or without, and nothing is
# left over; about as much text as one and a half passages of a long text.
PIECE = 511
HOW_TO_WRITE = (
    "Write it with numpy.save(PATH, ids): an array of one dimension is a stream, in which documents end at a "
    "separator; one of two dimensions is one document a row."
)

logger = logging.getLogger("nearline")


def read_ids(path: Path) -> tuple[str, list[Document]]:
    """The file's name, and its rows as Documents NAME:0, NAME:1, …, or the one stream in it."""
    values = open_ids(path)
    low, high = int(values.min()), int(values.max())
    if low < 0 or high > INT32_MAX:
        wrong = low if low < 0 else high
        place = [int(axis[0]) for axis in np.nonzero(values == wrong)]
        raise UsageError(
            f"ids:{path}: holds {wrong} at {place}, which is no token id: they "
            "are 0 to 2^31 - 1. Leave out rows and places that mark padding."
        )
    ids = np.ascontiguousarray(values, dtype=np.int32)
    ids.flags.writeable = False
    if ids.ndim == 1:
        return path.name, [Document(path.name, ids=ids)]
    return path.name, [Document(f"{path.name}:{number}", ids=row) for number, row in enumerate(ids)]


def open_ids(path: Path) -> np.ndarray:
    """The array in a file, mapped, once its head says that it can hold token ids."""
    values = _load(path)
    if values.ndim not in (1, 2) or values.dtype.kind not in "iu" or values.size == 0:
        raise UsageError(
            f"ids:{path}: holds an array of shape {values.shape} and dtype {values.dtype}; token ids are "
            f"integers in one dimension or two. {HOW_TO_WRITE}"
        )
    return values


def _load(path: Path) -> np.ndarray:
    try:
        return open_memmap(path, mode="r")
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(f"ids:{path}: no such file; a corpus is a file that exists.") from None
    except IsADirectoryError:
        raise UsageError(f"ids:{path}: a folder; ids: takes one .npy file.") from None
    except ValueError as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"ids:{path}: no whole .npy file of numbers ({reason}). {HOW_TO_WRITE}") from None
    except OSError as error:
        raise EnvironmentFault(f"ids:{path}: cannot be read ({error.strerror}).") from None


def is_stream(corpus: Corpus) -> bool:
    """Whether documents are still to be found in its token ids."""
    return corpus.kind == "ids" and len(corpus.documents) == 1


def bounded(
    corpus: Corpus, tokenizer: PreTrainedTokenizerBase | None, separator: int | None = None
) -> Corpus:
    """The corpus with its documents ended where they end: a stream at `separator` (default: the tokenizer's
    EOS token, where it occurs) or every PIECE tokens; of several documents each at `separator`, if given. One
    in which they were found before is returned as it is."""
    if corpus.kind != "ids":
        if separator is not None:
            raise UsageError(
                f"separator={separator}: {corpus.spec} holds no token ids but documents with bounds of their "
                "own. Leave separator out."
            )
        return corpus
    stream = is_stream(corpus) and not {"separator", "pieces"} & {*corpus.policies}
    if not stream and separator is None:
        return corpus
    policies, documents = dict(corpus.policies), list(corpus.documents)
    ending = _separator(corpus, tokenizer, separator)
    if ending is not None:
        documents = [part for document in documents for part in _at_separators(document, ending)]
        # Separators that follow one another, such as EOS and BOS of one id, have no document between them.
        documents = [document for document in documents if (_ids(document) != ending).any()]
        if not documents:
            raise UsageError(f"{corpus.spec}: holds nothing but the separator {ending}.")
        policies["separator"] = str(ending)
    if stream and _few_or_large(documents):
        documents = [part for document in documents for part in _in_pieces(document)]
        policies["pieces"] = f"{PIECE} tokens"
    if stream:
        logger.info("%s: %s found in its token ids", corpus.spec, counted(len(documents), "document"))
    else:
        logger.info(
            "%s: cut at separator %s inside of its rows too: %s in %s",
            corpus.spec,
            ending,
            counted(len(documents), "document"),
            counted(len(corpus.documents), "row"),
        )
    return dataclasses.replace(
        corpus,
        documents=tuple(documents),
        passages=corpus.passages or "pieces" in policies,
        known_groups=None,
        policies=policies,
    )


def _separator(
    corpus: Corpus, tokenizer: PreTrainedTokenizerBase | None, separator: int | None
) -> int | None:
    eos = None if tokenizer is None else tokenizer.eos_token_id
    chosen = eos if separator is None else separator
    if chosen is None or any((_ids(document) == chosen).any() for document in corpus.documents):
        return None if chosen is None else int(chosen)  # pyright: ignore[reportArgumentType]
    if separator is not None:
        raise UsageError(f"separator={separator}: {corpus.spec} does not hold this token id.")
    return None


def _at_separators(document: Document, separator: int) -> Iterator[Document]:
    ids = _ids(document)
    ends = np.flatnonzero(ids == separator) + 1
    yield from _keyed(document, [part for part in np.split(ids, ends) if len(part)])


def _in_pieces(document: Document) -> Iterator[Document]:
    ids = _ids(document)
    yield from _keyed(document, [ids[start : start + PIECE] for start in range(0, len(ids), PIECE)])


def _keyed(document: Document, parts: list[np.ndarray]) -> Iterator[Document]:
    if len(parts) == 1:
        yield dataclasses.replace(document, ids=parts[0])
    else:
        yield from (Document(f"{document.key}#{number:06d}", ids=part) for number, part in enumerate(parts))


def _few_or_large(documents: list[Document]) -> bool:
    """As of passages of texts: too few units, or one too large."""
    sizes = [len(_ids(document)) for document in documents]
    return len(sizes) < FEW_TEXTS or max(sizes) > LARGE_SHARE * sum(sizes)


def _ids(document: Document) -> Int32[np.ndarray, "_"]:
    assert document.ids is not None
    return document.ids
