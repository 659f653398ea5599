"""Corpora: every kind of source, every mistake in one sentence, and built-ins whose parts share nothing."""

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nearline.collect import corpora
from nearline.collect.built_in import PACKAGES, RESERVED, reserved_texts
from nearline.collect.corpora import Corpus, CorpusOptions, Document, from_documents, load
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


def test_a_home_folder_is_put_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    write_jsonl(tmp_path / "d.jsonl", [{"body": "hello"}])
    found = load("jsonl:~/d.jsonl:body")
    assert (found.documents[0].text, found.spec) == ("hello", "jsonl:d.jsonl:body")
    with pytest.raises(
        UsageError, match=r"\.jsonl: no such file, and patterns are not expanded; name one file"
    ):
        load("jsonl:~/*.jsonl:body")


def test_empty_documents_are_left_out_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", [{"text": " \n"}, {"text": "full"}])
    assert [document.key for document in load(f"jsonl:{path}").documents] == ["d.jsonl:2"]
    assert "1 of 2 documents is empty and left out" in caplog.text


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


@pytest.mark.parametrize("spec", ["docs:python", "text:here.txt"])
def test_only_data_sets_are_streams(spec: str) -> None:
    with pytest.raises(UsageError, match=f"streaming concerns hf: data sets only, and the corpus is {spec}"):
        load(spec, options=CorpusOptions(streaming=True))


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
    assert f"1 text cut into {len(corpus.documents)} passages" in caplog.text


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
        (None, "documents is a NoneType: give a list"),
        (5, "documents is a int: give a list"),
        ({"key": "a text"}, r"documents is a dict: give a list of documents; of a dict its items\(\)"),
        (pd.DataFrame({"text": ["a text"]}), "documents is a DataFrame: .* of a table one column"),
        (["fine", "hello \ud800 world"], "document 1"),
    ],
)
def test_documents_of_a_wrong_form_are_refused_by_their_place(documents: object, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        from_documents(documents)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Document(5, "a text"), "the key of a document is an int"),  # type: ignore[arg-type]
        (lambda: Document("k", np.arange(3)), r"the text of a document is a ndarray.*Document\(key, ids="),  # type: ignore[arg-type]
    ],
)
def test_the_parts_of_a_document_are_what_they_are_called(make: Callable[[], Document], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make()


# ---- what a program may give


def test_lists_arrays_and_chats_are_documents_too() -> None:
    chat = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "world"}]
    ids = from_documents([[1, 2, 3], np.array([4, 5], np.uint16), ("named", (6,)), []])
    assert ids.kind == "ids"
    assert [d.ids.tolist() for d in ids.documents if d.ids is not None] == [[1, 2, 3], [4, 5], [6]]
    assert [document.key for document in ids.documents] == ["000000", "000001", "named"]
    chats = from_documents([chat, ("named", chat[:1])])
    assert chats.kind == "chat"
    assert chats.documents[0].words == "hello\nworld"
    assert from_documents(ids.documents).documents == ids.documents


def test_an_array_that_is_given_may_change_later_and_its_document_does_not() -> None:
    given = np.array([1, 2, 3], np.int32)
    document = from_documents([given]).documents[0]
    given[0] = 9
    assert document.ids is not None
    assert document.ids.tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="read-only"):
        document.ids[0] = 9


def test_no_content_of_one_kind_is_that_of_another() -> None:
    chat = ({"role": "user", "content": "1 2"},)
    documents = [
        Document("k", "1 2"),
        Document("k", ids=np.array([1, 2], np.int32)),
        Document("k", ids=np.array([12], np.int32)),
        Document("k", messages=chat),
        Document("k", json.dumps(chat)),
    ]
    assert len({document.content_hash for document in documents}) == 5
    assert len(set(documents)) == 5
    with pytest.raises(UsageError, match="give one of text, ids and messages"):
        Document("k", "text", messages=chat)


