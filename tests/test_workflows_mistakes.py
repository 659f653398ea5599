"""A user's mistakes: one clear sentence each, the right exit code, no traceback, nothing left that looks
whole."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers_store import make_store
from nearline.store import durable
from nearline.workflows.cli import run

COLLECT = ["collect", "tiny-gpt2"]
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
    Path("afile").write_text("x", encoding="utf-8")
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
        ["tokns", "tokens"],
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
    ("fit without stores", ["fit", "study"], 2, ["store"]),
    ("fit of no store", ["fit", "study", "full"], 2, ["full"]),
    ("report of no study", ["report", "full"], 2, ["full"]),
    ("sites of an unknown model", ["sites", "./no-model"], 2, ["no-model"]),
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


def test_an_unsealed_store_is_refused_by_fit(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_store(world / "store")
    (world / "store" / "SEALED").unlink()
    assert run(["fit", "study", "store"]) == 3
    assert "seal" in capsys.readouterr().err
    assert not (world / "study" / "provenance.json").exists()


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
    def fail(*_: object) -> Callable[[], None]:
        raise failure

    monkeypatch.setattr("nearline.workflows.commands_stores.read_toml", fail)
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
