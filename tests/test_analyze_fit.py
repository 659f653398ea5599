"""A fit from sealed stores to a study: no leak, no sinks, the same bytes, the same conclusions, clear
refusals.
"""

import dataclasses
import logging
from pathlib import Path

import numpy as np
import pytest
from helpers_store import begin, commit, make_store, synthetic
from nearline import __version__
from nearline.analyze import FitSettings, fit
from nearline.analyze.layers import layer_source
from nearline.analyze.needs import COLUMNS
from nearline.analyze.population import FIT, TEST, fold_of_documents, load_population
from nearline.analyze.results import SCHEMAS
from nearline.analyze.summaries import largest_share
from nearline.reports.report import report_is_current
from nearline.store import EnvironmentFault, NearlineError, Reader, StoreNotSealed, Study, UsageError
from sklearn.linear_model import Ridge

# Needs are float32 numbers of a float32 surrogate; the refit by hand is float64 throughout.
NEED_TOLERANCE = 2e-3
ROUNDED = 1e-5  # of float32 norms
# Products of correlated features are a little linear: the planted share is not exact.
PLANTED_TOLERANCE = 0.03
SETTINGS = FitSettings(examples=3, histogram_bins=8)


def body_rows(store: Path, layer: int) -> dict[str, np.ndarray]:
    """Every row of a layer in memory, with what the population says of it: the slow way."""
    reader = Reader.open(store)
    source = layer_source(reader, layer)
    blocks = [source.block(block) for block in range(reader.n_blocks)]
    found = dict(
        zip(("residual", "x", "y"), (np.concatenate(part) for part in zip(*blocks, strict=True)), strict=True)
    )
    where = load_population(reader, fold_of_documents(reader, SETTINGS.folds, SETTINGS.seed), "store")
    return found | {"fold": where.fold, "split": where.split, "body": where.body, "group": where.group}


def by_hand(x: np.ndarray, y: np.ndarray, alpha: float) -> tuple[Ridge, np.ndarray, float]:
    """Ridge with our λ, the mean of y, and τ²."""
    x, y = x.astype(np.float64), y.astype(np.float64)
    model = Ridge(alpha=alpha * len(x) * x.var(axis=0).mean()).fit(x, y)
    return model, y.mean(axis=0), float(((y - y.mean(axis=0)) ** 2).sum(axis=1).mean())


