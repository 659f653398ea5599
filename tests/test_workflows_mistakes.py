"""A user's mistakes: one clear sentence each, the right exit code, no traceback, nothing left that looks
whole."""

import json
import os
import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers_mistakes import stock
from helpers_sentences import assert_one_sentence
from helpers_store import make_store
from nearline.analyze.stores import parse_stores
from nearline.store import Study, durable
from nearline.workflows.cli import run
from nearline.workflows.quickstart import quickstart_study

COLLECT = ["collect", "tiny-gpt2"]
OWN_SETTINGS = '[[models]]\nmodel = "tiny-gpt2"\n[[corpora]]\ncorpus = "docs:python"\n'
ROW = {"body": "a sentence of some length that is a document of its own. " * 4}


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the inputs that the mistakes below refer to."""
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("full").mkdir()
    Path("full/thesis.tex").write_text("five years of work", encoding="utf-8")
    Path("void.txt").write_text("", encoding="utf-8")
    Path("rows.jsonl").write_text("\n".join(json.dumps(ROW) for _ in range(3)), encoding="utf-8")
    Path("broken.jsonl").write_text('{"text": "fine"}\n{"text": \n', encoding="utf-8")
    Path("bad.toml").write_text("tokns = 3\n", encoding="utf-8")
    Path("good.toml").write_text("tokens = 3000\n", encoding="utf-8")
    Path("odd.toml").write_text('alpha = "most"\n', encoding="utf-8")
    Path("afile").write_text("x", encoding="utf-8")
    Path("mine").mkdir()
    Path("mine/study.toml").write_text(OWN_SETTINGS, encoding="utf-8")
    Study.create("begun")
    make_store(Path("astore"), n_tokens=300)
    return tmp_path


# name, arguments, exit code, words that the sentence must hold
MISTAKES: list[tuple[str, list[str], int, list[str]]] = [
    ("no such command", ["colect", "a", "b", "c"], 2, ["colect", "collect"]),
    ("missing argument", ["collect", "tiny-gpt2"], 2, ["CORPUS"]),
    ("unknown flag", [*COLLECT, "docs:python", "out", "--tokns", "5"], 2, ["--tokns", "--tokens"]),
    ("value of the wrong type", [*COLLECT, "docs:python", "out", "--tokens", "many"], 2, ["tokens", "many"]),
    ("value out of range", [*COLLECT, "docs:python", "out", "--tokens", "0"], 2, ["tokens"]),
    ("choice that is none", [*COLLECT, "docs:python", "out", "--dtype", "int8"], 2, ["dtype", "bfloat16"]),
    (
        "unknown key in a file",
        [*COLLECT, "docs:python", "out", "--config", "bad.toml"],
        2,
        ["nearline: --config bad.toml: unknown setting 'tokns': did you mean 'tokens'?"],
    ),
    (
        "wrong flag beside a file",
        [*COLLECT, "docs:python", "out", "--config", "good.toml", "--block", "-1"],
        2,
        ["nearline: block=-1"],
    ),
    (
        "wrong value in a file",
        ["fit", "study", "astore", "--config", "odd.toml", "--folds", "3"],
        2,
        ["nearline: --config odd.toml: alpha="],
    ),
    ("settings file missing", [*COLLECT, "docs:python", "out", "--config", "no.toml"], 2, ["no.toml"]),
    ("missing model", ["collect", "./no-model", "docs:python", "out"], 2, ["no-model"]),
    ("model is a file", ["collect", "./afile", "docs:python", "out"], 2, ["afile"]),
    ("model folder without config", ["collect", "./empty", "docs:python", "out"], 2, ["config.json"]),
    ("missing corpus file", [*COLLECT, "text:no.txt", "out"], 2, ["no.txt"]),
    ("empty corpus", [*COLLECT, "text:void.txt", "out"], 2, ["void.txt", "empty"]),
    ("unknown corpus", [*COLLECT, "docs:pyton", "out"], 2, ["docs:pyton", "docs:python"]),
    ("unknown field", [*COLLECT, "jsonl:rows.jsonl:text", "out"], 2, ["text", "body"]),
    ("malformed line", [*COLLECT, "jsonl:broken.jsonl", "out"], 2, ["broken.jsonl", "2"]),
    ("too few groups", [*COLLECT, "jsonl:rows.jsonl:body", "out"], 2, ["group"]),
    ("too few tokens", [*COLLECT, "docs:python", "out", "--tokens", "20"], 2, ["tokens"]),
    ("layer out of range", [*COLLECT, "docs:python", "out", "--layers", "3-9"], 2, ["3-9", "0-5"]),
    ("layers that are none", [*COLLECT, "docs:python", "out", "--layers", "x"], 2, ["layers", "x"]),
    (
        "sequence too long",
        [*COLLECT, "docs:python", "out", "--sequence-length", "100000"],
        2,
        ["100", "512"],
    ),
    ("folder in use", [*COLLECT, "docs:python", "full"], 2, ["full", "not empty"]),
    ("store is a file", [*COLLECT, "docs:python", "afile"], 2, ["afile"]),
    ("store not there", ["info", "nowhere"], 2, ["nowhere"]),
    ("no store at all", ["info", "full"], 2, ["full"]),
    ("fit without stores", ["fit", "study"], 2, ["STORES"]),
    ("fit of no store", ["fit", "study", "full"], 2, ["full"]),
    ("report of no study", ["report", "full"], 2, ["full"]),
    ("report of nothing", ["report"], 2, ["STUDIES"]),
    ("report of one study twice", ["report", "full", "full/../full"], 2, ["full is named twice"]),
    ("tables in no format", ["report", "full", "--format", "latex"], 2, ["--tables DIR"]),
    ("tables in an unknown format", ["report", "full", "--format", "xlsx"], 2, ["xlsx", "parquet"]),
    ("tables into a file", ["report", "full", "--tables", "afile"], 2, ["afile", "name a folder"]),
    (
        "report of no folder",
        ["report", "st/mine"],
        2 + 1,
        ["st/mine does not", "`nearline fit st/mine STORE`"],
    ),
    ("info of no folder", ["info", "st/mine"], 2, ["`nearline collect MODEL CORPUS st/mine` makes a store"]),
    ("push of no folder", ["push", "st/mine", "x"], 2, ["nearline: st/mine does not exist: check the path"]),
    ("pull of no folder", ["pull", "st/mine", "x"], 2, ["nearline: st/mine does not exist: check the path"]),
    ("pull of no file URL", ["pull", "file:st/mine", "x"], 2, ["st/mine does not exist: check the path"]),
    ("verify of no folder", ["verify", "st/mine"], 2, ["nearline: st/mine does not exist: check the path"]),
    ("seal of no folder", ["seal", "st/mine"], 2, ["nearline: st/mine does not exist: check the path"]),
    ("repair of no folder", ["repair", "st/mine"], 2, ["nearline: st/mine does not exist: check the path"]),
    ("run into a file", ["run", "mine/study.toml", "afile"], 2, ["afile is a file; `out` is the folder for"]),
    ("quickstart into a file", ["quickstart", "afile"], 2, ["afile is a file; `out` is the folder for"]),
    ("run of a folder", ["run", "full"], 2, ["full: this is a folder; give a TOML file of settings"]),
    ("config is a folder", ["measure", "full", "--config", "full"], 2, ["--config full: this is a folder"]),
    (
        "report over a file",
        ["report", "begun", "--out", "afile"],
        2,
        ["afile is there already, and is no re"],
    ),
    (
        "fit of no folder",
        ["fit", "study", "st/mine"],
        2,
        ["nearline: st/mine does not exist; `nearline coll"],
    ),
    (
        "alpha and a grid",
        ["fit", "study", "full", "--alpha", "0.5", "--alphas", "1,2"],
        2,
        ["alphas=1,2: alpha=cv chooses from a grid, and alpha=0.5 is given too"],
    ),
    (
        "quickstart of tokens below none",
        ["quickstart", "out", "--tokens", "-5"],
        2,
        ["tokens=-5: input should be"],
    ),
    ("quickstart of no tokens", ["quickstart", "out", "--tokens", "0"], 2, ["tokens=0: input should be"]),
    ("quickstart of one token", ["quickstart", "out", "--tokens", "1"], 2, ["quickstart takes 6000 or more"]),
    ("measure of no study", ["measure", "full"], 2, ["full is not a study"]),
    ("measure of no folder", ["measure", "st/mine"], 2 + 1, ["`nearline fit st/mine STORE`"]),
    ("measure with a slip", ["measure", "full", "--share", "0.5"], 2, ["--share", "--shares"]),
    ("measure at a share of all", ["measure", "full", "--shares", "1"], 2, ["shares"]),
    ("measure of no set", ["measure", "full", "--compound", "best"], 2, ["'best'", "cheapest@5"]),
    ("measure on a URL", ["measure", "s3://bucket/study"], 2, ["not behind a URL"]),
    ("export of no layers", ["export", "full", "out"], 2, ["--layers"]),
    ("export of layers that are none", ["export", "full", "out", "--layers", "x"], 2, ["layers='x'"]),
    ("export of no study", ["export", "full", "out", "--layers", "all"], 2, ["full is not a study"]),
    ("export to a URL", ["export", "full", "s3://b/x", "--layers", "2"], 2, ["not behind a URL"]),
    ("sites of an unknown model", ["sites", "./no-model"], 2, ["no-model"]),
]
# What takes a study, and what a store that is there, without the one.
OF_STUDY = [
    ["fit", "STUDY", "astore"],
    ["analyze", "STUDY"],
    ["measure", "STUDY"],
    ["finetune", "STUDY"],
    ["export", "STUDY", "out", "--layers", "all"],
    ["report", "STUDY"],
]
OF_STORE = [
    ["fit", "study", "STORE"],
    ["info", "STORE"],
    ["verify", "STORE"],
    ["repair", "STORE"],
    ["seal", "STORE"],
    ["push", "STORE", "out"],
    ["pull", "STORE", "out"],
]
NO_STUDY = {
    "mine/study.toml": "a file; a study is a folder. For a settings file: `nearline run mine/study.toml`",
    "afile": "afile is a file; a study is a folder",
    "astore": "astore is not a study but a store; `nearline fit STUDY astore` makes a study of it",
    "mine": "mine is not a study (a folder that `nearline fit` wrote): there is no provenance.json beside",
    "full": "full is not a study (a folder that `nearline fit` wrote)",
}
NO_STORE = {
    "mine/study.toml": "mine/study.toml is a file, not a store; a store is a folder",
    "begun": "begun is a study, not a nearline store: name one of its stores",
    "full": "full is not a nearline store",
}
for _of, _noun, _said in ((OF_STUDY, "STUDY", NO_STUDY), (OF_STORE, "STORE", NO_STORE)):
    MISTAKES += [
        (
            f"{arguments[0]} of {place}",
            [place if word == _noun else word for word in arguments],
            2,
            [words],
        )
        for arguments in _of
        for place, words in _said.items()
    ]


@pytest.mark.parametrize(
    ("arguments", "code", "words"), [m[1:] for m in MISTAKES], ids=[m[0].replace(" ", "-") for m in MISTAKES]
)
def test_one_sentence_and_the_right_code(
    world: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, words: list[str]
) -> None:
    got = run(arguments)
    error = capsys.readouterr().err
    assert got == code, error
    assert "Traceback" not in error
    last = error.strip().splitlines()[-1]
    assert last.startswith("nearline: ")
    for word in words:
        assert word in last, last
    assert not (world / "out" / "SEALED").exists()
    assert sorted(path.name for path in (world / "full").iterdir()) == ["thesis.tex"]
    assert (world / "mine/study.toml").read_text(encoding="utf-8") == OWN_SETTINGS


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shelf")
    stock(folder)
    return folder


@pytest.fixture
def own(shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder where the shelf's models and data lie, without network."""

    def refuse(*_: object, **__: object) -> None:
        raise socket.gaierror("no network in this test")

    monkeypatch.chdir(tmp_path)
    for entry in shelf.iterdir():
        (tmp_path / entry.name).symlink_to(entry)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


