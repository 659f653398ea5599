"""`nearline.open` and what it gives: the arrays, tokens and tables of a study, without torch."""

import html
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import nearline
import numpy as np
import polars as pl
import pytest
from helpers_planted import MIXTURE, PURE_TOKEN, planted_store
from helpers_store import make_store
from nearline.analyze import AnalyzeSettings, FitSettings, analyze, fit
from nearline.analyze.layers import layer_source
from nearline.analyze.moments_file import save_moments
from nearline.analyze.moments_reading import read_moments
from nearline.store import (
    DamageError,
    FormatError,
    IncompleteError,
    Reader,
    StoreNotFound,
    StoreNotSealed,
    Study,
    UsageError,
)
from nearline.workflows.opened import OpenStudy

EVIL = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shelf")
    for seed, name in enumerate(("one", "two")):
        planted_store(folder / name, [PURE_TOKEN, MIXTURE], seed=seed, n_tokens=1600, d=6)
    small = FitSettings(folds=3, alpha=0.01, examples=0)
    fit(folder / "study", [folder / "one", folder / "two"], small)
    analyze(folder / "study", AnalyzeSettings(only=("gates",), features=("input", "random")))
    Study.create(folder / "begun")
    return folder


@pytest.fixture
def study(shelf: Path) -> OpenStudy:
    found = nearline.open(shelf / "study")
    assert isinstance(found, OpenStudy)
    return found


# Opening