def errors(
    rows: dict[str, np.ndarray], chosen: np.ndarray, model: tuple[Ridge, np.ndarray, float]
) -> np.ndarray:
    ridge, mean, spread = model
    y = rows["y"][chosen].astype(np.float64)
    error = np.linalg.norm(y - ridge.predict(rows["x"][chosen].astype(np.float64)), axis=1)
    return error / np.sqrt(((y - mean) ** 2).sum(axis=1) + spread)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Few tokens per feature, so that a leak would show at once."""
    return make_store(tmp_path_factory.mktemp("stores") / "store", n_tokens=2500, d=32, linear=[0.95, 0.4])


@pytest.fixture(scope="module")
def study(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Study:
    return fit(tmp_path_factory.mktemp("studies") / "study", [store], SETTINGS)


def test_needs_of_fit_rows_are_out_of_fold(store: Path, study: Study) -> None:
    alpha = float(study.surrogates()["alpha"].sel(layer=1))
    rows = body_rows(store, 1)
    needs = study.need(1, "store")["error"].to_numpy()
    fitted = rows["body"] & (rows["split"] == FIT)
    np.testing.assert_array_equal(study.rows("store")["fold"].to_numpy(), rows["fold"])
    inside = by_hand(rows["x"][fitted], rows["y"][fitted], alpha)
    for fold in range(SETTINGS.folds):
        chosen = fitted & (rows["fold"] == fold)
        others = fitted & (rows["fold"] != fold)
        refitted = by_hand(rows["x"][others], rows["y"][others], alpha)
        np.testing.assert_allclose(needs[chosen], errors(rows, chosen, refitted), rtol=NEED_TOLERANCE)
        # In-sample needs are smaller by much more than rounding: had they been written, this would show.
        assert errors(rows, chosen, inside).mean() < 0.97 * needs[chosen].mean()


def test_needs_of_test_rows_are_of_the_full_surrogate(store: Path, study: Study) -> None:
    alpha = float(study.surrogates()["alpha"].sel(layer=0))
    rows = body_rows(store, 0)
    fitted = rows["body"] & (rows["split"] == FIT)
    model = by_hand(rows["x"][fitted], rows["y"][fitted], alpha)
    tested = rows["split"] == TEST
    needs = study.need(0, "store")["error"].to_numpy()
    np.testing.assert_allclose(needs[tested], errors(rows, tested, model), rtol=NEED_TOLERANCE)
    row = study.table("surrogates").to_pylist()[0]
    chosen = tested & rows["body"]
    y = rows["y"][chosen].astype(np.float64)
    lost = ((y - model[0].predict(rows["x"][chosen].astype(np.float64))) ** 2).sum()
    assert row["r2_test"] == pytest.approx(1 - lost / ((y - model[1]) ** 2).sum(), abs=1e-5)
    assert row["n_test_tokens"] == chosen.sum()
    assert row["n_tokens"] == fitted.sum()
    assert row["n_test_groups"] == np.unique(rows["group"][chosen]).size
    assert row["tokens_per_feature"] == pytest.approx(fitted.sum() / 32)


def test_folds_and_splits_go_by_group(study: Study) -> None:
    rows = study.rows("store").to_pydict()
    seen: dict[int, set[tuple[str, int]]] = {}
    for group, split, fold in zip(rows["group"], rows["split"], rows["fold"], strict=True):
        seen.setdefault(group, set()).add((split, fold))
    assert all(len(found) == 1 for found in seen.values())
    assert {fold for found in seen.values() for _, fold in found} == {-1, *range(SETTINGS.folds)}
    assert all(fold == -1 for found in seen.values() for split, fold in found if split != "fit")


def test_every_table_has_its_columns_and_rows(study: Study) -> None:
    for name, schema in SCHEMAS.items():
        assert study.table(name).schema.equals(schema), name
    assert study.table("surrogates")["layer"].to_pylist() == [0, 1]
    assert study.table("needs").num_rows == 2 * 4 * 3 * 2
    assert study.table("need_histogram").num_rows == 2 * 4 * 9
    assert study.table("alphas").num_rows == 2 * len(SETTINGS.alphas)
    assert study.need(0, "store").column_names == list(COLUMNS)
    assert all(str(kind) == "float" for kind in study.need(0, "store").schema.types)
    assert study.need(0, "store").num_rows == study.rows("store").num_rows == 2500
    weight = study.surrogates()["weight"]
    assert weight.dims == ("layer", "feature_out", "feature_in")
    assert weight.shape == (2, 32, 32)
    harvest = study.table("harvest").to_pylist()[0]
    assert harvest["n_fit"] + harvest["n_gate"] + harvest["n_test"] == harvest["n_tokens"] == 2500
    assert harvest["ppl_test_lo"] < harvest["ppl_test"] < harvest["ppl_test_hi"]
    assert harvest["sample"].startswith("<bos>")


def test_the_share_of_the_largest_row_is_told(store: Path, study: Study) -> None:
    for row in study.table("surrogates").to_pylist():
        rows = body_rows(store, row["layer"])
        y = rows["y"][(rows["split"] == TEST) & rows["body"]].astype(np.float64)
        mean = study.surrogates()["mean_y"].sel(layer=row["layer"]).values
        squares = ((y - mean) ** 2).sum(axis=1)
        assert row["largest_row"] == pytest.approx(squares.max() / squares.sum(), rel=ROUNDED)
    assert largest_share(np.array([3.0, 1.0, np.sqrt(6.0)], np.float32)) == pytest.approx(9 / 16)
    assert np.isnan(largest_share(np.zeros(3, np.float32)))


def test_examples_are_the_extremes_with_their_context(store: Path, study: Study) -> None:
    shown = [row for row in study.table("examples").to_pylist() if row["layer"] == 0]
    rows, needs = study.rows("store").to_pydict(), study.need(0, "store")["error"].to_pylist()
    tested = [
        row
        for row, (split, position, special) in enumerate(
            zip(rows["split"], rows["position"], rows["special"], strict=True)
        )
        if split == "test" and position != 0 and not special
    ]
    highest = [row for row in shown if row["kind"] == "highest"]
    assert highest[0]["value"] == max(needs[row] for row in tested)
    assert [row["rank"] for row in highest] == [1, 2, 3]
    token = next(row for row in tested if needs[row] == highest[0]["value"])
    sequence = [row for row in range(2500) if rows["sequence"][row] == rows["sequence"][token]]
    texts = {row: "<bos>" if rows["token_id"][row] == 0 else f" w{rows['token_id'][row]}" for row in sequence}
    assert highest[0]["token"] == texts[token]
    assert highest[0]["before"] == "".join(texts[row] for row in sequence if token - 12 <= row < token)
    assert highest[0]["after"] == "".join(texts[row] for row in sequence if token < row <= token + 6)
    assert highest[0]["position"] == rows["position"][token]
    documents = [row["document_key"] for row in shown if row["kind"] == "lowest"]
    assert max(documents.count(key) for key in documents) <= 2


def test_planted_shares_are_found_and_judged(tmp_path: Path) -> None:
    planted = [1.0, 0.97, 0.5]
    store = make_store(tmp_path / "store", n_layers=3, n_tokens=8000, linear=planted)
    rows = fit(tmp_path / "study", [store], SETTINGS).table("surrogates").to_pylist()
    assert rows[0]["r2_test"] > 0.9999
    assert rows[0]["r2_cv"] > 0.9999
    assert [row["verdict"] for row in rows] == ["supported", "supported", "not supported"]
    for row, share in zip(rows, planted, strict=True):
        assert row["r2_test"] == pytest.approx(share, abs=PLANTED_TOLERANCE)
        assert row["r2_sim_lo"] <= row["r2_lo"] <= row["r2_test"] <= row["r2_hi"] <= row["r2_sim_hi"]
        assert row["r2_contribution"] == row["r2_test"]
    needs = Study.open(tmp_path / "study").table("needs").to_pylist()
    exact = next(
        r
        for r in needs
        if (r["layer"], r["need"], r["split"], r["population"]) == (0, "error", "test", "body")
    )
    assert exact["max"] < 1e-3
    assert exact["share_below_half"] == 1.0


def test_contributions_through_a_norm_are_scored_for_themselves(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", n_tokens=3000, post_norm=True, norm_kind="rmsnorm")
    row = fit(tmp_path / "study", [store], SETTINGS).table("surrogates").to_pylist()[1]
    reader = Reader.open(store)
    source, rows = layer_source(reader, 1), body_rows(store, 1)
    weight = Study.open(tmp_path / "study").surrogates()
    predicted = rows["x"] @ weight["weight"].sel(layer=1).values.T + weight["bias"].sel(layer=1).values
    true, found = source.contribution(rows["y"]), source.contribution(predicted.astype(np.float32))
    fitted, tested = rows["body"] & (rows["split"] == FIT), rows["body"] & (rows["split"] == TEST)
    mean = true[fitted].astype(np.float64).mean(axis=0)
    wanted = 1 - ((true - found)[tested] ** 2).sum() / ((true[tested] - mean) ** 2).sum()
    assert row["r2_contribution"] == pytest.approx(wanted, abs=1e-5)
    assert abs(row["r2_contribution"] - row["r2_test"]) > 1e-3


def test_sinks_enter_no_fit_and_no_statistic_of_the_body(tmp_path: Path) -> None:
    data = synthetic(n_tokens=2000, storage_dtype="float32")
    sink = (data.columns["position"] == 0) | data.columns["special"]
    stored = {site: values.copy() for site, values in data.stored.items()}
    stored["mlp_output"][:, sink] = 1e6
    studies = []
    for name, content in (("plain", data), ("spoilt", dataclasses.replace(data, stored=stored))):
        writer = begin(tmp_path / name, content)
        for block in range(content.plan.n_blocks):
            commit(writer, content, block)
        writer.seal()
        studies.append(fit(tmp_path / f"study {name}", {"store": tmp_path / name}, SETTINGS))
    plain, spoilt = (
        [row for row in s.table("needs").to_pylist() if row["population"] == "body"] for s in studies
    )
    assert plain == spoilt
    weights = [study.surrogates()["weight"].values for study in studies]
    np.testing.assert_array_equal(weights[0], weights[1])
    ours, theirs = (study.table("surrogates").to_pylist()[0] for study in studies)
    assert ours["r2_test"] == theirs["r2_test"]
    assert ours["r2_sink"] != theirs["r2_sink"]
    assert ours["n_sink"] == (sink & (data.columns["split"] == TEST)).sum() > 0


def test_masked_rows_enter_nothing(tmp_path: Path) -> None:
    data = synthetic(n_tokens=2000, storage_dtype="float32")
    masked = np.zeros(2000, bool)
    masked[[7, 300, 301, 1500]] = True
    stored = {site: values.copy() for site, values in data.stored.items()}
    stored["residual"][:, masked] = np.nan
    columns = data.columns | {"valid": ~masked}
    writer = begin(tmp_path / "store", data := dataclasses.replace(data, stored=stored, columns=columns))
    for block in range(data.plan.n_blocks):
        commit(writer, data, block)
    writer.seal()
    study = fit(tmp_path / "study", [tmp_path / "store"], SETTINGS)
    assert np.isnan(study.need(0, "store")["error"].to_numpy()[masked]).all()
    assert np.isfinite(study.need(0, "store")["error"].to_numpy()[~masked]).all()
    counted = sum(
        r["n_tokens"] for r in study.table("needs").to_pylist() if (r["layer"], r["need"]) == (0, "error")
    )
    assert counted == 2000 - masked.sum()


def contents(study: Path) -> dict[str, bytes]:
    return {
        path.relative_to(study).as_posix(): path.read_bytes()
        for path in sorted(study.rglob("*"))
        if path.is_file() and "runs" not in path.parts
    }


def test_two_runs_give_the_same_bytes_whatever_the_workers(tmp_path: Path) -> None:
    """Enough rows for several ranges a layer, so that there is an order to get wrong."""
    store = make_store(tmp_path / "store", n_tokens=9000, d=16, n_layers=3)
    for name, workers in (("a", 1), ("b", 2), ("c", 2)):
        fit(tmp_path / name, [store], SETTINGS.model_copy(update={"workers": workers}))
    first = contents(tmp_path / "a")
    assert len(first) > 20
    assert contents(tmp_path / "b") == first
    assert contents(tmp_path / "c") == first


def test_storage_dtypes_lead_to_the_same_conclusions(tmp_path: Path) -> None:
    verdicts, scores = [], []
    for dtype in ("float32", "float16", "bfloat16"):
        store = make_store(tmp_path / dtype, n_tokens=6000, linear=[0.97, 0.6], storage_dtype=dtype)
        rows = fit(tmp_path / f"study {dtype}", {"store": store}, SETTINGS).table("surrogates").to_pylist()
        verdicts.append([row["verdict"] for row in rows])
        scores.append([row["r2_test"] for row in rows])
    assert verdicts[0] == verdicts[1] == verdicts[2] == ["supported", "not supported"]
    np.testing.assert_allclose(scores[1], scores[0], atol=1e-3)
    np.testing.assert_allclose(scores[2], scores[0], atol=5e-3)  # 8 bits of mantissa


def test_a_second_store_is_scored_by_surrogates_that_did_not_see_its_texts(tmp_path: Path) -> None:
    """The same corpus once more in another dtype: fit documents keep their folds, others have none."""
    wide = make_store(tmp_path / "wide", n_tokens=2500, d=32, linear=0.4)
    half = make_store(tmp_path / "half", n_tokens=2500, d=32, linear=0.4, storage_dtype="float16")
    other = make_store(tmp_path / "other", n_tokens=2500, d=32, linear=0.4, seed=5)
    study = fit(tmp_path / "study", [wide, half, other], SETTINGS)
    assert study.rows("half")["fold"].equals(study.rows("wide")["fold"])
    np.testing.assert_allclose(
        study.need(0, "half")["error"].to_numpy(), study.need(0, "wide")["error"].to_numpy(), rtol=0.05
    )
    assert set(study.rows("other")["fold"].to_pylist()) == {-1}
    rows = study.table("surrogates").to_pylist()
    assert [(row["store"], row["layer"]) for row in rows] == [
        (s, n) for s in ("wide", "half", "other") for n in (0, 1)
    ]
    assert {row["fit_on"] for row in rows} == {"wide"}
    assert rows[2]["r2_cv"] is None
    chosen = (
        fit(tmp_path / "chosen", [wide, other], FitSettings(fit_on="other")).table("surrogates").to_pylist()
    )
    assert {row["fit_on"] for row in chosen} == {"other"}


def test_a_current_fit_is_skipped_and_a_changed_one_is_not(
    store: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "study"
    fit(path, [store], SETTINGS)
    before = {file: file.stat().st_mtime_ns for file in path.rglob("*")}
    with caplog.at_level(logging.INFO, logger="nearline"):
        fit(path, [store], SETTINGS.model_copy(update={"workers": 1}))
    assert "nothing to do" in caplog.text
    assert {file: file.stat().st_mtime_ns for file in path.rglob("*")} == before
    fit(path, [store], SETTINGS.model_copy(update={"layers": "1"}))
    assert Study.open(path).table("surrogates")["layer"].to_pylist() == [1]
    assert [folder.name for folder in (path / "tokens" / "need").iterdir()] == ["layer=01"]
    Study.open(path).table_path("needs").write_bytes(b"gone")
    fit(path, [store], SETTINGS.model_copy(update={"layers": "1"}))
    assert Study.open(path).table("needs").num_rows == 4 * 3 * 2


def test_a_fit_that_stops_half_way_is_not_current(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "study"
    fit(path, [store], SETTINGS)
    whole = contents(path)
    other = SETTINGS.model_copy(update={"seed": 1})
    with monkeypatch.context() as patch:
        patch.setattr(Study, "write_surrogates", stop)
        with pytest.raises(EnvironmentFault, match="no space"):
            fit(path, [store], other)
    fit(path, [store], SETTINGS)
    assert contents(path) == whole


def stop(*_: object) -> str:
    raise EnvironmentFault("no space left")


def test_progress_counts_every_row_of_both_passes(store: Path, tmp_path: Path) -> None:
    calls: list[tuple[str, int, int, str]] = []

    def noted(stage: str, done: int, total: int, unit: str) -> None:
        calls.append((stage, done, total, unit))

    fit(tmp_path / "study", [store], SETTINGS, progress=noted)
    assert calls[-1] == ("fit", 2 * 2 * 2500, 2 * 2 * 2500, "row passes")
    assert [call[1] for call in calls] == sorted(call[1] for call in calls)


def test_workers_are_lowered_to_the_memory_limit(
    store: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="nearline"):
        fit(tmp_path / "study", [store], SETTINGS.model_copy(update={"workers": 8, "memory_limit": "10 MiB"}))
    assert "of 8 workers fit into 10 MiB" in caplog.text
    with pytest.raises(EnvironmentFault, match="raise `memory_limit`"):
        fit(tmp_path / "study2", [store], SETTINGS.model_copy(update={"memory_limit": "1 MiB"}))


def refusals(tmp_path: Path, store: Path) -> dict[str, tuple[object, FitSettings, type[NearlineError], str]]:
    twin = make_store(tmp_path / "deeper" / "store", n_tokens=500, d=8)
    return {
        "nothing": ([], SETTINGS, UsageError, "at least one store"),
        "missing": ([tmp_path / "none"], SETTINGS, NearlineError, "does not exist"),
        "layer": ([store], FitSettings(layers="1,7"), UsageError, "no layer 7; it has 0-1"),
        "twins": ([store, twin], SETTINGS, UsageError, "two stores are called store"),
        "models": ({"a": store, "b": twin}, SETTINGS, UsageError, "a and b differ in weights"),
        "fit_on": ([store], FitSettings(fit_on="other"), UsageError, "the stores of this fit are store"),
        "folds": ([store], FitSettings(folds=99), UsageError, "too few for 99 folds"),
        "unsealed": (
            [make_store(tmp_path / "unsealed", n_tokens=800, seal=False)],
            SETTINGS,
            StoreNotSealed,
            "seal",
        ),
        "no test": (
            [make_store(tmp_path / "short", n_tokens=160)],
            FitSettings(folds=2),
            UsageError,
            "no row of the test",
        ),
        "name": ({"../out": store}, SETTINGS, UsageError, "cannot name a store"),
    }


def test_what_cannot_be_fitted_is_refused_in_one_sentence(store: Path, tmp_path: Path) -> None:
    for case, (stores, settings, error, words) in refusals(tmp_path, store).items():
        study = tmp_path / f"study {case}"
        with pytest.raises(error, match=words) as caught:
            fit(study, stores, settings)  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)
        assert not study.exists()


def test_a_refused_fit_leaves_what_was_there(tmp_path: Path) -> None:
    short = make_store(tmp_path / "short", n_tokens=160)
    (tmp_path / "empty").mkdir()
    study = Study.create(tmp_path / "begun")
    for folder in ("new/studies/one", "empty", "begun"):
        with pytest.raises(UsageError, match="no row of the test"):
            fit(tmp_path / folder, [short], FitSettings(folds=2))
    assert not (tmp_path / "new").exists()
    assert list((tmp_path / "empty").iterdir()) == []
    assert sorted(path.name for path in study.path.iterdir()) == ["provenance.json", "study.toml"]
    assert repr(study) == f"Study({str(study.path)!r}: not fitted yet)"


def test_another_fit_takes_the_old_report_away(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = make_store(tmp_path / "store", n_tokens=600, d=4)
    settings = FitSettings(alpha=0.1, folds=2, examples=0, layers="0")
    study = fit(tmp_path / "study", [store], settings)
    # As `report` does, without the time it takes to draw.
    (study.path / "report.html").write_text("a page")
    tables = {key: d for key, d in study.provenance()["fit"]["outputs"].items() if key.startswith("tables/")}
    study.record_step(
        "report", inputs=tables, settings={"nearline": __version__}, outputs=["report.html"], facts={}
    )
    assert report_is_current(study.path)
    (study.path / "notes.txt").write_text("mine")
    with caplog.at_level(logging.INFO, "nearline"):
        study.table_path("alphas").unlink()
        fit(study.path, [store], settings)  # the same results once more
        assert (study.path / "report.html").exists()
        assert "replaces" not in caplog.text
        assert repr(study) == f"Study({str(study.path)!r}: fit, report)"
        fit(study.path, {"other": store}, settings.model_copy(update={"layers": "1"}))
    assert f"fit: {study.path}: replaces the fit with fit_on=store; layers=0; stores store" in caplog.text
    assert "removed report.html, which was of the results before" in caplog.text
    assert not (study.path / "report.html").exists()
    assert list(study.provenance()) == ["fit"]
    assert (study.path / "notes.txt").exists()


def test_few_documents_give_no_verdict(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", n_tokens=960, sequence_length=64, linear=0.99)
    rows = fit(tmp_path / "study", [store], FitSettings(folds=2)).table("surrogates").to_pylist()
    assert rows[0]["n_test_groups"] < 20
    assert {row["verdict"] for row in rows} == {"too few documents"}


def test_an_mlp_whose_output_does_not_vary_is_no_crash(tmp_path: Path) -> None:
    """Such a layer has no R²; the others keep theirs, and the family is still one over the same groups."""
    data = synthetic(n_tokens=1600, n_layers=3)
    data.stored["mlp_output"][1] = 0.25
    data.sites["mlp_output"][1] = 0.25
    writer = begin(tmp_path / "store", data)
    for block in range(data.plan.n_blocks):
        commit(writer, data, block)
    writer.seal()
    rows = fit(tmp_path / "study", [tmp_path / "store"], SETTINGS).table("surrogates").to_pylist()
    assert [np.isfinite(row["r2_test"]) for row in rows] == [True, False, True]
    assert rows[1]["verdict"] in ("cannot tell", "too few documents")
    assert all(row["r2_sim_lo"] < row["r2_test"] for row in (rows[0], rows[2]))