def test_near_duplicates_are_found_among_ids_and_chats() -> None:
    long = list(range(100, 160))
    assert from_documents([long, [7, 8, 9] * 9, [*long[:50], 1]]).groups().tolist() == [0, 1, 0]
    text = " ".join(f"word{i}" for i in range(40))
    chats = [[{"role": role, "content": text}] for role in ("user", "system")]
    assert from_documents([*chats, [{"role": "user", "content": "else"}]]).groups().tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([1, "a"], "a list that holds a str"),
        ([1, True], "a list that holds a bool"),
        ([1.5], "a list that holds a float"),
        ([1, {"role": "user", "content": "a"}], "a list that holds a dict and an int"),
        ([-1, 5], "the number -1, which is no token id"),
        ([2**31], "the number 2147483648, which is no token id"),
        (np.array([[1, 2]]), "an array of 2 dimensions"),
        (np.array([1.0]), "dtype float64"),
        ([{"role": "user"}], "message 0: no 'content'"),
        ([{"role": "user", "content": "a"}, {"content": "b"}], "message 1: no 'role'"),
        ([{"role": "user", "content": ["a"]}], "message 0: 'content' holds a list"),
        ([{"role": "user", "content": "\udc00"}], "half of a surrogate pair"),
    ],
)
def test_what_is_no_document_is_refused_by_its_place(value: object, words: str) -> None:
    with pytest.raises(UsageError, match=f"document 1 .*{re.escape(words)}"):
        from_documents([[5, 6], ("k", value)])


# ---- JSON lines


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"text": "a"}\n{"text": "\xff"}', ["line 2", "not UTF-8", "byte 10"]),
        (b'{"text": "a"}\n{"text": "\\ud800"}', ["line 2", "field 'text'", "half of a surrogate pair"]),
        (b"[" * 100_000, ["line 1", "not JSON", "too deep"]),
        (b'{"text": ' + b"9" * 5000 + b"}", ["line 1", "not JSON", "a number too long"]),
        (b'{"text": "a"}\n{"text": 5}', ["line 2", "holds an int"]),
        (b'{"text": "a"}\n{"text": [5]}', ["line 2", "holds token ids", "a corpus is of one kind"]),
        (b'{"text": true}', ["line 1", "holds a bool"]),
        (b'{"text": {"a": "b"}}', ["line 1", "holds a dict", "role and a content"]),
    ],
)
def test_a_line_that_is_wrong_is_named(tmp_path: Path, content: bytes, words: list[str]) -> None:
    (tmp_path / "rows").write_bytes(content)
    with pytest.raises(UsageError) as caught:
        load(f"jsonl:{tmp_path / 'rows'}")
    assert all(word in str(caught.value) for word in [*words, "rows"]), str(caught.value)


def test_line_ends_blank_lines_and_a_byte_order_mark_change_no_key(tmp_path: Path) -> None:
    lines = [b'{"text": "one"}', b"", b'{"text": null}', b'{"text": "two"}']
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(lines) + b"\r\n")
    first, second = (load(f"jsonl:{folder / 'a.jsonl'}") for folder in (tmp_path, tmp_path / "b"))
    assert first == second
    assert [document.key for document in first.documents] == ["a.jsonl:1", "a.jsonl:4"]


# ---- WikiText


WIKI = [
    "",
    " = First = \n",
    "",
    " The first article has a line . \n",
    " and another that ends in a formula : \n",
    " = 2 x = \n",
    " so that it goes on . \n",
    "",
    " = = Section = = \n",
    "",
    " = = = Part = = = \n",
    "",
    " More of the first <unk> article @-@ here . \n",
    "",
    " = A = B = \n",
    "",
    " The second article . \n",
    "",
]
ARTICLES = ["\n".join(line.rstrip("\n") for line in WIKI[a:b]).strip("\n") for a, b in ((1, 13), (14, 18))]


def texts_of(corpus: Corpus) -> list[str]:
    return [document.text for document in corpus.documents]


def test_rows_of_wikitext_become_articles_and_it_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="nearline")
    rows = write_jsonl(tmp_path / "wiki.jsonl", [{"text": line} for line in WIKI])
    (tmp_path / "wiki.txt").write_text("".join(line or " \n" for line in WIKI))
    pq.write_table(pa.table({"text": WIKI}), tmp_path / "wiki.parquet")
    for spec, keys in (
        (f"jsonl:{rows}", ["wiki.jsonl:2", "wiki.jsonl:15"]),
        (f"parquet:{tmp_path}/wiki.parquet", ["wiki.parquet:1", "wiki.parquet:14"]),
        (f"text:{tmp_path}", ["wiki.txt:2", "wiki.txt:15"]),
    ):
        corpus = load(spec)
        assert texts_of(corpus) == ARTICLES
        assert [document.key for document in corpus.documents] == keys
        assert corpus.policies == {"join": "wikitext"}
    assert caplog.text.count("rows of WikiText joined into 2 articles") == 3