def test_what_lies_there_is_recognised(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(nearline.open(shelf / "one"), Reader)
    assert isinstance(nearline.open(shelf / "one" / "activations.zarr"), Reader)
    assert isinstance(nearline.open(f"file://{shelf}/one"), Reader)
    assert isinstance(nearline.open(str(shelf / "study")), OpenStudy)
    monkeypatch.chdir(shelf / "study")
    assert isinstance(nearline.open("."), OpenStudy)


def test_what_is_neither_is_refused_with_what_it_is(shelf: Path, tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match="neither a store nor a study; it holds begun, one, study, two: open"
    ):
        nearline.open(shelf)
    with pytest.raises(
        IncompleteError, match=r"does not exist; `nearline collect .*makes a store, .* a study"
    ):
        nearline.open(shelf / "three")
    (tmp_path / "file").write_text("x")
    for place, message in (
        (tmp_path / "file", "is a file, not a store"),
        (tmp_path, "is not a nearline store"),
    ):
        with pytest.raises(StoreNotFound, match=message):
            nearline.open(place)
    save_moments(tmp_path / "moments", read_moments(Reader.open(shelf / "one"), "one", folds=2))
    with pytest.raises(StoreNotFound, match="holds moments only"):
        nearline.open(tmp_path / "moments")
    make_store(tmp_path / "cut", n_tokens=300, seal=False)
    with pytest.raises(StoreNotSealed):
        nearline.open(tmp_path / "cut")


HEAVY = ("torch", "transformers", "sklearn", "altair", "distributed", "numpy")


def loaded_by(program: str, where: Path) -> list[str]:
    """Which of the heavy packages a program has loaded; what it took is printed, and not asserted."""
    begin, end = "import sys, time; start = time.perf_counter()", "print(time.perf_counter() - start)"
    code = f"{begin}; {program}; {end}; print(*(m for m in {HEAVY!r} if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=where, check=True)
    seconds, modules = done.stdout.split("\n")[-3:-1]
    print(f"{program}: {float(seconds):.3f} s")
    return modules.split()


def test_importing_loads_nothing_and_opening_nothing_heavy(shelf: Path) -> None:
    assert loaded_by("import nearline", shelf) == []
    assert loaded_by("import nearline; nearline.open('one')._repr_html_()", shelf) == ["numpy"]
    asked = "s._repr_html_(); s.surrogates[0]; s.gate(0); s.tokens.collect()"
    assert loaded_by(f"import nearline; s = nearline.open('study'); {asked}", shelf) == ["numpy"]


# What was learned


def test_surrogates_are_those_of_the_study_and_give_its_r2(study: OpenStudy) -> None:
    arrays = Study.open(study.path).surrogates()
    assert list(study.surrogates) == [0, 1]
    assert study.surrogates.fit_on == "one"
    store = study.store("one")
    for layer, surrogate in study.surrogates.items():
        weight, bias = surrogate.weight, surrogate.bias
        assert (weight.dtype, bias.dtype) == (np.float32, np.float32)
        assert np.array_equal(weight, arrays["weight"].sel(layer=layer))
        assert np.array_equal(bias, arrays["bias"].sel(layer=layer))
        assert surrogate.alpha == 0.01
        batch = next(iter(store.batches(layers=layer, splits="test", rows="body")))
        x, y = batch
        mean = arrays["mean_y"].sel(layer=layer).values
        r2 = 1 - np.square(surrogate(x) - y).sum() / np.square(y - mean).sum()
        (known,) = study.table("surrogates").filter(store="one", layer=layer)["r2_test"]
        assert r2 == pytest.approx(known, abs=1e-4)


def test_layers_that_were_not_fitted_are_key_errors_in_one_sentence(study: OpenStudy) -> None:
    with pytest.raises(UsageError, match=r"layer 9 is not in .*study, which has 0, 1$"):
        study.surrogates[9]
    with pytest.raises(KeyError):
        study.surrogates[9]
    assert 9 not in study.surrogates
    assert study.surrogates.get(9) is None
    assert study.surrogates.get(True) is None  # type: ignore[call-overload]
    with pytest.raises(UsageError, match="no other fit 'pooled'; it has the main one only"):
        study.surrogates_of("pooled")


def test_a_gate_routes_as_the_study_says(study: OpenStudy) -> None:
    """p(linear) of test rows is what `analyze` wrote for them."""
    gate = study.gate(1)
    routing = Study.open(study.path).routing(1, "error", "one")
    x = np.concatenate([layer_source(study.store("one"), 1).inputs(block)[0] for block in range(10)])
    tokens, written = routing["token"].to_numpy(), routing["input@linear"].to_numpy()
    test = study.store("one").column("split")[tokens] == 2
    assert np.allclose(gate(x)[tokens][test], written[test], atol=1e-5)
    assert gate.is_linear(x).dtype == bool
    assert set(gate.pieces) == {"x"}
    assert gate.available_at_routing
    assert study.gate(0, "random").features == "random"


def test_gates_that_are_not_there_are_named(study: OpenStudy, shelf: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has no gate 'inputs@linear'; it has .*; the nearest is"):
        study.gate(0, "inputs")
    with pytest.raises(UsageError, match="has no need 'loss'; it has error"):
        study.gate(0, need="loss")
    with pytest.raises(UsageError, match="layer 5 is not in"):
        study.gate(5)
    shutil.copytree(shelf / "study", tmp_path / "study")
    shutil.rmtree(tmp_path / "study" / "gates.zarr")
    copied = nearline.open(tmp_path / "study")
    assert isinstance(copied, OpenStudy)
    with pytest.raises(IncompleteError, match=r"has no gates yet: run `nearline analyze .* --only gates`"):
        copied.gate(0)
    begun = nearline.open(shelf / "begun")
    assert isinstance(begun, OpenStudy)
    for ask in (lambda: begun.gate(0), lambda: begun.surrogates, lambda: begun.tokens):
        with pytest.raises(IncompleteError, match="not fitted yet: run `nearline fit"):
            ask()


# Tokens


def all_tokens(study: OpenStudy) -> pl.DataFrame:
    """The slow twin: every file read and laid side by side."""
    handle, frames = Study.open(study.path), []
    for store in study.stores:
        for layer in (0, 1):
            rows, need = pl.DataFrame(handle.rows(store)), pl.DataFrame(handle.need(layer, store))
            keys = pl.DataFrame(
                {"store": store, "layer": [layer] * rows.height}, schema_overrides={"layer": pl.Int32}
            )
            frames.append(pl.concat([keys, rows, need], how="horizontal"))
    return pl.concat(frames)


def test_tokens_are_all_files_side_by_side(study: OpenStudy) -> None:
    everything = all_tokens(study)
    assert isinstance(study.tokens, pl.LazyFrame)
    assert study.tokens.collect().equals(everything)
    assert study.tokens.collect_schema() == everything.schema
    one = study.tokens_of(layers=1, stores="two").collect()
    assert one.equals(everything.filter(store="two", layer=1))


QUERIES = {
    "filter": lambda frame: frame.filter(pl.col("layer") == 1, pl.col("split") == "test"),
    "keys only": lambda frame: frame.filter(pl.col("store") == "two", pl.col("layer") < 1),
    "nothing": lambda frame: frame.filter(pl.col("layer") == 7),
    "columns": lambda frame: frame.select("error", "layer"),
    "head": lambda frame: frame.filter(pl.col("layer") == 1).head(1700).select("token", "store"),
    "groups": lambda frame: (
        frame.group_by("store", "layer").agg(pl.col("error").mean(), pl.len()).sort("store", "layer")
    ),
    "nulls": lambda frame: frame.filter(pl.col("error").is_null() | (pl.col("layer") == 0)).select(pl.len()),
}


@pytest.mark.parametrize("name", QUERIES)
def test_queries_give_what_they_give_on_the_whole_frame(name: str, study: OpenStudy) -> None:
    query = QUERIES[name]
    assert query(study.tokens).collect().equals(query(all_tokens(study)))


def test_files_that_a_query_excludes_by_name_are_not_read(shelf: Path, tmp_path: Path) -> None:
    shutil.copytree(shelf / "study", tmp_path / "study")
    found = nearline.open(tmp_path / "study")
    assert isinstance(found, OpenStudy)
    lazy, part = found.tokens, found.tokens_of(layers=0)
    path = Study.open(tmp_path / "study").need_path(1, "two")
    path.write_bytes(path.read_bytes()[:200])
    assert lazy.filter(pl.col("layer") == 0).collect().height == 3200
    assert part.collect().height == 3200
    with pytest.raises(FormatError, match=r"two\.parquet: not a readable Parquet file"):
        lazy.collect()
    with pytest.raises(FormatError, match=r"two\.parquet"):
        found.tokens_of(layers=1, stores="two")


def test_needs_that_other_steps_brought_stand_beside_those_of_the_fit(shelf: Path, tmp_path: Path) -> None:
    shutil.copytree(shelf / "study", tmp_path / "study")
    handle = Study.open(tmp_path / "study")
    brought = np.linspace(0, 1, 1600, dtype=np.float32)
    handle.write_need(1, "one", pl.DataFrame({"loss": brought}).to_arrow(), step="measure")
    found = nearline.open(tmp_path / "study")
    assert isinstance(found, OpenStudy)
    frame = found.tokens.collect()
    assert frame.filter(store="one", layer=1)["loss"].to_list() == brought.tolist()
    assert frame["loss"].null_count() == 3 * 1600
    handle.write_need(1, "one", pl.DataFrame({"loss": brought[:9]}).to_arrow(), step="measure")
    with pytest.raises(DamageError, match="9 rows, the store has 1600"):
        found.tokens.collect()


def test_tokens_that_are_not_there_are_named(study: OpenStudy) -> None:
    with pytest.raises(UsageError, match="has no tokens of a store 'three'; it has one, two"):
        study.tokens_of(stores="three")
    with pytest.raises(UsageError, match="layer 4 was not fitted in"):
        study.tokens_of(layers=[0, 4])
    with pytest.raises(UsageError, match=r"has no table 'surogates'.*; the nearest is 'surrogates'"):
        study.table("surogates")
    with pytest.raises(UsageError, match="has no store 'three'; it has one, two"):
        study.store("three")


# For the eye


class Tags(HTMLParser):
    """What a browser would make of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: dict[str, str] = {}
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name: str(value) for name, value in attrs}


def check_harmless(page: str) -> None:
    """Text in a table: nothing that runs, and nothing to fetch."""
    found = Tags(page)
    assert found.tags == {"div", "b", "table", "tbody", "tr", "td"}
    assert set(found.attributes) == {"style"}
    assert not re.search(r"url\(|@import", "".join(found.attributes.values()))
    assert len(page) < 4000


def test_stores_and_studies_show_themselves_in_a_few_lines(study: OpenStudy, shelf: Path) -> None:
    page = study._repr_html_()
    check_harmless(page)
    for word in ("synthetic", "layer 1 0.", "nearly linear: ", "gates", "one, two"):
        assert word in page
    store = nearline.open(shelf / "one")
    assert isinstance(store, Reader)
    page = store._repr_html_()
    check_harmless(page)
    for word in ("1,600 (fit ", "0-1", "residual, mlp_output, embedding in float32, d = 6", ", sealed"):
        assert word in page
    assert repr(store).endswith("one': 1,600 rows, 2 layers)")
    begun = nearline.open(shelf / "begun")
    assert isinstance(begun, OpenStudy)
    assert "none yet: `nearline fit`" in begun._repr_html_()


def test_names_from_elsewhere_are_escaped(tmp_path: Path) -> None:
    made = make_store(tmp_path / f"a{EVIL[:4]}b", n_tokens=1600, d=6, model_name=EVIL)
    store = nearline.open(made)
    assert isinstance(store, Reader)
    assert html.escape(EVIL) in store._repr_html_()
    check_harmless(store._repr_html_())
    long = make_store(tmp_path / "long", n_tokens=300, d=6, model_name="m" * 4000)
    fit(tmp_path / "study", {"s": made}, FitSettings(folds=3, alpha=0.01, examples=0))
    study = nearline.open(tmp_path / "study")
    assert isinstance(study, OpenStudy)
    assert html.escape(EVIL) in study._repr_html_()
    check_harmless(study._repr_html_())
    opened: Any = nearline.open(long)
    check_harmless(opened._repr_html_())


def test_a_damaged_surrogate_is_an_error(shelf: Path, tmp_path: Path) -> None:
    shutil.copytree(shelf / "study", tmp_path / "study")
    chunk = tmp_path / "study" / "surrogates.zarr" / "weight" / "c" / "1" / "0" / "0"
    content = bytearray(chunk.read_bytes())
    content[7] ^= 1
    chunk.write_bytes(bytes(content))
    found = nearline.open(tmp_path / "study")
    assert isinstance(found, OpenStudy)
    assert found.surrogates[0].layer == 0
    with pytest.raises(DamageError, match="checksum"):
        found.surrogates[1]


def test_a_study_that_cannot_be_read_shows_why(shelf: Path, tmp_path: Path) -> None:
    shutil.copytree(shelf / "study", tmp_path / "study")
    found = nearline.open(tmp_path / "study")
    assert isinstance(found, OpenStudy)
    handle = Study.open(tmp_path / "study")
    scores = pl.DataFrame(handle.table("surrogates")).with_columns(r2_test=pl.lit(None, pl.Float64))
    handle.write_table("surrogates", scores.to_arrow())
    assert "layer 0 –, layer 1 –" in found._repr_html_()
    handle.write_table("surrogates", scores.select("layer").to_arrow())
    assert "cannot be read" in found._repr_html_()
    (tmp_path / "study" / "provenance.json").write_text(f"{{ {EVIL}")
    assert "cannot be read" in found._repr_html_()
    check_harmless(found._repr_html_())
