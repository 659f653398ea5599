"""Parquet files and data sets as corpora: the same documents give the same store whatever they came from."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import config as library_config
from datasets import exceptions as library_errors
from helpers_data_hub import FakeDataHub
from helpers_harvest import SMALL, files_of, texts
from helpers_hub import TOKEN
from helpers_models import tiny_model, tiny_tokenizer
from nearline.collect import collect, corpora, parse_settings
from nearline.collect.corpora import CorpusOptions, load
from nearline.collect.datasets_rows import _error
from nearline.collect.harvesting import harvest
from nearline.collect.repairing import repair
from nearline.collect.specs import portable, split_dataset
from nearline.store import Reader
from nearline.store.errors import DamageError, EnvironmentFault, UsageError

ZARR = "activations.zarr"
CHAT = [{"role": "user", "content": "the fox?"}, {"role": "assistant", "content": "jumps"}]


@pytest.fixture(scope="module", autouse=True)
def library(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The library with a cache of its own and no network; it writes without bars."""
    patch = pytest.MonkeyPatch()
    patch.setattr(library_config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    patch.setattr(library_config, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()
    yield datasets
    datasets.enable_progress_bars()
    patch.undo()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same rows in every form, under a path with a blank, a colon and letters of two alphabets."""
    folder = tmp_path_factory.mktemp("world") / "mit Leerzeichen: ü 東"
    folder.mkdir()
    rows = [
        {
            "text": text,
            "ids": [1, *range(5, 10 + number % 7)],
            "chat": [{**message, "name": None} for message in CHAT],
            "number": number,
            "share": 0.5,
            "nested": {"text": text},
            "shares": [0.5],
        }
        for number, text in enumerate(["Zwölf Boxkämpfer 🙂\u2028东京", *texts(), "", " \n"])
    ]
    rows[3] |= {"text": None, "ids": None, "chat": None}
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    table = pa.Table.from_pylist(rows)
    (folder / "rows.jsonl").write_text("".join(lines), encoding="utf-8")
    pq.write_table(table, folder / "rows.parquet", row_group_size=20)
    (folder / "parts").mkdir()
    for part in range(3):
        pq.write_table(table.slice(part * 25, 25), folder / "parts" / f"{part}.parquet")
    saved = datasets.Dataset(table)
    saved.save_to_disk(folder / "saved" / "rows")
    datasets.DatasetDict({"train": saved, "other": saved.select(range(50))}).save_to_disk(folder / "dict")
    (folder / "files" / "rows").mkdir(parents=True)
    for split, n_rows in (("train", len(lines)), ("test", 50)):
        text = "".join(lines[:n_rows])
        (folder / "files" / "rows" / f"{split}.jsonl").write_text(text, encoding="utf-8")
    return folder


FORMS = {
    "jsonl": "jsonl:{}/rows.jsonl:{}",
    "parquet": "parquet:{}/rows.parquet:{}",
    "parquet-folder": "parquet:{}/parts:{}",
    "saved": "hf:{}/saved/rows:::{}",
    "saved-splits": "hf:{}/dict::train:{}",
    "stream": "hf:{}/files/rows::train:{}",
}


def loaded(world: Path, form: str, column: str = "text", **options: Any) -> corpora.Corpus:
    options = {"streaming": form == "stream", **options}
    return load(FORMS[form].format(world, column), options=CorpusOptions(**options))


def contents(corpus: corpora.Corpus) -> list[bytes]:
    return [document.content for document in corpus.documents]


# ---- the claim


@pytest.fixture(scope="module")
def stores(world: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    model, tokenizer = tiny_model("llama")[0], tiny_tokenizer()
    folder = tmp_path_factory.mktemp("stores")
    return {
        form: harvest(model, tokenizer, loaded(world, form), folder / form, **{**SMALL, "threads": 1})
        for form in ("jsonl", "parquet", "saved", "stream")
    }


@pytest.mark.parametrize("form", ["parquet", "saved", "stream"])
def test_the_same_texts_give_the_same_store_whatever_they_came_from(
    form: str, stores: dict[str, Path]
) -> None:
    expected, got = files_of(stores["jsonl"]), files_of(stores[form])
    chunks = [name for name in expected if "/c/" in name]
    assert len(chunks) > 100
    for name in [*chunks, "plan.json", "vocabulary.parquet"]:
        assert got[name] == expected[name], name
    first, second = (Reader.open(stores[key]) for key in ("jsonl", form))
    columns = ["document", "content_hash", "group", "split", "n_tokens", "n_dropped"]
    assert first.documents.select(columns).equals(second.documents.select(columns))
    assert first.attributes.policies == second.attributes.policies
    assert first.attributes.tokenizer == second.attributes.tokenizer


def test_another_text_gives_another_store(world: Path, stores: dict[str, Path]) -> None:
    plan = files_of(stores["jsonl"])["plan.json"]
    changed = loaded(world, "parquet", max_documents=50)
    path = stores["jsonl"].parent / "changed"
    harvest(tiny_model("llama")[0], tiny_tokenizer(), changed, path, **{**SMALL, "threads": 1})
    assert files_of(path)["plan.json"] != plan
    assert Reader.open(path).attributes.policies["documents"] == "first 50"


@pytest.mark.parametrize("column", ["text", "ids", "chat"])
def test_what_a_column_holds_decides_the_kind_and_every_source_gives_the_same(
    world: Path, column: str
) -> None:
    expected = loaded(world, "jsonl", column)
    assert expected.kind == column
    assert len(expected.documents) == {"text": 60, "ids": 62, "chat": 62}[column]
    for form in FORMS:
        assert contents(loaded(world, form, column)) == contents(expected), form
    if column == "ids":
        ids = expected.documents[1].ids
        assert ids is not None
        assert (ids.dtype, ids.tolist()) == (np.int32, [1, 5, 6, 7, 8, 9, 10])
    if column == "chat":
        assert expected.documents[0].messages == tuple(CHAT)


def test_saved_and_streamed_rows_are_one_corpus_keys_and_spec_included(world: Path) -> None:
    saved, streamed = loaded(world, "saved"), loaded(world, "stream")
    assert saved == streamed
    assert saved.content_hash == streamed.content_hash
    assert streamed.spec == "hf:rows::train:text"
    assert [document.key for document in saved.documents[:4]] == ["rows:0", "rows:1", "rows:2", "rows:4"]
    assert loaded(world, "stream", streaming=False) == streamed


def test_the_split_that_is_taken_of_several_is_said(world: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "nearline")
    folder = world / "files" / "rows"
    load(f"hf:{folder}")
    assert f"hf:{folder}: takes split train of train, test" in caplog.text
    caplog.clear()
    load(f"hf:{folder}::test")
    assert "takes split" not in caplog.text


def test_a_copy_in_the_librarys_cache_is_the_same_corpus_with_no_network(world: Path) -> None:
    cache = Path(library_config.HF_DATASETS_CACHE)
    datasets.load_dataset(str(world / "files" / "rows"), cache_dir=str(cache))
    (cache / "rows").rename(cache / "some___rows")
    cached = load("hf:some/rows")
    assert contents(cached) == contents(loaded(world, "stream"))
    assert cached.spec == "hf:some/rows::train:text"
    assert cached == load("hf:some/rows", options=CorpusOptions(streaming=True))
    assert contents(load("hf:some/rows:default:test")) == contents(cached)[:49]


def test_nothing_is_written_for_a_folder_of_data_files(world: Path) -> None:
    cache = Path(library_config.HF_DATASETS_CACHE)
    before = sorted(cache.rglob("*")), sorted(world.rglob("*"))
    loaded(world, "stream", streaming=False)
    loaded(world, "saved")
    assert (sorted(cache.rglob("*")), sorted(world.rglob("*"))) == before
    assert datasets.are_progress_bars_disabled()


def test_rows_of_a_slice_keep_their_numbers(world: Path) -> None:
    for form in ("stream", "saved-splits"):
        spec = FORMS[form].format(world, "text").replace("train", "train[10:14]")
        corpus = load(spec)
        assert [document.key.split(":")[1] for document in corpus.documents] == ["10", "11", "12", "13"]
        assert "train[10:14]" in corpus.spec
        assert contents(corpus) == contents(loaded(world, form))[9:13]
    assert len(load(f"hf:{world}/dict::other[45:]").documents) == 5


# ---- reading no further than needed


@pytest.mark.parametrize("form", ["jsonl", "parquet", "stream"])
def test_nothing_behind_the_last_document_wanted_is_read(tmp_path: Path, form: str) -> None:
    """The second file, or the line behind the first thousand, is broken: who reads it, fails."""
    rows = [{"text": f"row {number}"} for number in range(2000)]
    if form == "jsonl":
        lines = [json.dumps(row) for row in rows]
        lines[1500] = '{"text": '
        (tmp_path / "rows.jsonl").write_text("\n".join(lines))
        spec = f"jsonl:{tmp_path}/rows.jsonl"
    else:
        for name in ("train-0.parquet", "train-1.parquet"):
            pq.write_table(pa.Table.from_pylist(rows), tmp_path / name, compression="snappy")
        damage(tmp_path / "train-1.parquet")
        spec = f"{'parquet' if form == 'parquet' else 'hf'}:{tmp_path}"
    corpus = load(spec, options=CorpusOptions(max_documents=700, streaming=form == "stream"))
    assert [document.text for document in corpus.documents] == [row["text"] for row in rows[:700]]
    with pytest.raises((UsageError, DamageError)):
        load(spec)


def damage(path: Path) -> None:
    """Turn bits of the first column's pages; the footer stays."""
    content = bytearray(path.read_bytes())
    content[60:2000:7] = bytes(byte ^ 0x5A for byte in content[60:2000:7])
    path.write_bytes(content)


# ---- mistakes


def broken(folder: Path, name: str) -> str:
    """A file or a folder with one fault, and how its corpus is named."""
    path = folder / "x"
    good = pa.table({"text": ["a fine text"] * 500})
    match name:
        case "empty":
            path.write_bytes(b"")
        case "jsonl as parquet":
            path.write_bytes(b'{"text": "a"}\n' * 99)
        case "cut":
            pq.write_table(good, path)
            path.write_bytes(path.read_bytes()[:-9])
        case "damaged":
            pq.write_table(pa.table({"text": [f"text {i}" for i in range(3000)]}), path)
            damage(path)
        case "not utf-8":
            text = pa.Array.from_buffers(
                pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"\xff\xfe")]
            )
            pq.write_table(pa.table({"text": text}), path)
        case "two columns":
            pq.write_table(pa.Table.from_arrays([good["text"]] * 2, ["text", "text"]), path)
        case "no data files":
            path.mkdir()
        case "script":
            path.mkdir()
            (path / "x.py").write_text("raise SystemExit('this ran')")
        case "no rows":
            path.mkdir()
            (path / "a.jsonl").write_text("")
        case "other columns":
            path.mkdir()
            (path / "a.jsonl").write_text('{"text": "a"}\n')
            (path / "b.jsonl").write_text('{"body": "b"}\n')
        case "bracket":
            (folder / "x[1]").mkdir()
            return f"{folder}/x[1]"
    return str(path)


