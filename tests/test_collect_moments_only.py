"""A harvest of moments alone gives the surrogates of a harvest with rows, and nothing half-written."""

import itertools
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers_harvest import SMALL, Planted, files_of, harvested, texts
from helpers_models import tiny_model, tiny_tokenizer
from nearline.analyze import fit
from nearline.analyze.layers import layer_source
from nearline.analyze.moments import Moments
from nearline.analyze.moments_file import open_moments
from nearline.analyze.moments_reading import read_moments
from nearline.analyze.settings import FitSettings
from nearline.analyze.surrogates import LayerMoments, solve_layer
from nearline.collect import moments_only, stopping
from nearline.collect.device_moments import full_precision
from nearline.collect.forecast import forecast
from nearline.collect.harvesting import collect
from nearline.collect.ranks import Ranks
from nearline.collect.settings import HarvestSettings, parse
from nearline.collect.stopping import Interrupted, StopRequest, TimeIsUp
from nearline.store import SPLITS, NotFinite, OutOfRange, Reader, StoreNotFound, UsageError, info, verify

FOLDS = 3
RULES = FitSettings().alphas
# What the issue promises of predictions, relative to the spread of y over the rows.
PREDICTION_TOLERANCE = 1e-5
# Float32 products of the same rows in batches of another size.
SUM_TOLERANCE = 1e-6


def summed(path: Path, family: str = "llama", **overrides: Any) -> Path:
    return harvested(path, family, **{"moments_only": True, "folds": FOLDS, **overrides})


def parts(moments: LayerMoments) -> list[Moments]:
    assert moments.sinks is not None
    assert moments.test_sinks is not None
    return [*moments.folds, moments.test, moments.sinks, moments.test_sinks]


# Layer norm, RMS norm with a norm behind the MLP beside it, one behind it alone, and a factor of what the MLP
# gives.
CASES = [
    ("gpt2", "float32"),
    ("gemma2", "bfloat16"),
    ("olmo2", "float16"),
    ("granite", "bfloat16"),
]


@pytest.mark.parametrize(("family", "storage_dtype"), CASES)
def test_surrogates_are_those_of_the_stored_rows(family: str, storage_dtype: str, tmp_path: Path) -> None:
    """Same documents in the same folds, same alpha, and predictions of every row equal to 1e-5 of their
    spread, for every fold's surrogate."""
    found = open_moments(summed(tmp_path / "moments", family, storage_dtype=storage_dtype))
    reader = Reader.open(harvested(tmp_path / "rows", family, storage_dtype=storage_dtype))
    wanted = read_moments(reader, "rows", folds=FOLDS)
    assert found.documents.equals(wanted.documents)
    assert (found.layers, found.folds) == (reader.layers, wanted.folds)
    for layer in found.layers:
        ours, theirs = found.layer(layer), wanted.layer(layer)
        assert [part.n for part in parts(ours)] == [part.n for part in parts(theirs)]
        assert min(part.n for part in parts(ours)) > 0
        one, other = (solve_layer(moments, RULES, extras=True) for moments in (ours, theirs))
        assert one.chosen == other.chosen
        assert one.r2_test == pytest.approx(other.r2_test, abs=1e-6)
        for left, right in zip(one.variants, other.variants, strict=True):
            if "paper" not in left.name:  # λ next to nothing: rounding decides at rows like no other
                assert (left.r2_sink, left.r2_all) == pytest.approx((right.r2_sink, right.r2_all), rel=1e-5)
        _same_contribution(ours, theirs)
        x = np.concatenate([layer_source(reader, layer).inputs(block)[0] for block in range(reader.n_blocks)])
        for left, right in zip(one.surrogates, other.surrogates, strict=True):
            difference = left.predict(x) - right.predict(x)
            error = np.sqrt(np.square(difference, dtype=np.float64).sum(axis=1).mean() / right.spread)
            assert error < PREDICTION_TOLERANCE


