"""Moments that are saved, loaded and added to give the surrogates of reading every row again."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers_store import make_store
from nearline.analyze import FitSettings, fit
from nearline.analyze.moments_file import open_moments, save_moments
from nearline.analyze.moments_reading import add_store, read_moments
from nearline.analyze.moments_source import MomentsSource, merge_sources
from nearline.analyze.population import joint_folds
from nearline.analyze.stores import open_sources
from nearline.analyze.surrogates import LayerFit, merge_layers, solve_layer
from nearline.store import DamageError, FormatError, Reader, StoreNotFound, UsageError

FOLDS = 3
SETTINGS = FitSettings(folds=FOLDS, workers=1, examples=0)
# Sums in float64 that are joined in another order: the last places of sums of a few thousand rows.
ADDED = 1e-9


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("stores") / "store", n_tokens=2200, d=12, post_norm=True)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another corpus of the same model."""
    return make_store(
        tmp_path_factory.mktemp("stores") / "other", n_tokens=1800, d=12, post_norm=True, seed=5
    )


@pytest.fixture(scope="module")
def saved(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("moments") / "moments"
    save_moments(folder, read_moments(Reader.open(store), "store", folds=FOLDS))
    return folder


def surrogates(source: MomentsSource, layer: int) -> LayerFit:
    return solve_layer(source.layer(layer), SETTINGS.rules, extras=True)


def same_bytes(one: LayerFit, other: LayerFit) -> bool:
    pairs = zip(one.surrogates, other.surrogates, strict=True)
    weights = all(
        a.weight.tobytes() == b.weight.tobytes() and a.bias.tobytes() == b.bias.tobytes() for a, b in pairs
    )
    return weights and (one.curve, one.ranks, one.variants) == (other.curve, other.ranks, other.variants)


def test_loaded_moments_give_the_same_bytes(store: Path, saved: Path) -> None:
    read, loaded = read_moments(Reader.open(store), "store", folds=FOLDS), open_moments(saved)
    assert loaded.documents.equals(read.documents)
    assert (loaded.attributes, loaded.sources, loaded.folds) == (read.attributes, read.sources, read.folds)
    assert loaded.layers == (0, 1)
    for layer in loaded.layers:
        assert same_bytes(surrogates(loaded, layer), surrogates(read, layer))
        one, other = loaded.layer(layer).contribution, read.layer(layer).contribution
        assert one is not None
        assert other is not None
        assert one.tobytes() == other.tobytes()


def test_saving_twice_gives_the_same_bytes(saved: Path, tmp_path: Path) -> None:
    again = save_moments(tmp_path / "again", open_moments(saved))
    assert again.digest == open_moments(saved).digest
    with pytest.raises(UsageError, match="holds moments already"):
        save_moments(tmp_path / "again", again)


def test_a_store_is_added_without_reading_the_first_again(
    store: Path, other: Path, saved: Path, tmp_path: Path
) -> None:
    """The first store is not there when the second is added; surrogates are those of reading both."""
    moved = tmp_path / "moments"
    shutil.copytree(saved, moved)
    both = add_store(open_moments(moved), Reader.open(other), "other")
    kept = save_moments(tmp_path / "both", both)
    readers = {"store": Reader.open(store), "other": Reader.open(other)}
    folds = joint_folds(readers, FOLDS, 0)
    assert kept.folds == folds["other"] == folds["store"]
    assert [one["corpus"] for one in kept.sources] == ["synthetic:0", "synthetic:5"]
    assert kept.n_fit_groups() == sum(
        read_moments(reader, name, folds=FOLDS).n_fit_groups() for name, reader in readers.items()
    )
    parts = [read_moments(readers[name], name, folds=FOLDS, given=folds[name]) for name in readers]
    for layer in kept.layers:
        found, wanted = (
            surrogates(kept, layer),
            solve_layer(merge_layers(*(part.layer(layer) for part in parts)), SETTINGS.rules, extras=True),
        )
        assert same_bytes(found, wanted)
        alone = surrogates(open_moments(saved), layer)
        assert not np.allclose(found.full.weight, alone.full.weight, rtol=1e-3), "the new rows count"


def test_moments_add_in_any_order(store: Path, other: Path) -> None:
    one = read_moments(Reader.open(store), "store", folds=FOLDS)
    two = read_moments(Reader.open(other), "other", folds=FOLDS, given=one.folds)
    for layer in one.layers:
        left, right = merge_sources(one, two).layer(layer), merge_sources(two, one).layer(layer)
        for a, b in zip((*left.folds, left.test), (*right.folds, right.test), strict=True):
            np.testing.assert_allclose(a.cxy, b.cxy, rtol=ADDED, atol=ADDED * np.abs(b.cxy).max())


def test_moments_of_other_folds_are_not_added(store: Path, other: Path) -> None:
    one, reader = read_moments(Reader.open(store), "store", folds=FOLDS), Reader.open(other)
    ways: list[dict[str, Any]] = [{"folds": 4}, {"folds": FOLDS, "seed": 1}, {"folds": FOLDS, "layers": [0]}]
    for how in ways:
        with pytest.raises(UsageError, match="cannot be added: sum both over the same layers and folds"):
            merge_sources(one, read_moments(reader, "other", **how))
    turned = {h: (fold + 1) % FOLDS for h, fold in one.folds.items()}
    again = read_moments(Reader.open(store), "again", folds=FOLDS, given=turned)
    with pytest.raises(UsageError, match=r"is in fold \d of one and \d of the other"):
        merge_sources(one, again)


def test_damage_is_found_before_a_number_is_used(saved: Path, tmp_path: Path) -> None:
    for name, kind, words in (
        ("layer=01.zarr/cxy/c/2/0/0", DamageError, "is not what moments.json says"),
        ("documents.parquet", DamageError, "is not what moments.json says"),
        ("moments.json", FormatError, "moments.json"),
    ):
        folder = tmp_path / name.partition("/")[0]
        shutil.copytree(saved, folder)
        content = bytearray((folder / name).read_bytes())
        content[len(content) // 2] ^= 0xFF
        (folder / name).write_bytes(content)
        with pytest.raises(kind, match=words):
            open_moments(folder).layer(1)
    shutil.rmtree(tmp_path / "layer=01.zarr" / "layer=00.zarr")
    with pytest.raises(DamageError, match="is missing: fetch it from a copy"):
        open_moments(tmp_path / "layer=01.zarr").layer(0)


def test_moments_without_sinks_are_not_saved(saved: Path, tmp_path: Path) -> None:
    source = open_moments(saved)
    bare = replace(source, load=lambda layer: replace(source.layer(layer), sinks=None))
    with pytest.raises(UsageError, match="without those of sink rows"):
        save_moments(tmp_path / "bare", bare)
    assert not (tmp_path / "bare" / "moments.json").exists()


def test_a_fit_takes_moments_in_the_place_of_a_store(
    store: Path, other: Path, saved: Path, tmp_path: Path
) -> None:
    """Needs of the store beside it, and of the summed store's own rows out of fold, are those of a fit that
    read every row; the study says what it was fitted on."""
    with_rows = fit(tmp_path / "rows", {"store": store, "other": other}, SETTINGS)
    study = fit(tmp_path / "study", {"sums": saved, "store": store, "other": other}, SETTINGS)
    for written in (one.surrogates()["weight"].values for one in (with_rows, study)):
        for layer in (0, 1):
            full = surrogates(open_moments(saved), layer).full
            assert written[layer].tobytes() == full.weight.tobytes()
    for name in ("store", "other"):
        assert study.rows(name).equals(with_rows.rows(name))
        assert study.need(1, name).equals(with_rows.need(1, name))
    rows = study.table("surrogates").to_pylist()
    assert {row["fit_on"] for row in rows} == {"sums"}
    assert {row["store"] for row in rows} == {"store", "other"}
    for name in ("ranks", "variants", "learning_curve"):
        found, wanted = (one.table(name).to_pylist() for one in (study, with_rows))
        assert [row | {"store": ""} for row in found] == [row | {"store": ""} for row in wanted]
    assert study.provenance()["fit"]["inputs"]["sums"] == open_moments(saved).digest


@pytest.mark.parametrize(
    ("names", "settings", "words"),
    [
        (
            ["sums"],
            SETTINGS,
            "sums holds moments only, and needs are computed of rows: give a store",
        ),
        (["store", "sums"], SETTINGS, "fit_on=sums"),
        (["sums", "store"], FitSettings(folds=4), "set folds=3 and seed=0"),
        (["sums", "store"], FitSettings(folds=3, seed=2), "set folds=3 and seed=0"),
        (["sums", "narrow"], SETTINGS, "differ in weights"),
    ],
)
def test_what_cannot_be_fitted_is_said(
    names: list[str], settings: FitSettings, words: str, store: Path, saved: Path, tmp_path: Path
) -> None:
    narrow = make_store(tmp_path / "narrow", n_tokens=600, d=8) if "narrow" in names else store
    where = {"sums": saved, "store": store, "narrow": narrow}
    with pytest.raises(UsageError) as caught:
        fit(tmp_path / "study", {name: where[name] for name in names}, settings)
    assert words in str(caught.value)
    assert not (tmp_path / "study").exists()


def test_sources_are_told_apart(store: Path, saved: Path) -> None:
    sources = open_sources({"store": store, "sums": saved}, FitSettings(folds=FOLDS, fit_on="sums"))
    assert (list(sources.readers), list(sources.moments), sources.fit_on) == (["store"], ["sums"], "sums")
    assert sources.fitted is sources.moments["sums"]
    assert open_sources({"store": store}, SETTINGS).fitted is None
    with pytest.raises(StoreNotFound, match="holds moments only"):
        Reader.open(saved)
