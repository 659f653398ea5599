"""The main job on a bundled model: from nothing to a report, then nothing to do, without torch."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nearline.analyze.analyze_settings import ANALYSES
from nearline.collect.bundled_models import BUNDLED
from nearline.store import Reader, Study, UsageError
from nearline.workflows.quickstart import LEAST_TOKENS, quickstart, quickstart_study

sys.path.insert(0, str(Path(__file__).parent / "benchmarks"))

from smollm2_study import tables

TOKENS = LEAST_TOKENS
MODELS = BUNDLED[:1]  # the other one takes as long again
WHOLE = quickstart_study()
CORPORA = WHOLE.corpora
SWEEP = WHOLE.models[0].measure
# Of float32 sums of four parts, in units of the row's scale.
ROUNDING = 1e-4
# p by float64 from float32 weights, against the float32 of `analyze`.
APPLIED = 1e-4


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished quickstart."""
    folder = tmp_path_factory.mktemp("quick")
    result = quickstart(folder, tokens=TOKENS, models=MODELS)
    assert {step.state for step in result.steps} == {"done"}
    assert len(result.reports) == len(MODELS)
    assert not any(step.name.startswith("finetune") for step in result.steps)  # that is for `full`
    assert WHOLE.models[0].finetune is not None
    return folder


def test_stores_are_sealed_and_studies_cover_every_layer(out: Path) -> None:
    stores = sorted((out / "stores").iterdir())
    assert len(stores) == len(CORPORA) * len(MODELS)
    for store in stores:
        assert TOKENS * 0.5 <= Reader.open(store).n_tokens <= TOKENS
    for name in MODELS:
        rows = Study.open(out / "studies" / name).table("surrogates").to_pylist()
        assert len(rows) == len(CORPORA) * 6
        assert all(row["r2_lo"] <= row["r2_test"] <= row["r2_hi"] <= 1 for row in rows)
        assert (out / "studies" / name / "report.html").read_text(encoding="utf-8").count("<svg") >= 2


def test_every_analysis_is_done_for_every_pair_of_corpora(out: Path) -> None:
    for name in MODELS:
        study = Study.open(out / "studies" / name)
        assert set(ANALYSES) <= set(study.provenance())
        for table in ("variance", "gates", "nofly", "clusters", "regression"):
            assert set(study.table(table)["layer"].to_pylist()) == set(range(6)), table
        pairs = {(row["store_a"], row["store_b"]) for row in study.table("nofly").to_pylist()}
        assert len(pairs) == 3
        assert max(study.table("decomposition")["identity_error"].to_pylist()) < ROUNDING


def test_the_model_is_visited_again(out: Path) -> None:
    """One store, some layers, the gate beside chance at the same share: as the report shows it."""
    study = Study.open(out / "studies" / MODELS[0])
    rows = study.table("interventions").to_pylist()
    alone = {(row["name"], row["layer"]) for row in rows if row["chosen"] == "one"}
    assert alone == {(name, layer) for name in SWEEP.interventions for layer in (0, 4)}
    assert {row["store"] for row in rows} == {f"{MODELS[0]}-{CORPORA[0]}"} == {*SWEEP.stores}
    assert all(row["linear_share"] == 1.0 for row in rows if row["name"] == "linear")
    assert all(row["delta_lo"] <= row["delta_nats"] <= row["delta_hi"] for row in rows)
    page = (out / "studies" / MODELS[0] / "report.html").read_text(encoding="utf-8")
    for figure in ("costs", "routers", "pareto", "sets", "losses"):
        assert f'id="figure-{figure}"' in page


def test_the_tables_of_a_study_as_markdown(out: Path) -> None:
    """What `benchmarks/smollm2_study.py` prints of the model that it takes minutes to run."""
    page = tables(Study.open(out / "studies" / MODELS[0]))
    for words in ("x = β + t + p + k", "r disattenuated", "token_all+context_only", "context adds", "| L5 |"):
        assert words in page, words
    assert "nan" not in page.split("### No-fly")[0]


def test_gates_and_surrogates_are_applied_with_numpy_alone(out: Path) -> None:
    """The block of docs/tables.md gives the p that `analyze` wrote, and the error that `fit` wrote."""
    page = (Path(__file__).parents[1] / "docs" / "tables.md").read_text(encoding="utf-8")
    program = page.partition("```python\n")[2].partition("```")[0]
    name = MODELS[0]
    store, path = out / "stores" / f"{name}-stdlib", out / "studies" / name
    program = program.replace("STORE/", f"{store.as_posix()}/").replace("STUDY/", f"{path.as_posix()}/")
    found: dict[str, Any] = {}
    exec(program, found)
    study, rows = Study.open(path), found["rows"]
    routing = study.routing(1, "error", store.name)
    expected = np.full(rows[-1] + 1, np.nan)
    known = routing["token"].to_numpy() <= rows[-1]
    expected[routing["token"].to_numpy()[known]] = routing[found["name"]].to_numpy()[known]
    tested = np.isfinite(expected[rows]) & (study.rows(store.name)["split"].to_numpy()[rows] == "test")
    np.testing.assert_allclose(found["p"][tested], expected[rows][tested], atol=APPLIED)
    y = Reader.open(store).rows("mlp_output", 1, 0, Reader.open(store).n_blocks)[rows]
    error = study.need(1, store.name)["error_norm"].to_numpy()[rows]
    fitted = study.rows(store.name)["fold"].to_numpy()[rows] >= 0  # their needs are out of fold
    distance = np.linalg.norm(y - found["predicted"], axis=1)
    np.testing.assert_allclose(distance[~fitted], error[~fitted], rtol=1e-3)
    assert tested.sum() > 20
    assert (~fitted).sum() > 20


def test_a_rerun_has_nothing_to_do_and_loads_no_torch(out: Path, tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from nearline.workflows import show_runs; "
        "from nearline.workflows.quickstart import quickstart; "
        f"result = quickstart(Path({str(out)!r}), tokens={TOKENS}, models={MODELS}); "
        "show_runs.steps(result, as_json=False); print('torch' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert result.stdout.strip().splitlines()[-1] == "False"
    steps = ("collect ", "fit ", "analyze ", "measure ", "report ")
    states = [line.split()[2] for line in result.stdout.splitlines() if line.startswith(steps)]
    assert states.count("current") == (len(CORPORA) + 4) * len(MODELS)


def test_other_settings_never_replace_a_store(out: Path) -> None:
    with pytest.raises(UsageError, match="other settings"):
        quickstart(out, tokens=2 * TOKENS, models=MODELS)
