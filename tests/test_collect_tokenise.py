"""Tokenising: ids are the tokenizer's own, BOS follows the policy, and the vocabulary gives the text back."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers_harvest import SMALL, texts
from helpers_models import tiny_model, tiny_tokenizer
from helpers_tokenizers import TEXTS, byte_level, fast, sentencepiece, word_pieces
from hypothesis import given
from hypothesis import strategies as st
from nearline.collect import encoding
from nearline.collect.bundled_models import BUNDLED, bundled_path
from nearline.collect.corpora import from_documents, load
from nearline.collect.harvesting import harvest
from nearline.collect.models import describe
from nearline.collect.planning import build_plan
from nearline.collect.repairing import repair
from nearline.collect.settings import parse
from nearline.collect.token_bytes import token_bytes
from nearline.collect.tokenise import SENTENCE, Policy, fingerprint, resolve_bos, tokenise, tokenise_for
from nearline.collect.windows import Cutting
from nearline.store.errors import UsageError
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import AddedToken, AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast

# ---- ids


def test_documents_are_tokenised_one_by_one() -> None:
    tokenizer, corpus = byte_level(), from_documents(TEXTS[:2] * 300)
    tokens = tokenise(corpus, tokenizer)
    assert len(tokens.ids) == 600
    assert all(row.dtype == np.int32 for row in tokens.ids)
    for document, row in zip(corpus.documents, tokens.ids, strict=True):
        assert row.tolist() == tokenizer.encode(document.text, add_special_tokens=False)
    assert tokens.n_tokens == sum(map(len, tokens.ids))


def test_long_texts_are_not_encoded_all_at_once() -> None:
    """A tokenizer takes tens of bytes for each character that it is given at once."""
    book, page = "b" * (encoding.CHARS_AT_ONCE // 3), "a page"
    parts = list(encoding.parts([*[book] * 7, *[page] * 1000, "b" * 2 * encoding.CHARS_AT_ONCE, page]))
    assert [text for part in parts for text in part][:8] == [*[book] * 7, page]
    assert [len(part) for part in parts] == [4, 4, 512, 488, 1]
    assert all(sum(map(len, part[:-1])) < encoding.CHARS_AT_ONCE for part in parts)
    assert list(encoding.parts([])) == []


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


# ---- tokenizers of every kind


class Framing(ByT5Tokenizer):
    """Puts BOS in front and EOS behind whatever it is told."""

    def build_inputs_with_special_tokens(self, token_ids_0: Any, token_ids_1: Any = None) -> Any:
        return [self.bos_token_id, *token_ids_0, self.eos_token_id]

    def prepare_for_model(self, *ids: Any, **more: Any) -> Any:
        return super().prepare_for_model(*ids, **(more | {"add_special_tokens": True}))


def test_what_a_tokenizer_adds_though_told_not_to_is_taken_off() -> None:
    framing = Framing(bos_token="<s>")
    assert framing("a", add_special_tokens=False)["input_ids"] == [framing.bos_token_id, 100, 1]
    wanted_of: dict[Policy, Any] = {"auto": framing.bos_token_id, "never": None}
    for bos, wanted in wanted_of.items():
        tokens = tokenise(from_documents(["plain", "</s>"]), framing, bos=bos)
        assert tokens.bos_id == wanted
        right = tokenise(from_documents(["plain", "</s>"]), ByT5Tokenizer()).ids
        assert [row.tolist() for row in tokens.ids] == [row.tolist() for row in right]


@pytest.mark.parametrize("make", [byte_level, ByT5Tokenizer], ids=["fast", "slow"])
def test_added_tokens_are_matched_and_special_ones_are_not(make: Any) -> None:
    tokenizer = make()
    tokenizer.add_tokens(["sprocket"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|tool|>"]})
    added, special = tokenizer.convert_tokens_to_ids(["sprocket", "<|tool|>"])
    texts = ["a sprocket b", "a sprocket <|tool|> sprocket"]
    plain, spelled = (row.tolist() for row in tokenise(from_documents(texts), tokenizer).ids)
    assert plain == tokenizer.encode(texts[0], add_special_tokens=False)
    assert (spelled.count(added), spelled.count(special)) == (2, 0)
    assert b"".join(token_bytes(tokenizer, spelled)).decode() == texts[1]


def test_the_tokenizer_is_left_as_it_was() -> None:
    tokenizer = byte_level()
    backend = tokenizer.backend_tokenizer
    backend.enable_truncation(max_length=4, stride=1)
    backend.enable_padding(length=9, direction="left")
    before = (backend.encode_special_tokens, backend.truncation, backend.padding, backend.to_str())
    tokens = tokenise(from_documents(TEXTS), tokenizer)
    assert (backend.encode_special_tokens, backend.truncation, backend.padding, backend.to_str()) == before
    assert [*map(len, tokens.ids)] == [*map(len, tokenise(from_documents(TEXTS), byte_level()).ids)]


def test_an_id_beyond_the_vocabulary_of_the_model_is_named() -> None:
    with pytest.raises(
        UsageError, match=r"document 000000: token id \d+ at place \d+ is outside .* of 9\. Give"
    ):
        tokenise(from_documents(TEXTS), byte_level(), vocab_size=9)


HOSTILE = {
    "one token": "a",
    "emoji": "👩‍👩‍👧‍👦 🙂 🇩🇪 👍🏽",
    "right to left": "שלום עולם مرحبا بالعالم \u202eabc",
    "combining": "e\u0301 o\u0302\u0323 Z" + "\u0334" * 50,
    "nul": "a\x00b\x00\x00",
    "return": "a\rb\r\nc\r",
    "word": "supercali" * 500,
    "special": "<|endoftext|><s></s><unk>",
    "bom": "\ufeffa\ufeff",
    "blank": " \u3000\u00a0 x \u2028\u2029\t ",
    "private": "\ue000\U0010ffff\ufffd",
}


@pytest.mark.parametrize(
    "make", [byte_level, sentencepiece, ByT5Tokenizer], ids=["byte_level", "sentencepiece", "slow"]
)
@pytest.mark.parametrize("text", HOSTILE.values(), ids=[*HOSTILE])
def test_hostile_texts_come_back_from_the_vocabulary(make: Any, text: str) -> None:
    tokens = tokenise(from_documents(["", text]), make())
    assert len(tokens.ids) == 1
    assert not set(tokens.ids[0].tolist()) & set(tokens.special_ids)
    ids, counts = np.unique(tokens.ids[0], return_counts=True)
    table = tokens.vocabulary(ids, counts)
    raw = dict(zip(table["token_id"].to_pylist(), table["bytes"].to_pylist(), strict=True))
    assert b"".join(raw[index] for index in tokens.ids[0].tolist()).decode() == text


def test_vocabularies_that_do_not_give_the_text_back_give_what_the_model_saw() -> None:
    leading = sentencepiece(first=True)
    ids = tokenise(from_documents(["the dog"]), leading).ids[0].tolist()
    assert b"".join(token_bytes(leading, ids)) == b" the dog"
    ids = tokenise(from_documents(["walking odd walk"]), word_pieces()).ids[0].tolist()
    assert b"".join(token_bytes(word_pieces(), ids)) == b"walking[UNK]walk"


def test_a_document_of_a_million_tokens() -> None:
    tokens = tokenise(from_documents(["the dog's 🙂\r" * 70_000, "a" * 100_000]), byte_level(257))
    assert [len(row) for row in tokens.ids] > [1_000_000, 90_000]
    lengths = np.array([len(row) for row in tokens.ids] + [500] * 20)
    splits = np.array([0, 0] + [1, 2] * 10, np.uint8)
    found = build_plan(
        lengths,
        splits,
        [f"{number:032x}" for number in range(22)],
        tokens=2000,
        block=200,
        cutting=Cutting(sequence_length=128, min_length=16, batch_tokens=512, seed=0, bos_id=0),
    )
    assert found.plan.n_tokens == 2000
    assert (tokens.corpus.groups() == [0, 1]).all()


# ---- excluded tokens


def test_excluded_tokens_count_as_special() -> None:
    asked = parse({"exclude_tokens": "101, 65,65"})
    assert asked == parse({"exclude_tokens": [65, 101]})
    tokens = tokenise_for(asked, from_documents(TEXTS), byte_level(), 400)
    assert tokens.special_ids == (0, 65, 101)
    assert tokens.corpus.policies == {"exclude_tokens": "65,101"}
    with pytest.raises(UsageError, match=r"exclude_tokens: id 101 is outside .*; ids are 0-99"):
        tokenise_for(asked, from_documents(TEXTS), byte_level(), 100)
    for wrong in ("a", "1,-2", "1.5", "99999999999", True, [1.5]):
        with pytest.raises(UsageError, match="exclude_tokens"):
            parse({"exclude_tokens": wrong})
    assert parse({"exclude_tokens": ""}).exclude_tokens is None


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


def test_the_fingerprint_of_a_slow_tokenizer_covers_its_added_tokens() -> None:
    def made(*tokens: AddedToken) -> str:
        tokenizer = ByT5Tokenizer()
        tokenizer.add_tokens([*tokens])
        return fingerprint(tokenizer)

    flags = [{}, {"lstrip": True}, {"rstrip": True}, {"single_word": True}]
    found = [made(), *(made(AddedToken("word", **one)) for one in flags)]
    assert len(set(found)) == len(found)
    assert made() == made()


def other_sentence(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """The same by its fingerprint, and for every text but the fixed sentence."""
    known = type(tokenizer)

    class Other(known):
        def __call__(self, text: Any = None, *rest: Any, **more: Any) -> Any:
            return super().__call__(
                [one.replace("fox", "dog") if one == SENTENCE else one for one in text], **more
            )

    tokenizer.__class__ = Other
    return tokenizer


def test_runs_and_repairs_are_refused_where_the_sentence_has_other_ids(tmp_path: Path) -> None:
    model, corpus = tiny_model("llama")[0], from_documents(texts())
    few: dict[str, Any] = SMALL | {"tokens": 300, "threads": 1}
    other = other_sentence(tiny_tokenizer())
    assert fingerprint(other) == fingerprint(tiny_tokenizer())
    harvest(model, tiny_tokenizer(), corpus, tmp_path / "s", rank=0, world_size=2, **few)
    for rank in (0, 1):
        with pytest.raises(UsageError, match=r"begun with the tokenizer, `tokenizer\.ids` = "):
            harvest(model, other, corpus, tmp_path / "s", rank=rank, world_size=2, **few)
    store = harvest(model, tiny_tokenizer(), corpus, tmp_path / "whole", **few)
    chunk = store / "activations.zarr" / "residual" / "c" / "1" / "1" / "0"
    chunk.write_bytes(b"")
    with pytest.raises(UsageError, match="the ids of a sentence are not those that the store was made with"):
        repair(store, model=describe(model, other), corpus=corpus)
    repair(store, model=describe(model, tiny_tokenizer()), corpus=corpus)


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
