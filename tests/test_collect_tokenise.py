"""Tokenising: ids are the tokenizer's own, BOS follows the policy, and the vocabulary gives the text back."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nearline.collect.bundled_models import BUNDLED, bundled_path
from nearline.collect.corpora import from_documents, load
from nearline.collect.token_bytes import token_bytes
from nearline.collect.tokenise import SENTENCE, fingerprint, resolve_bos, tokenise
from nearline.store.errors import UsageError
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast

TEXTS = [
    "The dog's ball\n    rolled over 12,345 hills.\n\n",
    "naïve 東京 🙂 \x00\t end",
    "a<|endoftext|>b </s>",
]
TRAINING = [*TEXTS, "the quick brown fox jumps over the lazy dog " * 20]


def fast(backend: Tokenizer, **tokens: object) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=backend, **tokens)


def byte_level(vocabulary: int = 400, **tokens: object) -> PreTrainedTokenizerFast:
    """As GPT-2's: BOS and EOS are one token, and it is not added unless asked for."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    backend.train_from_iterator(TRAINING, trainer)
    return fast(backend, **({"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"} | tokens))


def sentencepiece() -> PreTrainedTokenizerFast:
    """As Llama's and Gemma's: ▁ for spaces, byte fallback, BOS put in front."""
    words = ["▁", "▁the", "▁dog", "e", "t", "h", "o", "d", "g", "s", "▁▁"]
    tokens = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)], *words]
    backend = Tokenizer(
        models.BPE({token: i for i, token in enumerate(tokens)}, [], byte_fallback=True, unk_token="<unk>")
    )
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return fast(backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>", add_bos_token=True)


def word_pieces() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordPiece({"[UNK]": 0, "walk": 1, "##ing": 2, "▁odd": 3}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    return fast(backend, unk_token="[UNK]")


# ---- ids


def test_documents_are_tokenised_one_by_one() -> None:
    tokenizer, corpus = byte_level(), from_documents(TEXTS[:2] * 300)
    tokens = tokenise(corpus, tokenizer)
    assert len(tokens.ids) == 600
    assert all(row.dtype == np.int32 for row in tokens.ids)
    for document, row in zip(corpus.documents, tokens.ids, strict=True):
        assert row.tolist() == tokenizer.encode(document.text, add_special_tokens=False)
    assert tokens.n_tokens == sum(map(len, tokens.ids))


@pytest.mark.parametrize("tokenizer", [byte_level(), sentencepiece()], ids=["byte_level", "sentencepiece"])
def test_a_text_that_spells_a_special_token_does_not_get_it(tokenizer: PreTrainedTokenizerFast) -> None:
    tokens = tokenise(from_documents(TEXTS), tokenizer, bos="always")
    assert not set(np.concatenate(tokens.ids).tolist()) & set(tokens.special_ids)
    assert tokenizer.decode(tokens.ids[2].tolist()) == TEXTS[2]


def test_truncation_and_padding_left_on_by_others_do_not_matter() -> None:
    tokenizer = byte_level(pad_token="<|endoftext|>")
    expected = tokenise(from_documents(TEXTS), tokenizer)
    tokenizer(TEXTS, truncation=True, max_length=3, padding="max_length")
    again = tokenise(from_documents(TEXTS), tokenizer)
    assert [row.tolist() for row in again.ids] == [row.tolist() for row in expected.ids]
    assert again.fingerprint == expected.fingerprint


def test_a_tokenizer_that_makes_nothing_is_refused() -> None:
    backend = Tokenizer(models.WordLevel({"known": 0}, unk_token="missing"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.normalizer = normalizers.Replace(".", "")
    with pytest.raises(UsageError, match="no token of any document"):
        tokenise(from_documents(["..."]), fast(backend))


# ---- BOS


@pytest.mark.parametrize(
    ("tokenizer", "auto", "always"),
    [
        pytest.param(byte_level(), None, 0, id="has one, does not add it"),
        pytest.param(byte_level(add_bos_token=True), 0, 0, id="has one and adds it"),
        pytest.param(sentencepiece(), 1, 1, id="sentencepiece"),
    ],
)
def test_bos_policies(tokenizer: PreTrainedTokenizerFast, auto: int | None, always: int) -> None:
    corpus = from_documents(TEXTS[:1])
    assert tokenise(corpus, tokenizer, bos="auto").bos_id == auto
    assert tokenise(corpus, tokenizer, bos="always").bos_id == always
    assert tokenise(corpus, tokenizer, bos="never").bos_id is None
    assert (
        tokenise(corpus, tokenizer, bos="always").ids[0].tolist()
        == tokenise(corpus, tokenizer).ids[0].tolist()
    )


def test_always_needs_a_bos_token() -> None:
    tokenizer = word_pieces()
    assert resolve_bos(tokenizer, "auto") is None
    with pytest.raises(UsageError, match="no BOS token"):
        resolve_bos(tokenizer, "always")
    with pytest.raises(UsageError, match="auto, always, never"):
        resolve_bos(tokenizer, "sometimes")  # pyright: ignore[reportArgumentType]


# ---- identity


def test_the_fingerprint_tells_tokenizers_apart() -> None:
    more_special = byte_level()
    more_special.add_special_tokens({"pad_token": "<pad>"})
    more_words = byte_level()
    more_words.add_tokens(["sprocket"])
    other = byte_level()
    other.backend_tokenizer.normalizer = normalizers.Lowercase()
    found = [byte_level(), byte_level(300), more_special, more_words, other, sentencepiece(), ByT5Tokenizer()]
    assert len({fingerprint(tokenizer) for tokenizer in found}) == len(found)
    assert fingerprint(byte_level()) == fingerprint(byte_level(add_bos_token=True))


def test_the_sentence_and_the_special_ids_are_recorded() -> None:
    tokenizer = byte_level()
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    tokens = tokenise(from_documents(TEXTS), tokenizer)
    assert tokens.sentence == SENTENCE
    assert tokenizer.decode(list(tokens.sentence_ids)) == SENTENCE
    assert tokens.special_ids == (0, len(tokenizer) - 1)


# ---- vocabulary


@given(st.text(max_size=40))
def test_bytes_of_a_byte_level_vocabulary_join_to_the_text(text: str) -> None:
    tokenizer = BYTE_LEVEL
    ids = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
    assert b"".join(token_bytes(tokenizer, ids)) == text.encode()


@given(st.text(alphabet=st.characters(exclude_characters="▁"), max_size=40))
def test_bytes_of_a_sentencepiece_vocabulary_join_to_the_text(text: str) -> None:
    tokenizer = SENTENCEPIECE
    ids = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
    assert b"".join(token_bytes(tokenizer, ids)) == text.encode()


BYTE_LEVEL, SENTENCEPIECE = byte_level(), sentencepiece()


def test_other_vocabularies_are_spelled_plainly() -> None:
    assert token_bytes(word_pieces(), [1, 2, 3]) == [b"walk", b"ing", "▁odd".encode()]


def test_special_and_added_tokens_are_spelled_as_they_are() -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens(["Ġ é"])  # Ġ is a space in the vocabulary itself
    assert token_bytes(tokenizer, [0, len(tokenizer) - 1]) == [b"<|endoftext|>", "Ġ é".encode()]


def test_ids_beyond_the_vocabulary_have_no_bytes() -> None:
    assert token_bytes(byte_level(), [5000]) == [b""]


def test_the_vocabulary_table() -> None:
    tokens = tokenise(
        from_documents(["東東 東"]), byte_level(257)
    )  # no merges: each character is three tokens
    ids, counts = np.unique(tokens.ids[0], return_counts=True)
    table = tokens.vocabulary(ids, counts)
    assert table.column_names == ["token_id", "bytes", "text", "count"]
    assert [str(column.type) for column in table.columns] == ["int32", "binary", "string", "int64"]
    assert set(table["text"].to_pylist()) == {"\ufffd", " "}
    raw = dict(zip(table["token_id"].to_pylist(), table["bytes"].to_pylist(), strict=True))
    assert b"".join(raw[i] for i in tokens.ids[0].tolist()).decode() == "東東 東"
    assert sum(table["count"].to_pylist()) == 10


def test_a_slow_tokenizer_will_do() -> None:
    tokens = tokenise(from_documents(["plain text"]), ByT5Tokenizer())
    assert b"".join(tokens.vocabulary(tokens.ids[0], np.ones(10, int))["bytes"].to_pylist()) == b"plain text"


# ---- with the bundled models


@pytest.mark.parametrize("name", BUNDLED)
def test_windows_of_bundled_models_open_with_bos(name: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(bundled_path(name))
    tokens = tokenise(from_documents(TEXTS), tokenizer)
    assert tokens.bos_id == tokenizer.bos_token_id == 0
    assert tokenizer.decode(list(tokens.sentence_ids)) == SENTENCE


@pytest.mark.parametrize(("spec", "at_least"), [("docs:python", 60_000), ("docs:stdlib", 60_000)])
def test_built_in_corpora_hold_enough_tokens(spec: str, at_least: int) -> None:
    """docs:scientific holds six times as much as docs:stdlib; it would cost two seconds more here."""
    tokens = tokenise(load(spec), AutoTokenizer.from_pretrained(bundled_path("tiny-gpt2")))
    assert tokens.n_tokens >= at_least


def test_the_sentence_is_printable_in_one_piece() -> None:
    assert re.search(r"[^\x00-\x7f]", SENTENCE)
    assert len(SENTENCE) < 100
