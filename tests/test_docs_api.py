"""The pages of the public functions: made out of docstrings, and every public name has one."""

import subprocess
import sys
from inspect import getdoc, isclass, isfunction
from pathlib import Path

import nearline.analyze
import nearline.collect
import nearline.reports
import nearline.store
import pytest

SCRIPT = Path(__file__).parents[1] / "docs" / "build_api.py"


@pytest.mark.parametrize("package", [nearline.store, nearline.analyze, nearline.collect, nearline.reports])
def test_every_public_name_says_what_it_is(package: object) -> None:
    public = getattr(package, "__all__", None) or [one for one in vars(package) if not one.startswith("_")]
    values = {one: getattr(package, one) for one in public}
    named = {one: value for one, value in values.items() if isfunction(value) or isclass(value)}
    assert named
    assert [one for one, value in named.items() if not (getdoc(value) or "").strip()] == []


@pytest.mark.long
def test_the_pages_are_made(tmp_path: Path) -> None:
    subprocess.run([sys.executable, SCRIPT, tmp_path / "out"], check=True, cwd=tmp_path)
    page = (tmp_path / "out" / "nearline" / "collect.html").read_text(encoding="utf-8")
    for name in ("harvest", "FinetuneSettings", "load_linearised"):
        assert f'id="{name}"' in page
