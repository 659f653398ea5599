"""The main job on both bundled models: from nothing to reports, then nothing to do, without torch."""

import subprocess
import sys
from pathlib import Path

import pytest
from nearline.collect.bundled_models import BUNDLED
from nearline.store import Reader, Study, UsageError
from nearline.workflows.quickstart import quickstart

TOKENS = 9_000


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished quickstart."""
    folder = tmp_path_factory.mktemp("quick")
    result = quickstart(folder, tokens=TOKENS)
    assert {step.state for step in result.steps} == {"done"}
    assert len(result.reports) == len(BUNDLED)
    return folder


def test_stores_are_sealed_and_studies_cover_every_layer(out: Path) -> None:
    stores = sorted((out / "stores").iterdir())
    assert len(stores) == 2 * len(BUNDLED)
    for store in stores:
        assert TOKENS * 0.5 <= Reader.open(store).n_tokens <= TOKENS
    for name in BUNDLED:
        rows = Study.open(out / "studies" / name).table("surrogates").to_pylist()
        assert len(rows) == 2 * 6
        assert all(row["r2_lo"] <= row["r2_test"] <= row["r2_hi"] <= 1 for row in rows)
        assert (out / "studies" / name / "report.html").read_text(encoding="utf-8").count("<svg") >= 2


def test_a_rerun_has_nothing_to_do_and_loads_no_torch(out: Path, tmp_path: Path) -> None:
    program = (
        "import sys; from nearline.workflows.cli import run; "
        f"code = run(['quickstart', {str(out)!r}, '--tokens', '{TOKENS}']); "
        "print(code, 'torch' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert result.stdout.strip().splitlines()[-1] == "0 False"
    states = [line.split()[-1] for line in result.stdout.splitlines() if line.startswith(("collect", "fit"))]
    assert states == ["current"] * 6


def test_other_settings_never_replace_a_store(out: Path) -> None:
    with pytest.raises(UsageError, match="other settings"):
        quickstart(out, tokens=TOKENS // 2)
