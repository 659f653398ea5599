"""Everything the README says is run: its commands through the command line, its Python as it stands."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from nearline.collect.bundled_models import bundled_path
from nearline.collect.corpora import load
from nearline.workflows.cli import run

README = Path(__file__).parents[1] / "README.md"
PAPER = ((24, 1024), (36, 1280), (12, 768), (24, 1024), (16, 2048), (32, 2560))  # layers and widths
STUDIES = README.parent / "docs" / "studies.md"


def blocks(language: str, page: Path = README) -> list[str]:
    return re.findall(rf"^```{language} run\n(.*?)^```", page.read_text(encoding="utf-8"), re.S | re.M)


def write_files(page: Path) -> None:
    """The files that a page spells out, into this folder."""
    found = re.findall(r"^```toml (\S+)\n(.*?)^```", page.read_text(encoding="utf-8"), re.S | re.M)
    assert found
    for name, text in found:
        Path(name).write_text(text, encoding="utf-8")


def test_every_command_and_program_of_the_readme_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from nearline.collect import models

    monkeypatch.chdir(tmp_path)
    shutil.copytree(bundled_path("tiny-gpt2"), "my-model")
    documents = [document.text for document in load("docs:python").documents]
    Path("texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in documents))

    write_files(README)
    commands = [line for block in blocks("bash") for line in block.splitlines() if line]
    assert len(commands) >= 5
    for command in commands:
        program, *arguments = shlex.split(command)
        assert program == "nearline"
        assert run(arguments) == 0, command
    assert Path("studies/mine/report.html").stat().st_size > 10_000

    programs = blocks("python")
    assert len(programs) >= 3
    loaded = models.load("tiny-pythia")
    names = {"model": loaded.model, "tokenizer": loaded.tokenizer, "documents": documents}
    for program in programs:
        exec(compile(program, str(README), "exec"), dict(names))
    assert Path("stores/live/SEALED").exists()
    assert "verdict" in capsys.readouterr().out


def test_the_commands_on_whole_studies_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_files(STUDIES)
    for command in (line for block in blocks("bash", STUDIES) for line in block.splitlines()):
        assert run(shlex.split(command)[1:]) == 0, command
    printed = capsys.readouterr().out
    for step in (
        "collect tiny-gpt2-reference",
        "losses tiny-pythia",
        "measure tiny-gpt2",
        "report tiny-pythia",
    ):
        assert f"{step} " in printed
    n_bytes = 102_400 * 3 * 2 * sum((2 * layers + 1) * width for layers, width in PAPER)
    assert f"18 stores, {n_bytes / 2**30:.0f} GiB" in STUDIES.read_text(encoding="utf-8")


def test_files_the_readme_names_exist() -> None:
    links = re.findall(r"\]\((?!https?:)([^)]+)\)", README.read_text(encoding="utf-8"))
    assert links
    for link in links:
        assert (README.parent / link).exists(), link
    makefile = (README.parent / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^make (\w+)", README.read_text(encoding="utf-8"), re.M):
        assert f"\n{target}:" in makefile