def _same_contribution(ours: LayerMoments, theirs: LayerMoments) -> None:
    assert (ours.contribution is None) == (theirs.contribution is None)
    if ours.contribution is not None and theirs.contribution is not None:
        scale = np.abs(theirs.contribution).max()
        np.testing.assert_allclose(ours.contribution, theirs.contribution, atol=SUM_TOLERANCE * scale)


@pytest.fixture(scope="module")
def moments(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that tests read."""
    return summed(tmp_path_factory.mktemp("moments") / "moments")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store with rows of the same model and texts, that tests read."""
    return harvested(tmp_path_factory.mktemp("rows") / "rows")


def test_batches_of_another_size_give_the_same_sums(moments: Path, tmp_path: Path) -> None:
    """Many sequences at once: rows land in the sums they belong to. What attention rounds otherwise there is
    the tolerance."""
    wide = open_moments(summed(tmp_path / "wide", batch_tokens=2000))
    for one, other in zip(parts(wide.layer(1)), parts(open_moments(moments).layer(1)), strict=True):
        assert one.n == other.n
        for name in ("mean_x", "mean_y", "cxx", "cxy", "cyy"):
            left, right = getattr(one, name), getattr(other, name)
            np.testing.assert_allclose(left, right, rtol=0, atol=1e-4 * np.abs(right).max())


def test_the_cast_to_the_storage_dtype_is_in_the_sums(moments: Path, tmp_path: Path) -> None:
    """Sums of bfloat16 values are not those of float16 values: a cast that is left out shows."""
    narrow = open_moments(summed(tmp_path / "narrow", storage_dtype="bfloat16")).layer(0).folds[0]
    wide = open_moments(moments).layer(0).folds[0]
    assert np.abs(narrow.cxy - wide.cxy).max() > 100 * SUM_TOLERANCE * np.abs(wide.cxy).max()


def test_two_runs_give_the_same_bytes_and_a_third_does_nothing(moments: Path, tmp_path: Path) -> None:
    one, before = summed(tmp_path / "one"), files_of(moments)
    assert before == files_of(one)
    assert open_moments(one).digest == open_moments(moments).digest
    summed(one)
    others: list[dict[str, Any]] = [{"folds": 4}, {"fold_seed": 1}, {"storage_dtype": "bfloat16"}]
    for other in others:
        with pytest.raises(UsageError, match="name a new folder"):
            summed(one, **other)
    assert files_of(one) == before


def test_a_store_and_moments_do_not_share_a_folder(moments: Path, rows: Path) -> None:
    before = files_of(rows), files_of(moments)
    with pytest.raises(UsageError, match="is not empty"):
        summed(rows)
    with pytest.raises(UsageError, match="is not empty"):
        harvested(moments)
    assert (files_of(rows), files_of(moments)) == before


def test_a_second_process_is_refused_and_costs_the_first_nothing(tmp_path: Path) -> None:
    """While the first writes its parts, moments.json is not there yet: they look like a failed run's."""
    path = tmp_path / "moments"
    parts = ["documents.parquet", "layer=00.zarr"]

    def fails_half_way() -> None:
        with moments_only.claimed(path, Ranks()):
            for part in parts:
                (path / part).mkdir()
            with pytest.raises(UsageError, match="another process"):
                summed(path)
            assert sorted(found.name for found in path.iterdir()) == [*parts, "runs"]
            raise RuntimeError("disk")

    with pytest.raises(RuntimeError, match="disk"):
        fails_half_way()
    assert not path.exists(), "what the first one left when it failed"


def test_layers_are_those_asked_for(moments: Path, tmp_path: Path) -> None:
    every, some = open_moments(moments), open_moments(summed(tmp_path / "some", layers=[0, 2]))
    assert (some.layers, some.attributes.storage.layers) == ((0, 2), (0, 2))
    for layer in some.layers:
        assert some.layer(layer).test.cxy.tobytes() == every.layer(layer).test.cxy.tobytes()
    with pytest.raises(UsageError, match="no moments of layer 1"):
        some.layer(1)


def test_a_fit_on_moments_is_the_fit_of_the_rows(moments: Path, rows: Path, tmp_path: Path) -> None:
    """From the harvest to the study: weights, needs and scores of the store with rows beside the moments."""
    settings = FitSettings(folds=FOLDS, workers=1, examples=0, allow=())
    summed_up = fit(tmp_path / "sums", {"sums": moments, "store": rows}, settings)
    of_rows = fit(tmp_path / "rows", {"store": rows}, settings)
    one, other = (study.surrogates() for study in (summed_up, of_rows))
    assert summed_up.rows("store").equals(of_rows.rows("store"))
    for layer in range(3):
        found, wanted = (study.need(layer, "store")["error"].to_numpy() for study in (summed_up, of_rows))
        np.testing.assert_allclose(found, wanted, rtol=0, atol=PREDICTION_TOLERANCE)
        np.testing.assert_allclose(one["alpha"][layer], other["alpha"][layer], rtol=1e-6)
    scores = [[row["r2_test"] for row in s.table("surrogates").to_pylist()] for s in (summed_up, of_rows)]
    assert scores[0] == pytest.approx(scores[1], abs=1e-6)


# What ends a run


def test_a_run_that_is_stopped_leaves_nothing_and_starts_over(moments: Path, tmp_path: Path) -> None:
    model, path = tiny_model("llama")[0], tmp_path / "moments"
    request = StopRequest()
    watching = model.model.layers[0].register_forward_hook(lambda *_: setattr(request, "requested", True))
    with pytest.raises(Interrupted, match="nothing was kept; the same command starts over"):
        summed(path, model=model, stop=request)
    assert not path.exists()
    watching.remove()
    assert files_of(summed(path, model=model)) == files_of(moments)


def test_a_run_whose_time_is_up_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every forward pass moves the clock on by ten seconds."""
    model, start, n_passes = tiny_model("llama")[0], stopping.now(), itertools.count(1)
    later = iter(start + 10 * number for number in n_passes)
    clock = [start]
    monkeypatch.setattr(stopping, "now", lambda: clock[0])
    model.model.layers[0].register_forward_hook(lambda *_: clock.__setitem__(0, next(later)))
    with pytest.raises(TimeIsUp, match=r"nothing was kept.*give it more time"):
        summed(tmp_path / "moments", model=model, max_time="1m")
    assert not (tmp_path / "moments").exists()


def test_what_a_killed_run_left_is_no_moments_folder_and_is_replaced(moments: Path, tmp_path: Path) -> None:
    torn = tmp_path / "torn"
    shutil.copytree(moments, torn)
    (torn / "moments.json").unlink()
    (torn / "layer=01.zarr" / "cxx" / "zarr.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"moments.json is missing, which is written last"):
        open_moments(torn)
    summed(torn)
    assert files_of(torn) == files_of(moments)


@pytest.mark.parametrize(
    ("value", "kind", "words"),
    [(float("nan"), NotFinite, "Try another compute dtype"), (70000.0, OutOfRange, "does not fit float16")],
)
def test_a_value_that_cannot_be_stored_is_told_with_its_token(
    value: float, kind: type[Exception], words: str, rows: Path, tmp_path: Path
) -> None:
    """The row that is named holds the token, and goes into a sum: rows of gate are not looked at."""
    reader = Reader.open(rows)
    ids, split = reader.column("token_id"), reader.column("split")
    later = np.setdiff1d(ids[split == SPLITS.index("test")], ids[split != SPLITS.index("test")])
    token = int(later[0]) if later.size else int(ids[-1])
    with pytest.raises(kind, match=words) as caught:
        summed(tmp_path / "moments", model=Planted(value, token).model, storage_dtype="float16")
    message = str(caught.value)
    found = re.search(r"`mlp_output` layer 1, token row ([\d,]+) \(token id (\d+), position", message)
    assert found is not None
    assert int(found[2]) == token
    row = int(found[1].replace(",", ""))
    assert (ids[row], row) == (token, np.flatnonzero((ids == token) & (split != SPLITS.index("gate")))[0])
    assert "mask" not in message
    assert not (tmp_path / "moments").exists()


# What is refused beforehand


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"on_nonfinite": "mask"}, "use on_nonfinite=stop"),
        ({"sites": "all"}, "stores no rows"),
        ({"compressor": "zstd"}, "compressor=zstd go with rows"),
        ({"rank": 0, "world_size": 2}, "one process"),
        ({"moments_only": False}, "folds=7: rows are stored without folds"),
        ({"folds": 1}, "folds=1"),
    ],
)
def test_settings_that_go_with_rows_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse({"moments_only": True, "folds": 7, **given})
    assert words in str(caught.value)


def test_ranks_of_a_launcher_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="sums in one process"):
        summed(tmp_path / "moments")
    assert not (tmp_path / "moments").exists()


def test_too_few_groups_are_refused_before_the_model_runs(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="too few for 50 folds"):
        summed(tmp_path / "moments", folds=50)
    assert not (tmp_path / "moments").exists()


def test_commands_on_stores_say_that_there_are_no_rows(moments: Path) -> None:
    for command in (Reader.open, info, verify):
        with pytest.raises(StoreNotFound, match="holds moments only, no rows"):
            command(moments)


# Precision, and what it takes


def test_products_run_in_full_precision_and_the_settings_come_back() -> None:
    backends = [torch.backends.cuda.matmul, torch.backends.mkldnn.matmul]  # type: ignore[attr-defined]
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        loose = [backend.fp32_precision for backend in backends]
        with full_precision():
            assert [backend.fp32_precision for backend in backends] == ["ieee", "ieee"]
        assert [backend.fp32_precision for backend in backends] == loose
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> HarvestSettings:
    """A tiny model and a corpus in files."""
    folder = tmp_path_factory.mktemp("world")
    tiny_model("gemma2")[0].save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    rows = [json.dumps({"text": text}) for text in texts(200)]
    (folder / "corpus.jsonl").write_text("\n".join(rows), encoding="utf-8")
    inputs = {"model": str(folder / "model"), "corpus": f"jsonl:{folder / 'corpus.jsonl'}"}
    return parse({**inputs, **SMALL, "moments_only": True, "folds": FOLDS, "threads": 1})


def test_plan_says_what_moments_take(world: HarvestSettings, tmp_path: Path) -> None:
    found = forecast(world, tmp_path / "moments", probe=True)
    assert not (tmp_path / "moments").exists()
    done = collect(world, tmp_path / "moments")
    files = files_of(tmp_path / "moments")
    chunks = [content for name, content in files.items() if "/c/" in name]
    n_sums, d, n_layers = FOLDS + 3, 32, 3
    sums = n_layers * n_sums * (2 * d * d + 3 * d + 1) * 8
    assert found.store_bytes == sums
    assert abs(sum(len(content) for content in chunks) - sums) < 2000, "checksums, and the contributions"
    assert len(chunks) == found.n_objects
    assert len(files) <= found.n_files <= len(files) + 2
    n_folders = sum(path.is_dir() for path in (tmp_path / "moments").rglob("*"))
    assert n_folders <= found.n_folders <= n_folders + 2 * n_layers
    assert sums < found.host_parts["moments"] < sums + 2**20
    assert found.host_bytes == sum(found.host_parts.values())
    assert "block buffers" not in found.host_parts
    assert found.sites == ("residual", "mlp_output")
    assert found.speeds is not None
    assert found.speeds.seconds > 0
    assert done.n_collected == found.splits["fit"] + found.splits["test"], "gate rows are not even run"
    assert any("no rows are stored" in note for note in done.notes)
    with pytest.raises(UsageError, match="folds=3 with fold_seed=0, this run has folds=4"):
        forecast(world.model_copy(update={"folds": 4}), tmp_path / "moments", probe=False)