@pytest.mark.parametrize(
    ("spec", "kind", "words"),
    [
        ("parquet:{w}/none.parquet", UsageError, ["no such file"]),
        ("parquet:{w}/rows.parquet:txt", UsageError, ["no column 'txt'", "'text', 'ids'", "PATH:COLUMN"]),
        ("parquet:{w}/rows.parquet:number", UsageError, ["row 0", "column 'number' holds an int"]),
        ("parquet:{w}/rows.parquet:share", UsageError, ["row 0", "a float"]),
        ("parquet:{w}/rows.parquet:nested", UsageError, ["row 0", "a dict", "role and a content"]),
        ("parquet:{w}/rows.parquet:shares", UsageError, ["row 0", "a list that holds a float"]),
        ("parquet:{w}/saved", UsageError, ["holds no .parquet file"]),
        ("parquet:{empty}", UsageError, ["not a Parquet file"]),
        ("parquet:{jsonl as parquet}", UsageError, ["not a Parquet file"]),
        ("parquet:{cut}", UsageError, ["not a Parquet file", "the end of it is missing"]),
        ("parquet:{damaged}", DamageError, ["column 'text'", "damaged"]),
        ("parquet:{not utf-8}", DamageError, ["column 'text'", "damaged", "utf-8"]),
        ("parquet:{two columns}", UsageError, ["two columns 'text'"]),
        ("jsonl:{w}/parts", UsageError, ["a folder", "jsonl: takes one file"]),
        ("hf:{w}/files/rows::valid", UsageError, ["no split 'valid'", "train, test"]),
        ("hf:{w}/files/rows::tset", UsageError, ["no split 'tset'", "did you mean test?"]),
        ("hf:{w}/files/rows:smal", UsageError, ["no configuration 'smal'", "default"]),
        ("hf:{w}/files/rows:::body", UsageError, ["no column 'body'", "'text', 'ids'"]),
        ("hf:{w}/files/rows:::number", UsageError, ["row 0", "holds an int"]),
        ("hf:{w}/files/rows::train[:10%]", UsageError, ["train[:10%]", "NAME[FROM:TO]"]),
        ("hf:{w}/files/rows::train+test", UsageError, ["train+test", "no sums"]),
        ("hf:{w}/dict:small", UsageError, ["a saved data set has no configurations"]),
        ("hf:{w}/saved/rows::test", UsageError, ["no split 'test'", "saved alone, as 'train'"]),
        ("hf:{w}/rows.jsonl", UsageError, ["rows.jsonl", "a file, not a folder", "jsonl:"]),
        ("hf:{w}/none", UsageError, ["/none: no folder", "Hub id"]),
        ("hf:{no data files}", UsageError, ["holds no data files"]),
        ("hf:{script}", UsageError, ["loading script", "never runs"]),
        ("hf:{no rows}", UsageError, ["hold no row"]),
        ("hf:{other columns}", UsageError, ["do not have the same columns"]),
        ("hf:{bracket}", UsageError, ["[", "rename it"]),
        ("hf:json", UsageError, ["no folder", "Hub id"]),
        ("hf:a/b:c:d:e:f", UsageError, ["hf:NAME[:CONFIG[:SPLIT[:COLUMN]]]"]),
        ("hf:nobody/nothing", EnvironmentFault, ["nobody/nothing", "cannot be reached", "local folder"]),
    ],
)  # fmt: skip
def test_a_mistake_is_one_clear_sentence(
    world: Path, tmp_path: Path, spec: str, kind: type[Exception], words: list[str]
) -> None:
    head, brace, tail = spec.partition("{")
    name, _, tail = tail.partition("}")
    full = spec if not brace else head + (str(world) if name == "w" else broken(tmp_path, name)) + tail
    with pytest.raises(kind) as caught:
        load(full)
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "\n" not in message
    assert caught.value.__cause__ is None


