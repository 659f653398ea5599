"""A study from elsewhere is data too: hostile settings, provenance, arrays and tables are refused by name."""

import io
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers_hostile import Bytes, author_json, listing, peak_bytes, put, text
from nearline.reports.harvested import proof
from nearline.store import DamageError, FormatError, Study, UsageError

ESCAPE = "\x1b[2J"
PEAK_BYTES = 16 * 2**20
SETTINGS, PROVENANCE, ARRAYS = "study.toml", "provenance.json", "surrogates.zarr/zarr.json"
WEIGHT = "consolidated_metadata.metadata.weight"
LAYER = "consolidated_metadata.metadata.layer"


def toml(content: str) -> Bytes:
    return Bytes(lambda _: content.encode())


def outputs(name: str, digest: Any = "0" * 64) -> Callable[[Any], None]:
    return lambda found: found["steps"]["fit"]["outputs"].update({name: digest})


def rename(name: str) -> Callable[[Any], None]:
    def change(root: Any) -> None:
        metadata = root["consolidated_metadata"]["metadata"]
        metadata[name] = metadata.pop("weight")

    return change


def both(path: str, shape: Any, chunks: Any) -> Callable[[Any], None]:
    def change(root: Any) -> None:
        put(f"{path}.shape", shape)(root)
        put(f"{path}.chunk_grid.configuration.chunk_shape", chunks)(root)

    return change


CASES: dict[str, tuple[str, Any, str]] = {
    "no TOML": (SETTINGS, toml("stores = {"), "study.toml"),
    "no UTF-8": (SETTINGS, Bytes(lambda _: b"a = '\xff'"), "study.toml"),
    "deep TOML": (SETTINGS, toml("a = " + "[" * 20_000), "study.toml"),
    "TOML of 2 MB": (SETTINGS, toml("#" * 2**21), "at most 1048576 are read"),
    "an integer of 10,000 digits": (SETTINGS, toml("[settings]\na = " + "9" * 10_000), "study.toml"),
    "an integer of 30 digits": (SETTINGS, toml("[settings]\na = " + "9" * 30), "settings.a.*64 bits"),
    "infinity": (SETTINGS, toml("[settings]\na = inf"), "settings.a is inf"),
    "a time": (SETTINGS, toml("[settings]\na = 1979-05-27"), "settings.a"),
    "an unknown table": (SETTINGS, toml("[hooks]\nrun = 'x'"), "unknown key 'hooks'"),
    "a store elsewhere": (SETTINGS, toml("[stores]\n'../../x' = 'a'"), "cannot name a store"),
    "a store named like a device": (SETTINGS, toml("[stores]\nNUL = 'a'"), "cannot name a store"),
    "a path that steers": (SETTINGS, toml('[stores]\na = "\\u001b[2J"'), "control characters"),
    "a store that is a number": (SETTINGS, toml("[stores]\na = 1"), "`a` must be a string"),
    "an output elsewhere": (PROVENANCE, outputs("../../etc/passwd"), "inside the folder"),
    "an absolute output": (PROVENANCE, outputs("/etc/passwd"), "inside the folder"),
    "a digest that is none": (PROVENANCE, outputs("x", "00"), "hex digits"),
    "an input that is a number": (PROVENANCE, put("steps.fit.inputs.s", 1), "`s` must be a string"),
    "an unknown key": (PROVENANCE, put("steps.fit.code", "x"), "unknown key 'code'"),
    "a newer provenance": (PROVENANCE, put("schema", 2), "schema"),
    "a step that steers": (PROVENANCE, put(f"steps.{ESCAPE}", {}), "not a name"),
    "a key twice": (PROVENANCE, text(b'"schema": 1', b'"schema": 1, "schema": 1'), "'schema' stands twice"),
    "an array elsewhere": (ARRAYS, rename("../../tables"), "cannot name an array"),
    "an array in a folder": (ARRAYS, rename("a/b"), "cannot name an array"),
    "10^12 layers": (ARRAYS, put(f"{WEIGHT}.shape.0", 10**12), "shape"),
    "a coordinate of 8 TB": (ARRAYS, both(LAYER, [2**41], [2**41]), "chunk_shape"),
    "a coordinate of 1 GB": (ARRAYS, both(LAYER, [2**28], [2**28]), "bytes, 1073741828 expected"),
    "a matrix of 4 TB": (ARRAYS, both(WEIGHT, [2, 2**20, 2**20], [1, 2**20, 2**20]), "chunk_shape"),
    "a matrix of 1 GB": (
        ARRAYS,
        both(WEIGHT, [2, 2**14, 2**14], [1, 2**14, 2**14]),
        "bytes, 1073741828 expected",
    ),
    "chunks cut otherwise": (ARRAYS, both(WEIGHT, [2, 4, 4], [1, 2, 4]), "chunk_shape"),
    "pickled weights": (ARRAYS, put(f"{WEIGHT}.codecs", [{"name": "numcodecs.pickle"}]), "codecs"),
    "object weights": (ARRAYS, put(f"{WEIGHT}.data_type", "object"), "data_type"),
    "another kind of consolidation": (ARRAYS, put("consolidated_metadata.kind", "remote"), "zarr.json"),
    "an unknown key of the group": (ARRAYS, put("x", 1), "unknown key 'x'"),
    "no consolidated metadata": (
        ARRAYS,
        lambda root: root.pop("consolidated_metadata") and None,
        "consolidated",
    ),
    "deep attributes": (ARRAYS, put("attributes.a", [[[[[[[[[[1]]]]]]]]]]), "too deeply"),
}
COSTLY = [case for case in CASES if case.startswith(("10^12", "a coordinate", "a matrix", "TOML of"))]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    study = Study.create(tmp_path_factory.mktemp("whole") / "study")
    arrays = {"layer": np.arange(2, dtype=np.int32), "weight": np.zeros((2, 4, 4), np.float32)}
    written = [
        study.write_surrogates(arrays, {"fit_on": "s"}),
        study.write_table("t", pa.table({"a": [1, 2]})),
    ]
    study.write_settings({"s": study.path / "s"}, {"alpha": "cv"})
    study.record_step("fit", inputs={"s": "0" * 64}, settings={}, outputs=written, facts={"n": 2})
    read_all(study.path)
    return study.path