DOCS = "jsonl:docs.jsonl"
SMALL = [DOCS, "out", "--tokens", "300", "--sequence-length", "24", "--min-length", "4"]
LLAMA = ["llama", *SMALL]
# What a first user does with a model and data of their own: name, arguments of collect, exit code, words that
# the sentence must hold.
OWN: list[tuple[str, list[str], int, list[str]]] = [
    # Models
    ("bundled name with a slip", ["tiny-gtp2", *SMALL], 2, ["tiny-gtp2", "did you mean 'tiny-gpt2'"]),
    ("hub id offline", ["someone/model", *SMALL], 4, ["someone/model", "no folder here", "local folder"]),
    ("folder without weights", ["no-weights", *SMALL], 2, ["no-weights holds no weights", "safetensors"]),
    ("folder without tokenizer", ["no-tokenizer", *SMALL], 2, ["without a tokenizer", "ids:PATH"]),
    ("pickled weights", ["pickle", *SMALL], 2, ["pytorch_model.bin", "can run code", "allow_pickle"]),
    ("GGUF file as model", ["gguf/model.Q4.gguf", *SMALL], 2, ["is a file", "gguf_file 'model.Q4.gguf'"]),
    ("GGUF file not named", ["gguf", *SMALL], 2, ["no config.json", "gguf_file: model.Q4.gguf"]),
    ("GGUF file of another name", ["gguf", *SMALL, "--gguf-file", "x.gguf"], 2, ["x.gguf", "model.Q4.gguf"]),
    (
        "GGUF file cut short",
        ["gguf", *SMALL, "--gguf-file", "model.Q4.gguf"],
        2,
        ["gguf/model.Q4", "no whole GGUF file (4 bytes)", "Download it again"],
    ),
    ("encoder", ["encoder", *SMALL], 2, ["'bert'", "encoder", "decoder-only causal"]),
    ("encoder and decoder", ["encoder-decoder", *SMALL], 2, ["'t5'", "encoder", "decoder-only causal"]),
    ("recurrent model", ["recurrent", *SMALL], 2, ["'mamba'", "recurrence", "decoder-only causal"]),
    ("multimodal model", ["multimodal", *SMALL], 2, ["'llava'", "more than text", "LlamaForCausalLM"]),
    ("unheard-of family", ["unheard-of", *SMALL], 2, ["unheard-of", "'strange9'", "newer transformers"]),
    (
        "model with code of its own",
        ["own-code", *SMALL],
        2,
        ["own-code", "code of its own", "trust_remote_code"],
    ),
    ("adapter whose base is gone", ["adapter", *SMALL], 2, ["'adapter'", "/gone/base", "adapter=FOLDER"]),
    ("adapter that is none", [*LLAMA, "--adapter", "gguf"], 2, ["gguf", "adapter_config.json"]),
    ("adapter that is nowhere", [*LLAMA, "--adapter", "nowhere"], 4, ["'nowhere'", "folder of the adapter"]),
    ("adapter without weights", [*LLAMA, "--adapter", "adapter"], 2, ["'adapter' holds no weights"]),
    ("attention of another name", [*LLAMA, "--attention", "flash"], 2, ["'flash'", "eager", "sdpa"]),
    ("device of another name", [*LLAMA, "--device", "gpu"], 2, ["'gpu'", "cuda"]),
    ("revision of a folder", [*LLAMA, "--revision", "main"], 2, ["'main'", "no revisions"]),
    ("memory without a map", [*LLAMA, "--max-memory", "cpu=4GiB"], 2, ["cpu=4GiB", "device_map"]),
    ("memory of no device", [*LLAMA, "--device-map", "auto", "--max-memory", "x"], 2, ["'x'", "0=20GiB"]),
    # Corpora
    (
        "no kind of corpus",
        ["llama", "docs.jsonl", "out"],
        2,
        ["'docs.jsonl'", "Did you mean jsonl:docs.jsonl?"],
    ),
    (
        "kind with a slip",
        ["llama", "josnl:docs.jsonl", "out"],
        2,
        ["josnl", "Did you mean jsonl:docs.jsonl?"],
    ),
    (
        "keys from no file",
        [*LLAMA, "--include", "keys"],
        2,
        ["include=keys: no such file", "keys of documents"],
    ),
    ("missing file", ["llama", "jsonl:no.jsonl", "out"], 2, ["no.jsonl", "no such file"]),
    ("missing field", ["llama", "jsonl:docs.jsonl:body", "out"], 2, ["'body'", "'text'", "jsonl:PATH:FIELD"]),
    ("missing column", ["llama", "parquet:docs.parquet", "out"], 2, ["'text'", "'body'", "PATH:COLUMN"]),
    ("column of numbers", ["llama", "parquet:docs.parquet:number", "out"], 2, ["'number'", "int", "text"]),
    ("field of numbers", ["llama", "jsonl:numbers.jsonl", "out"], 2, ["line 1", "int", "text"]),
    ("two kinds of documents", ["llama", "jsonl:mixed.jsonl", "out"], 2, ["line 2", "token ids", "one kind"]),
    ("lines that are no objects", ["llama", "jsonl:lists.jsonl", "out"], 2, ["line 1", "object"]),
    ("no lines", ["llama", "jsonl:void.jsonl", "out"], 2, ["void.jsonl", "no text"]),
    ("blank texts", ["llama", "jsonl:blank.jsonl", "out"], 2, ["blank.jsonl", "no text"]),
    ("no Parquet file", ["llama", "parquet:text.parquet", "out"], 2, ["text.parquet", "not a Parquet file"]),
    (
        "data set offline",
        ["llama", "hf:wikitext:wikitext-2-raw-v1", "out"],
        4,
        ["hf:wikitext", "local folder"],
    ),
    ("missing split", ["llama", "hf:dataset::test", "out"], 2, ["'test'", "its splits are train"]),
    ("missing data set column", ["llama", "hf:dataset::train:body", "out"], 2, ["'body'", "'text'"]),
    ("ids of another model", ["llama", "ids:ids.npy", "out"], 2, ["token id 160", "vocabulary of 160"]),
    (
        "ids that are no integers",
        ["llama", "ids:floats.npy", "out"],
        2,
        ["floats.npy", "float64", "integers"],
    ),
    ("no array", ["llama", "ids:text.npy", "out"], 2, ["text.npy", "numpy.save"]),
    # Choices
    ("unknown key to include", [*LLAMA, "--include", "keys.txt"], 2, ["'no-such-key'", "include"]),
    ("missing list of keys", [*LLAMA, "--exclude", "no.txt"], 2, ["no.txt", "no such file"]),
    ("share above one", [*LLAMA, "--keep", "2"], 2, ["keep='2'", "1/8"]),
    ("articles where none are", [*LLAMA, "--join", "wikitext"], 2, ["join=wikitext", "join=never"]),
    ("token ids that are none", [*LLAMA, "--exclude-tokens", "the"], 2, ["'the'", "11,50256"]),
    ("excluded id out of range", [*LLAMA, "--exclude-tokens", "999"], 2, ["id 999", "0-159"]),
    ("site with a slip", [*LLAMA, "--sites", "mlp_out"], 2, ["'mlp_out'", "did you mean 'mlp_output'"]),
    ("layer beyond the last", [*LLAMA, "--layers", "99"], 2, ["layers=99", "0-2", "nearline sites"]),
    ("window beyond the positions", [*LLAMA, "--sequence-length", "1000"], 2, ["1000", "128"]),
    ("batch below one window", [*LLAMA, "--batch-tokens", "8"], 2, ["batch_tokens=8", "at least 24"]),
    ("rank that is none", [*LLAMA, "--rank", "3", "--world-size", "2"], 2, ["rank=3", "0-1"]),
]