def test_a_text_among_ids_is_refused_by_its_row_whoever_reads_it(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"text": [5, 6]}\n{"text": []}\n{"text": "words"}\n')
    for spec, place in ((f"jsonl:{tmp_path}/train.jsonl", "line 3"), (f"hf:{tmp_path}", "row 2")):
        with pytest.raises(UsageError, match=f"{place}.* holds a text, the documents before it token ids"):
            load(spec)


def test_without_the_library_only_hf_is_refused(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(EnvironmentFault, match=r"pip install 'nearline\[collect\]'"):
        loaded(world, "saved")
    assert loaded(world, "parquet").kind == "text"


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (
            library_errors.DatasetNotFoundError("Dataset 'a/b' is a gated dataset on the Hub. hf_SECRET"),
            UsageError,
            ["gated", "HF_TOKEN", "hf auth login"],
        ),
        (
            library_errors.DatasetNotFoundError("Dataset 'a/b' doesn't exist. hf_SECRET"),
            UsageError,
            ["nor a data set on the Hub", "HF_TOKEN", "hf auth login"],
        ),
        (ConnectionError("https://u:hf_SECRET@hub?token=hf_SECRET"), EnvironmentFault, ["cannot be reached"]),
        (RuntimeError("hf_SECRET"), UsageError, ["RuntimeError", "parquet:PATH"]),
    ],
)
def test_what_the_hub_says_is_told_without_its_words(
    error: Exception, kind: type[Exception], words: list[str]
) -> None:
    told = _error(datasets, split_dataset("a/b"), error)
    assert type(told) is kind
    assert all(word in str(told) for word in ["hf:a/b", *words]), told
    assert "SECRET" not in str(told)


