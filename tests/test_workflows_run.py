"""`nearline run`: one file from nothing to reports, then nothing to do, then one setting changed; refusals,
all before the first step."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers_sentences import assert_one_sentence
from helpers_store import tree
from nearline.collect.bundled_models import bundled_path
from nearline.collect.corpora import load
from nearline.store import IncompleteError, Reader, Study, UsageError
from nearline.workflows.cli import run as command
from nearline.workflows.reasons import Why
from nearline.workflows.steps import Job, planned, run_jobs
from nearline.workflows.study import Part, run
from nearline.workflows.study_plan import plan_study
from nearline.workflows.study_settings import read_study

# A local model and a corpus beside the file, as small as a fit takes.
SETTINGS = """
out = "results"
[collect]
tokens = 2000
sequence_length = 64
layers = "1,4"
threads = 1
[fit]
folds = 2
[analyze]
only = ["clusters"]
clusters = 3
components = 3
[measure]
layers = "4"
interventions = ["linear"]
compound = ["none"]
noise_floor = false
[compute]
workers = 1
[[models]]
model = "./small-model"
name = "small"
shape = { layers = 6, d_model = 192, d_ff = 768, vocabulary = 4096 }
[[corpora]]
corpus = "jsonl:texts/rows.jsonl:body"
"""
KINDS = ("collect", "fit", "analyze", "measure", "report")


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a settings file, all of whose steps are done."""
    folder = tmp_path_factory.mktemp("study")
    shutil.copytree(bundled_path("tiny-gpt2"), folder / "small-model")
    (folder / "texts").mkdir()
    rows = [json.dumps({"body": document.text}) for document in load("docs:python").documents[:120]]
    (folder / "texts" / "rows.jsonl").write_text("\n".join(rows), encoding="utf-8")
    (folder / "study.toml").write_text(SETTINGS, encoding="utf-8")
    found = run(folder / "study.toml")
    assert [step.state for step in found.steps] == ["done"] * len(KINDS)
    assert [step.name for step in found.steps] == [
        "collect small-rows",
        *(f"{kind} small" for kind in KINDS[1:]),
    ]
    # What is done says why it had to be, not what is true no more.
    assert [step.why for step in found.steps] == ["there was no store"] + ["not done before"] * 4
    assert found.reports == (folder / "results" / "studies" / "small" / "report.html",)
    return folder


def states(folder: Path, text: str = SETTINGS, *, dry: bool = True, **chosen: Any) -> dict[str, str]:
    """What a run of other settings would do, or did, by the kind of step."""
    path = folder / "other.toml"
    path.write_text(text, encoding="utf-8")
    return {step.name: step.state for step in run(path, part=Part(dry=dry, **chosen)).steps}


