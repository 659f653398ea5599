"""docs/transcoder.md is run as it stands, and what it says of its result is true."""

import inspect
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from nearline.store import Reader, Study
from nearline.workflows.cli import run

PAGE = Path(__file__).parents[1] / "docs" / "transcoder.md"
TEXT = PAGE.read_text(encoding="utf-8")
AT_LEAST = 0.1
"""The transcoder is ahead of the ridge by more than twice this where it was measured."""
SAME_ROWS = 1e-5  # float32 against the float64 sums of the fit


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language} run\n(.*?)^```", TEXT, re.S | re.M)


def test_the_page_trains_a_transcoder_that_is_scored_on_the_rows_of_the_ridge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for command in "".join(blocks("bash")).splitlines():
        program, *arguments = shlex.split(command)
        assert program == "nearline"
        assert run(arguments) == 0, command
    names: dict[str, Any] = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for program in blocks("python"):
            exec(compile(program, str(PAGE), "exec"), names)
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


def test_the_page_names_every_argument() -> None:
    named = set(re.findall(r"`(\w+)`", TEXT.partition("## What the shuffle")[0]))
    assert set(inspect.signature(Reader.batches).parameters) - {"self"} <= named
