"""Token ids as documents: files of them, streams cut where documents end, runs without a tokenizer."""

import json
import re
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers_harvest import SMALL as USUAL
from helpers_harvest import files_of
from helpers_models import VOCAB_SIZE, tiny_model, tiny_tokenizer
from helpers_tokenizers import byte_level, sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from nearline.analyze import FitSettings, fit
from nearline.collect.corpora import Corpus, from_documents, load
from nearline.collect.documents import INT32_MAX
from nearline.collect.harvesting import collect, harvest
from nearline.collect.repairing import repair
from nearline.collect.settings import parse
from nearline.collect.token_files import PIECE, bounded, read_ids
from nearline.collect.tokenise import tokenise, tokenise_for
from nearline.reports import report
from nearline.store import Reader, info, verify
from nearline.store.errors import UsageError

SMALL: dict[str, Any] = USUAL | {"tokens": 450, "block": 90, "threads": 1}
RNG = np.random.default_rng(0)
END = 2  # the tiny tokenizer's EOS


def documents(n: int = 80, *, longest: int = 40) -> list[np.ndarray]:
    random = np.random.default_rng(1)
    return [random.integers(3, VOCAB_SIZE, random.integers(8, longest)) for _ in range(n)]


def stream(parts: list[np.ndarray], end: int = END) -> np.ndarray:
    return np.concatenate([[*part, end] for part in parts])


def ids_of(corpus: Corpus) -> list[list[int]]:
    return [document.ids.tolist() for document in corpus.documents if document.ids is not None]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")[0]


# ---- files


