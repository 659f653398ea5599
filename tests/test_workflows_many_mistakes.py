"""Several mistakes in a settings file are told in one message: the same sentences as one by one, and none
that only follows from another.

Cost: seconds; nothing is harvested.
"""

from pathlib import Path

import pytest
from helpers_store import tree
from nearline.store import UsageError
from nearline.workflows.cli import run as command
from nearline.workflows.study import Part, run
from nearline.workflows.study_checks import checked_study

SETTINGS = """
out = "results"
[collect]
tokens = 2000
layers = "1,4"
[fit]
folds = 2
[analyze]
only = ["clusters"]
clusters = 3
[measure]
layers = "4"
interventions = ["linear"]
compound = ["none"]
[compute]
workers = 1
[[models]]
model = "tiny-gpt2"
[[corpora]]
corpus = "docs:python"
"""
# Each is a mistake of its own: of a key, a value, a name, what goes together, and what is not there.
APART = [
    ("tokens = 2000", "tokns = 2000"),
    ("folds = 2", 'folds = 1\nfit_on = "pyton"'),
    ("clusters = 3", 'clusters = 1\nfeatures = ["inpt"]'),
    ('layers = "4"', 'layers = "3"\nneed = "eror"'),
    ('["linear"]', '["linnear"]'),
    ("workers", "worker"),
    ('"tiny-gpt2"', '"tiny-gpt2"\ncollect = { min_length = 0 }\nfit = { alfa = 1 }'),
    ('"docs:python"', '"jsonl:none.jsonl"\nname = "python"'),
]


def told(folder: Path, *edits: tuple[str, str]) -> list[str]:
    """The sentences about a settings file in which parts were replaced."""
    text = SETTINGS
    for old, new in edits:
        assert old in text
        text = text.replace(old, new, 1)
    (folder / "study.toml").write_text(text, encoding="utf-8")
    before = tree(folder)
    with pytest.raises(UsageError) as refused:
        run(folder / "study.toml", part=Part(dry=True))
    assert tree(folder) == before
    lines = str(refused.value).split("\n")
    if len(lines) > 1:
        assert lines.pop(0) == f"{len(lines)} mistakes in {folder / 'study.toml'}:"
    assert all(line.startswith(f"{folder / 'study.toml'}, [") for line in lines)
    return [line.removeprefix(f"{folder / 'study.toml'}, ") for line in lines]


def test_all_mistakes_are_told_in_the_words_that_each_has_alone(tmp_path: Path) -> None:
    alone = [line for edit in APART for line in told(tmp_path, edit)]
    assert len(alone) == len(set(alone)) == 12
    assert sorted(told(tmp_path, *APART)) == sorted(alone)


@pytest.mark.parametrize(
    ("edits", "words"),
    [
        # A step whose layers are wrong itself is nothing to hold the next ones against.
        ([('layers = "1,4"', 'layers = "1,9"')], ["[collect]: layers = 1,9"]),
        (
            [('"tiny-gpt2"', '"tiny-gpt2"\nshape = { layer = 6 }'), ('layers = "1,4"', 'layers = "1,9"')],
            ["shape: unknown setting 'layer'", "d_model", "d_ff", "vocabulary", "[collect]: layers = 1,9"],
        ),
        # What is said wrongly may be what the check behind it asks for.
        ([('interventions = ["linear"]', 'intervention = ["linear"]')], ["'intervention'"]),
        ([('["linear"]', '["gatd@input"]')], ["[measure]: intervention 'gatd@input'"]),
        ([('["clusters"]', '["clusters", "gaets"]')], ["[analyze]: only='gaets'"]),
        ([('["linear"]', "[]\nneed = 'eror'"), ('["clusters"]', '["gates"]')], ["need = 'eror' is none"]),
        ([("tokens =", 'max_memory = "0=1GiB"\ndevice_map = "atuo"\ntokens =')], ["device_map='atuo'"]),
        ([("tokens =", 'max_memory = "0=1GiB"\ndevce_map = "auto"\ntokens =')], ["'devce_map'"]),
        # Names of tables with a slip: whatever names these is right for all that is known.
        (
            [("[[corpora]]", "[[corpora]]\nnme = 'texts'"), ("folds = 2", "fit_on = 'texts'")],
            ["[[corpora]] python: unknown setting 'nme'"],
        ),
        (
            [("[[corpora]]", "[[corpora]]\ncorpos = 'docs:stdlib'\n[[corpora]]"), ('"clusters"', '"nofly"')],
            ["[[corpora]] 1: unknown setting 'corpos'"],
        ),
        # The same said of each model and store is said once.
        (
            [('"tiny-gpt2"', '"tiny-gpt2"\n[[models]]\nmodel = "tiny-pythia"'), ("folds = 2", "folds = 0")],
            ["[fit]: folds=0"],
        ),
        (
            [
                ('"docs:python"', '"docs:python"\n[[corpora]]\ncorpus = "docs:stdlib"'),
                ("tokens = 2000", 'sites = "residual"'),
            ],
            ["read the site mlp_output, and collect of tiny-gpt2-python and 1 more leaves it out"],
        ),
        # Two of one name are two stores of one name too.
        ([('"tiny-gpt2"', '"tiny-gpt2"\n[[models]]\nmodel = "tiny-gpt2"')], ["two are called tiny-gpt2"]),
    ],
)
def test_what_only_follows_from_another_mistake_is_not_told(
    tmp_path: Path, edits: list[tuple[str, str]], words: list[str]
) -> None:
    found = told(tmp_path, *edits)
    assert len(found) == len(words), found
    for sentence, word in zip(found, words, strict=True):
        assert word in sentence


def test_a_slip_in_the_name_of_a_table_hides_no_other_mistake(tmp_path: Path) -> None:
    """[colect] says nothing about [fit], and everything of harvests is doubtful."""
    text = SETTINGS.replace("[collect]", "[colect]").replace("folds = 2", "folds = 1")
    (tmp_path / "study.toml").write_text(text, encoding="utf-8")
    with pytest.raises(UsageError) as refused:
        checked_study(tmp_path / "study.toml")
    first, slip, folds = str(refused.value).split("\n")
    assert first.startswith("2 mistakes in ")
    assert "unknown setting 'colect': did you mean 'collect'?" in slip
    assert "[fit]: folds=1" in folds


def test_the_command_line_says_them_line_by_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = SETTINGS.replace("folds = 2", "fold = 2").replace("clusters = 3", "clusters = 1")
    Path("study.toml").write_text(text, encoding="utf-8")
    for arguments in (["run", "study.toml"], ["plan", "study.toml"]):
        assert command(arguments) == 2
        lines = capsys.readouterr().err.splitlines()
        assert lines[0] == "nearline: 2 mistakes in study.toml:"
        assert [line[:20] for line in lines[1:]] == ["study.toml, [fit]: u", "study.toml, [analyze"]
