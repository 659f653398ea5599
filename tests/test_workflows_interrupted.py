"""A signal during a step: one sentence says what is kept and what the same command does; 130 is the code.

That it is kept, and gone on with, is tested beside each step. Cost: a second.
"""

from importlib import import_module
from pathlib import Path

import pytest
from nearline.workflows.cli import run
from nearline.workflows.interrupted import KEPT
from nearline.workflows.steps import Job, Why, planned, run_jobs
from nearline.workflows.study_steps import KINDS

PLACES = {
    "fit": ("nearline.analyze.fit", "fit"),
    "analyze": ("nearline.analyze.analyze", "analyze_steps"),
    "measure": ("nearline.collect.measuring", "measure"),
    "finetune": ("nearline.collect.tuning", "finetune"),
}


def interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("command", PLACES)
def test_what_is_kept_of_a_command(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module, function = PLACES[command]
    monkeypatch.setattr(import_module(module), function, interrupt)
    stores = [str(tmp_path / "store")] if command == "fit" else []
    assert run([command, str(tmp_path / "study"), *stores]) == 130
    assert capsys.readouterr().err.endswith(f"nearline: interrupted: {KEPT[command]}\n")


@pytest.mark.parametrize("kind", KEPT)
def test_of_a_study_the_step_is_named(kind: str) -> None:
    assert kind in KINDS
    jobs = (Job(kind, f"{kind} small", "small", lambda: Why("is new", "was new"), interrupt),)
    with pytest.raises(Exception, match=f"^interrupted in {kind} small: {KEPT[kind]}$") as stopped:
        run_jobs(jobs, planned(jobs))
    assert getattr(stopped.value, "exit_code", None) == 130