# ---- names


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("hf:owner/name", "hf:owner/name::train:text"),
        ("hf:name:config:test:body", "hf:name:config:test:body"),
        ("hf:owner/name@1a2b::train[5:]", "hf:owner/name@1a2b::train[5:]:text"),
        ("hf:owner/name::train[:]", "hf:owner/name::train:text"),
        ("hf:./gone: by/now::test", "hf:now::test:text"),
        ("hf:/gone/by/now", "hf:now::train:text"),
        ("parquet:/data/a.parquet", "parquet:a.parquet:text"),
        ("parquet:/data/a.parquet:body", "parquet:a.parquet:body"),
        ("jsonl:a.jsonl", "jsonl:a.jsonl:text"),
        ("ids:/data/ids.npy", "ids:ids.npy"),
        ("text:/data/a.txt", "text:a.txt"),
        ("docs:python", "docs:python"),
    ],
)
def test_what_a_store_calls_a_corpus(spec: str, expected: str) -> None:
    assert portable(spec) == expected


def test_the_recorded_name_is_what_loading_records(world: Path) -> None:
    for form in FORMS:
        spec = FORMS[form].format(world, "text")
        assert load(spec).spec == portable(spec)


# ---- repair


def test_a_parquet_corpus_is_found_again_with_its_options(world: Path, tmp_path: Path) -> None:
    tiny_model("llama")[0].save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    left_out = tmp_path / "left out.txt"
    left_out.write_text("rows.parquet:7\nrows.parquet:9\n")
    settings = {
        **SMALL,
        "tokens": 400,
        "model": str(tmp_path / "model"),
        "corpus": f"parquet:{world}/rows.parquet",
        "max_documents": 40,
        "exclude": str(left_out),
        "threads": 1,
    }
    store = collect(parse_settings(settings), tmp_path / "store").path
    before = files_of(store, without=("runs", "README.md"))
    assert "rows.parquet:7" not in Reader.open(store).documents["key"].to_pylist()
    chunk = store / f"{ZARR}/mlp_output/c/1/2/0"
    chunk.write_bytes(bytes(len(chunk.read_bytes())))
    repair(store)
    assert files_of(store, without=("runs", "README.md")) == before


