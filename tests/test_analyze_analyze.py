"""The dispatcher of analyses: what is current is skipped, what is refused or fails leaves everything as it
was, what is killed is done again, and the bytes are the same wherever the work ran.
"""

import logging
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers_deaths import DIED, run_all
from helpers_planted import MIXTURE, PURE_TOKEN, planted, planted_store
from helpers_store import tree, write_all
from nearline.analyze import AnalyzeSettings, FitSettings, fit, fit_is_current
from nearline.analyze.analysis_tables import ANALYSIS_SCHEMAS
from nearline.analyze.analyze import analyses_are_current, analyze_steps
from nearline.analyze.analyze_settings import ANALYSES, ANALYSIS_FIELDS
from nearline.analyze.currency import stale_steps
from nearline.analyze.gathering import gather
from nearline.store import DamageError, Study, UsageError

# Small and quick, and still enough groups for verdicts.
QUICK: dict[str, Any] = {
    "features": "input,token_all,context_only,token_all+context_only,random",
    "c_grid": "1e-2,1",
    "folds": 3,
    "permutations": 19,
    "clusters": 4,
    "components": 4,
}
FIT = FitSettings(folds=3, alphas="1e-4,1e-2", examples=1)  # type: ignore[arg-type]


def quick(**more: Any) -> AnalyzeSettings:
    return AnalyzeSettings.model_validate(QUICK | more)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("stores")
    return {
        name: planted_store(folder / name, [PURE_TOKEN, MIXTURE], seed=seed, n_tokens=2400, d=6)
        for seed, name in enumerate(("one", "two"))
    }


