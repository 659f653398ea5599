"""The direction of imports, and what the light packages may load."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = ("torch", "transformers", "tokenizers", "datasets", "distributed")


def test_imports_run_one_way() -> None:
    result = subprocess.run(
        [
            str(Path(sys.executable).parent / "lint-imports"),
            "--config",
            str(ROOT / "pyproject.toml"),
            "--no-cache",
        ],
        capture_output=True,
        text=True,
        cwd=ROOT / "tests",
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    "modules", ["nearline.analyze, nearline.store, nearline.reports", "nearline.workflows.cli", "nearline"]
)
def test_light_packages_load_nothing_heavy(modules: str, tmp_path: Path) -> None:
    program = f"import sys, {modules}; print([m for m in {HEAVY!r} if m in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert result.stdout.strip() == "[]"
