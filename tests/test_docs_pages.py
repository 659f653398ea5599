"""The pages on training and on notebooks are run as they stand, and what they say of it is true."""

import inspect
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from nearline.reports import notebook
from nearline.store import Reader, Study
from nearline.workflows.cli import run

DOCS = Path(__file__).parents[1] / "docs"
TRANSCODER, NOTEBOOK = DOCS / "transcoder.md", DOCS / "notebook.md"
AT_LEAST = 0.1
"""The transcoder is ahead of the ridge by twice this where it was measured."""
SAME_ROWS = 1e-5  # float32 against the float64 sums of the fit


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language} run\n(.*?)^```", page.read_text(encoding="utf-8"), re.S | re.M)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the commands of the first page have run."""
    made = tmp_path_factory.mktemp("pages")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(made)
        run_commands(TRANSCODER)
    return made


def run_commands(page: Path) -> None:
    for command in "".join(blocks(page, "bash")).splitlines():
        program, *arguments = shlex.split(command)
        assert program == "nearline"
        assert run(arguments) == 0, command


def run_programs(page: Path) -> dict[str, Any]:
    names: dict[str, Any] = {}
    for program in blocks(page, "python"):
        exec(compile(program, str(page), "exec"), names)
    return names


def test_the_page_trains_a_transcoder_that_is_scored_on_the_rows_of_the_ridge(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        names = run_programs(TRANSCODER)
    finally:
        torch.set_num_threads(threads)
    assert "transcoder 0." in capsys.readouterr().out
    assert names["transcoder"] > names["ridge"] + AT_LEAST
    # The same sum over the same batches gives the ridge its number of the table: one yardstick for both.
    fitted = Study.open("studies/tiny").surrogates().sel(layer=3)
    assert ridge_score(Reader.open("stores/tiny"), fitted) == pytest.approx(names["ridge"], abs=SAME_ROWS)


def ridge_score(store: Reader, fitted: xr.Dataset) -> float:
    weight, bias, mean = (np.asarray(fitted[name], np.float64) for name in ("weight", "bias", "mean_y"))
    sse = total = 0.0
    for x, y in store.batches(layers=3, splits="test", rows="body", dtype="float64", batch_size=500):
        sse += np.square(x @ weight.T + bias - y).sum()
        total += np.square(y - mean).sum()
    return 1 - sse / total


def test_the_page_on_batches_names_every_argument() -> None:
    text = TRANSCODER.read_text(encoding="utf-8").partition("## What the shuffle")[0]
    assert set(inspect.signature(Reader.batches).parameters) - {"self"} <= set(re.findall(r"`(\w+)`", text))


def test_the_page_on_notebooks_runs(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    run_commands(NOTEBOOK)
    names = run_programs(NOTEBOOK)
    errors = names["hardest"].collect()["error"].to_list()
    assert len(errors) > 8
    assert errors == sorted(errors, reverse=True)
    assert np.square(names["residue"]).sum() < np.square(names["y"] - names["y"].mean(0)).sum()
    assert (folder / "auc.svg").read_text(encoding="utf-8").startswith("<svg")


def test_the_page_on_notebooks_names_every_chart() -> None:
    charts = {
        name
        for name, found in vars(notebook).items()
        if inspect.isfunction(found) and found.__module__ == notebook.__name__ and not name.startswith("_")
    }
    named = set(re.findall(r"^\| `(\w+)\(study", NOTEBOOK.read_text(encoding="utf-8"), re.M))
    assert charts == named
