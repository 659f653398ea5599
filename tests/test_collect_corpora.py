"""Corpora: every kind of source, every mistake in one sentence, and built-ins whose parts share nothing."""

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nearline.collect.built_in import PACKAGES, RESERVED, reserved_texts
from nearline.collect.corpora import Corpus, Document, from_documents, load
from nearline.collect.docstrings import docstrings, file_docstrings, source_files
from nearline.collect.groups import near_duplicate_groups
from nearline.collect.passages import cut_text, few_long_texts
from nearline.store.errors import EnvironmentFault, UsageError

load_once = cache(load)


def write_jsonl(path: Path, records: list[object]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def many(n: int) -> list[str]:
    return [f"Document number {i} says something of its own, and nothing else." for i in range(n)]


# ---- local files


def test_a_file_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("Zwölf Boxkämpfer", encoding="utf-8")
    corpus = load(f"text:{tmp_path / 'note.txt'}")
    assert corpus.documents == (Document("note.txt", "Zwölf Boxkämpfer"),)
    assert not corpus.passages


def test_a_folder_gives_one_document_a_file_sorted_by_name(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("b.txt", "a.md", "sub/c.txt", "ignored.py"):
        (tmp_path / name).write_text(f"text of {name}")
    corpus = load(f"text:{tmp_path}")
    assert [document.key for document in corpus.documents] == ["a.md", "b.txt", "sub/c.txt"]


def test_the_recorded_spec_holds_no_path(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    paths = [write_jsonl(tmp_path / place / "d.jsonl", [{"text": "same"}]) for place in ("here", "there")]
    first, second = (load(f"jsonl:{path}") for path in paths)
    assert first == second
    assert first.spec == "jsonl:d.jsonl:text"


def test_jsonl_reads_the_field_asked_for(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", [{"text": "a", "body": "line\u2028separator"}, {"body": "b"}])
    corpus = load(f"jsonl:{path}:body")
    assert [document.text for document in corpus.documents] == ["line\u2028separator", "b"]
    assert [document.key for document in corpus.documents] == ["d.jsonl:1", "d.jsonl:2"]


def test_a_path_with_a_colon_is_a_path(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a:b", [{"text": "hello"}])
    assert load(f"jsonl:{path}").documents[0].text == "hello"
    assert load(f"jsonl:{path}:text").documents[0].text == "hello"


def test_empty_documents_are_left_out_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", [{"text": " \n"}, {"text": "full"}])
    assert [document.key for document in load(f"jsonl:{path}").documents] == ["d.jsonl:2"]
    assert "1 of 2 documents are empty" in caplog.text


@pytest.mark.parametrize(
    ("spec", "content", "words"),
    [
        ("text:{}", None, ["no such file"]),
        ("jsonl:{}", None, ["no such file"]),
        ("text:{}", b"", ["no text"]),
        ("text:{}", b"\xff\xfe\xff", ["not UTF-8", "byte 0"]),
        ("jsonl:{}", b"{}\n", ["line 1", "no field 'text'", "none"]),
        ("jsonl:{}", b'{"text": "a"}\n{"body": "b", "id": 1}', ["line 2", "'body', 'id'", "PATH:FIELD"]),
        ("jsonl:{}:id", b'{"text": "a", "id": 7}', ["line 1", "'id'", "int"]),
        ("jsonl:{}", b"[1, 2]", ["line 1", "list"]),
        ("jsonl:{}", b'{"text": ', ["line 1", "not JSON"]),
    ],
)  # fmt: skip
def test_a_bad_file_is_one_clear_sentence(
    tmp_path: Path, spec: str, content: bytes | None, words: list[str]
) -> None:
    path = tmp_path / "input"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        load(spec.format(path))
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "\n" not in message


def test_folders_in_the_wrong_place(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"holds no \.txt or \.md"):
        load(f"text:{tmp_path}")
    with pytest.raises(UsageError, match="takes one file"):
        load(f"jsonl:{tmp_path}")


@pytest.mark.parametrize("spec", ["docs:pyhton", "docs", "", "text:", "text", "wiki:en"])
def test_an_unknown_spec_names_what_there_is(spec: str) -> None:
    with pytest.raises(UsageError, match=r"docs:python.*jsonl:PATH"):
        load(spec)


def test_an_unknown_spec_names_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"Did you mean docs:python\?"):
        load("docs:pyhton")


def test_parts_belong_to_built_ins(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'harvest' or 'train'"):
        load("docs:python", "test")
    with pytest.raises(UsageError, match="only built-in"):
        load(f"text:{tmp_path}", "train")


# ---- documents given by a program


def test_texts_pairs_and_documents_make_the_same_corpus() -> None:
    texts = ["one", "two"]
    corpus = from_documents(texts, "mine")
    assert corpus.documents == (Document("000000", "one"), Document("000001", "two"))
    assert from_documents([("000000", "one"), Document("000001", "two")], "mine") == corpus
    assert corpus.groups().tolist() == [0, 1]


def test_the_content_hash_tells_where_one_text_ends() -> None:
    pairs = [("a", "bc")], [("ab", "c")], [("a", "b"), ("c", "")], [("a", "bc"), ("d", "e")]
    assert len({from_documents(list(documents)).content_hash for documents in pairs}) == len(pairs)


def test_a_document_hash_is_128_bits_of_its_text() -> None:
    assert len(Document("k", "text").content_hash) == 32
    assert Document("k", "text").content_hash == Document("other", "text").content_hash


def test_a_corpus_of_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="no text"):
        from_documents([])


# ---- passages


paragraphs = st.lists(st.integers(0, 60).map(lambda n: " ".join(f"w{i}" for i in range(n))), max_size=30)


@given(paragraphs.map("\n\n".join), st.sampled_from([10, 50, 200]))
def test_passages_hold_every_word_once_in_order(text: str, size: int) -> None:
    passages = cut_text(text, size)
    assert " ".join(passages).split() == text.split()
    longest = max((len(passage) for passage in passages), default=0)
    assert longest < 3 * size + size // 2 + 4  # all but full, one uncut paragraph, and a short tail
    assert all(len(passage) >= size // 2 - 2 for passage in passages[:-1])


def test_passages_break_between_paragraphs_and_lines_where_they_can() -> None:
    poem = "\n".join(f"{i} a line of verse that goes on" for i in range(100))
    assert all(piece.split()[0].isdigit() for piece in cut_text(poem, 300))
    text = "\n\n".join(["short paragraph " * 5] * 40)
    assert all(piece.endswith("paragraph ") for piece in cut_text(text, 300))


def test_a_book_becomes_passages_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="nearline")
    (tmp_path / "book.txt").write_text("\n\n".join(f"Paragraph {i}. " + "word " * 60 for i in range(300)))
    corpus = load(f"text:{tmp_path / 'book.txt'}")
    assert corpus.passages
    assert len(corpus.documents) > 40
    assert corpus.documents[3].key == "book.txt#0003"
    assert f"1 texts cut into {len(corpus.documents)} passages" in caplog.text


def test_many_short_documents_stay_whole(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", [{"text": text} for text in many(60)])
    corpus = load(f"jsonl:{path}")
    assert not corpus.passages
    assert len(corpus.documents) == 60
    assert few_long_texts(many(39))
    assert not few_long_texts(many(40))
    assert few_long_texts([*many(60), "word " * 1000])


# ---- docstrings


SOURCE = b'''"""Module."""
def first(x):
    """First
        indented
    last."""
    def inner():
        """Not visited."""
class Thing:
    """A thing."""
    async def act(self):
        """Acts."""
def without(): return """not a docstring"""
'''


def test_docstrings_are_cleaned_and_named_by_their_place() -> None:
    assert list(file_docstrings(SOURCE, "pkg.mod")) == [
        ("pkg.mod", "Module."),
        ("pkg.mod.first", "First\n    indented\nlast."),
        ("pkg.mod.Thing", "A thing."),
        ("pkg.mod.Thing.act", "Acts."),
    ]


@pytest.mark.parametrize("source", [b'"""open', b'x = """a""" +', b'\0"""', b"plain = 1"])
def test_files_that_are_no_python_give_nothing(source: bytes) -> None:
    assert list(file_docstrings(source, "m")) == []


def test_test_folders_and_foreign_copies_are_passed_over(tmp_path: Path) -> None:
    for name in ("b.py", "a/c.py", "tests/t.py", "a/_vendor/v.py", "x.egg-info/s.py", "a/readme.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    assert [path.relative_to(tmp_path).as_posix() for path in source_files(tmp_path)] == ["b.py", "a/c.py"]


def test_docstrings_of_an_installed_package() -> None:
    found = dict(docstrings("blake3"))
    assert all(name.startswith("blake3") for name in found)
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        list(docstrings("no_such_package"))


# ---- built-ins


@pytest.mark.parametrize("spec", list(RESERVED))
def test_a_built_in_is_large_enough_and_its_parts_share_no_group(spec: str) -> None:
    harvest, train = load_once(spec), load_once(spec, "train")
    n_harvest = len(harvest.documents)
    assert harvest.groups().max() + 1 >= 100
    assert np.array_equal(harvest.groups(), groups_of(harvest)), "what loading knew is what computing gives"
    together = near_duplicate_groups([d.text for d in (*harvest.documents, *train.documents)])
    assert not set(together[:n_harvest].tolist()) & set(together[n_harvest:].tolist())
    assert harvest.passages == (spec == "docs:python")


def groups_of(corpus: Corpus) -> np.ndarray:
    return near_duplicate_groups([document.text for document in corpus.documents])


def test_loading_twice_gives_the_same_corpus() -> None:
    assert load("docs:python") == load("docs:python")


def test_an_installation_without_the_texts_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PACKAGES, "docs:scientific", ("no_such_package",))
    with pytest.raises(EnvironmentFault, match="no_such_package is not installed"):
        load("docs:scientific")
    monkeypatch.setitem(PACKAGES, "docs:scientific", ())
    with pytest.raises(EnvironmentFault, match="holds no docstrings"):
        load("docs:scientific")


def test_what_is_reserved_depends_on_keys_alone_and_takes_whole_groups() -> None:
    keys = [f"package.function_{i}" for i in range(400)]
    alone = reserved_texts(keys, np.arange(400, dtype=np.int32), 0.4)
    assert 0.3 < alone.mean() < 0.5
    pairs = (np.arange(400) // 2).astype(np.int32)
    paired = reserved_texts(keys, pairs, 0.4)
    assert np.array_equal(paired[::2], paired[1::2])
    some = reserved_texts(keys[100:], np.arange(300, dtype=np.int32), 0.4)
    assert np.array_equal(some, alone[100:])
    one_topic = reserved_texts(["with#0000", "with#0001"], np.array([0, 1], np.int32), 0.5)
    assert one_topic[0] == one_topic[1]


@pytest.mark.parametrize(
    ("documents", "words"),
    [
        ("one string", "one string"),
        ([{"text": "a row of a data set"}], "document 0 is a dict"),
        ([1, 2], "document 0 is a int"),
        (["fine", "hello \ud800 world"], "document 1"),
    ],
)
def test_documents_of_a_wrong_form_are_refused_by_their_place(documents: object, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        from_documents(documents)  # type: ignore[arg-type]
