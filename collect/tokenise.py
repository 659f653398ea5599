"""A corpus as token ids, document by document, and what has to be remembered about the tokenizer.

In: a Corpus of texts, token ids or chats, and a Hugging Face tokenizer, fast or slow, or none where the
documents are ids. Out: a frozen TokenisedCorpus: int32 ids per document, the BOS id that windows get (by
policy), the documents as they were found, and the tokenizer's fingerprint with one fixed sentence. Where
windows get a BOS, none is left at the head of a document. Windows and their BOS rows are the plan's business.
Cost: that of encoding, about 1 s per million tokens on two cores with a fast tokenizer.
"""

import dataclasses
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
import pyarrow as pa
from blake3 import blake3
from jaxtyping import Int
from transformers import PreTrainedTokenizerBase

from ..store.errors import UsageError
from .chats import encode_chats, template_hash
from .corpora import CorpusOptions, select
from .documents import Corpus
from .encoding import Ids, encode, special_tokens, untouched
from .settings import HarvestSettings
from .token_bytes import token_bytes
from .token_files import bounded, is_stream

Policy = Literal["auto", "always", "never"]
POLICIES = ("auto", "always", "never")
# Words, accents, another script, an emoji, digits, a line break and a tab: most mix-ups show here.
SENTENCE = "The naïve fox — said “東京” 🙂 — jumped 1,234.5 times.\n\tThen it's asleep."
NO_TOKENIZER = "none"  # the fingerprint where ids came without one
IDENTIFYING_PARTS = ("model", "normalizer", "pre_tokenizer", "added_tokens")  # what decides the ids of a text


@dataclass(frozen=True, eq=False)
class TokenisedCorpus:
    """Token ids per document of `corpus`, and the tokenizer's identity."""

    ids: tuple[Ids, ...]
    bos_id: int | None
    special_ids: tuple[int, ...]
    fingerprint: str
    sentence: str
    sentence_ids: tuple[int, ...]
    tokenizer: PreTrainedTokenizerBase | None = field(repr=False)
    corpus: Corpus = field(repr=False)

    @property
    def n_tokens(self) -> int:
        return sum(len(row) for row in self.ids)

    @cached_property
    def bos_places(self) -> Mapping[int, Collection[int]]:
        """Where documents hold the BOS that windows get, by document."""
        if self.bos_id is None:
            return {}
        places = ((number, np.flatnonzero(row == self.bos_id)) for number, row in enumerate(self.ids))
        return {number: frozenset(found.tolist()) for number, found in places if len(found)}

    def vocabulary(self, ids: Int[np.ndarray, " type"], counts: Int[np.ndarray, " type"]) -> pa.Table:
        """token_id, bytes, text, count of these ids. The bytes of consecutive tokens join to the text they
        stand for; `text` shows a token alone, with a replacement mark where it cuts a character. Both are
        empty where there is no tokenizer."""
        listed = [int(index) for index in ids]
        raw = [b""] * len(listed) if self.tokenizer is None else token_bytes(self.tokenizer, listed)
        return pa.table(
            {
                "token_id": pa.array(ids, pa.int32()),
                "bytes": pa.array(raw, pa.binary()),
                "text": pa.array([value.decode("utf-8", errors="replace") for value in raw], pa.string()),
                "count": pa.array(counts, pa.int64()),
            }
        )


def tokenise_for(
    settings: HarvestSettings,
    corpus: Corpus,
    tokenizer: PreTrainedTokenizerBase | None,
    vocab_size: int,
) -> TokenisedCorpus:
    """`tokenise` with what the settings say. What they ask for beside the defaults stands in the policies of
    the corpus that was tokenised."""
    found = bounded(corpus, tokenizer, settings.separator)
    if is_stream(corpus):  # only now there are documents to choose from
        found = select(found, CorpusOptions.of(settings))
    asked = {"keep": settings.keep, "exclude_tokens": settings.exclude_tokens}
    policies = found.policies | {name: value for name, value in asked.items() if value is not None}
    return tokenise(
        dataclasses.replace(found, policies=policies, content_hash=corpus.content_hash),
        tokenizer,
        bos=settings.bos,
        exclude=settings.excluded_ids,
        vocab_size=vocab_size,
    )


def tokenise(
    corpus: Corpus,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    bos: Policy = "auto",
    separator: int | None = None,
    exclude: Collection[int] = (),
    vocab_size: int | None = None,
) -> TokenisedCorpus:
    """Every document's ids. What can be refused without encoding is refused first. `separator` ends documents
    of ids; the ids in `exclude` count as special; ids from `vocab_size` on are no ids of this model."""
    if tokenizer is None and corpus.kind != "ids":
        raise UsageError(
            f"this model comes without a tokenizer, and {corpus.spec} holds {corpus.kind} documents, which "
            "need one. Give a tokenizer, or token ids (ids:PATH, or lists of integers)."
        )
    bos_id = resolve_bos(tokenizer, bos)
    special = _special(tokenizer, exclude, vocab_size)
    corpus = bounded(corpus, tokenizer, separator)
    if corpus.kind == "chat" and tokenizer is not None:
        policies = corpus.policies | {"chat_template": template_hash(tokenizer)}
        corpus = dataclasses.replace(corpus, policies=policies)
    ids = _document_ids(corpus, tokenizer)
    _check_ids(corpus, ids, vocab_size)
    ids = [_without_bos(row, bos_id) for row in ids]
    if not any(len(row) for row in ids):
        cause = "holds nothing but the BOS token"
        if corpus.kind != "ids":
            cause = "the tokenizer makes no token of any document; is it this model's own?"
        raise UsageError(f"{corpus.spec}: {cause}")
    identity = (NO_TOKENIZER, "", ())
    if tokenizer is not None:
        identity = (fingerprint(tokenizer), SENTENCE, tuple(encode(tokenizer, [SENTENCE])[0].tolist()))
    return TokenisedCorpus(tuple(ids), bos_id, special, *identity, tokenizer, corpus)


