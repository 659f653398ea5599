"""Fits beside the main one: out of fold by hand, one read for all of them, gone when the main fit changes;
and moments that are kept instead of read again.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from helpers_store import begin, commit, make_store, synthetic
from nearline.analyze import AnalyzeSettings, FitSettings, fit
from nearline.analyze.compute import session
from nearline.analyze.compute_settings import ComputeSettings
from nearline.analyze.evidence import Evidence
from nearline.analyze.gathering import gather
from nearline.analyze.moments_file import save_moments
from nearline.analyze.moments_reading import read_moments
from nearline.analyze.named_fits import ensure, surrogate_of
from nearline.analyze.population import FIT, LEFT_OUT, TEST, joint_folds, load_population
from nearline.store import NearlineError, Reader, Study, UsageError
from sklearn.linear_model import Ridge

# Needs are float32 numbers of a float32 surrogate; the refit by hand is float64 throughout.
NEED_TOLERANCE = 2e-3
SETTINGS = FitSettings(folds=3, examples=1, histogram_bins=4, alphas=(1e-3, 1e-1), workers=2)
LAYER = 1


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """`twin` holds the texts of `main` once more; `other` has texts of its own. Few tokens per feature, so
    that a leak would show at once.
    """
    folder = tmp_path_factory.mktemp("stores")
    common: dict[str, Any] = {"n_tokens": 1800, "d": 24, "linear": [0.9, 0.4]}
    return {
        "main": make_store(folder / "main", **common),
        "other": make_store(folder / "other", seed=5, **common),
        "twin": make_store(folder / "twin", storage_dtype="float16", **common),
    }


@pytest.fixture(scope="module")
def evidence(stores: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Evidence:
    study = fit(tmp_path_factory.mktemp("studies") / "study", stores, SETTINGS)
    made = gather(study, AnalyzeSettings())
    make(made, ["main", "other", "twin", "pooled"])
    return made


def make(evidence: Evidence, names: Sequence[str]) -> list[tuple[Any, ...]]:
    """Make the fits; the steps of the progress."""
    steps: list[tuple[Any, ...]] = []
    with session(
        ComputeSettings(workers=2), lambda stage, done, total, unit: steps.append((stage, done, total, unit))
    ) as workers:
        ensure(evidence, names, workers)
    return steps


def by_hand(evidence: Evidence, name: str, fitted: Sequence[str]) -> dict[str, np.ndarray]:
    """`error` of every body row of every store, each by a ridge on the fit rows of the `fitted` stores
    without the row's text; NaN where the text has no fold.
    """
    order = {one: evidence.stores[one].reader for one in evidence.stores}
    folds = joint_folds(order, SETTINGS.folds, SETTINGS.seed)
    rows: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    texts: dict[str, np.ndarray] = {}
    for one, store in evidence.stores.items():
        blocks = [store.source(LAYER).inputs(block) for block in range(store.reader.n_blocks)]
        x, y = (np.concatenate(part).astype(np.float64) for part in zip(*blocks, strict=True))
        rows[one] = x, y
        hashes = np.array(store.reader.documents["content_hash"].to_pylist())
        texts[one] = hashes[store.population.document]
    chosen = {one: evidence.stores[one].population.rows(FIT) for one in fitted}
    seen = {one: load_population(order[one], folds[one], one).fold for one in fitted}
    fold_of_text = {
        text: fold
        for one in fitted
        for text, fold in zip(texts[one][chosen[one]], seen[one][chosen[one]], strict=True)
    }
    alpha = float(evidence.study.surrogates(name)["alpha"].sel(layer=LAYER))
    models = {fold: refit(rows, chosen, seen, fold, alpha) for fold in (-1, *range(SETTINGS.folds))}
    found: dict[str, np.ndarray] = {}
    for one, (x, y) in rows.items():
        fold = np.array([fold_of_text.get(text, -1) for text in texts[one]])
        found[one] = np.full(len(y), np.nan)
        for left_out, (ridge, mean, spread) in models.items():
            at = np.flatnonzero(fold == left_out)
            if at.size:
                error = np.linalg.norm(y[at] - ridge.predict(x[at]), axis=1)
                found[one][at] = error / np.sqrt(((y[at] - mean) ** 2).sum(axis=1) + spread)
        found[one][~evidence.stores[one].population.body] = np.nan
    return found


def refit(
    rows: dict[str, tuple[np.ndarray, np.ndarray]],
    chosen: dict[str, np.ndarray],
    seen: dict[str, np.ndarray],
    fold: int,
    alpha: float,
) -> tuple[Ridge, np.ndarray, float]:
    """A ridge on all the chosen rows but those of a fold, the mean of y and τ²."""
    kept = {one: at[seen[one][at] != fold] for one, at in chosen.items()}
    x, y = (np.concatenate([rows[one][part][at] for one, at in kept.items()]) for part in (0, 1))
    model = Ridge(alpha=alpha * len(x) * x.var(axis=0).mean()).fit(x, y)
    return model, y.mean(axis=0), float(((y - y.mean(axis=0)) ** 2).sum(axis=1).mean())


@pytest.mark.parametrize(
    ("name", "fitted"), [("other", ["other"]), ("twin", ["twin"]), ("pooled", ["main", "other", "twin"])]
)
def test_needs_are_by_surrogates_that_have_not_seen_the_text(
    evidence: Evidence, name: str, fitted: list[str]
) -> None:
    for store, wanted in by_hand(evidence, name, fitted).items():
        body = evidence.stores[store].population.body
        needs = evidence.need_columns(LAYER, store, ["error"], surrogate=surrogate_of(evidence, name))[
            "error"
        ]
        np.testing.assert_allclose(needs[body], wanted[body], rtol=NEED_TOLERANCE)


def test_a_text_in_two_stores_is_held_out_from_both(evidence: Evidence) -> None:
    """The twin's needs under the pooled fit are those of the main store, and would be smaller in sample."""
    fitted = evidence.stores["main"].population.rows(FIT)
    ours, theirs = (
        evidence.need_columns(LAYER, store, ["error"], surrogate="pooled")["error"][fitted]
        for store in ("main", "twin")
    )
    np.testing.assert_allclose(theirs, ours, rtol=0.05)
    tested = evidence.stores["main"].population.rows(TEST)
    held_out = evidence.need_columns(LAYER, "main", ["error"], surrogate="pooled")["error"][tested]
    # Of the same law: no text of either split was seen. In sample the fit rows' would be a sixth smaller.
    assert ours.mean() == pytest.approx(held_out.mean(), rel=0.06)


