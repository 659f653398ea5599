"""Moments from elsewhere are refused before memory is taken for what they state, or a number is used."""

import json
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from helpers_store import make_store
from nearline.analyze import FitSettings
from nearline.analyze.moments_arrays import layer_arrays
from nearline.analyze.moments_file import MOMENTS, open_moments, save_moments
from nearline.analyze.moments_reading import add_store, read_moments
from nearline.analyze.moments_source import COLUMNS, merge_sources
from nearline.analyze.stores import open_sources
from nearline.store import DamageError, FormatError, IncompleteError, Reader, UsageError
from nearline.store.tables import write_table
from nearline.store.whole import digest_of, write_arrays

FOLDS, D = 3, 8
SETTINGS = FitSettings(folds=FOLDS, workers=1, examples=0)
GROUP, DOCUMENTS = "layer=00.zarr", "documents.parquet"
# What a refusal may take: JSON and metadata of a few kilobytes, and what Python imports on the way.
REFUSAL_BYTES = 8 * 2**20

Arrays = dict[str, Any]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("stores") / "store", n_layers=1, n_tokens=1600, d=D)


@pytest.fixture(scope="module")
def saved(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("moments") / "moments"
    save_moments(folder, read_moments(Reader.open(store), "store", folds=FOLDS))
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy to tamper with."""
    shutil.copytree(saved, tmp_path / "moments")
    return tmp_path / "moments"


def seal(folder: Path, **changed: Any) -> None:
    """Whoever tampers can write digests too."""
    content = json.loads((folder / MOMENTS).read_bytes())
    content["files"] = {name: digest_of(folder / name) for name in content["files"]}
    (folder / MOMENTS).write_text(json.dumps(content | changed))


def with_value(name: str, value: float) -> Callable[[Arrays], Arrays]:
    def change(arrays: Arrays) -> Arrays:
        dims, values = arrays[name]
        values = values.copy()
        values.flat[0] = value
        return arrays | {name: (dims, values)}

    return change


def cut(arrays: Arrays) -> Arrays:
    return {name: (dims, values[:-1]) for name, (dims, values) in arrays.items()}


def narrow(arrays: Arrays) -> Arrays:
    kept = {1: np.s_[:], 2: np.s_[:, :4], 3: np.s_[:, :4, :4]}
    return {name: (dims, values[kept[values.ndim]]) for name, (dims, values) in arrays.items()}


def single(arrays: Arrays) -> Arrays:
    return {name: (dims, values.astype(np.float32)) for name, (dims, values) in arrays.items()}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (with_value("cxx", np.nan), "`cxx` holds a value that is not finite"),
        (with_value("mean_y", np.inf), "`mean_y` holds a value that is not finite"),
        (with_value("n", np.nan), "`n` holds a value that is not finite"),
        (with_value("n", -4.0), "`n` is not a number of rows"),
        (with_value("n", 10.5), "`n` is not a number of rows"),
        (with_value("n", 2.0**60), "`n` is not a number of rows"),
        (with_value("n", 0.0), "a sum over no rows is not 0"),
        (with_value("n", 10.0), f"rows in folds where {DOCUMENTS} has"),
        (with_value("cyy", -1.0), "a sum of squares is negative"),
        (with_value("cxx", -1.0), "a sum of squares is negative"),
        (cut, "not those of 6 sums of width 8 in float64"),
        (narrow, "not those of 6 sums of width 8 in float64"),
        (lambda arrays: arrays | {"cxy": arrays["cxx"]}, "not those of 6 sums"),
        (lambda arrays: arrays | {"more": (("part",), np.zeros(6))}, "not those of 6 sums"),
        (lambda arrays: arrays | {"part": (("part",), np.zeros(6))}, "not those of 6 sums"),
        (lambda arrays: {name: arrays[name] for name in arrays if name != "cyy"}, "not those of 6 sums"),
        (single, "not those of 6 sums of width 8 in float64"),
        (lambda arrays: arrays | {"contribution": (("target",), np.zeros(D))}, "not those of 6 sums"),
    ],
)
def test_arrays_that_are_no_sums_are_refused(
    change: Callable[[Arrays], Arrays], words: str, saved: Path, folder: Path
) -> None:
    arrays, attrs = layer_arrays(open_moments(saved).layer(0))
    write_arrays(folder / GROUP, change(arrays), attrs)
    seal(folder)
    with pytest.raises(FormatError) as caught:
        open_moments(folder).layer(0)
    assert words in str(caught.value)
    assert GROUP in str(caught.value)


def test_sizes_that_are_only_stated_cost_no_memory(folder: Path) -> None:
    """A group of a few kilobytes that promises 2 GiB matrices, and a model to match; chunks are missing."""

    def widened(data: Any) -> Any:
        if isinstance(data, dict):
            return {key: widened(value) for key, value in data.items()}
        if isinstance(data, list):
            return [2**14 if type(item) is int and item == D else widened(item) for item in data]
        return data

    for path in sorted((folder / GROUP).rglob("zarr.json")):
        path.write_text(json.dumps(widened(json.loads(path.read_bytes()))))
    content = json.loads((folder / MOMENTS).read_bytes())
    for width in (D, 2**14):
        content["attributes"]["model"]["d_model"] = width
        (folder / MOMENTS).write_text(json.dumps(content))
        seal(folder)
        source = open_moments(folder)
        tracemalloc.start()
        try:
            with pytest.raises((FormatError, DamageError)):
                source.layer(0)
            assert tracemalloc.get_traced_memory()[1] < REFUSAL_BYTES
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize(
    ("column", "value"),
    [("fold", FOLDS), ("fold", -3), ("group", -1), ("n_fit", -1), ("n_fit", 10**6), ("split", "best")],
)
def test_documents_that_cannot_be_are_refused(column: str, value: Any, folder: Path) -> None:
    rows = open_moments(folder).documents.to_pylist()
    rows[1][column] = value
    write_table(folder / DOCUMENTS, pa.Table.from_pylist(rows, COLUMNS))
    seal(folder)
    with pytest.raises(FormatError, match=str(value)):
        open_moments(folder)


def test_rows_of_a_document_that_no_fold_leaves_out_are_refused(folder: Path) -> None:
    rows = open_moments(folder).documents.to_pylist()
    next(row for row in rows if row["n_fit"])["fold"] = -1
    write_table(folder / DOCUMENTS, pa.Table.from_pylist(rows, COLUMNS))
    seal(folder)
    with pytest.raises(FormatError, match=r"n_fit=\d+, which moments in 3 folds cannot have"):
        open_moments(folder)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"folds": 1}, "`folds` must be"),
        ({"folds": 10**9}, "`folds` must be"),
        ({"seed": "0"}, "`seed` must be"),
        ({"schema": 2}, "`schema` must be"),
        ({"layers": [1]}, "`layers` are not those of the attributes"),
        ({"layers": [0, 0]}, "`layers` are not those of the attributes"),
        ({"files": {"../../x": "0" * 64}}, "files"),
        ({"files": {}}, "files"),
        ({"sources": [{}]}, "sources"),
        ({"sources": [{"corpus": 3, "n_tokens": 1, "digest": None}]}, "`corpus` must be"),
        ({"more": 1}, "more"),
    ],
)
def test_facts_that_cannot_be_are_refused(changed: dict[str, Any], words: str, folder: Path) -> None:
    content = json.loads((folder / MOMENTS).read_bytes())
    (folder / MOMENTS).write_text(json.dumps(content | changed))
    with pytest.raises(FormatError) as caught:
        open_moments(folder)
    assert words in str(caught.value)


def test_a_missing_part_is_found_when_the_folder_is_opened(folder: Path) -> None:
    shutil.rmtree(folder / GROUP)
    with pytest.raises(DamageError, match="is missing: fetch it from a copy"):
        open_moments(folder)


def test_a_torn_folder_is_said_to_be_one(store: Path, folder: Path) -> None:
    """Not that it is no store: that would send the reader looking for rows that never were."""
    (folder / MOMENTS).unlink()
    with pytest.raises(IncompleteError, match=r"moments.json is missing, which is written last"):
        open_sources({"sums": folder, "store": store}, SETTINGS)


def test_what_a_killed_run_left_does_not_stay_beside_new_moments(saved: Path, folder: Path) -> None:
    (folder / MOMENTS).unlink()
    shutil.copytree(folder / GROUP, folder / "layer=07.zarr")
    save_moments(folder, open_moments(saved))
    assert sorted(path.name for path in folder.iterdir()) == [DOCUMENTS, GROUP, MOMENTS]


def test_moments_of_another_model_are_not_added(saved: Path, tmp_path: Path) -> None:
    for name, d, weights in (("other", D, 1), ("narrow", 6, 0)):
        path = make_store(tmp_path / name, n_layers=1, n_tokens=1600, seed=3, d=d, weights_seed=weights)
        with pytest.raises(UsageError, match="differ in weights"):
            add_store(open_moments(saved), Reader.open(path), name)


def test_the_rows_of_a_store_are_not_added_twice(store: Path, saved: Path) -> None:
    source = open_moments(saved)
    with pytest.raises(UsageError, match="which would count twice"):
        merge_sources(source, read_moments(Reader.open(store), "again", folds=FOLDS, given=source.folds))