@pytest.mark.parametrize("dtype", ["u1", "i2", "<u2", ">i4", "i4", "u4", "i8", "u8"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_any_integers_are_read(dtype: str, order: Any, tmp_path: Path) -> None:
    path, values = tmp_path / "rows of ids ü.npy", RNG.integers(0, 120, (5, 7))
    np.save(path, np.asarray(values.astype(dtype), order=order))
    name, found = read_ids(path)
    assert name == path.name
    assert [document.key for document in found] == [f"{path.name}:{number}" for number in range(5)]
    assert [document.ids.tolist() for document in found if document.ids is not None] == values.tolist()
    assert all(document.ids is not None and document.ids.dtype == np.int32 for document in found)
    np.save(path, values[0].astype(dtype))
    assert [document.key for document in read_ids(path)[1]] == [path.name]


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (np.ones(3), r"shape \(3,\) and dtype float64; token ids are integers"),
        (np.ones(3, bool), "dtype bool"),
        (np.ones((1, 2, 3), int), r"shape \(1, 2, 3\)"),
        (np.zeros((0,), int), "ids"),
        (np.array(5), r"shape \(\)"),
        (np.array([1, -100, 3]), r"holds -100 at \[1\], which is no token id: they are 0 to 2\^31 - 1"),
        (np.array([[1, 2], [3, 2**31]]), r"holds 2147483648 at \[1, 1\]"),
        (np.array(["a"]), "dtype <U1"),
        (np.array([[1], [1, 2]], object), "no whole .npy file of numbers .*Python objects"),
    ],
)
def test_what_is_no_ids_is_refused(values: np.ndarray, sentence: str, tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", values, allow_pickle=True)
    with pytest.raises(UsageError, match=sentence):
        read_ids(tmp_path / "ids.npy")


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "ids.npy"
    with pytest.raises(UsageError, match="no such file"):
        read_ids(path)
    with pytest.raises(UsageError, match=r"a folder; ids: takes one \.npy file"):
        read_ids(tmp_path)
    np.save(path, np.arange(1000))
    whole = path.read_bytes()
    for content in (b"", b"token ids", whole[:-8], whole[:20], b"PK\x03\x04" + bytes(60)):
        path.write_bytes(content)
        with pytest.raises(UsageError, match=r"no whole \.npy file"):
            read_ids(path)
    np.savez(tmp_path / "ids.npz", np.arange(5))
    with pytest.raises(UsageError, match=r"no whole \.npy file of numbers .* Write it with numpy\.save"):
        read_ids(tmp_path / "ids.npz")


def test_a_file_and_its_rows_in_memory_are_one_corpus(tmp_path: Path) -> None:
    rows = RNG.integers(0, VOCAB_SIZE, (50, 20))
    np.save(tmp_path / "rows.npy", rows.astype(np.uint16))
    read = load(f"ids:{tmp_path / 'rows.npy'}")
    assert read.spec == "ids:rows.npy"
    for rows_given in (
        rows,
        rows.tolist(),
        torch.from_numpy(rows),
        [(f"rows.npy:{i}", row) for i, row in enumerate(rows)],
    ):
        found = from_documents(rows_given)
        assert ids_of(found) == ids_of(read)
        assert [one.content_hash for one in found.documents] == [one.content_hash for one in read.documents]


# ---- where documents end


@settings(max_examples=30)
@given(st.lists(st.lists(st.integers(3, 9), max_size=6), min_size=40, max_size=60), st.booleans())
def test_a_stream_ends_its_documents_at_separators(parts: list[list[int]], ended: bool) -> None:
    parts = [[5, 6], *parts]
    whole = [token for part in parts for token in (*part, END)][: None if ended else -1]
    corpus = from_documents([whole])
    found = bounded(corpus, tiny_tokenizer())
    full = [[*part, END] for part in parts if part]
    if not ended and parts[-1]:
        full[-1].pop()
    if len(full) >= 40 and max(map(len, full)) <= 0.1 * sum(map(len, full)):
        assert ids_of(found) == full
    assert [*chain(*ids_of(found))] == [*chain(*full)]
    assert found.content_hash == corpus.content_hash, "the corpus is what was read, whatever the tokenizer"
    assert found.policies["separator"] == str(END)


def test_a_stream_without_bounds_is_cut_into_pieces() -> None:
    whole = RNG.integers(3, 100, 50 * PIECE + 7)
    for tokenizer in (None, tiny_tokenizer()):
        found = bounded(from_documents([("s", whole)]), tokenizer)
        assert np.concatenate(ids_of(found)).tolist() == whole.tolist()
        assert {len(row) for row in ids_of(found)} == {PIECE, 7}
        assert found.passages
        assert found.policies == {"pieces": f"{PIECE} tokens"}
        assert [one.key for one in found.documents[:2]] == ["s#000000", "s#000001"]


def test_few_documents_of_a_stream_are_cut_too() -> None:
    found = bounded(from_documents([stream(documents(2, longest=4000))]), tiny_tokenizer())
    assert len(found.documents) > 2
    assert {"pieces", "separator"} <= set(found.policies)


def test_a_separator_may_be_named() -> None:
    parts = documents()
    whole = from_documents([stream(parts, 159)])
    found = bounded(whole, None, 159)
    assert len(found.documents) >= len(parts)
    assert all(row[-1] == 159 for row in ids_of(found))
    with pytest.raises(UsageError, match="separator=155: documents does not hold"):
        bounded(from_documents([[1, 2, 3] * 500]), None, 155)
    with pytest.raises(UsageError, match="holds nothing but the separator 7"):
        bounded(from_documents([[7, 7]]), None, 7)
    with pytest.raises(UsageError, match="holds no token ids but documents with bounds of their own"):
        bounded(from_documents(["text"]), tiny_tokenizer(), 2)


def test_rows_are_documents_unless_a_separator_is_named() -> None:
    """Packed and padded rows: END inside and behind. A named separator undoes both."""
    rows = from_documents([[5, 6, END, 7, 8], [9, 9, END, END, END]])
    assert bounded(rows, tiny_tokenizer()) is rows
    assert ids_of(bounded(rows, tiny_tokenizer(), END)) == [[5, 6, END], [7, 8], [9, 9, END]]


def test_what_is_done_about_bounds_is_said_once_and_in_full(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "nearline")
    parts = documents()
    both_ends = np.concatenate([[END, *part, END] for part in parts])  # BOS is EOS, as in GPT-2
    found = bounded(from_documents([both_ends]), tiny_tokenizer())
    assert ids_of(found) == [[*part, END] for part in parts]
    assert [record.getMessage() for record in caplog.records] == [
        "documents: 80 documents found in its token ids"
    ]
    caplog.clear()
    tokens = tokenise_for(parse({}), from_documents([[5, 6, END]]), tiny_tokenizer(), VOCAB_SIZE)
    assert len(tokens.ids) == 1
    assert [record.getMessage() for record in caplog.records] == [
        "documents: 1 document found in its token ids"
    ]
    caplog.clear()
    bounded(from_documents([[5, 6, END, 7, 8], [9, 9]]), tiny_tokenizer(), END)
    assert [record.getMessage() for record in caplog.records] == [
        "documents: cut at separator 2 inside of its rows too: 3 documents in 2 rows"
    ]


def test_documents_of_a_stream_are_chosen_once_they_are_found() -> None:
    corpus = from_documents([stream(documents(200))])
    found = tokenise_for(parse({"max_documents": 50}), corpus, tiny_tokenizer(), VOCAB_SIZE)
    assert len(found.ids) == 50
    assert found.corpus.content_hash == corpus.content_hash


def test_near_duplicates_among_ids_are_groups() -> None:
    long = RNG.integers(3, 150, 60)
    rows = [long, RNG.integers(3, 150, 60), np.append(long[5:], 4), [5], [5], [6]]
    assert from_documents(rows).groups().tolist() == [0, 1, 0, 2, 2, 3]
    whole = np.concatenate([[*row, END] for row in [*rows, *documents(60)]])
    assert bounded(from_documents([whole]), tiny_tokenizer()).groups().tolist()[:6] == [0, 1, 0, 2, 2, 3]


# ---- ids against model and tokenizer


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        (
            [[1, 2], [3, 160, 4]],
            r"document 000001: token id 160 at place 1 is outside the model's vocabulary of 160",
        ),
        ([[1, 2], [3, -1]], r"document 1 .*-1, which is no token id"),
        ([[1, INT32_MAX + 1]], "2147483648, which is no token id"),
        ([[1.5, 2.0]], "document 0 .*a float"),
        ([np.ones(3)], "dtype float64"),
        ([[True, False]], "document 0 .*a bool"),
        ([np.ones(3, bool)], "dtype bool"),
        ([[1, "a"]], "document 0"),
        ([[], []], "no text|at least one document"),
        ([1, 2, 3], "document 0 is a int"),
        (["text", [1, 2]], "a corpus is of one kind"),
    ],
)
def test_wrong_ids_are_refused_before_the_model_runs(
    rows: Any, sentence: str, tmp_path: Path, model: Any
) -> None:
    with pytest.raises(UsageError, match=sentence):
        harvest(model, tiny_tokenizer(), rows, tmp_path / "s", **SMALL)
    assert not (tmp_path / "s").exists()


