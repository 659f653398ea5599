"""The same study as jobs of Snakemake: which there are and what they ask for, and the same bytes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers_store import tree
from nearline import workflows
from nearline.workflows.rules import Rules
from nearline.workflows.study import run

FOLDER = Path(workflows.__path__[0])
SNAKEMAKE = Path(sys.executable).with_name("snakemake")
SETTINGS = """
[collect]
tokens = 6000
layers = "1,4"
keep = "1/4"
threads = 1
device = "cpu"
[analyze]
need = ["error", "loss"]
only = ["gates", "clusters"]
features = ["input", "norm", "random"]
[measure]
need = "loss"
interventions = ["linear", "gated@input:0.5"]
compound = ["cheapest@2"]
threads = 1
device = "cpu"
[[models]]
model = "tiny-gpt2"
[[models]]
model = "tiny-pythia"
[[corpora]]
corpus = "docs:stdlib"
[[corpora]]
corpus = "docs:python"
"""


def snakemake(folder: Path, settings: Path, *arguments: str) -> str:
    """What Snakemake says; the output goes to `folder`/out."""
    command = [str(SNAKEMAKE), "-s", str(FOLDER / "Snakefile"), *arguments]
    command += ["--config", f"settings={settings}", f"out={folder / 'out'}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def counts(said: str) -> dict[str, int]:
    """Jobs by their rule."""
    return {name: int(n) for name, n in re.findall(r"^(\w+)\s+(\d+)$", said, re.MULTILINE) if name != "total"}


def test_jobs_of_the_paper_and_what_they_ask_for(tmp_path: Path) -> None:
    profile = FOLDER / "profile" / "slurm"
    said = snakemake(
        tmp_path, FOLDER / "paper.toml", "-n", "--cores", "8", "--workflow-profile", str(profile)
    )
    each = dict.fromkeys(("fit", "losses", "analyze", "measure", "report"), 6)
    assert counts(said) == {"collect": 18, "finetune": 1, "all": 1, **each}
    assert not (tmp_path / "out").exists()
    largest = said.partition("steps/pythia-2.8b/collect-lambada\n")[2].partition("\n[")[0]
    n_bytes = 102_400 * 65 * 2560 * 2
    assert int(re.findall(r"disk_mb=(\d+)", largest)[0]) * 1e6 == pytest.approx(n_bytes, rel=0.01)
    for words in ("gpu=1", "threads: 4", "runtime=480", "mem_mb="):
        assert words in largest
    fitted = said.partition("rule fit:")[2].partition("\n[")[0]
    assert "gpu" not in fitted
    assert "mem_mb=" in fitted


@pytest.mark.long
def test_the_commands_of_the_page_find_the_jobs(tmp_path: Path) -> None:
    """As they are written, in a shell, with the study of the page; asked what they would do."""
    page = (Path(__file__).parents[1] / "docs" / "studies.md").read_text(encoding="utf-8")
    (study,) = re.findall(r"^```toml study.toml\n(.*?)^```", page, re.S | re.M)
    (block,) = re.findall(r"^```bash\n(W=.*?)^```", page, re.S | re.M)
    (tmp_path / "study.toml").write_text(study, encoding="utf-8")
    where, *commands = block.splitlines()
    assert len(commands) == 3
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    for command in commands:
        asked = f"{where}; {command.partition('#')[0]} -n"
        done = subprocess.run(
            ["bash", "-euc", asked],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "PATH": path},
        )
        assert done.returncode == 0, done.stderr
        assert counts(done.stdout + done.stderr)["collect"] == 4, command


def test_what_a_job_depends_on(tmp_path: Path) -> None:
    """A setting changes the steps that read it, by their digests, and no other."""
    kinds = ("collect", "fit", "losses", "analyze", "measure")

    def made_of(text: str) -> dict[str, str]:
        (tmp_path / "study.toml").write_text(text, encoding="utf-8")
        rules = Rules.read(str(tmp_path / "study.toml"))
        corpora = {kind: "stdlib" if kind == "collect" else "" for kind in kinds}
        return {kind: rules.made_of(kind, "tiny-gpt2", corpus) for kind, corpus in corpora.items()}

    before = made_of(SETTINGS)
    for old, new, changed in (
        ("tokens = 6000", "tokens = 7000", {"collect"}),
        ('"clusters"', '"regression"', {"analyze"}),
        ("gated@input:0.5", "gated@input:0.3", {"measure"}),
        ('need = "loss"', 'need = "loss"\nnoise_floor = false', {"losses", "measure"}),
        ('[[models]]\nmodel = "tiny-pythia"', "", set()),
    ):
        now = made_of(SETTINGS.replace(old, new))
        assert {kind for kind in kinds if now[kind] != before[kind]} == changed


@pytest.mark.long
def test_the_same_study_by_snakemake_has_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First one model; then both, where only what is new runs; every table as one process makes it."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    both, one = tmp_path / "both.toml", tmp_path / "one.toml"
    both.write_text(SETTINGS, encoding="utf-8")
    one.write_text(SETTINGS.replace('[[models]]\nmodel = "tiny-pythia"\n', ""), encoding="utf-8")
    first = snakemake(tmp_path, one, "--cores", "2")
    each = ("fit", "losses", "analyze", "measure", "report")
    assert counts(first) == {"collect": 2, "all": 1, **dict.fromkeys(each, 1)}
    second = snakemake(tmp_path, both, "--cores", "2")
    assert counts(second) == {"collect": 2, "all": 1, **dict.fromkeys(each, 1)}
    assert "Nothing to be done" in snakemake(tmp_path, both, "--cores", "2")
    changed = tmp_path / "changed.toml"
    changed.write_text(SETTINGS.replace('["cheapest@2"]', '["none"]'), encoding="utf-8")
    assert counts(snakemake(tmp_path, changed, "-n", "--cores", "2")) == {"measure": 2, "report": 2, "all": 1}
    found = run(both, tmp_path / "direct")
    assert {step.state for step in found.steps} == {"done"}
    for model in ("tiny-gpt2", "tiny-pythia"):
        direct, jobs = (tmp_path / place / "studies" / model for place in ("direct", "out"))
        tables = tree(direct / "tables")
        assert len(tables) > 10
        assert tree(jobs / "tables") == tables
