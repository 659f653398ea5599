"""Study folders: what is written is read, the same bytes twice, and a step knows when it is current."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import xarray as xr
from nearline.store import DamageError, FormatError, IncompleteError, MissingChunk, Study, UsageError

TABLE = pa.table({"layer": pa.array([1, 2], pa.int32()), "value": [0.5, float("nan")], "text": ["a|b", "ü"]})
WEIGHT = np.random.default_rng(0).standard_normal((3, 4, 5)).astype(np.float32)
ARRAYS = {
    "layer": np.array([1, 3, 8], dtype=np.int32),
    "weight": WEIGHT,
    "bias": WEIGHT[:, :, 0],
    "alpha": np.array([0.1, 1.0, 10.0]),
    "mean": (("layer", "feature_in"), WEIGHT[:, 0]),
}


def fill(study: Study) -> list[str]:
    """Write one of everything; the outputs' names."""
    return [
        study.write_table("surrogates", TABLE),
        study.write_rows("python docs", TABLE),
        study.write_need(5, "python docs", TABLE),
        study.write_surrogates(ARRAYS, {"fit_on": "python docs"}),
        study.write_surrogates(ARRAYS, {}, name="other"),
    ]


def test_everything_comes_back(tmp_path: Path) -> None:
    study = Study.create(tmp_path / "study")
    outputs = fill(study)
    assert outputs == [
        "tables/surrogates.parquet",
        "tokens/rows/python docs.parquet",
        "tokens/need/layer=05/python docs.parquet",
        "surrogates.zarr",
        "surrogates@other.zarr",
    ]
    again = Study.open(tmp_path / "study")
    for found in (again.table("surrogates"), again.rows("python docs"), again.need(5, "python docs")):
        assert found.schema.names == ["layer", "value", "text"]  # and no column made of the folder's name
        assert found["text"].to_pylist() == ["a|b", "ü"]
    assert again.has_table("surrogates")
    assert not again.has_table("gates")
    assert again.tables() == ["surrogates"]
    with pytest.raises(IncompleteError, match=r"gates\.parquet"):
        again.table("gates")


def test_surrogates_are_lazy_labelled_and_plain_zarr(tmp_path: Path) -> None:
    study = Study.create(tmp_path / "study")
    with pytest.raises(IncompleteError, match="has not run"):
        study.surrogates()
    fill(study)
    found = study.surrogates()
    assert found.attrs == {"fit_on": "python docs"}
    assert found["weight"].dims == ("layer", "feature_out", "feature_in")
    assert np.array_equal(found["weight"].sel(layer=3).values, WEIGHT[1])
    assert np.array_equal(found["weight"][[2, 0], 1:, [0, 3]].values, WEIGHT[[2, 0], 1:][..., [0, 3]])
    assert np.array_equal(found["mean"].sel(layer=8).values, WEIGHT[2, 0])
    assert found["alpha"].dtype == np.float64
    xr.testing.assert_identical(found.load(), xr.open_zarr(tmp_path / "study/surrogates.zarr").load())
    smaller = {"layer": ARRAYS["layer"][:1], "weight": WEIGHT[:1]}
    study.write_surrogates(smaller, {})  # replaces the folder whole: nothing of the older one stays
    assert set(study.surrogates()) == {"weight"}
    assert not (tmp_path / "study/surrogates.zarr/bias").exists()


def test_a_damaged_surrogate_raises(tmp_path: Path) -> None:
    study = Study.create(tmp_path / "study")
    study.write_surrogates(ARRAYS, {})
    chunk = tmp_path / "study/surrogates.zarr/weight/c/1/0/0"
    content = bytearray(chunk.read_bytes())
    content[7] ^= 4
    chunk.write_bytes(content)
    assert study.surrogates()["weight"].sel(layer=1).shape == (4, 5)
    with pytest.raises(DamageError, match="`weight` layer 1"):
        study.surrogates()["weight"].sel(layer=3).load()
    chunk.unlink()
    with pytest.raises(MissingChunk, match="`weight` layer 1"):
        study.surrogates()["weight"].load()


def test_the_same_results_give_the_same_bytes(tmp_path: Path) -> None:
    trees = []
    for name in ("a", "b"):
        study = Study.create(tmp_path / name)
        outputs = fill(study)
        study.record_step("fit", inputs={"s": "0" * 64}, settings={"k": 5}, outputs=outputs, facts={"n": 3})
        study.write_settings({"s": tmp_path / "store"}, {"alpha": "cv"})
        study.write_run({"host": name})
        files = [path for path in study.path.rglob("*") if path.is_file() and path.parent.name != "runs"]
        trees.append({path.relative_to(study.path).as_posix(): path.read_bytes() for path in files})
    assert trees[0] == trees[1]