def test_the_main_fit_is_no_named_fit(evidence: Evidence) -> None:
    assert surrogate_of(evidence, "main") is None
    assert surrogate_of(evidence, "pooled") == "pooled"
    assert sorted(evidence.study.provenance()) == ["fit", "fit@other", "fit@pooled", "fit@twin"]
    surrogates = evidence.study.surrogates("pooled")
    assert surrogates.attrs["fit_on"] == "main,other,twin"
    assert surrogates["weight"].shape == (2, 24, 24)
    assert make(evidence, ["main", "other", "pooled"]) == []


def test_all_fits_of_a_call_read_each_store_once_and_alone_give_the_same_bytes(
    evidence: Evidence, stores: dict[str, Path], tmp_path: Path
) -> None:
    study = fit(tmp_path / "study", stores, SETTINGS)
    alone = gather(study, AnalyzeSettings())
    rows = sum(store.reader.n_tokens for store in alone.stores.values())
    for names in (["pooled"], ["twin", "other"]):
        steps = make(alone, names)
        # Every row of the stores that are fitted for the moments, and of all stores for the needs.
        summed = rows if names == ["pooled"] else rows - alone.stores["main"].reader.n_tokens
        assert steps[-1][1:] == (2 * (summed + rows), 2 * (summed + rows), "row passes")
    theirs, ours = study.provenance(), evidence.study.provenance()
    assert theirs == ours


def test_named_fits_go_with_the_main_fit_they_stand_beside(
    evidence: Evidence, stores: dict[str, Path], tmp_path: Path
) -> None:
    study = fit(tmp_path / "study", stores, SETTINGS)
    make(gather(study, AnalyzeSettings()), ["other"])
    needs = study.need_path(0, "main", surrogate="other")
    # As a process of before leaves it that died before its record.
    study.write_need(1, "main", study.need(1, "main"), surrogate="dead")
    fit(study.path, stores, SETTINGS.model_copy(update={"examples": 2}))
    assert "fit@other" in study.provenance()
    assert needs.exists()
    assert not (study.path / "tokens" / "need@dead").exists()
    fit(study.path, stores, SETTINGS.model_copy(update={"alphas": (1e-2,)}))
    assert list(study.provenance()) == ["fit"]
    assert not needs.parent.parent.exists()
    assert not (study.path / "surrogates@other.zarr").exists()