def test_what_stands_before_the_first_title_is_one_document(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "wiki.jsonl", [{"text": line} for line in WIKI[4:]])
    corpus = load(f"jsonl:{path}")
    assert [document.key for document in corpus.documents] == ["wiki.jsonl:1", "wiki.jsonl:11"]
    assert "= = Section = =" in corpus.documents[0].text
    assert corpus.documents[1].text == ARTICLES[1]


def test_many_articles_cross_the_rows_that_were_looked_at(tmp_path: Path) -> None:
    rows = [line for i in range(70) for line in ["", f" = Title {i} = \n", "", *[f" line {i} \n", ""] * 12]]
    corpus = load(f"jsonl:{write_jsonl(tmp_path / 'wiki.jsonl', [{'text': line} for line in rows])}")
    assert len(rows) > 1500
    assert [text.split("\n")[0] for text in texts_of(corpus)] == [f" = Title {i} = " for i in range(70)]
    assert all(f"line {i} " in text for i, text in enumerate(texts_of(corpus)))
    few = load(f"jsonl:{tmp_path / 'wiki.jsonl'}", options=CorpusOptions(max_documents=45))
    assert texts_of(few) == texts_of(corpus)[:45]
    assert few.policies == {"join": "wikitext", "documents": "first 45"}


@pytest.mark.parametrize(
    "rows",
    [
        [line for line in WIKI if "Fi" not in line and "A = B" not in line],  # no title
        [line for line in WIKI if line],  # no empty rows, so no title stands alone
        [*WIKI, *["a line"] * 30],  # too few empty ones
        [*WIKI, "a text\n\nof several lines"],
        [line.strip() for line in WIKI],  # not to the letter
    ],
)
def test_rows_that_only_resemble_wikitext_are_left_alone(tmp_path: Path, rows: list[str]) -> None:
    path = write_jsonl(tmp_path / "wiki.jsonl", [{"text": line} for line in rows])
    assert load(f"jsonl:{path}").policies == {}


def test_joining_can_be_forced_and_forbidden(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "wiki.jsonl", [{"text": line} for line in WIKI])
    apart = load(f"jsonl:{path}", options=CorpusOptions(join="never"))
    assert texts_of(apart) == [line for line in WIKI if line]
    assert apart.policies == {}
    stripped = write_jsonl(tmp_path / "bare.jsonl", [{"text": line.strip()} for line in WIKI])
    forced = load(f"jsonl:{stripped}", options=CorpusOptions(join="wikitext"))
    assert texts_of(forced) == ["\n".join(map(str.strip, text.split("\n"))) for text in ARTICLES]
    plain = write_jsonl(tmp_path / "plain.jsonl", [{"text": text} for text in many(60)])
    with pytest.raises(UsageError, match="no row is a title"):
        load(f"jsonl:{plain}", options=CorpusOptions(join="wikitext"))
    ids = write_jsonl(tmp_path / "ids.jsonl", [{"text": [1, 2]}])
    with pytest.raises(UsageError, match=r"line 1.*holds a list; only rows of text can be joined"):
        load(f"jsonl:{ids}", options=CorpusOptions(join="wikitext"))


def test_a_column_whose_name_holds_a_dot_is_no_part_of_another(tmp_path: Path) -> None:
    columns = {"a": [{"b": "of the other"}] * 60, "a.b": many(60)}
    pq.write_table(pa.table(columns), tmp_path / "dots.parquet")
    assert texts_of(load(f"parquet:{tmp_path}/dots.parquet:a.b")) == many(60)


# ---- which documents


def keys_of(corpus: Corpus) -> list[str]:
    return [document.key for document in corpus.documents]


def key_file(path: Path, *keys: str) -> str:
    path.write_text("".join(f"{key}\n\n" for key in keys), encoding="utf-8")
    return str(path)


@pytest.fixture
def sixty(tmp_path: Path) -> str:
    texts = ["" if i == 4 else text for i, text in enumerate(many(60))]
    return f"jsonl:{write_jsonl(tmp_path / 'd.jsonl', [{'text': text} for text in texts])}"