@pytest.mark.parametrize(
    "damage", ["delete", "change", "delete in folder", "change in folder", "add in folder"]
)
def test_a_step_is_current_until_something_moves(tmp_path: Path, damage: str) -> None:
    study = Study.create(tmp_path / "study")
    inputs, settings = {"python docs": "1" * 64}, {"folds": 5, "grid": [0.1, 1], "layers": None}
    assert not study.step_is_current("fit", inputs, settings)
    study.record_step("fit", inputs=inputs, settings=settings, outputs=fill(study), facts={})
    again = Study.open(study.path)
    assert again.step_is_current("fit", inputs, settings)
    assert again.step_is_current("fit", inputs, {**settings, "grid": (0.1, 1)})
    assert not again.step_is_current("fit", {"python docs": "2" * 64}, settings)
    assert not again.step_is_current("fit", {**inputs, "other": "1" * 64}, settings)
    assert not again.step_is_current("fit", inputs, {**settings, "folds": 6})
    assert not again.step_is_current("report", inputs, settings)
    target = study.path / (
        "surrogates.zarr/weight/c/0/0/0" if "folder" in damage else "tables/surrogates.parquet"
    )
    if "delete" in damage:
        target.unlink()
    elif "add" in damage:
        (target.parent / "stray").write_bytes(b"")
    else:
        target.write_bytes(target.read_bytes() + b"x")
    assert not again.step_is_current("fit", inputs, settings)


def test_a_step_that_did_not_write_its_outputs_is_not_recorded(tmp_path: Path) -> None:
    study = Study.create(tmp_path / "study")
    with pytest.raises(IncompleteError, match="gates"):
        study.record_step("gates", inputs={}, settings={}, outputs=["tables/gates.parquet"], facts={})
    with pytest.raises(FormatError, match="inside the folder"):
        study.record_step("gates", inputs={}, settings={}, outputs=["../secret"], facts={})
    assert study.provenance() == {}


def test_settings_and_store_paths_survive_and_move_along(tmp_path: Path) -> None:
    study = Study.create(tmp_path / "work" / "study")
    settings = {
        "alpha": "cv",
        "name": 'x "quoted" \\ \n ü \x7f',
        "grid": [0.001, 1e22, 5],
        "flag": True,
        "gone": None,
        "sub": {"odd key.": 1, "deep": {"x": -0.0}},
    }
    study.write_settings({"python docs": tmp_path / "work" / "store"}, settings)
    expected = {key: value for key, value in settings.items() if value is not None}
    assert study.settings() == expected
    (tmp_path / "work").rename(tmp_path / "moved")
    moved = Study.open(tmp_path / "moved" / "study")
    assert Path(moved.stores()["python docs"]).resolve() == (tmp_path / "moved" / "store").resolve()
    with pytest.raises(UsageError, match="object"):
        study.write_settings({}, {"bad": object()})


def test_create_opens_what_is_there_and_refuses_other_folders(tmp_path: Path) -> None:
    Study.create(tmp_path / "study").write_table("x", TABLE)
    assert Study.create(tmp_path / "study").has_table("x")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"thesis\.txt"):
        Study.create(tmp_path / "other")
    with pytest.raises(UsageError, match="not a study"):
        Study.open(tmp_path / "other")
    with pytest.raises(IncompleteError, match="does not exist"):
        Study.open(tmp_path / "nothing")


def test_a_settings_file_of_that_name_is_no_study(tmp_path: Path) -> None:
    own = tmp_path / "study.toml"
    own.write_text("[[models]]\n", encoding="utf-8")
    with pytest.raises(UsageError, match=r"no provenance\.json beside its study\.toml.*run .*study\.toml"):
        Study.open(tmp_path)
    with pytest.raises(UsageError, match="is not empty"):
        Study.create(tmp_path)
    with pytest.raises(
        UsageError, match=r"is a file; a study is a folder\. For a settings file: `nearline run"
    ):
        Study.open(own)
    assert own.read_text(encoding="utf-8") == "[[models]]\n"


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "a\nb", "a:b"])
def test_names_that_are_no_file_names_are_refused(tmp_path: Path, name: str) -> None:
    study = Study.create(tmp_path / "study")
    for write in (study.write_table, study.write_rows):
        with pytest.raises(UsageError, match="cannot name a file"):
            write(name, TABLE)


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"schema": 1}',
        '{"schema": 1, "steps": {"fit": {}}}',
        '{"schema": 1, "steps": {"f": {"inputs": {}, "settings": {}, "facts": {}, "outputs": {"../x": ""}}}}',
    ],
)
def test_hostile_provenance_is_refused(tmp_path: Path, content: str) -> None:
    study = Study.create(tmp_path / "study")
    (study.path / "provenance.json").write_text(content)
    with pytest.raises(FormatError, match=r"provenance\.json"):
        study.step_is_current("fit", {}, {})


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("weight", WEIGHT[0], "weight"),
        ("unknown", WEIGHT, "give"),
        ("bias", WEIGHT[:, :, 0].astype(complex), "complex128"),
        ("bias", np.empty((0, 4), np.float32), "bias"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(
    tmp_path: Path, name: str, array: np.ndarray, message: str
) -> None:
    study = Study.create(tmp_path / "study")
    with pytest.raises(UsageError, match=message):
        study.write_surrogates({name: array}, {})
    assert not list(study.path.glob("surrogates*"))


def test_broken_settings_say_which_file(tmp_path: Path) -> None:
    study = Study.create(tmp_path / "study")
    (study.path / "study.toml").write_text("stores = [")
    with pytest.raises(FormatError, match=r"study\.toml"):
        study.settings()
    assert json.loads((study.path / "provenance.json").read_text()) == {"schema": 1, "steps": {}}
