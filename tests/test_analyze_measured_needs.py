"""Needs that a measurement brings are known on gate and test rows alone: every analysis uses the rows that
have them, and what it would learn of fit rows it learns of gate rows.
"""

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from helpers_planted import PURE_NOISE, planted_store
from nearline.analyze import AnalyzeSettings, FitSettings, fit
from nearline.analyze.analyze import analyze
from nearline.analyze.cost_tables import to_cost_table
from nearline.analyze.gate_features import held_out_means, type_means
from nearline.analyze.noise_floor import NOISE as BELOW
from nearline.analyze.noise_floor import noise_floor_row
from nearline.store import Study, UsageError

SETTINGS = AnalyzeSettings(
    need=("loss", "kl"),
    features=("token_type", "norm"),
    folds=2,
    c_grid=(1e-2, 1.0),
    permutations=19,
    clusters=4,
    components=4,
    workers=1,
)
NOISE = 0.5  # of the planted need, where the token's part has variance 1


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    """Two stores; `loss` is the token's own number with noise, `kl` is noise; NaN on fit rows."""
    folder = tmp_path_factory.mktemp("needs")
    stores = [
        planted_store(folder / name, [PURE_NOISE], seed=seed, n_tokens=2000, d=6)
        for seed, name in enumerate(("one", "two"))
    ]
    fit(folder / "study", stores, FitSettings(folds=2, alphas=(1e-2,), examples=1, workers=1))
    found, of_token = Study.open(folder / "study"), np.random.default_rng(1).standard_normal(40)
    for seed, name in enumerate(("one", "two")):
        rows, noise = found.rows(name), np.random.default_rng(seed)
        token, split = rows["token_id"].to_numpy(), np.array(rows["split"].to_pylist())
        known = (split != "fit") & (rows["target_id"].to_numpy() >= 0)
        loss = of_token[token] + NOISE * noise.standard_normal(token.size)
        columns = {"loss": loss, "kl": noise.standard_normal(token.size)}
        table = {need: np.where(known, one, np.nan).astype(np.float32) for need, one in columns.items()}
        found.write_need(0, name, pa.table(table), step="measure")
    analyze(found.path, SETTINGS)
    return found


def known_rows(study: Study, store: str, *splits: str) -> np.ndarray:
    """Body rows of these splits with a need."""
    rows = study.rows(store)
    body = ~rows["special"].to_numpy() & (rows["position"].to_numpy() != 0)
    loss = study.need(0, store, step="measure")["loss"].to_numpy()
    return body & np.isin(rows["split"].to_pylist(), splits) & np.isfinite(loss)


def of(study: Study, table: str, **where: object) -> list[dict[str, object]]:
    found = pl.from_arrow(study.table(table))
    assert isinstance(found, pl.DataFrame)
    return found.filter(**where).to_dicts()


def test_token_types_are_averaged_over_gate_rows(study: Study) -> None:
    """Their gate knows a need that is the token's, and nothing of one that is noise."""
    (token,) = of(study, "gates", store="one", need="loss", features="token_type", size="linear")
    (noise,) = of(study, "gates", store="one", need="kl", features="token_type", size="linear")
    assert token["auc"] > 0.8  # type: ignore[operator]
    assert noise["auc_lo"] < 0.5 < noise["auc_hi"]  # type: ignore[operator]
    assert token["n_tokens"] == known_rows(study, "one", "test").sum()
    gates, rows = study.group("gates"), known_rows(study, "one", "gate")
    ids = study.rows("one")["token_id"].to_numpy()
    means = type_means(ids[rows], study.need(0, "one", step="measure")["loss"].to_numpy()[rows])
    assert np.isin(np.unique(ids[rows]), gates["type"].values).all()
    stored = gates["token_type"].sel(layer=0).values[gates.attrs["needs"].index("loss")]
    np.testing.assert_array_equal(stored, means.of(gates["type"].values))


def test_a_gate_is_not_fitted_on_its_own_label() -> None:
    """A gate row's type mean is that of the other folds, whatever the needs in its own are."""
    rng = np.random.default_rng(0)
    ids, fold = rng.integers(0, 5, 200), rng.integers(0, 3, 200)
    need = rng.standard_normal(5)[ids] + rng.standard_normal(200)
    need = need.astype(np.float32)
    found = held_out_means(ids, need, fold, 3)
    for one in range(3):
        own = fold == one
        np.testing.assert_array_equal(found[own], type_means(ids[~own], need[~own]).of(ids[own]))
        changed = held_out_means(ids, np.where(own, need + 10, need).astype(np.float32), fold, 3)
        np.testing.assert_array_equal(changed[own], found[own])
        assert not np.array_equal(changed[~own], found[~own])


def test_every_analysis_uses_the_rows_that_have_the_need(study: Study) -> None:
    for store in ("one", "two"):
        test = known_rows(study, store, "test").sum()
        for table in ("clusters", "regression"):
            assert [row["n_tokens"] for row in of(study, table, store=store, need="loss")] == [test]
        both = known_rows(study, store, "gate", "test").sum()
        (row,) = of(study, "variance", store=store, need="loss", key="input")
        assert 0.95 * both <= row["n_tokens"] <= both  # type: ignore[operator]
        assert row["share_lo"] > 0.4  # type: ignore[operator]
    (row,) = of(study, "nofly", need="loss", key="input")
    assert row["surrogate"] == "one"
    assert row["r"] > 0.9  # type: ignore[operator]
    assert of(study, "nofly", need="kl", key="input")[0]["r_lo"] < 0.4  # type: ignore[operator]


def test_a_need_that_was_not_measured_is_refused(study: Study) -> None:
    with pytest.raises(UsageError, match=r"loss_single: .* nearline measure brings it"):
        analyze(study.path, AnalyzeSettings(need=("loss_single",)))


def test_labels_that_rounding_decides_get_no_verdict(study: Study) -> None:
    """In store two the same δ is another one in a finer dtype; in store one it is the same."""
    rng, still = np.random.default_rng(2), np.zeros(600)
    delta, group = rng.standard_normal(600), np.arange(600) // 20
    rounded = {"one": delta, "two": delta + 5 * rng.standard_normal(600)}
    floor = [
        noise_floor_row(name, 0, ("bfloat16", "float32"), loss, delta, still, group)
        for name, loss in rounded.items()
    ]
    study.write_table("noise_floor", to_cost_table("noise_floor", floor))
    only = ("gates", "clusters")
    analyze(study.path, SETTINGS.model_copy(update={"only": only}))
    for table in ("gates", "clusters"):
        below = {(row["store"], row["need"]) for row in of(study, table) if row["verdict"] == BELOW}
        assert below == {("two", "loss")}