def _document_ids(corpus: Corpus, tokenizer: PreTrainedTokenizerBase | None) -> list[Ids]:
    if tokenizer is None or corpus.kind == "ids":
        return [document.ids for document in corpus.documents if document.ids is not None]
    if corpus.kind == "chat":
        return encode_chats(tokenizer, corpus.documents)
    return encode(tokenizer, [document.text for document in corpus.documents])


def _check_ids(corpus: Corpus, ids: list[Ids], vocab_size: int | None) -> None:
    if vocab_size is None:
        return
    for document, row in zip(corpus.documents, ids, strict=True):
        if len(row) and int(row.max()) >= vocab_size:
            place = int(np.flatnonzero(row >= vocab_size)[0])
            cause = (
                "Were these ids made for another model?"
                if corpus.kind == "ids"
                else "Give the tokenizer that was made for this model."
            )
            raise UsageError(
                f"document {document.key}: token id {int(row[place])} at place {place} is outside the "
                f"model's vocabulary of {vocab_size}. {cause}"
            )


def _without_bos(ids: Ids, bos_id: int | None) -> Ids:
    """No BOS at the head, where each window gets one of its own."""
    if bos_id is None or not len(ids) or ids[0] != bos_id:
        return ids
    others = np.flatnonzero(ids != bos_id)
    return ids[others[0] if len(others) else len(ids) :]


def _special(
    tokenizer: PreTrainedTokenizerBase | None, exclude: Collection[int], vocab_size: int | None
) -> tuple[int, ...]:
    if vocab_size is not None and (beyond := sorted(one for one in exclude if one >= vocab_size)):
        raise UsageError(
            f"exclude_tokens: id {beyond[0]} is outside the model's vocabulary; ids are 0-{vocab_size - 1}."
        )
    own = () if tokenizer is None else special_ids(tokenizer)
    return tuple(sorted({*own, *exclude}))


def resolve_bos(tokenizer: PreTrainedTokenizerBase | None, policy: Policy) -> int | None:
    """The id that opens every window, or None. `auto` does what the tokenizer does when left to itself."""
    if policy not in POLICIES:
        raise UsageError(f"bos={policy!r}: allowed are {', '.join(POLICIES)}.")
    bos_id = None if tokenizer is None else tokenizer.bos_token_id
    if policy == "always" and bos_id is None:
        lacking = "there is no tokenizer" if tokenizer is None else "this tokenizer has no BOS token"
        raise UsageError(f"bos='always': {lacking}; use 'auto' or 'never'.")
    if policy == "never" or tokenizer is None or bos_id is None:
        return None
    return int(bos_id) if policy == "always" or adds_bos(tokenizer) else None  # pyright: ignore[reportArgumentType]


def adds_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    with untouched(tokenizer):
        ids = tokenizer("a", add_special_tokens=True)["input_ids"]
    return bool(ids) and ids[0] == tokenizer.bos_token_id  # pyright: ignore[reportIndexIssue]


def special_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Named special tokens and added tokens that are marked special, sorted."""
    return tuple(sorted(set(special_tokens(tokenizer).values())))


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """BLAKE3 of vocabulary, merges, normalisation, splitting rules and the map of special tokens. Truncation,
    padding and templates are left out: they change with use, and change no id of a text. Of a slow tokenizer
    the rules are code; what it shows of them goes in, and the ids of SENTENCE are recorded beside it."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        parts = _slow_parts(tokenizer)
    else:
        whole = json.loads(backend.to_str())
        parts = {name: whole[name] for name in IDENTIFYING_PARTS}
    parts["special"] = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return blake3(json.dumps(parts, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def _slow_parts(tokenizer: PreTrainedTokenizerBase) -> dict[str, object]:
    parts: dict[str, object] = {"vocabulary": tokenizer.get_vocab(), "class": type(tokenizer).__name__}
    flags = ("content", "special", "lstrip", "rstrip", "single_word", "normalized")
    added = tokenizer.added_tokens_decoder.items()
    parts["added_tokens"] = [[index, *(getattr(token, flag) for flag in flags)] for index, token in added]
    if (pieces := getattr(tokenizer, "sp_model", None)) is not None:
        parts["sentencepiece"] = blake3(pieces.serialized_model_proto()).hexdigest()
    if merges := getattr(tokenizer, "bpe_ranks", None):
        parts["merges"] = sorted((rank, str(pair)) for pair, rank in merges.items())
    return parts
