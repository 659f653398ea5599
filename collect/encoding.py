"""Texts as token ids: nothing added, nothing cut, and nothing in a text read as a special token.

In: a Hugging Face tokenizer, fast or slow, and texts. Out: int32 ids of each. Text is text: a document that
spells `<|endoftext|>` does not get the special token, which would be a BOS in mid-text; tokens that were
added and are not special are matched as the tokenizer does it. What a tokenizer puts around a text even when
it is told to add nothing is taken off. The tokenizer is left as it was found.
Cost: about 1 s per million tokens on two cores with a fast tokenizer; memory: the ids, and
some 200 MB for the texts that are encoded at once.
"""

import re
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from jaxtyping import Int32
from transformers import PreTrainedTokenizerBase

from ..store.errors import UsageError

TEXTS_AT_ONCE = 512
CHARS_AT_ONCE = 2**22  # what a tokenizer notes about each token takes some 40 bytes a character
PROBE = "a"

Ids = Int32[np.ndarray, "_"]


def encode(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, special: bool = False) -> list[Ids]:
    """Ids of each text. `special`: special tokens that the texts spell are meant (a rendered chat)."""
    ids: list[Ids] = []
    with untouched(tokenizer):
        head, tail = frame(tokenizer)
        for part in parts(texts):
            encoded = _encode(tokenizer, part, special)
            ids += [np.array(row, np.int32)[head : len(row) - tail] for row in encoded]
    return ids


def parts(texts: Sequence[str]) -> Iterator[list[str]]:
    """The texts in runs that a tokenizer gets at once: no more than TEXTS_AT_ONCE, and none that is longer
    than CHARS_AT_ONCE but by its last text."""
    part: list[str] = []
    length = 0
    for text in texts:
        part.append(text)
        length += len(text)
        if len(part) == TEXTS_AT_ONCE or length >= CHARS_AT_ONCE:
            yield part
            part, length = [], 0
    if part:
        yield part


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Named special tokens and added tokens that are marked special: how they are spelled, and their ids."""
    named = zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True)
    added = (
        (token.content, index) for index, token in tokenizer.added_tokens_decoder.items() if token.special
    )
    return {str(token): int(index) for token, index in (*named, *added)}


def any_of(spellings: Sequence[str]) -> re.Pattern[str]:
    """Finds and captures any of these; where one begins with another, the longer one."""
    longest_first = sorted((re.escape(one) for one in spellings if one), key=len, reverse=True)
    return re.compile(f"({'|'.join(longest_first)})" if longest_first else "((?!))")


def frame(tokenizer: PreTrainedTokenizerBase) -> tuple[int, int]:
    """How many special ids this tokenizer puts in front of and behind a text when told to add none: 0 and 0,
    but for a few that do as they please."""
    special = set(special_tokens(tokenizer).values())
    empty = _encode(tokenizer, [""], special=False)[0]
    if not special & set(empty):
        return 0, 0
    probe = _encode(tokenizer, [PROBE], special=False)[0]
    head = next((n for n, index in enumerate(probe) if index not in special), len(probe))
    tail = next((n for n, index in enumerate(reversed(probe)) if index not in special), len(probe))
    if head + tail != len(empty):
        raise UsageError(
            "the tokenizer puts special tokens into texts though it is told to add none, and not only around "
            "them; give token ids as documents instead of texts."
        )
    return head, tail


def _encode(tokenizer: PreTrainedTokenizerBase, texts: list[str], special: bool) -> list[list[int]]:
    if getattr(tokenizer, "is_fast", False):
        return _ids_of(tokenizer, texts, split_special=not special)
    if special:
        return _ids_of(tokenizer, texts, split_special=False)
    return list(_encode_slow(tokenizer, texts))


def _encode_slow(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> Iterator[list[int]]:
    """A slow tokenizer that splits special tokens splits all others that were added too, so a text that
    spells a special token is cut at the others here."""
    known = special_tokens(tokenizer)
    spelled = any_of([*known])
    others = {token.content: index for index, token in tokenizer.added_tokens_decoder.items()}
    added = any_of([content for content in others if content not in known])
    for text in texts:
        if not spelled.search(text):
            yield from _ids_of(tokenizer, [text], split_special=False)
            continue
        ids: list[int] = []
        for piece in filter(None, added.split(text)):
            found = added.fullmatch(piece)
            ids += [others[piece]] if found else _ids_of(tokenizer, [piece], split_special=True)[0]
        yield ids


def _ids_of(tokenizer: PreTrainedTokenizerBase, texts: list[str], *, split_special: bool) -> list[list[int]]:
    encoded = tokenizer(
        texts,
        add_special_tokens=False,
        split_special_tokens=split_special,
        truncation=False,
        padding=False,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,  # documents may be longer than the model's context: windows are cut later
    )
    return encoded["input_ids"]  # pyright: ignore[reportReturnType]


@contextmanager
def untouched(tokenizer: PreTrainedTokenizerBase) -> Generator[None]:
    """Whatever is encoded inside, a fast tokenizer splits, truncates and pads afterwards as it did before."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        yield
        return
    splits, truncation, padding = backend.encode_special_tokens, backend.truncation, backend.padding
    try:
        yield
    finally:
        backend.encode_special_tokens = splits
        if truncation is not None:
            backend.enable_truncation(**truncation)
        if padding is not None:
            backend.enable_padding(**padding)