def test_empty_documents_are_left_out_and_single_tokens_are_kept(model: Any, tmp_path: Path) -> None:
    rows = [[], [7], *documents(), []]
    path = harvest(model, None, rows, tmp_path / "s", **{**SMALL, "min_length": 1})
    assert not verify(path, level="full").problems
    table = Reader.open(path).documents
    assert table["key"].to_pylist()[:2] == ["000001", "000002"]


@pytest.mark.parametrize(
    ("tokenizer", "bos", "policy", "rest"),
    [
        pytest.param(sentencepiece(), 1, "auto", [5, 1, 6], id="adds one itself"),
        pytest.param(byte_level(), 0, "always", [5, 0, 6], id="asked for"),
    ],
)
def test_ids_that_begin_with_bos_get_no_second_one(
    tokenizer: Any, bos: int, policy: Any, rest: list[int]
) -> None:
    rest = [bos if token in (0, 1) else token for token in rest]
    tokens = tokenise(from_documents([[bos, *rest], [bos, bos, *rest], rest]), tokenizer, bos=policy)
    assert tokens.bos_id == bos
    assert [row.tolist() for row in tokens.ids] == [rest] * 3
    assert tokens.bos_places == {number: {1} for number in range(3)}
    left = tokenise(from_documents([[bos, *rest], rest]), tokenizer, bos="never")
    assert (left.bos_id, left.ids[0].tolist()) == (None, [bos, *rest])
    with pytest.raises(UsageError, match="holds nothing but the BOS token"):
        tokenise(from_documents([[bos], [bos, bos]]), tokenizer, bos=policy)


def columns_of(path: Path) -> dict[str, np.ndarray]:
    reader = Reader.open(path)
    return {
        name: np.concatenate([reader.column_block(name, block) for block in range(reader.plan.n_blocks)])
        for name in ("token_id", "target_id", "position", "special", "document")
    }