def test_layers_that_were_made_stay_when_others_are_asked_for(
    stores: dict[str, Path], tmp_path: Path
) -> None:
    two = {name: stores[name] for name in ("main", "other")}
    study = fit(tmp_path / "study", two, SETTINGS)
    for layers, there in (("1", [1]), ("0", [0, 1])):
        make(gather(study, AnalyzeSettings(layers=layers)), ["other"])
        assert study.provenance()["fit@other"]["settings"]["layers"] == there
        assert study.surrogates("other")["layer"].values.tolist() == there
    assert make(gather(study, AnalyzeSettings(layers="1")), ["other"]) == []


def test_what_cannot_be_fitted_beside_is_refused(stores: dict[str, Path], tmp_path: Path) -> None:
    few = make_store(tmp_path / "few", n_tokens=480, d=24, linear=[0.9, 0.4], seed=9, sequence_length=80)
    two = {"main": stores["main"], "few": few}
    study = fit(tmp_path / "study", two, FitSettings(folds=5, examples=0))
    evidence, before = gather(study, AnalyzeSettings()), study.provenance()
    for name, words in (
        ("nobody", "no store 'nobody' to fit"),
        ("few", r"store few: .* too few for 5 folds"),
    ):
        with pytest.raises(NearlineError, match=words) as caught:
            make(evidence, [name])
        assert isinstance(caught.value, UsageError)
    assert study.provenance() == before
    assert not study.need_path(0, "main", surrogate="few").exists()


def test_a_study_fitted_on_moments_is_refused_as_a_whole(stores: dict[str, Path], tmp_path: Path) -> None:
    """Analyses learn from rows of the store that is fitted, and moments have none."""
    save_moments(tmp_path / "moments", read_moments(Reader.open(stores["main"]), "moments", folds=3))
    study = fit(tmp_path / "study", [tmp_path / "moments", stores["other"]], SETTINGS)
    before = study.provenance()
    with pytest.raises(UsageError, match=r"fitted on moments, a folder of moments without rows.*fit NEW"):
        gather(study, AnalyzeSettings())
    assert study.provenance() == before


# Moments that are kept


def outputs(study: Study) -> dict[str, str]:
    return study.provenance()["fit"]["outputs"]


def test_kept_moments_are_loaded_instead_of_read(stores: dict[str, Path], tmp_path: Path) -> None:
    two = {name: stores[name] for name in ("main", "other")}
    other = SETTINGS.model_copy(update={"alphas": (1e-2, 1.0)})
    plain = fit(tmp_path / "plain", two, other)
    study = fit(
        tmp_path / "kept", {"main": stores["main"]}, SETTINGS.model_copy(update={"keep_moments": True})
    )
    assert (study.path / "moments@main" / "moments.json").exists()
    steps: list[tuple[Any, ...]] = []
    fit(
        study.path,
        two,
        other,
        progress=lambda stage, done, total, unit: steps.append((stage, done, total, unit)),
    )
    # Two layers of two stores, for the needs; no row for the moments.
    assert steps[-1][1] == 2 * 2 * 1800
    assert outputs(study) == outputs(plain)
    found = [make(gather(one, AnalyzeSettings()), ["pooled"])[-1][1] for one in (plain, study)]
    assert found == [2 * 4 * 1800, 2 * 3 * 1800]  # of the new store alone
    assert study.provenance()["fit@pooled"] == plain.provenance()["fit@pooled"]
    assert (study.path / "moments@other").exists()  # where one is kept, the others are
    assert not list(study.path.glob("*.partial"))


def test_moments_of_other_stores_or_folds_are_not_used(stores: dict[str, Path], tmp_path: Path) -> None:
    kept = SETTINGS.model_copy(update={"keep_moments": True})
    study = fit(tmp_path / "study", {"a": stores["main"]}, kept)
    fit(study.path, {"a": stores["main"]}, kept.model_copy(update={"seed": 3}))
    plain = fit(tmp_path / "plain", {"a": stores["main"]}, SETTINGS.model_copy(update={"seed": 3}))
    assert outputs(study) == outputs(plain)
    fit(study.path, {"a": stores["other"]}, SETTINGS)
    assert outputs(study) == outputs(fit(tmp_path / "other", {"a": stores["other"]}, SETTINGS))


# The estimate of the loss


