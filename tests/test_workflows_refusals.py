"""What an analysis refuses, on the command line: one clear sentence, the right exit code, and whatever was in
the study before is there byte for byte.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers_planted import MIXTURE, PURE_TOKEN, planted, planted_store, without_embedding
from helpers_sentences import assert_one_sentence
from helpers_store import make_store, tree, write_all
from nearline.analyze import AnalyzeSettings, FitSettings, analyze, fit
from nearline.store import Study
from nearline.workflows.cli import run

SMALL = FitSettings(folds=3, alpha=0.01, examples=0)


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stores of two models and studies of them."""
    folder = tmp_path_factory.mktemp("lab")
    shares = [PURE_TOKEN, MIXTURE]
    for seed, name in enumerate(("one", "two")):
        planted_store(folder / name, shares, seed=seed, n_tokens=1600, d=6)
    planted_store(folder / "other-model", shares, n_tokens=800, d=6, weights_seed=5)
    make_store(folder / "shallow", n_tokens=800, d=6, n_layers=2, layers=[0])
    make_store(folder / "deep", n_tokens=800, d=6, n_layers=2)
    write_all(folder / "bare", without_embedding(planted([MIXTURE], n_tokens=800, d=6)))
    fit(folder / "study", [folder / "one", folder / "two"], SMALL)
    analyze(folder / "study", AnalyzeSettings(only=("clusters",), clusters=3, components=3))
    fit(folder / "alone", [folder / "one"], SMALL.model_copy(update={"layers": "0"}))
    fit(folder / "bare-study", [folder / "bare"], SMALL)
    planted_store(folder / "tiny", shares, seed=7, n_tokens=320, d=6)
    fit(folder / "narrow", [folder / "one", folder / "tiny"], SMALL.model_copy(update={"folds": 9}))
    Study.create(folder / "begun")
    (folder / "odd.toml").write_text("[compute]\nsheduler = 'threads'\n", encoding="utf-8")
    (folder / "twice.toml").write_text("workers = 1\n[compute]\nworkers = 2\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def content(shelf: Path) -> dict[str, bytes]:
    """What lies on the shelf before anything is asked."""
    return tree(shelf)


@pytest.fixture
def lab(shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the shelf, to be changed."""
    folder = shutil.copytree(shelf, tmp_path / "lab")
    monkeypatch.chdir(folder)
    return folder


def _store_is_gone(lab: Path) -> None:
    (lab / "two").rename(lab / "elsewhere")


def _store_is_another(lab: Path) -> None:
    shutil.rmtree(lab / "two")
    planted_store(lab / "two", [PURE_TOKEN, MIXTURE], seed=8, n_tokens=1600, d=6)


def _store_is_not_sealed(lab: Path) -> None:
    (lab / "two" / "SEALED").unlink()


def _needs_are_damaged(lab: Path) -> None:
    path = lab / "study" / "tokens" / "need" / "layer=01" / "two.parquet"
    path.write_bytes(path.read_bytes()[:-8] + b"otherPAR1"[-8:])


def _needs_are_gone(lab: Path) -> None:
    (lab / "study" / "tokens" / "need" / "layer=01" / "two.parquet").unlink()


STUDY = ["analyze", "study"]
# name, what has happened before, arguments, exit code, words that the sentence must hold
REFUSED: list[tuple[str, list[str], int, list[str]]] = [
    ("no study", ["analyze", "nowhere"], 3, ["nowhere does not exist", "nearline fit nowhere"]),
    ("no study but a store", ["analyze", "one"], 2, ["one is not a study"]),
    ("study not fitted", ["analyze", "begun"], 3, ["not fitted", "`nearline fit begun STORE…`"]),
    (
        "stores of different models",
        ["fit", "study", "one", "other-model"],
        2,
        ["one and other-model differ in weights"],
    ),
    (
        "layer missing in one store",
        ["fit", "study", "deep", "shallow", "--layers", "0-1"],
        2,
        ["store shallow has no layer 1; it has 0"],
    ),
    ("layer not fitted", [*STUDY, "--layers", "0,7"], 2, ["layer 7 was not fitted", "it has 0-1"]),
    ("layers that are none", [*STUDY, "--layers", "x"], 2, ["'x' is no layer"]),
    (
        "too few groups to fit",
        ["fit", "study", "one", "--folds", "90"],
        2,
        ["too few for 90 folds"],
    ),
    (
        "too few groups for gates",
        [*STUDY, "--only", "gates", "--folds", "12"],
        2,
        ["store one has", "in its gate split, too few for the 12 folds"],
    ),
    (
        "too few groups for a fit of a store's own",
        ["analyze", "narrow"],
        2,
        ["store tiny has", "too few for the 9 folds of the fit that nofly makes of it", "--only"],
    ),
    (
        "too few occurrences",
        [*STUDY, "--only", "nofly", "--occurrences", "90000"],
        2,
        ["occurrences=90000", "one", "two"],
    ),
    (
        "need that a step would bring",
        [*STUDY, "--need", "error,loss"],
        2,
        ["need=loss: store one has no such column", "error_stream", "nearline measure brings it"],
    ),
    ("need with a slip", [*STUDY, "--need", "eror"], 2, ["need=eror", "error, error_raw"]),
    (
        "column that is no need",
        [*STUDY, "--need", "y_norm"],
        2,
        ["need=y_norm", "error, error_raw"],
    ),
    ("unknown analysis", [*STUDY, "--only", "gaits"], 2, ["'gaits'", "'gates'"]),
    (
        "unknown feature set",
        [*STUDY, "--only", "gates", "--features", "input,tokens"],
        2,
        ["tokens", "token_full"],
    ),
    (
        "dead scheduler",
        [*STUDY, "--only", "clusters", "--scheduler", "tcp://127.0.0.1:1"],
        4,
        ["tcp://127.0.0.1:1"],
    ),
    ("scheduler that is none", [*STUDY, "--scheduler", "cloud"], 2, ["cloud", "threads", "local"]),
    (
        "one store has no pair",
        ["analyze", "alone", "--only", "nofly"],
        2,
        ["nofly", "has one (one)"],
    ),
    ("store without embedding", ["analyze", "bare-study"], 2, ["no `embedding`", "--only"]),
    ("odd key under compute", [*STUDY, "--config", "odd.toml"], 2, ["sheduler", "scheduler"]),
    ("key twice", [*STUDY, "--config", "twice.toml"], 2, ["workers", "give it once"]),
    (
        "odd key under compute of fit",
        ["fit", "new", "one", "--config", "odd.toml"],
        2,
        ["sheduler"],
    ),
    ("value out of range", [*STUDY, "--target-share", "2"], 2, ["target_share"]),
    ("unknown flag", [*STUDY, "--ony", "gates"], 2, ["--ony", "--only"]),
]


# name, what has happened before, exit code, words that the sentence must hold
SPOILT: list[tuple[str, Callable[[Path], None], int, list[str]]] = [
    ("store gone", _store_is_gone, 2, ["store two of study cannot be read", "nearline fit study"]),
    ("store of other content", _store_is_another, 2, ["store two of study", "is not what was fitted"]),
    ("store not sealed", _store_is_not_sealed, 3, ["store two of study", "seal"]),
    ("needs changed by hand", _needs_are_damaged, 1, ["two.parquet"]),
    ("needs gone", _needs_are_gone, 3, ["two.parquet does not exist", "`nearline fit study STORE…` again"]),
]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [row[1:] for row in REFUSED],
    ids=[r[0].replace(" ", "-") for r in REFUSED],
)
def test_a_refusal_is_one_sentence_and_costs_nothing(
    shelf: Path,
    content: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    words: list[str],
) -> None:
    monkeypatch.chdir(shelf)
    got = run(arguments)
    assert_one_sentence(capsys.readouterr().err, got, code, words)
    assert tree(shelf) == content


@pytest.mark.parametrize(
    ("spoil", "code", "words"), [row[1:] for row in SPOILT], ids=[r[0].replace(" ", "-") for r in SPOILT]
)
def test_a_study_whose_ground_is_gone_is_refused(
    lab: Path,
    capsys: pytest.CaptureFixture[str],
    spoil: Callable[[Path], None],
    code: int,
    words: list[str],
) -> None:
    spoil(lab)
    before = tree(lab)
    got = run(STUDY)
    assert_one_sentence(capsys.readouterr().err, got, code, words)
    assert tree(lab) == before


def test_what_an_analysis_prints(lab: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["--only", "clusters,regression", "--clusters", "3", "--components", "3"]
    assert run([*STUDY, *settings]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].split() == ["analysis", "state", "found"]
    assert [line.split()[:2] for line in printed[1:3]] == [["clusters", "current"], ["regression", "done"]]
    assert "median AUC 0." in printed[1]
    assert "above chance: " in printed[1]
    assert printed[-1] == "next: nearline report study"
    assert run([*STUDY, *settings, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert [one["state"] for one in facts["analyses"]] == ["current", "current"]
    assert sum(facts["analyses"][0]["verdicts"].values()) == facts["analyses"][0]["n_rows"] == 4


def test_settings_come_from_a_file_and_flags_win(lab: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (lab / "settings.toml").write_text(
        'only = ["clusters"]\nclusters = 3\ncomponents = 2\n[compute]\nworkers = 1\nscheduler = "threads"\n',
        encoding="utf-8",
    )
    assert run([*STUDY, "--config", "settings.toml", "--components", "3"]) == 0
    assert "clusters  current" in capsys.readouterr().out


def test_the_help_lists_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["analyze", "--help"]) == 0
    found = capsys.readouterr().out
    for name in AnalyzeSettings.model_fields:
        assert f"--{name.replace('_', '-')} " in found, name