@pytest.fixture(scope="module")
def fitted(stores: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study that is fitted and not analysed, beside a copy of its stores: it can be copied and moved."""
    folder = tmp_path_factory.mktemp("fitted")
    for name, store in stores.items():
        shutil.copytree(store, folder / name)
    fit(folder / "study", {name: folder / name for name in stores}, FIT)
    return folder


@pytest.fixture(scope="module")
def analysed(fitted: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with every analysis done."""
    folder = tmp_path_factory.mktemp("analysed") / "copy"
    shutil.copytree(fitted, folder)
    result = analyze_steps(folder / "study", quick())
    assert result.states == dict.fromkeys(ANALYSES, "done")
    return folder


@pytest.fixture
def study(analysed: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return shutil.copytree(analysed, tmp_path / "copy") / "study"


def again(study: Path, **more: Any) -> Mapping[str, str]:
    return analyze_steps(study, quick(**more)).states


def times(study: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in study.rglob("*")}


def test_every_table_is_written_with_its_columns_and_recorded(analysed: Path) -> None:
    found = Study.open(analysed / "study")
    assert set(ANALYSES) <= set(found.provenance())
    recorded = {output for step in found.provenance().values() for output in step["outputs"]}
    for name, schema in ANALYSIS_SCHEMAS.items():
        assert found.table(name).schema.equals(schema), name
        assert f"tables/{name}.parquet" in recorded
    written = {path.relative_to(found.path).as_posix() for path in found.path.rglob("*") if path.is_file()}
    folders = tuple(f"{name}/" for name in recorded if name.endswith(".zarr"))
    left = {name for name in written - recorded if not name.startswith(folders)}
    assert left == {"provenance.json", "study.toml"}


def test_what_is_current_is_skipped_and_says_so(study: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = times(study)
    with caplog.at_level(logging.INFO, "nearline"):
        assert again(study) == dict.fromkeys(ANALYSES, "current")
        # How it is computed is no part of what is computed.
        assert again(study, workers=1, memory_limit="1 GiB") == dict.fromkeys(ANALYSES, "current")
    assert caplog.text.count("nothing to do") == 2
    assert times(study) == before
    assert analyses_are_current(study, quick())
    assert not analyses_are_current(study, quick(need="error_norm"))


@pytest.mark.parametrize("changed", [{"clusters": 5}, {"occurrences": 12}, {"margin": 0.02}])
def test_other_settings_replace_what_depends_on_them(study: Path, changed: dict[str, Any]) -> None:
    expected = {name for name, fields in ANALYSIS_FIELDS.items() if set(fields) & set(changed)}
    assert 0 < len(expected) < len(ANALYSES)
    before, recorded = tree(study), Study.open(study).provenance()
    states = again(study, **changed)
    assert {name for name, state in states.items() if state == "done"} == expected
    after = tree(study)
    mine = {output for name in expected for output in recorded[name]["outputs"]}
    others = {
        name: content
        for name, content in before.items()
        if name != "provenance.json" and not any(name == one or name.startswith(f"{one}/") for one in mine)
    }
    assert {name: after[name] for name in others} == others
    assert again(study, **changed) == dict.fromkeys(ANALYSES, "current")


def test_every_setting_belongs_to_an_analysis() -> None:
    """A field that no analysis lists would be missing in the records: results of other settings would pass
    for current."""
    listed = {name for fields in ANALYSIS_FIELDS.values() for name in fields}
    from nearline.analyze.compute_settings import MACHINE_FIELDS

    ours = set(AnalyzeSettings.model_fields) - MACHINE_FIELDS - {"only", "layers", "need"}
    assert ours == listed


def test_what_an_analysis_needs_runs_first(fitted: Path, tmp_path: Path, caplog: Any) -> None:
    study = shutil.copytree(fitted, tmp_path / "copy") / "study"
    with caplog.at_level(logging.INFO, "nearline"):
        states = again(study, only="gates", layers="1")
    assert states == {"decomposition": "done", "gates": "done"}
    assert "decomposition: runs first, gates uses it" in caplog.text
    assert Study.open(study).table("gates")["layer"].unique().to_pylist() == [1]
    # Of all layers, it serves gates of one; gates of another layer need it anew.
    assert again(study, only="decomposition") == {"decomposition": "done"}
    assert "gates" not in Study.open(study).provenance()  # made of the maps before
    assert again(study, only="gates", layers="1") == {"decomposition": "current", "gates": "done"}
    assert again(study, only="gates", layers="0") == {"decomposition": "current", "gates": "done"}
    assert Study.open(study).table("gates")["layer"].unique().to_pylist() == [0]


def test_results_that_are_not_written_again_go(study: Path) -> None:
    routing = study / "tokens" / "routing"
    assert sorted(path.name for path in routing.iterdir()) == ["layer=00", "layer=01"]
    assert again(study, only="gates", layers="0") == {"decomposition": "current", "gates": "done"}
    assert [path.name for path in routing.iterdir()] == ["layer=00"]


def test_an_analysis_that_fails_leaves_earlier_results(study: Path) -> None:
    """A chunk of the second layer is damaged: clusters of the first one are found, then it stops."""
    before = tree(study)
    chunk = study.parent / "one" / "activations.zarr" / "residual" / "c" / "1" / "3" / "0"
    content = bytearray(chunk.read_bytes())
    content[40] ^= 1
    chunk.write_bytes(content)
    with pytest.raises(DamageError, match="residual"):
        again(study, clusters=5, permutations=29)
    after = tree(study)
    # No-fly reads tables only, and came first.
    recorded = Study.open(study).provenance()
    done = {"provenance.json", *recorded["nofly"]["outputs"]}
    assert {name: after[name] for name in after if name not in done} == {
        name: before[name] for name in before if name not in done
    }
    assert recorded["nofly"]["settings"]["permutations"] == 29
    assert recorded["clusters"]["settings"]["clusters"] == QUICK["clusters"]
    assert stale_steps(Study.open(study)) == []


def test_another_fit_takes_its_analyses_away(study: Path, caplog: pytest.LogCaptureFixture) -> None:
    paths = {name: study.parent / name for name in ("one", "two")}
    with caplog.at_level(logging.INFO, "nearline"):
        fit(study, paths, FIT.model_copy(update={"seed": 3}))
    assert not set(ANALYSES) & set(Study.open(study).provenance())
    assert not (study / "gates.zarr").exists()
    assert not (study / "tables" / "gates.parquet").exists()
    assert "removed" in caplog.text


def test_held_out_rows_hold_no_text_that_was_learned_from(stores: dict[str, Path], tmp_path: Path) -> None:
    """A document of one store's gate split stands in the other's test split, with a near-duplicate."""
    first, second = planted([MIXTURE], seed=0, n_tokens=2400), planted([MIXTURE], seed=9, n_tokens=2400)
    mine, theirs = first.documents.to_pydict(), second.documents.to_pydict()
    used = {split: held(first, split) for split in ("fit", "gate", "test")}
    there = held(second, "test")
    for split, document in zip(("fit", "gate", "test"), there[:3], strict=True):
        theirs["content_hash"][document] = mine["content_hash"][used[split][0]]
    theirs["group"][there[3]] = theirs["group"][there[1]]  # a near-duplicate of the one in gate
    write_all(tmp_path / "a", first)
    write_all(tmp_path / "b", replaced(second, theirs))
    allowing = FIT.model_copy(update={"allow": ("documents",)})
    study = fit(tmp_path / "study", [tmp_path / "a", tmp_path / "b"], allowing)
    evidence = gather(study, AnalyzeSettings())
    population = evidence.stores["b"].population
    kept = set(population.group[evidence.test_rows("b")].tolist())
    gone = {theirs["group"][there[0]], theirs["group"][there[1]]}
    assert set(population.group[population.rows(2)].tolist()) - kept == gone
    assert theirs["group"][there[2]] in kept  # a text of the other's test split was learned from by nobody
    np.testing.assert_array_equal(evidence.test_rows("a"), evidence.stores["a"].population.rows(2))


def held(data: Any, split: str) -> list[int]:
    """Documents with rows in a split, one of each group."""
    documents = data.documents.to_pydict()
    found: dict[int, int] = {}
    for document in np.unique(data.plan.document).tolist():
        if documents["split"][document] == split:
            found.setdefault(documents["group"][document], document)
    return list(found.values())


def replaced(data: Any, documents: dict[str, list[Any]]) -> Any:
    import dataclasses

    import pyarrow as pa

    return dataclasses.replace(data, documents=pa.table(documents, schema=data.documents.schema))


def test_only_one_process_writes_results(study: Path) -> None:
    from nearline.store.staging import StagedStudy

    with StagedStudy(study).at_work(), pytest.raises(UsageError, match="another process"):
        again(study, clusters=5)
    assert again(study) == dict.fromkeys(ANALYSES, "current")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The smallest stores that everything runs on, fitted."""
    folder = tmp_path_factory.mktemp("small") / "copy"
    for seed, name in enumerate(("one", "two")):
        planted_store(folder / name, [MIXTURE], seed=seed, n_tokens=800, d=4)
    fit(folder / "study", [folder / name for name in ("one", "two")], FIT)
    return folder


@pytest.mark.sampled
def test_the_bytes_are_the_same_wherever_the_work_ran(
    small: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    found: dict[str, dict[str, bytes]] = {}
    places = [("threads", 3), ("local", 2)]
    if request.config.getoption("--run-long"):
        places += [("threads", 1), ("local", 3)]
    for scheduler, workers in places:
        study = shutil.copytree(small, tmp_path / f"{scheduler} {workers}") / "study"
        assert set(again(study, scheduler=scheduler, workers=workers).values()) == {"done"}
        found[f"{scheduler} {workers}"] = tree(study)
    first, *others = found.values()
    assert len(first) > 100
    for other in others:
        assert other == first


@pytest.mark.sampled
def test_a_killed_analysis_is_done_again(small: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Killed before a change that it makes: a second run gives the bytes of an undisturbed one"""
    settings = QUICK | {"features": ["input", "random"]}

    def copy(name: str) -> str:
        return str(shutil.copytree(small, tmp_path / name) / "study")

    def task(study: str, **more: Any) -> dict[str, Any]:
        return {"study": study, "settings": settings, **more}

    def killed(deaths: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        tasks = []
        for death in deaths:
            study = copy(f"killed {death}")
            tasks += [task(study, **death), task(study)]
        return tasks

    # When gates are written aside, and when the last table is put in place.
    deaths: list[dict[str, Any]] = [{"die_on": "gates.zarr"}, {"die_on": r"regression_terms\.parquet$"}]
    undisturbed, *outcomes = run_all([task(copy("whole")), *killed(deaths)])
    assert undisturbed["code"] == 0
    n_changes, whole = undisturbed["changes"], tree(tmp_path / "whole" / "study")
    assert n_changes > 60
    if request.config.getoption("--run-long"):
        points = [{"die_at": at} for at in (*range(1, n_changes, n_changes // 40), n_changes)]
        outcomes += run_all(killed(points))
        deaths += points
    assert [one["code"] for one in outcomes] == [DIED, 0] * len(deaths)
    for death in deaths:
        assert tree(tmp_path / f"killed {death}" / "study") == whole, death
    print(f"killed at {len(deaths)} of {n_changes} changes: the same bytes each time")


def test_a_killed_fit_leaves_the_one_before(analysed: Path, tmp_path: Path) -> None:
    """Of all layers, or of a fit that an analysis makes: killed when the second layer is written."""
    study = shutil.copytree(analysed, tmp_path / "copy") / "study"
    paths = {name: study.parent / name for name in ("one", "two")}
    before = tree(study)
    other: dict[str, Any] = {"folds": 3, "alphas": [1e-3], "examples": 1}
    named = {"only": ["nofly"], "layers": "0-1", "workers": 1}
    fitted = shutil.copytree(analysed, tmp_path / "named") / "study"
    for name in ("nofly", "fit@one", "fit@two", "fit@pooled"):
        if name in Study.open(fitted).provenance():
            Study.open(fitted).drop_step(name)
    without = tree(fitted)
    stores = {name: str(path) for name, path in paths.items()}
    outcomes = run_all(
        [
            {"study": str(study), "stores": stores, "settings": other, "die_on": "need/layer=01"},
            {"study": str(fitted), "settings": named, "die_on": "need@pooled/layer=01"},
        ]
    )
    assert [one["code"] for one in outcomes] == [DIED, DIED]
    for folder, was in ((study, before), (fitted, without)):
        left = set(tree(folder)) - set(was)
        assert any("layer=00" in name for name in left)  # it had results when it died
        assert {name: content for name, content in tree(folder).items() if name not in left} == was
    assert fit_is_current(study, paths, FIT)
    assert analyses_are_current(study, quick())
    fit(study, paths, FIT)
    assert tree(study) == before
    fit(fitted, {name: fitted.parent / name for name in paths}, FIT)
    assert tree(fitted) == without