@pytest.mark.parametrize("bos", ["always", "never"])
def test_no_sequence_opens_with_two_bos(bos: str, model: Any, tmp_path: Path) -> None:
    """BOS stands everywhere in these documents, at the head, in a row, and where windows would open."""
    random = np.random.default_rng(3)
    rows = [np.where(random.random(60) < 0.4, 1, random.integers(3, 160, 60)) for _ in range(80)]
    path = harvest(
        model, tiny_tokenizer(), rows, tmp_path / "s", bos=bos, **{**SMALL, "min_length": 1, "block": 89}
    )
    found, plan = columns_of(path), Reader.open(path).plan
    assert not verify(path).problems
    first = plan.row_offsets[:-1]
    second = first[plan.length > 1] + 1
    assert (found["special"] == np.isin(found["token_id"], [0, 1, 2, 3])).all()
    if bos == "never":
        assert (found["token_id"][first] == 1).sum() > 10, "they are the documents' own, and marked"
        return
    assert (found["token_id"][first] == 1).all()
    assert (found["token_id"][second] != 1).all()
    assert (found["token_id"] == 1).sum() > len(first) + 50, "inside a sequence they stay"


# ---- whole runs


def test_a_model_without_a_tokenizer_from_harvest_to_report(model: Any, tmp_path: Path) -> None:
    path = harvest(model, None, documents(200), tmp_path / "s", **{**SMALL, "tokens": 1800, "block": 180})
    assert not verify(path).problems
    facts = Reader.open(path).attributes.tokenizer
    assert (facts.fingerprint, facts.sentence, facts.ids, facts.bos_id, facts.special_ids) == (
        "none",
        "",
        (),
        None,
        (),
    )
    vocabulary = Reader.open(path).vocabulary
    assert set(vocabulary["bytes"].to_pylist()) == {b""}
    assert set(vocabulary["text"].to_pylist()) == {""}
    assert info(path)["sealed"]
    fit(tmp_path / "study", [path], FitSettings(layers="1"))
    page = report(tmp_path / "study").read_text(encoding="utf-8")
    assert re.search(r"⟨\d+⟩⟨\d+⟩", page)
    with pytest.raises(UsageError, match=r"bos='always': there is no tokenizer"):
        harvest(model, None, documents(), tmp_path / "t", bos="always", **SMALL)
    with pytest.raises(UsageError, match="without a tokenizer, and documents holds text documents"):
        harvest(model, None, ["a text"], tmp_path / "t", **SMALL)


def test_rows_are_the_same_from_a_file_a_list_and_a_stream(model: Any, tmp_path: Path) -> None:
    parts = documents(100)
    rows = [np.append(part, END) for part in parts]
    np.save(tmp_path / "stream.npy", stream(parts).astype(np.uint16))
    paths = [
        harvest(model, tiny_tokenizer(), rows, tmp_path / "list", **SMALL),
        harvest(
            model, tiny_tokenizer(), load(f"ids:{tmp_path / 'stream.npy'}"), tmp_path / "stream", **SMALL
        ),
    ]
    chunks = [
        {name: data for name, data in files_of(path / "activations.zarr").items() if "/c/" in name}
        for path in paths
    ]
    assert chunks[0] == chunks[1]
    assert Reader.open(paths[1]).attributes.policies["separator"] == str(END)


def test_a_store_of_ids_is_continued_and_repaired_by_name(model: Any, tmp_path: Path) -> None:
    folder = tmp_path / "a model"
    model.save_pretrained(folder)
    np.save(tmp_path / "s.npy", stream(documents(100)).astype(np.uint16))
    wanted = parse(
        SMALL
        | {
            "model": str(folder),
            "corpus": f"ids:{tmp_path / 's.npy'}",
            "separator": END,
            "keep": "1/2",
            "tokens": 400,
        }
    )
    store = tmp_path / "store"
    collect(wanted, store)
    whole = files_of(store / "activations.zarr")
    chunk = store / "activations.zarr" / "residual" / "c" / "1" / "2" / "0"
    chunk.write_bytes(chunk.read_bytes()[:-9])
    assert (
        verify(store, level="full").problems
        if "level" in verify.__code__.co_varnames
        else verify(store).problems
    )
    repair(store)
    assert files_of(store / "activations.zarr") == whole
    policies = json.loads((store / "activations.zarr" / "zarr.json").read_text())["attributes"]["policies"]
    assert (policies["keep"], policies["separator"]) == ("1/2", str(END))