def test_loss_estimate_is_the_gradient_times_the_error(tmp_path: Path) -> None:
    data = synthetic(n_tokens=1200, d=8, with_gradient=True)
    # The last target of some sequences is missing: no target follows their last two rows.
    last = np.flatnonzero(np.diff(np.r_[data.columns["sequence"], -1]))
    data.columns["target_id"][last[::3] - 1] = -1
    data.columns["nll"][last[::3] - 1] = np.nan
    writer = begin(tmp_path / "store", data)
    for block in range(data.plan.n_blocks):
        commit(writer, data, block)
    writer.seal()
    plain = make_store(tmp_path / "plain", n_tokens=1200, d=8, seed=3)
    study = fit(tmp_path / "study", [tmp_path / "store", plain], SETTINGS)
    needs = study.need(LAYER, "store")
    assert needs.column_names[-1] == "loss_estimate"
    assert "loss_estimate" not in study.need(LAYER, "plain").column_names
    found, rows = needs["loss_estimate"].to_numpy(), study.rows("store")
    sequence, target = data.columns["sequence"], data.columns["target_id"]
    follows = [bool((target[row:][sequence[row:] == sequence[row]] >= 0).any()) for row in range(1200)]
    assert np.isfinite(found).tolist() == follows
    evidence = gather(study, AnalyzeSettings())
    source, surrogate = evidence.stores["store"].source(LAYER), study.surrogates()
    x, y = (
        np.concatenate(part)
        for part in zip(*(source.inputs(block) for block in range(data.plan.n_blocks)), strict=True)
    )
    weight, bias = (surrogate[name].sel(layer=LAYER).values.astype(np.float64) for name in ("weight", "bias"))
    wanted = (data.sites["mlp_output_grad"][LAYER] * (x @ weight.T + bias - y)).sum(axis=1)
    scored = np.flatnonzero(np.array(follows) & (rows["fold"].to_numpy() < 0))
    np.testing.assert_allclose(found[scored], wanted[scored], rtol=1e-3, atol=1e-5)
    table = [row for row in study.table("needs").to_pylist() if row["need"] == "loss_estimate"]
    assert {row["store"] for row in table} == {"store"}
    assert len(table) == 2 * 3 * 2
    tested = [
        row for row in table if (row["layer"], row["split"], row["population"]) == (LAYER, "test", "body")
    ]
    chosen = evidence.stores["store"].population.rows(TEST)
    assert tested[0]["mean"] == pytest.approx(float(np.nanmean(found[chosen])), rel=1e-4)
    assert tested[0]["n_tokens"] == np.isfinite(found[chosen]).sum()
    bins = [row for row in study.table("need_histogram").to_pylist() if row["need"] == "loss_estimate"]
    shown = [row for row in bins if row["layer"] == LAYER]
    assert sum(row["count"] for row in shown) == tested[0]["n_tokens"]
    assert shown[0]["bin_lo"] < 0 < shown[-1]["bin_hi"]


def test_rows_left_out_of_the_pooled_fit_have_no_need_by_it(tmp_path: Path) -> None:
    """A group of the second store that links two folds of the first: every surrogate has seen it nearly."""
    first = make_store(tmp_path / "first", n_tokens=1600, d=8)
    data = synthetic(n_tokens=1600, d=8, seed=4)
    main = fit(tmp_path / "alone", [first], SETTINGS)
    texts, folds = fitted_texts(main)
    groups, splits = data.documents["group"].to_numpy(), np.array(data.documents["split"].to_pylist())
    group = next(g for g in range(groups.max()) if ((groups == g) & (splits == "fit")).sum() >= 2)
    members = np.flatnonzero(groups == group)
    hashes = data.documents["content_hash"].to_pylist()
    documents, at = data.documents, data.documents.column_names.index("content_hash")
    hashes[members[0]], hashes[members[1]] = texts[folds.index(0)], texts[folds.index(1)]
    data = dataclasses.replace(data, documents=documents.set_column(at, "content_hash", pa.array(hashes)))
    writer = begin(tmp_path / "second", data)
    for block in range(data.plan.n_blocks):
        commit(writer, data, block)
    writer.seal()
    study = fit(tmp_path / "study", [first, tmp_path / "second"], SETTINGS)
    evidence = gather(study, AnalyzeSettings())
    make(evidence, ["second", "pooled"])
    linked = np.isin(data.columns["document"], members)
    assert linked.any()
    needs = study.need(0, "second", surrogate="pooled")["error"].to_numpy()
    assert np.isnan(needs[linked]).all()
    assert np.isfinite(needs[~linked]).all()
    assert (study.rows("second")["fold"].to_numpy()[linked] == LEFT_OUT).all()


def fitted_texts(study: Study) -> tuple[list[str], list[int]]:
    """Content hashes of documents that were fitted, with their folds."""
    evidence = gather(study, AnalyzeSettings())
    hashes = evidence.fitted.reader.documents["content_hash"].to_pylist()
    population = evidence.fitted.population
    rows = population.rows(FIT)
    pairs = dict(zip(population.document[rows].tolist(), population.fold[rows].tolist(), strict=True))
    return [hashes[document] for document in pairs], list(pairs.values())