# ---- the Hub


CHILD = """
import json, sys
from nearline.collect.corpora import CorpusOptions, load
from nearline.store.errors import NearlineError

for spec, options in json.loads(sys.stdin.read()):
    try:
        found = load(spec, options=CorpusOptions(**options))
        said = {"spec": found.spec, "hash": found.content_hash}
        said |= {"keys": [document.key for document in found.documents]}
    except NearlineError as error:
        said = {"error": str(error), "exit_code": error.exit_code}
    print(json.dumps(said))
"""
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "downloaded": ("hf:org/rows", {}),
    "streamed": ("hf:org/rows", {"streaming": True}),
    "pinned": ("hf:org/rows@v1", {"streaming": True}),
    "first": ("hf:org/rows::test", {"streaming": True, "max_documents": 7}),
    "wrong revision": ("hf:org/rows@v9", {}),
    "wrong configuration": ("hf:org/two:thee", {}),
    "no configuration": ("hf:org/two", {"streaming": True}),
    "configuration": ("hf:org/two:three", {"streaming": True}),
    "gated": ("hf:org/gated", {}),
    "missing": ("hf:org/misspelt", {}),
    "script": ("hf:org/script", {}),
}


@pytest.fixture(scope="module")
def answers(world: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the real library says, in a process of its own, of data sets on a hub of ours."""
    content = {path.name: path.read_bytes() for path in (world / "files" / "rows").iterdir()}
    table = (world / "rows.parquet").read_bytes()
    card = "---\nconfigs:\n" + "".join(
        f"- config_name: {name}\n  data_files: {name}.parquet\n" for name in ("three", "four")
    )
    with FakeDataHub() as hub:
        hub.repos["org/rows"] = hub.repos["org/gated"] = content
        hub.repos["org/two"] = {
            "README.md": f"{card}---\n".encode(),
            "three.parquet": table,
            "four.parquet": table,
        }
        hub.repos["org/script"] = {"script.py": b"raise SystemExit('this ran')", **content}
        hub.gated.add("org/gated")
        child = subprocess.run(
            [sys.executable, "-c", CHILD],
            input=json.dumps(list(ASKED.values())),
            env=hub.environment(tmp_path_factory.mktemp("home")),
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert child.returncode == 0, child.stderr
    said = [json.loads(line) for line in child.stdout.splitlines()]
    return {**dict(zip(ASKED, said, strict=True)), "stderr": child.stderr}


def test_a_set_of_the_hub_is_the_same_corpus_streamed_downloaded_pinned_or_in_a_folder(
    answers: dict[str, Any], world: Path
) -> None:
    expected = loaded(world, "stream")
    keys = [f"org/{document.key}" for document in expected.documents]
    for form in ("downloaded", "streamed", "pinned"):
        assert answers[form]["keys"] == keys, answers[form]
    assert answers["downloaded"] == answers["streamed"]
    assert answers["downloaded"]["hash"] == answers["pinned"]["hash"]
    assert answers["pinned"]["spec"] == "hf:org/rows@v1::train:text"
    renamed = [(f"org/{document.key}", document.text) for document in expected.documents]
    assert answers["streamed"]["hash"] == corpora.from_documents(renamed).content_hash
    assert answers["first"]["keys"] == [key for key in keys if key != "org/rows:3"][:7]
    assert answers["configuration"]["spec"] == "hf:org/two:three:train:text"
    assert len(answers["configuration"]["keys"]) == 60


@pytest.mark.parametrize(
    ("asked", "exit_code", "words"),
    [
        ("wrong revision", 2, ["org/rows@v9", "revision"]),
        ("wrong configuration", 2, ["no configuration 'thee'", "three, four", "did you mean three?"]),
        ("no configuration", 2, ["several configurations", "three", "four"]),
        ("gated", 2, ["org/gated", "gated on the Hub", "hf auth login", "HF_TOKEN"]),
        ("missing", 2, ["org/misspelt", "nor a data set on the Hub", "HF_TOKEN"]),
        ("script", 2, ["org/script", "loading script", "never runs"]),
    ],
)
def test_what_the_hub_refuses_is_one_sentence(
    answers: dict[str, Any], asked: str, exit_code: int, words: list[str]
) -> None:
    said = answers[asked]
    assert said.get("exit_code") == exit_code, said
    assert all(word in said["error"] for word in words), said
    assert "\n" not in said["error"]


def test_the_hub_is_read_without_bars_and_no_token_is_told(answers: dict[str, Any]) -> None:
    assert TOKEN not in json.dumps(answers)
    assert "%|" not in answers["stderr"]
