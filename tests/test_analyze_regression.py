"""Regressions of a need on token features: the plane is that of statsmodels, its intervals those of leaving
groups out, R² is covered, and planted needs are found through a whole study.
"""

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import statsmodels.api as sm
from helpers_store import make_store
from nearline.analyze import plane as plane_module
from nearline.analyze.analyze_settings import AnalyzeSettings
from nearline.analyze.compute import session
from nearline.analyze.evidence import Evidence
from nearline.analyze.fit import fit
from nearline.analyze.gathering import gather
from nearline.analyze.intervals import critical_value, r_squared_bounds
from nearline.analyze.plane import Plane, fit_plane, unexplained
from nearline.analyze.population import FIT, GATE
from nearline.analyze.regression import run
from nearline.analyze.token_features import TERMS, TYPE_TERMS, describe, token_features
from nearline.store import Study

N_GROUPS = 40
# Normal equations of standardised columns in float64 against a QR of the columns as they are.
SAME = 1e-8


def by_group(rng: np.random.Generator, n_groups: int, n_terms: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """Columns that differ by group, of groups of very different size."""
    group = np.repeat(np.arange(n_groups), np.ceil(rng.lognormal(3.5, 0.8, n_groups)).astype(int))
    x = np.sqrt(0.3) * rng.standard_normal((n_groups, n_terms))[group]
    return x + np.sqrt(0.7) * rng.standard_normal((group.size, n_terms)), group


def columns_of(x: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    return lambda rows: x[rows]


def fitted(x: np.ndarray, y: np.ndarray, group: np.ndarray) -> Plane:
    return fit_plane(columns_of(x), y, group, np.arange(y.size))


def planted(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x, group = by_group(rng, N_GROUPS)
    y = 3.0 + x @ [1.0, -0.5, 0.0, 0.2] + rng.standard_normal(N_GROUPS)[group]
    return x * [1.0, 10.0, 0.1, 1.0] + [0.0, 5.0, 3.0, -8.0], y + rng.standard_normal(group.size), group


def test_the_plane_is_that_of_statsmodels() -> None:
    x, y, group = planted()
    found = fitted(x, y, group)
    theirs = sm.OLS(y, sm.add_constant(x)).fit(cov_type="cluster", cov_kwds={"groups": group})
    np.testing.assert_allclose(found.coefficients.estimate / found.sd, theirs.params[1:], rtol=SAME)
    np.testing.assert_allclose(found.of(x), theirs.fittedvalues, rtol=SAME)
    assert found.r2 == pytest.approx(theirs.rsquared, rel=SAME)
    correlation = np.corrcoef(x, y, rowvar=False)[-1, :-1]
    np.testing.assert_allclose(found.correlation, correlation, rtol=SAME)
    # Their sandwich is smaller than leaving groups out by what each group holds of the rows.
    ratio = found.coefficients.standard_error / found.sd / theirs.bse[1:]
    assert (ratio > 1.0).all()
    assert (ratio < 1.25).all()


def test_its_standard_errors_are_those_of_leaving_groups_out() -> None:
    x, y, group = planted(1)
    found = fitted(x, y, group)
    design = sm.add_constant(x)
    without = np.array(
        [np.linalg.lstsq(design[group != g], y[group != g], rcond=None)[0][1:] for g in range(N_GROUPS)]
    )
    spread = ((without - without.mean(axis=0)) ** 2).sum(axis=0) * (N_GROUPS - 1) / N_GROUPS
    np.testing.assert_allclose(found.coefficients.standard_error / found.sd, np.sqrt(spread), rtol=1e-6)


def test_tiles_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y, group = planted(2)
    whole = fitted(x, y, group)
    error = unexplained(whole, columns_of(x), y, group, np.arange(y.size)).estimate
    assert 1.0 - error[0] == pytest.approx(whole.r2, rel=SAME)
    monkeypatch.setattr(plane_module, "TILE_ROWS", 97)
    tiled = fitted(x, y, group)
    np.testing.assert_allclose(tiled.coefficients.estimate, whole.coefficients.estimate, rtol=SAME)
    np.testing.assert_allclose(
        unexplained(whole, columns_of(x), y, group, np.arange(y.size)).estimate, error, rtol=SAME
    )


def test_columns_that_say_nothing_new_are_left_out() -> None:
    x, y, group = planted(3)
    more = np.column_stack([np.full(y.size, 7.1), x, 1.0 - 2.0 * x[:, 0], x[:, 1] + x[:, 2]])
    found = fitted(more, y, group)
    np.testing.assert_array_equal(found.kept, [False, True, True, True, True, False, False])
    np.testing.assert_allclose(
        found.coefficients.estimate, fitted(x, y, group).coefficients.estimate, rtol=1e-6
    )
    assert np.isnan(found.correlation[0])
    assert found.correlation[5] == pytest.approx(-found.correlation[1])


def test_a_column_that_varies_in_one_group_only_has_no_sure_coefficient() -> None:
    x, y, group = planted(4)
    alone = np.where(group == 5, np.random.default_rng(0).standard_normal(y.size), 0.0)
    found = fitted(np.column_stack([x, alone]), y + alone, group)
    assert np.isfinite(found.coefficients.influence).all()
    error = found.coefficients.standard_error[-1]
    assert error > 0.5 * abs(found.coefficients.estimate[-1])


def test_a_need_that_does_not_vary_has_no_r2() -> None:
    x, y, group = planted()
    found = fitted(x, np.full(y.size, 2.0), group)
    assert np.isnan(found.r2)
    empty = fit_plane(columns_of(x), y, group, np.empty(0, np.int64))
    assert not empty.kept.any()
    assert np.isnan(unexplained(empty, columns_of(x), y, group, np.empty(0, np.int64)).estimate).all()


@pytest.mark.sampled
@pytest.mark.parametrize("share", [0.3, 0.8])
def test_held_out_r2_is_covered(share: float, request: pytest.FixtureRequest) -> None:
    """Documents differ in features and in level; the truth is the fitted plane's R² over all documents."""
    n_sets = 1000 if request.config.getoption("--run-long") else 150
    slope = np.array([1.0, -0.5, 0.0, 0.2])
    noise = float(slope @ slope) * (1 - share) / share
    held = 0
    for seed in range(n_sets):
        rng = np.random.default_rng((seed, int(10 * share)))
        x, group = by_group(rng, 2 * N_GROUPS)
        level = np.sqrt(0.2 * noise) * rng.standard_normal(2 * N_GROUPS)[group]
        y = x @ slope + level + np.sqrt(0.8 * noise) * rng.standard_normal(group.size)
        learned, tested = np.flatnonzero(group < N_GROUPS), np.flatnonzero(group >= N_GROUPS)
        plane = fit_plane(columns_of(x), y, group, learned)
        found = unexplained(plane, columns_of(x), y, group, tested)
        low, high = r_squared_bounds(found, critical_value(found))
        wrong = slope - plane.coefficients.estimate / plane.sd
        error = noise + wrong @ wrong + plane.of(np.zeros((1, 4)))[0] ** 2
        truth = 1.0 - error / (noise + slope @ slope + plane.centre**2)
        held += bool(low[0] <= truth <= high[0])
    print(f"R² {share}: {held / n_sets:.3f} covered")
    assert 0.90 <= held / n_sets <= 0.98


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # length, function word, capital, digit, punctuation, begins a word
        (" the", (3, 1, 0, 0, 0, 1)),
        ("The", (3, 1, 1, 0, 0, 0)),
        (" Paris", (5, 0, 1, 0, 0, 1)),
        ("’s", (2, 1, 0, 0, 0, 0)),
        (" 1984", (4, 0, 0, 1, 0, 1)),
        (" (“", (2, 0, 0, 0, 1, 1)),
        ("$", (1, 0, 0, 0, 1, 0)),
        ("\n", (1, 0, 0, 0, 0, 0)),
        (" ", (0, 0, 0, 0, 0, 1)),
        ("", (0, 0, 0, 0, 0, 0)),
        ("É", (1, 0, 1, 0, 0, 0)),
        ("\ufffd", (1, 0, 0, 0, 0, 0)),
    ],
)
def test_what_is_said_of_a_token(text: str, expected: tuple[float, ...]) -> None:
    assert describe(text) == expected


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("regression")
    stores = {
        name: make_store(folder / name, n_tokens=n, d=8, seed=seed)
        for name, n, seed in (("a", 5000, 1), ("b", 4000, 2))
    }
    return fit(folder / "study", stores).path


def evidence_of(study: Path, *needs: str) -> Evidence:
    settings = AnalyzeSettings(need=needs)
    return gather(Study.open(study), settings)


def plant(study: Path, name: str, value: Callable[[np.ndarray, np.random.Generator], np.ndarray]) -> None:
    """A need of this name in every store and layer, out of a row's features."""
    evidence = evidence_of(study, "error")
    for (store, rows), layer in itertools.product(evidence.stores.items(), evidence.layers):
        features = token_features(rows.reader, rows.population).of(np.arange(rows.reader.n_tokens))
        values = value(features, np.random.default_rng((layer, len(store), 5))).astype(np.float32)
        evidence.study.write_need(layer, store, pa.table({name: values}), step=name)


def test_frequencies_are_counted_where_nothing_is_tested(study: Path) -> None:
    store = evidence_of(study, "error").stores["a"]
    features = token_features(store.reader, store.population)
    population = store.population
    row = int(population.rows(FIT)[0])
    token = population.token_id[row]
    fit_rows = population.rows(FIT)
    seen = int((population.token_id[fit_rows] == token).sum())
    found = features.of(np.array([row]))[0]
    total = fit_rows.size + features.token_id.size
    assert found[TERMS.index("log_frequency")] == pytest.approx(np.log((seen + 1) / total))
    assert found[TERMS.index("log_position")] == np.log1p(population.position[row])
    assert found.size == len(TYPE_TERMS) + 1


def test_planted_needs_are_told_apart(study: Path) -> None:
    """A need that frequency explains by four fifths, one that nothing explains; in both stores and layers."""
    frequency, position = TERMS.index("log_frequency"), TERMS.index("log_position")

    def explained(features: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        signal = features[:, frequency] - 0.5 * features[:, position]
        return signal / signal.std() + 0.5 * rng.standard_normal(signal.size)

    plant(study, "explained", explained)
    plant(study, "noise", lambda features, rng: rng.standard_normal(len(features)))
    evidence = evidence_of(study, "explained", "noise")
    with session(evidence.settings) as workers:
        assert run(evidence, workers) == ["tables/regression.parquet", "tables/regression_terms.parquet"]
    rows = evidence.study.table("regression").to_pylist()
    assert [(row["store"], row["layer"], row["need"]) for row in rows] == list(
        itertools.product("ab", (0, 1), ("explained", "noise"))
    )
    for row in rows:
        assert row["r2_sim_lo"] < row["r2_lo"] < row["r2_test"] < row["r2_hi"] < row["r2_sim_hi"]
        if row["need"] == "explained":
            assert row["r2_test"] == pytest.approx(0.8, abs=0.03)
            assert row["verdict"] == "supported"
        else:
            assert abs(row["r2_test"]) < 0.02
            assert row["verdict"] == "not supported"
    terms = {
        row["term"]: row
        for row in evidence.study.table("regression_terms").to_pylist()
        if row["need"] == "explained"
    }
    assert terms["log_frequency"]["lo"] > 0 > terms["log_position"]["hi"]
    assert terms["length"]["lo"] < 0.05
    assert np.isnan([terms["capital"]["coefficient"], terms["capital"]["r"]]).all()  # " w17" has none


def test_it_is_a_plain_regression_of_the_study(study: Path) -> None:
    """The slow twin: everything in memory, by statsmodels."""
    evidence = evidence_of(study, "error_norm")
    with session(evidence.settings) as workers:
        run(evidence, workers)
    where, other = evidence.stores["a"], evidence.stores["b"]
    learned = np.flatnonzero(where.population.body & np.isin(where.population.split, (FIT, GATE)))
    varying = [TERMS.index(term) for term in ("length", "log_frequency", "log_position")]
    x, y = (
        token_features(where.reader, where.population).of(learned)[:, varying],
        evidence.need_columns(1, "a")["error_norm"][learned].astype(float),
    )
    theirs = sm.OLS(y, sm.add_constant(x)).fit()
    tested = evidence.test_rows("b")
    features = token_features(other.reader, other.population).of(tested)[:, varying]
    need = evidence.need_columns(1, "b")["error_norm"][tested].astype(float)
    error = np.sum((need - theirs.predict(sm.add_constant(features))) ** 2)
    rows = evidence.study.table("regression").to_pylist()
    (row,) = [row for row in rows if (row["store"], row["layer"]) == ("b", 1)]
    assert row["r2_fit"] == pytest.approx(theirs.rsquared, rel=SAME)
    assert row["r2_test"] == pytest.approx(1 - error / np.sum((need - y.mean()) ** 2), rel=1e-6)
    assert row["n_tokens"] == tested.size


def test_documents_without_a_need_may_be_others_at_each_layer(study: Path) -> None:
    evidence = evidence_of(study, "error_norm")
    for (name, store), layer in itertools.product(evidence.stores.items(), evidence.layers):
        gone = np.isin(store.population.group % 7, (layer, layer + 1, 5 * layer))
        need = evidence.need_columns(layer, name)["error_norm"]
        table = pa.table({"holed": np.where(gone, np.float32("nan"), need)})
        evidence.study.write_need(layer, name, table, step="holed")
    evidence = evidence_of(study, "holed")
    with session(evidence.settings) as workers:
        run(evidence, workers)
    rows = evidence.study.table("regression").to_pylist()
    for row in rows:
        tested = evidence.test_rows(row["store"])
        tested = tested[np.isfinite(evidence.need_columns(row["layer"], row["store"])["holed"][tested])]
        assert row["n_tokens"] == tested.size
        assert row["n_groups"] == evidence.stores[row["store"]].population.n_groups(tested)
        assert row["r2_sim_lo"] < row["r2_lo"] < row["r2_test"] < row["r2_hi"] < row["r2_sim_hi"]
    assert rows[0]["n_groups"] != rows[1]["n_groups"]
