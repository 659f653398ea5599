"""Every command of the pages for users runs as it stands, and what pages link to is there."""

import re
import shlex
from pathlib import Path

import pytest
from nearline.analyze.analyze_settings import ANALYSES
from nearline.collect.interventions import parse_interventions
from nearline.collect.tuning_arms import ARMS, BASE
from nearline.workflows.cli import run

DOCS = Path(__file__).parents[1] / "docs"
PAGES = sorted(DOCS.glob("*.md"))


@pytest.mark.long  # the README's commands, which every run tries, are much the same
@pytest.mark.parametrize("page", ["your-model", "sharing"])
def test_every_command_of_a_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    commands = "".join(re.findall(r"^```bash run\n(.*?)^```", text, re.S | re.M)).splitlines()
    assert len(commands) >= 5
    for command in commands:
        program, *arguments = shlex.split(command)
        assert program == "nearline"
        assert run(arguments) == 0, command


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_page_links_to_is_there(page: Path) -> None:
    for link in re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        assert (DOCS / link).exists(), link


def test_modules_that_pages_name_are_there() -> None:
    for page in PAGES:
        if page.stem == "lab-log":
            continue  # it tells of what was
        for path in re.findall(
            r"`((?:analyze|store|collect|reports|workflows)/\w+\.py)`", page.read_text("utf-8")
        ):
            assert (DOCS.parent / path).exists(), (page.name, path)


def first_cells(page: str, heading: str) -> list[str]:
    """What stands in code spans in the first column of the table under a heading."""
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    table = re.split(rf"^\| {re.escape(heading)} \|", text, maxsplit=1, flags=re.M)[1].split("\n\n")[0]
    return [name for line in table.splitlines()[2:] for name in re.findall(r"`([^`]+)`", line.split("|")[1])]


def test_tables_name_what_there_is() -> None:
    assert set(first_cells("measuring", "arm")) == set(ARMS) - {BASE}
    assert set(first_cells("analyses", "`--only`")) == set(ANALYSES)
    interventions = first_cells("measuring", "intervention")
    assert [one.name for one in parse_interventions(interventions)] == interventions