@pytest.mark.parametrize(
    ("arguments", "code", "words"), [m[1:] for m in OWN], ids=[m[0].replace(" ", "-") for m in OWN]
)
def test_own_models_and_data_are_refused_in_one_sentence(
    own: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, words: list[str]
) -> None:
    assert len(OWN) >= 20
    flags = dict(zip(arguments[3::2], arguments[4::2], strict=True))  # of a flag named twice, the later one
    got = run(["collect", *arguments[:3], *(part for flag in flags.items() for part in flag)])
    assert_one_sentence(capsys.readouterr().err, got, code, words)
    assert not (own / "out").exists()


def test_cuda_where_there_is_none(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    if torch.cuda.is_available():  # then it is no mistake
        assert run(["collect", *LLAMA, "--device", "cuda"]) == 0
        return
    got = run(["collect", *LLAMA, "--device", "cuda"])
    assert_one_sentence(capsys.readouterr().err, got, 4, ["'cuda'", "no CUDA device", "cpu"])


def test_a_store_is_not_continued_with_other_settings(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["collect", *LLAMA, "--threads", "1"]) == 0
    files = {path: path.read_bytes() for path in (own / "out").rglob("*") if path.is_file()}
    for other, words in {
        ("--layers", "0-1"): ["layers"],
        ("--seed", "1"): ["plan"],
        ("--storage-dtype", "float32"): ["float32", "float16"],
        ("--sites", "residual,mlp_output"): ["sites"],
        ("--keep", "1/2"): ["keep"],
    }.items():
        capsys.readouterr()
        got = run(["collect", *LLAMA, "--threads", "1", *other])
        assert_one_sentence(capsys.readouterr().err, got, 2, ["out", *words])
    assert {path: path.read_bytes() for path in (own / "out").rglob("*") if path.is_file()} == files


def test_a_store_without_what_a_fit_needs(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["collect", *LLAMA, "--threads", "1", "--sites", "residual"]) == 0
    capsys.readouterr()
    got = run(["fit", "study", "out"])
    assert_one_sentence(capsys.readouterr().err, got, 2, ["store out has no `mlp_output`", "a fit needs"])
    assert not (own / "study").exists()


def test_an_unsealed_store_is_refused_by_fit(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_store(world / "store")
    (world / "store" / "SEALED").unlink()
    assert run(["fit", "study", "store"]) == 3
    assert "seal" in capsys.readouterr().err
    assert not (world / "study" / "provenance.json").exists()


def test_stores_of_one_name_are_told_apart(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in ("a", "b", "odd"):
        make_store(world / folder / ("x=la" if folder == "odd" else "la"), n_tokens=400, d=4, n_layers=1)
    words = "two stores are called la (a/la and b/la): give them names, as in"
    assert_refused(capsys, ["a/la", "b/la"], words, "`nearline fit STUDY one=a/la two=b/la`")
    assert_refused(capsys, ["a/la", "./a/la"], "one store is given twice (a/la and ./a/la)")
    # Two copies have one seal.
    assert_refused(capsys, ["one=a/la", "two=b/la"], "stores one and two are one and the same (seal ")
    assert_refused(capsys, ["one=a/la", "one=b/la"], "two stores are called one (a/la and b/la)")
    assert parse_stores(["one=a/la", "b/la", "two=s3://x/y"]) == {
        "one": "a/la",
        "la": "b/la",
        "two": "s3://x/y",
    }
    assert parse_stores(["s3://x/y=z", "odd/x=la"]) == ["s3://x/y=z", "odd/x=la"]
    shutil.move(world / "odd" / "x=la", world / "x=la")
    assert parse_stores(["x=la"]) == ["x=la"]


def assert_refused(capsys: pytest.CaptureFixture[str], stores: list[str], *words: str) -> None:
    got = run(["fit", "study", *stores])
    assert_one_sentence(capsys.readouterr().err, got, 2, list(words))
    assert not Path("study").exists()


def test_the_help_of_fit_and_quickstart(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["fit", "--help"]) == 0
    found = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "STUDY STORES..." in found
    assert "NAME=STORE gives a store another name" in found
    assert "alpha=cv chooses from, and not given with another alpha" in found
    assert re.search(r"\* +STORES", found)
    assert run(["quickstart", "--help"]) == 0
    usual = quickstart_study().models[0].stores[0].settings.tokens
    assert f"[default: {usual}]" in " ".join(capsys.readouterr().out.replace("│", " ").split())


def test_a_full_disk_is_an_environment_fault(
    world: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(world)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1_000_000))
    assert run([*COLLECT, "docs:python", "out", "--tokens", "20000"]) == 4
    error = capsys.readouterr().err
    assert "free" in error
    assert "Traceback" not in error
    assert not (world / "out" / "SEALED").exists()


def test_an_unwritable_folder_is_an_environment_fault(
    world: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: str | Path, *_: object, **__: object) -> int:
        raise PermissionError(13, "Permission denied", str(path))

    # The tests may run as root, for whom every folder is writable.
    monkeypatch.setattr(durable.os, "open", refuse)
    assert run([*COLLECT, "docs:python", "out"]) == 4
    assert "out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("failure", "code"), [(KeyboardInterrupt(), 130), (MemoryError(), 4), (RuntimeError("odd"), 70)]
)
def test_what_is_no_mistake_of_the_user_has_its_own_code(
    world: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    failure: BaseException,
    code: int,
) -> None:
    def fail(*_: object, **__: object) -> Callable[[], None]:
        raise failure

    monkeypatch.setattr("nearline.workflows.commands_stores.parsed", fail)
    assert run([*COLLECT, "docs:python", "out"]) == code
    assert ("Traceback" in capsys.readouterr().err) == (code == 70)
    assert not Path(os.fspath(world / "out" / "SEALED")).exists()


@pytest.mark.parametrize(
    "arguments",
    [
        [*COLLECT, "docs:python", "s3://bucket/store"],
        ["plan", "tiny-gpt2", "docs:python", "s3://bucket/store"],
        ["seal", "s3://bucket/store"],
        ["repair", "gs://bucket/store"],
        ["push", "hf://datasets/me/store", "copy"],
        ["pull", "copy", "https://host/store"],
        ["fit", "s3://bucket/study", "store"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_url_where_a_folder_belongs_makes_no_folder_of_that_name(
    world: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    before = sorted(world.rglob("*"))
    assert run(arguments) == 2
    assert "a folder on this machine, not behind a URL" in capsys.readouterr().err
    assert sorted(world.rglob("*")) == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["colect"], "there is no command 'colect'; did you mean collect?"),
        (["xyzzy"], "there is no command 'xyzzy'; commands: "),
        (["info", "a", "extra"], "unexpected argument 'extra'."),
        (["collect", "m", "c", "s", "--tokns", "3"], "Did you mean --tokens? `nearline collect --help`"),
    ],
)
def test_a_slip_in_the_command_is_answered_in_plain_words(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert run(arguments) == 2
    assert words in capsys.readouterr().err