def test_documents_are_chosen_by_key_in_the_order_of_the_corpus(tmp_path: Path, sixty: str) -> None:
    wanted = key_file(tmp_path / "wanted", "d.jsonl:9", "d.jsonl:3", "d.jsonl:5", "d.jsonl:40")
    unwanted = key_file(tmp_path / "unwanted", "d.jsonl:9")
    only = load(sixty, options=CorpusOptions(include=wanted))
    assert keys_of(only) == ["d.jsonl:3", "d.jsonl:9", "d.jsonl:40"]
    assert keys_of(load(sixty, options=CorpusOptions(include=wanted, exclude=unwanted))) == [
        "d.jsonl:3",
        "d.jsonl:40",
    ]
    first = load(sixty, options=CorpusOptions(exclude=unwanted, max_documents=8))
    assert keys_of(first) == [f"d.jsonl:{n}" for n in (1, 2, 3, 4, 6, 7, 8, 10)], "after the exclusion"
    assert first.policies["documents"] == "first 8"
    again = key_file(tmp_path / "again", "d.jsonl:40", "d.jsonl:5", "d.jsonl:3", "d.jsonl:9")
    assert load(sixty, options=CorpusOptions(include=again)) == only, "the order of the file says nothing"


def test_the_same_choice_among_live_documents(tmp_path: Path, sixty: str) -> None:
    options = CorpusOptions(exclude=key_file(tmp_path / "no", "d.jsonl:1", "d.jsonl:50"), max_documents=40)
    chosen = corpora.select(load(sixty), options)
    assert chosen == load(sixty, options=options)
    assert corpora.select(chosen, options) is chosen
    assert corpora.select(load(sixty), CorpusOptions()) == load(sixty)
    built_in = load_once("docs:python")
    few = corpora.select(built_in, CorpusOptions(max_documents=50))
    assert few.documents == built_in.documents[:50]
    assert np.array_equal(few.groups(), groups_of(few))
    assert few == load("docs:python", options=CorpusOptions(max_documents=50))


def test_passages_are_chosen_by_their_own_key_or_by_that_of_their_text(tmp_path: Path) -> None:
    for name in ("a", "b"):
        text = "\n\n".join(f"Paragraph {name}{i}. " + "word " * 60 for i in range(20))
        (tmp_path / f"{name}.txt").write_text(text)
    whole = load(f"text:{tmp_path}")
    assert whole.passages
    of_b = [key for key in keys_of(whole) if key.startswith("b")]
    for keys, expected in (
        (["b.txt"], of_b),
        ([of_b[1]], of_b[1:2]),
        (["a.txt#0002", "b.txt"], ["a.txt#0002", *of_b]),
    ):
        include = key_file(tmp_path / "keys", *keys)
        assert keys_of(load(f"text:{tmp_path}", options=CorpusOptions(include=include))) == expected
    exclude = key_file(tmp_path / "keys", "a.txt", of_b[0])
    assert keys_of(load(f"text:{tmp_path}", options=CorpusOptions(exclude=exclude))) == of_b[1:]
    assert len(load(f"text:{tmp_path}", options=CorpusOptions(max_documents=3)).documents) == 3


@pytest.mark.parametrize(
    ("option", "keys", "words"),
    [
        ("include", ["d.jsonl:3", "d.jsonl:61", "x"], ["2 of the 3 keys", "'d.jsonl:61'", "did you mean"]),
        (
            "exclude",
            ["d.json:3"],
            [
                "the only key in the files of include and exclude is not in the corpus",
                "'d.json:3'",
                "did you mean 'd.jsonl:3'?",
            ],
        ),
        ("include", ["d.jsonl:5"], ["leave no document"]),
        ("exclude", [f"d.jsonl:{n}" for n in range(1, 61)], ["leave no document"]),
        ("include", [], ["names no key"]),
    ],
)
def test_a_choice_that_cannot_be_is_named(
    tmp_path: Path, sixty: str, option: str, keys: list[str], words: list[str]
) -> None:
    given: dict[str, Any] = {option: key_file(tmp_path / "keys", *keys)}
    options = CorpusOptions(**given)
    with pytest.raises(UsageError) as caught:
        load(sixty, options=options)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    with pytest.raises(UsageError):
        corpora.select(load(sixty), options)


def test_an_unknown_key_to_leave_out_is_named_though_all_to_take_are_found(
    tmp_path: Path, sixty: str
) -> None:
    include, exclude = (key_file(tmp_path / name, key) for name, key in (("a", "d.jsonl:3"), ("b", "x")))
    with pytest.raises(UsageError, match=r"1 of the 2 keys .*'x'"):
        load(sixty, options=CorpusOptions(include=include, exclude=exclude))


def test_a_file_of_keys_that_is_not_there_is_named(tmp_path: Path, sixty: str) -> None:
    with pytest.raises(UsageError, match=r"gone\.txt: no such file"):
        load(sixty, options=CorpusOptions(exclude=str(tmp_path / "gone.txt")))
