"""A corpus as token ids, document by document, and what has to be remembered about the tokenizer.

In: a Corpus and a Hugging Face tokenizer, fast or slow. Out: a frozen TokenisedCorpus: int32 ids per
document without BOS or EOS, the BOS id that windows get (by policy), and the tokenizer's fingerprint with
one fixed sentence. Text is text: a document that spells `<|endoftext|>` does not get the special token,
which would be a BOS in mid-text. Windows and their BOS rows are the plan's business.
Cost: about 1 s per million tokens on two cores with a fast tokenizer; memory a few bytes per character.
"""

import json
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import pyarrow as pa
from blake3 import blake3
from jaxtyping import Int, Int32
from transformers import PreTrainedTokenizerBase

from ..store.errors import UsageError
from .corpora import Corpus
from .token_bytes import token_bytes

Policy = Literal["auto", "always", "never"]
POLICIES = ("auto", "always", "never")
# Words, accents, another script, an emoji, digits, a line break and a tab: most mix-ups show here.
SENTENCE = "The naïve fox — said “東京” 🙂 — jumped 1,234.5 times.\n\tThen it's asleep."
DOCUMENTS_AT_ONCE = 512
IDENTIFYING_PARTS = ("model", "normalizer", "pre_tokenizer", "added_tokens")  # what decides the ids of a text


@dataclass(frozen=True, slots=True, eq=False)
class TokenisedCorpus:
    """Token ids per document, and the tokenizer's identity."""

    ids: tuple[Int32[np.ndarray, "_"], ...]
    bos_id: int | None
    special_ids: tuple[int, ...]
    fingerprint: str
    sentence: str
    sentence_ids: tuple[int, ...]
    tokenizer: PreTrainedTokenizerBase = field(repr=False)

    @property
    def n_tokens(self) -> int:
        return sum(len(row) for row in self.ids)

    def vocabulary(self, ids: Int[np.ndarray, " type"], counts: Int[np.ndarray, " type"]) -> pa.Table:
        """token_id, bytes, text, count of these ids. The bytes of consecutive tokens join to the text they
        stand for; `text` shows a token alone, with a replacement mark where it cuts a character."""
        raw = token_bytes(self.tokenizer, [int(i) for i in ids])
        return pa.table(
            {
                "token_id": pa.array(ids, pa.int32()),
                "bytes": pa.array(raw, pa.binary()),
                "text": pa.array([value.decode("utf-8", errors="replace") for value in raw], pa.string()),
                "count": pa.array(counts, pa.int64()),
            }
        )


def tokenise(corpus: Corpus, tokenizer: PreTrainedTokenizerBase, *, bos: Policy = "auto") -> TokenisedCorpus:
    """Every document's ids. The BOS policy is resolved first, so that a wrong one costs nothing."""
    bos_id = resolve_bos(tokenizer, bos)
    texts = [document.text for document in corpus.documents]
    ids: list[np.ndarray] = []
    for start in range(0, len(texts), DOCUMENTS_AT_ONCE):
        ids += encode(tokenizer, texts[start : start + DOCUMENTS_AT_ONCE])
    if not any(len(row) for row in ids):
        raise UsageError(
            f"{corpus.spec}: the tokenizer makes no token of any document; is it this model's own?"
        )
    sentence_ids = tuple(encode(tokenizer, [SENTENCE])[0].tolist())
    return TokenisedCorpus(
        tuple(ids), bos_id, special_ids(tokenizer), fingerprint(tokenizer), SENTENCE, sentence_ids, tokenizer
    )


def encode(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[Int32[np.ndarray, "_"]]:
    """Ids of each text, nothing added, nothing cut, nothing in it read as a special token."""
    encoded = tokenizer(
        texts,
        add_special_tokens=False,
        split_special_tokens=True,
        truncation=False,
        padding=False,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,  # documents may be longer than the model's context: windows are cut later
    )
    return [np.array(row, np.int32) for row in encoded["input_ids"]]  # pyright: ignore[reportGeneralTypeIssues]


def resolve_bos(tokenizer: PreTrainedTokenizerBase, policy: Policy) -> int | None:
    """The id that opens every window, or None. `auto` does what the tokenizer does when left to itself."""
    if policy not in POLICIES:
        raise UsageError(f"bos={policy!r}: allowed are {', '.join(POLICIES)}.")
    bos_id = tokenizer.bos_token_id
    if policy == "always" and bos_id is None:
        raise UsageError("bos='always': this tokenizer has no BOS token; use 'auto' or 'never'.")
    if policy == "never" or bos_id is None:
        return None
    return int(bos_id) if policy == "always" or adds_bos(tokenizer) else None  # pyright: ignore[reportArgumentType]


def adds_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    ids = tokenizer("a", add_special_tokens=True)["input_ids"]
    return bool(ids) and ids[0] == tokenizer.bos_token_id  # pyright: ignore[reportIndexIssue]


def special_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Named special tokens and added tokens that are marked special, sorted."""
    added = (index for index, token in tokenizer.added_tokens_decoder.items() if token.special)
    return tuple(sorted({*map(int, tokenizer.all_special_ids), *map(int, added)}))


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """BLAKE3 of vocabulary, merges, normalisation, splitting rules and the map of special tokens. Truncation,
    padding and templates are left out: they change with use, and change no id of a text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        parts = {"vocabulary": tokenizer.get_vocab(), "class": type(tokenizer).__name__}
    else:
        whole = json.loads(backend.to_str())
        parts = {name: whole[name] for name in IDENTIFYING_PARTS}
    parts["special"] = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return blake3(json.dumps(parts, sort_keys=True, ensure_ascii=False).encode()).hexdigest()
