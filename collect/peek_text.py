"""The text of a preview as token ids, under the rules that the study's store was harvested by.

In: one text or several, or token ids; a tokenizer (None where ids are given to a model without one). Out: a
frozen `PeekedText`: ids with their BOS, cut at the model's positions, each token as text, and which tokens
are special. Cost: one tokenisation.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Bool, Int32
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..store.errors import UsageError
from . import tokenise
from .anatomy import Anatomy
from .peek_study import StudyFacts
from .token_bytes import token_bytes

Text: TypeAlias = (
    "str | np.ndarray | Tensor | Sequence[str | int] | Sequence[Sequence[int] | np.ndarray | Tensor]"
)
Ids = Int32[np.ndarray, "_"]

_NO_UTF_8 = re.compile("[\udc80-\udcff]")  # what surrogateescape makes of a byte that is in no character


@dataclass(frozen=True, slots=True, eq=False)
class PeekedText:
    """Token ids of each text with its BOS, and per token of all of them what it spells and what it is.
    `pieces` are for the eye: (what tokens in a row spell, how many they are), more than one only where a
    token ends inside a character."""

    ids: tuple[Ids, ...]
    tokens: tuple[str, ...]
    pieces: tuple[tuple[str, int], ...]
    special: Bool[np.ndarray, "token"]
    notes: tuple[str, ...]

    @property
    def n_tokens(self) -> int:
        return len(self.tokens)

    @property
    def token_id(self) -> Ids:
        return np.concatenate(self.ids)

    @property
    def text(self) -> Int32[np.ndarray, "token"]:
        """Which text each token stands in."""
        return np.repeat(np.arange(len(self.ids), dtype=np.int32), [len(ids) for ids in self.ids])

    @property
    def position(self) -> Int32[np.ndarray, "token"]:
        return np.concatenate([np.arange(len(ids), dtype=np.int32) for ids in self.ids])


def peeked_text(
    text: Text, tokenizer: PreTrainedTokenizerBase | None, facts: StudyFacts, found: Anatomy
) -> PeekedText:
    """Tokenise, add BOS, cut; or the reason why not."""
    _check_tokenizer(tokenizer, facts)
    ids = [_with_bos(one, facts.bos_id) for one in _plain_ids(text, tokenizer)]
    _check_ids(ids, found.vocab_size)
    most = found.max_positions
    notes: list[str] = []
    if cut := sum(max(len(one) - most, 0) for one in ids) if most is not None else 0:
        notes.append(f"{cut:,} tokens beyond the model's {most:,} positions were cut off")
    ids = [one[:most] for one in ids]
    if max(map(len, ids)) > facts.sequence_length:
        notes.append(f"positions from {facts.sequence_length:,} on are beyond what the study has seen")
    every = np.concatenate(ids)
    special = np.isin(every, np.asarray(facts.special_ids, np.int32))
    if tokenizer is None:  # then a token is its number
        tokens = tuple(map(str, every.tolist()))
        pieces = tuple((f"⟨{token}⟩", 1) for token in tokens)
        return PeekedText(tuple(ids), tokens, pieces, special, tuple(notes))
    raw = [token_bytes(tokenizer, one.tolist()) for one in ids]
    tokens = tuple(readable(token) for one in raw for token in one)
    pieces = tuple(piece for one in raw for piece in whole_characters(one))
    return PeekedText(tuple(ids), tokens, pieces, special, tuple(notes))


def readable(raw: bytes) -> str:
    """UTF-8 as text; a byte of a character that is not whole as ⟨F0⟩."""
    text = raw.decode("utf-8", errors="surrogateescape")
    return _NO_UTF_8.sub(lambda found: f"⟨{ord(found[0]) - 0xDC00:02X}⟩", text)


def whole_characters(tokens: Iterable[bytes]) -> list[tuple[str, int]]:
    """The text of tokens, together with those behind them where they end inside a character, and how many."""
    pieces: list[tuple[str, int]] = []
    held, n_held = b"", 0
    for token in tokens:
        held, n_held = held + token, n_held + 1
        if not _ends_inside(held):
            pieces.append((readable(held), n_held))
            held, n_held = b"", 0
    return [*pieces, (readable(held), n_held)] if n_held else pieces


def _ends_inside(raw: bytes) -> bool:
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data"
    return False


def _check_tokenizer(tokenizer: PreTrainedTokenizerBase | None, facts: StudyFacts) -> None:
    if tokenizer is None:
        return
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise UsageError(
            f"a tokenizer is expected, and {type(tokenizer).__name__} was given. Give what AutoTokenizer's "
            "from_pretrained loads, or None where the text is token ids."
        )
    mine = tokenise.fingerprint(tokenizer)
    if mine != facts.fingerprint:
        raise UsageError(
            f"this tokenizer (fingerprint {mine[:12]}) is not the one that store {facts.store} of study "
            f"{facts.study} was made with ({facts.fingerprint[:12]}): its ids mean other tokens. Give the "
            f"tokenizer of {facts.model}."
        )


def _plain_ids(text: Text, tokenizer: PreTrainedTokenizerBase | None) -> list[Ids]:
    """Ids of each text, nothing added."""
    parts = _parts(text)
    if not isinstance(parts[0], str):
        return parts
    if tokenizer is None:
        raise UsageError("text needs a tokenizer; give one, or give token ids instead of text")
    ids = tokenise.encode(tokenizer, parts)
    for number, (one, spelled) in enumerate(zip(ids, parts, strict=True), 1):
        if not len(one):
            which = f"text {number} of {len(parts)}" if len(parts) > 1 else "the text"
            raise UsageError(f"{which} ({spelled[:30]!r}) has no token: give some text to look at")
    return ids


def _parts(text: Text) -> list[Any]:
    """Texts as they are, or ids as arrays; never a mixture."""
    if isinstance(text, str):
        return [text]
    values: Any = text.detach().cpu().numpy() if isinstance(text, Tensor) else text
    parts = list(values) if isinstance(values, list | tuple | np.ndarray) else []
    if not parts:
        raise UsageError(f"{type(text).__name__} without a text: give a text, token ids, or a list of either")
    if all(isinstance(part, str) for part in parts):
        return parts
    try:
        arrays = [np.asarray(part) for part in parts]
        ids = [np.asarray(parts)] if all(one.ndim == 0 for one in arrays) else arrays
        if any(one.ndim != 1 or not one.size or one.dtype.kind not in "iu" for one in ids):
            raise ValueError
        return [one.astype(np.int64) for one in ids]
    except (TypeError, ValueError):
        raise UsageError(
            f"{type(parts[0]).__name__} among what was given is neither text nor token ids: give a text, a "
            "list of texts, whole numbers, or a list of lists of these, none of them empty"
        ) from None


def _with_bos(ids: np.ndarray, bos_id: int | None) -> np.ndarray:
    """One BOS in front where there is to be one, whatever the ids brought of their own."""
    if bos_id is None:
        return ids
    others = np.flatnonzero(ids != bos_id)
    return np.concatenate([[bos_id], ids[others[0] :] if others.size else ids[:0]])


def _check_ids(ids: list[np.ndarray], vocab_size: int) -> None:
    every = np.concatenate(ids)
    if every.min() < 0 or every.max() >= vocab_size:
        wrong = every[(every < 0) | (every >= vocab_size)][0]
        raise UsageError(
            f"token id {wrong} is outside the model's vocabulary of {vocab_size}: tokenizer and model do not "
            "belong together"
        )
    ids[:] = [one.astype(np.int32) for one in ids]