def read_all(path: Path) -> None:
    """Everything that a study may be asked for."""
    study = Study.open(path)
    study.settings()
    study.stores()
    assert study.step_is_current("fit", {"s": "0" * 64}, {})
    study.surrogates().load()
    study.table("t")


@pytest.mark.parametrize("case", CASES)
def test_a_hostile_study_is_refused_by_name_and_costs_nothing(case: str, whole: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(whole, tmp_path / "study"))
    file, change, message = CASES[case]
    author_json(path / file, change)
    if file != PROVENANCE:  # its author makes the digests of the outputs right, too
        Study(path).record_step(
            "fit", inputs={"s": "0" * 64}, settings={}, outputs=["surrogates.zarr"], facts={}
        )
    before = listing(path)

    def refused() -> None:
        with pytest.raises((FormatError, DamageError), match=f"(?s){message}") as caught:
            read_all(path)
        assert "\x1b" not in str(caught.value)
        assert len(str(caught.value)) < 800

    if case in COSTLY:
        assert peak_bytes(refused) < PEAK_BYTES
    else:
        refused()
    assert listing(path) == before


def parquet(**columns: Any) -> bytes:
    sink = io.BytesIO()
    large: Any = {"row_group_size": 2**28, "data_page_size": 2**28, "max_rows_per_page": 2**28}
    pq.write_table(pa.table(columns), sink, compression="zstd", **large)
    return sink.getvalue()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: b"", "not a readable Parquet file"),
        (lambda: b"PAR1" * 4, "not a readable Parquet file"),
        (lambda: parquet(a=pa.array([[1], [2]])), "column 'a' is list"),
        (lambda: parquet(a=pa.array([{"x": 1}])), "column 'a' is struct"),
        (lambda: parquet(a=pa.array(["x", "y"]).dictionary_encode()), "column 'a' is dictionary"),
        (lambda: parquet(a=pa.array([1], pa.timestamp("us"))), "column 'a' is timestamp"),
        (lambda: parquet(**{f"{ESCAPE}{i}": pa.array([[1]]) for i in range(2)}), "u001b"),
        (lambda: parquet(**{f"c{i}": [1] for i in range(600)}), "more than 512 columns"),
        (lambda: parquet(a=np.zeros(3 * 10**7, np.int8)), "no table of ours is packed like that"),
    ],
)
def test_a_hostile_table_is_refused(
    make: Callable[[], bytes], message: str, whole: Path, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(whole, tmp_path / "study"))
    (path / "tables/t.parquet").write_bytes(make())
    with pytest.raises(FormatError, match=message) as caught:
        Study.open(path).table("t")
    assert "t.parquet" in str(caught.value)
    assert "\x1b" not in str(caught.value)


def test_a_pipe_in_the_place_of_a_file_does_not_hold_the_reader(whole: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(whole, tmp_path / "study"))
    for name in (SETTINGS, "tables/t.parquet", ARRAYS, PROVENANCE):
        (path / name).unlink()
        os.mkfifo(path / name)
    study = Study(path)
    for read in (study.settings, study.surrogates, lambda: study.table("t"), study.provenance):
        with pytest.raises(DamageError, match="not a file"):
            read()


@pytest.mark.parametrize(
    "name", ["../x", "a/b", "", ".hidden", "CON", "nul.txt", "a" * 300, "a\nb", "x.", "y "]
)
def test_names_that_cannot_name_a_file_are_refused(name: str, whole: Path) -> None:
    with pytest.raises(UsageError, match="cannot name a file"):
        Study(whole).table(name)


@pytest.mark.parametrize(
    "found",
    ["[" * 100_000, '{"norm_error": 1e999}', '{"n_rows": ' + "9" * 5000 + "}", "\ud800", "{", '{"a": [{}]}'],
)
def test_a_hostile_proof_is_shown_and_not_obeyed(found: str) -> None:
    assert isinstance(proof(found), str)