def test_a_rerun_from_anywhere_has_nothing_to_do_and_loads_no_torch(study: Path, tmp_path: Path) -> None:
    before = tree(study)
    program = (
        "import sys; from nearline.workflows.cli import run; "
        f"code = run(['run', {str(study / 'study.toml')!r}]); print(code, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    lines = done.stdout.splitlines()
    assert lines[-1] == "0 False"
    assert [line.split()[2] for line in lines[1 : 1 + len(KINDS)]] == ["current"] * len(KINDS)
    assert tree(study) == before


def test_a_folder_that_is_moved_is_still_current(study: Path, tmp_path: Path) -> None:
    """Paths are relative, and copied files have other times but the same content."""
    moved = shutil.copytree(study, tmp_path / "elsewhere")
    for path in (moved / "texts").iterdir():
        os.utime(path, ns=(1, 1))
    assert set(states(moved).values()) == {"current"}


def test_one_setting_changes_what_depends_on_it(study: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(study, tmp_path / "copy")
    text = SETTINGS.replace("clusters = 3", "clusters = 2")
    found = states(folder, text, dry=False, only=list(KINDS[:-1]))  # a page takes seconds
    assert found == {
        "collect small-rows": "current",
        "fit small": "current",
        "analyze small": "done",
        "measure small": "current",
    }
    assert states(folder, text) == {**dict.fromkeys(found, "current"), "report small": "to do"}


@pytest.mark.parametrize(
    ("old", "new", "first", "why"),
    [
        ("folds = 2", "folds = 3", "fit small", "folds=3, was 2"),
        ("clusters = 3", "clusters = 2", "analyze small", "clusters=2, was 3"),
        ('layers = "4"', 'layers = "1"', "measure small", "layers=1, was 4"),
        ('["linear"]', '["linear", "zero"]', "measure small", "interventions=linear,zero, was linear"),
        (
            "[[corpora]]",
            '[[corpora]]\ncorpus = "docs:stdlib"\n[[corpora]]',
            "collect small-stdlib",
            "no store yet",
        ),
        (
            "[[models]]",
            '[[models]]\nmodel = "tiny-pythia"\n[[models]]',
            "collect tiny-pythia-rows",
            "no store yet",
        ),
        ("workers = 1", "workers = 2", None, ""),
    ],
)
def test_the_first_step_that_a_change_runs_says_why(
    study: Path, old: str, new: str, first: str | None, why: str
) -> None:
    path = study / "other.toml"
    path.write_text(SETTINGS.replace(old, new), encoding="utf-8")
    to_do = [step for step in run(path, part=Part(dry=True)).steps if step.state == "to do"]
    assert (to_do[0].name if to_do else None) == first
    assert why in (to_do[0].why if to_do else "")
    assert all("pythia" in step.name for step in to_do) or "pythia" not in new


def test_a_store_is_never_replaced(study: Path, tmp_path: Path) -> None:
    before = tree(study / "results")
    with pytest.raises(UsageError, match=r"other settings \(tokens=3000, was 2000\)"):
        states(study, SETTINGS.replace("tokens = 2000", "tokens = 3000"), dry=False)
    assert tree(study / "results") == before
    folder = shutil.copytree(study, tmp_path / "copy")
    with (folder / "texts" / "rows.jsonl").open("a", encoding="utf-8") as stream:
        stream.write('\n{"body": "one more"}')
    with pytest.raises(UsageError, match=r"other files: .*rows\.jsonl \(corpus\) has changed"):
        states(folder)
    shutil.rmtree(folder / "texts")  # nothing says that it would be another one
    shutil.rmtree(folder / "small-model")
    assert set(states(folder).values()) == {"current"}
    (folder / "results" / "stores" / "small-rows" / "SEALED").unlink()
    with pytest.raises(UsageError, match="no longer the one that was sealed here"):
        states(folder)
    shutil.rmtree(folder / "results" / "stores" / "small-rows")
    with pytest.raises(UsageError, match=r"\[\[models\]\] small: model .*there is no such folder"):
        states(folder)


def test_what_was_stopped_goes_on(study: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(study, tmp_path / "copy")
    store = folder / "results" / "stores" / "small-rows"
    digest = Reader.open(store).digest
    last = max((store / "blocks").glob("*.json"))
    for path in (last, store / "SEALED", folder / "results" / "records" / "small-rows.json"):
        path.unlink()
    step = run(folder / "study.toml", part=Part(dry=True)).steps[0]
    assert (step.state, step.why[:11]) == ("to do", "unfinished:")
    found = run(folder / "study.toml")
    assert [step.state for step in found.steps] == ["done"] + ["current"] * (len(KINDS) - 1)
    assert re.fullmatch(r"\d+ blocks? (was|were) there", found.steps[0].why)
    assert Reader.open(store).digest == digest


def test_one_step_or_store_alone(study: Path, tmp_path: Path) -> None:
    assert states(study, only=["fit"]) == {"fit small": "current"}
    assert states(study, only=["collect"], corpora=["rows"]) == {"collect small-rows": "current"}
    with pytest.raises(IncompleteError, match="does not exist"):
        run(study / "study.toml", tmp_path / "new", part=Part(only=["analyze"]))
    assert not (tmp_path / "new").exists()


def test_a_plan_says_what_the_store_has(study: Path) -> None:
    """The arithmetic of a study without its model, against the store that was written."""
    found = plan_study(read_study(study / "study.toml"), probe=False).stores[0]
    reader = Reader.open(study / "results" / "stores" / "small-rows")
    manifest = reader.manifest
    assert manifest is not None
    assert (found.bytes, found.objects) == (manifest.chunk_bytes, manifest.n_objects + reader.n_blocks)
    assert found.device_hours is not None
    assert found.device_hours > 0


def test_jobs_are_asked_before_any_runs() -> None:
    """A refusal costs nothing; a job behind one that has to run is asked when its turn comes."""
    ran: list[str] = []

    def refuse() -> Why | None:
        raise UsageError("no")

    first = Job("fit", "first", "a", lambda: Why("is new", "was new"), lambda _: ran.append("first"))
    second = Job("measure", "second", "a", lambda: None if ran else refuse(), lambda _: ran.append("second"))
    other = Job("fit", "other", "b", refuse, lambda _: ran.append("other"))
    with pytest.raises(UsageError, match="no"):
        planned((first, second, other))
    assert not ran
    plan = planned((first, second))
    assert [step.state for step in plan] == ["to do", "to do"]
    assert (plan[0].why, plan[1].why) == ("is new", "follows first")
    done = run_jobs((first, second), plan)
    assert [(step.state, step.why) for step in done] == [("done", "was new"), ("current", second.current)]
    assert ran == ["first"]


def test_a_step_behind_several_harvests_says_so() -> None:
    stores = [
        Job("collect", f"collect {name}", "a", lambda: Why("is new", "was new"), lambda _: None)
        for name in "xyz"
    ]
    behind = Job("fit", "fit a", "a", lambda: None, lambda _: None)
    assert planned((*stores, behind))[-1].why == "follows collect x and 2 more"
    assert planned((*stores[:1], behind))[-1].why == "follows collect x"


@pytest.mark.long
def test_gates_of_losses_come_from_one_run(tmp_path: Path) -> None:
    """Losses, gates of them, the model gated by these: each needs the one before; then all are current."""
    text = SETTINGS.replace("./small-model", "tiny-gpt2").replace(
        "jsonl:texts/rows.jsonl:body", "docs:python"
    )
    text = text.replace('only = ["clusters"]', 'need = ["error", "loss"]\nonly = ["gates"]\nfolds = 2')
    text = text.replace('["linear"]', '["linear", "gated@input:0.5"]\nneed = "loss"').replace(
        "= false", "= true"
    )
    text = text.replace("tokens = 2000", "tokens = 6000").replace('layers = "4"', 'layers = "1,4"')
    (tmp_path / "study.toml").write_text(text, encoding="utf-8")
    kinds = [step.name.split()[0] for step in run(tmp_path / "study.toml").steps]
    assert kinds == ["collect", "fit", "losses", "analyze", "measure", "report"]
    rows = Study.open(tmp_path / "results" / "studies" / "small").table("interventions").to_pylist()
    assert {row["name"] for row in rows} == {"linear", "gated@input:0.5"}
    assert {step.state for step in run(tmp_path / "study.toml").steps} == {"current"}


# old text, new text, words that the sentence must hold
MISTAKES: list[tuple[str, str, list[str]]] = [
    ("out =", "output =", ["study.toml", "'output'", "did you mean 'out'"]),
    ("[collect]", "[colect]", ["study.toml", "'colect'", "did you mean 'collect'"]),
    ("tokens = 2000", "tokns = 2000", ["study.toml, [collect]", "'tokns'", "the nearest is 'tokens'"]),
    ("folds = 2", "fold = 2", ["study.toml, [fit]", "'fold'", "the nearest is 'folds'"]),
    ("folds = 2", "folds = 1", ["study.toml, [fit]", "folds=1"]),
    ("workers = 1", "worker = 1", ["study.toml, [compute]", "'worker'", "the nearest is 'workers'"]),
    ("[compute]", "[report]\nout = 'x'\n[compute]", ["study.toml, [report]", "'out'", "known are none"]),
    ("folds = 2", "folds = 2\n[fit.compute]\nworkers = 2", ["[fit]", "[compute] stands by itself"]),
    ("name = ", "nme = ", ["[[models]] small-model", "'nme'", "'name'"]),
    ("shape = {", "fit = { alfa = 1 }\nshape = {", ["[[models]] small, fit", "'alfa'", "'alpha'"]),
    ("shape = {", "collect = { tokens = 0 }\nshape = {", ["[[models]] small, collect", "tokens=0"]),
    ("layers = 6,", "layers = 7,", ["[[models]] small, shape", "layers = 7 is written", "the model has 6"]),
    ("layers = 6,", "", ["[[models]] small, shape", "layers"]),
    ("d_ff", "d_f", ["[[models]] small, shape", "'d_f'", "'d_ff'"]),
    ("tokens = 2000", "rank = 1", ["[collect]", "rank has no place here", "--rank"]),
    ("tokens = 2000", "moments_only = true", ["moments_only has no place here", "--moments-only"]),
    ('layers = "4"', 'layers = "5"', ["[measure]", "layers = 5", "no layer 5 here; it has 1,4"]),
    ('layers = "1,4"', 'layers = "1,9"', ["[collect]", "no layer 9 here; it has 0-5"]),
    ('"linear"', '"linnear"', ["linnear", "linear"]),
    ('["linear"]', "[]", ["[measure]", "route by gates", "makes none"]),
    ('["none"]', '["1+4"]', ["[measure]", "compound = 1+4", "no layer 1 here; it has 4"]),
    ("clusters = 3\n", 'need = "eror"\n', ["[analyze]", "need = 'eror'", "the nearest is 'error'"]),
    ("clusters = 3\n", 'features = "inpt"\n', ["features=inpt", "'input'"]),
    ('["clusters"]', '["nofly"]', ["[analyze]", "nofly compares corpora, and there is one"]),
    ("[measure]", '[measure]\nneed = "loss"', ["[measure]", "need = 'loss'", "`need` of [analyze]"]),
    ("[measure]", '[measure]\nstores = ["row"]', ["[measure]", "stores = 'row'", "the nearest is 'rows'"]),
    ("folds = 2", 'fit_on = "rws"', ["[fit]", "fit_on = 'rws'", "the nearest is 'rows'"]),
    ("tokens = 2000", 'sites = "residual"', ["fits read the site mlp_output", "collect of small-rows"]),
    ("[measure]", "[measure]\nvalidate_estimate = true", ["loss_estimate read the site mlp_output_grad"]),
    ("clusters = 3\n", 'need = "loss"\n', ["[measure]", "layers = 4 leaves out layer 1"]),
    ("jsonl:texts", "json:texts", ["[[corpora]]", "json", "Did you mean jsonl"]),
    ("rows.jsonl", "none.jsonl", ["[[corpora]] none", "none.jsonl does not exist"]),
    ("./small-model", "./no-model", ["[[models]] small", "no-model"]),
    ('name = "small"', 'name = "a/b"', ["[[models]]", "'a/b' cannot name a folder"]),
    ("[[models]]", '[[models]]\nmodel = "tiny-gpt2"\nname = "small"\n[[models]]', ["two are called small"]),
    ("[[corpora]]", "[[corpora]]\nname = 'x'\n[[corpora]]", ["[[corpora]] x", "it names no corpus"]),
    ("[[models]]", "[fit]\n[[models]]", ["study.toml: not a readable TOML file"]),
]


@pytest.mark.parametrize(
    ("old", "new", "words"), MISTAKES, ids=[f"{old}→{new}"[:60] for old, new, _ in MISTAKES]
)
def test_a_mistake_in_the_file_is_one_sentence_and_costs_nothing(
    study: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    old: str,
    new: str,
    words: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("small-model").symlink_to(study / "small-model")
    Path("texts").symlink_to(study / "texts")
    assert old in SETTINGS
    Path("study.toml").write_text(SETTINGS.replace(old, new, 1), encoding="utf-8")
    before = tree(tmp_path)
    got = command(["run", "study.toml"])
    assert_one_sentence(capsys.readouterr().err, got, 2, words)
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "none.toml"], ["none.toml: there is no such file"]),
        (["run", "study.toml", "--only", "colect"], ["only=colect", "the nearest is 'collect'"]),
        (["run", "study.toml", "--model", "smal"], ["model=smal", "the nearest is 'small'"]),
        (["run", "study.toml", "--corpus", "rows"], ["corpus=rows", "only=collect"]),
        (["run", "study.toml", "s3://bucket/x"], ["not behind a URL"]),
        (["plan", "small"], ["MODEL CORPUS STORE, or SETTINGS.toml", "'small'"]),
        (["plan", "study.toml", "docs:python"], ["STORE is missing"]),
        (["plan", "study.toml", "--tokens", "5"], ["tokens of a study stand in its settings file"]),
    ],
)
def test_a_mistake_on_the_command_line_is_one_sentence(
    study: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: list[str],
) -> None:
    monkeypatch.chdir(study)
    got = command(arguments)
    assert_one_sentence(capsys.readouterr().err, got, 2, words)
