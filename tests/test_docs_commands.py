"""Every command of the pages for users runs as it stands, and what pages link to is there."""

import re
import shlex
from pathlib import Path

import pytest
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
