"""Norms, contributions and needs against their definitions in float64; summaries against plain numpy."""

import itertools

import numpy as np
import pytest
from nearline.analyze.moments import from_rows
from nearline.analyze.needs import NEEDS, needs_by_fold, row_needs
from nearline.analyze.norms import Contribution, Norm, apply_norm, parse_kind
from nearline.analyze.population import Population
from nearline.analyze.ridge import Surrogate, solve, spectrum
from nearline.analyze.summaries import histogram_rows, need_rows, unexplained
from nearline.store import UsageError

# float32 rows against float64 definitions: sums of a few hundred squares, then a root.
ROUNDING = 2e-6
N, D = 700, 48


def drawn(seed: int = 0, n: int = N, d: int = D) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((n, d)) * 3 + 1).astype(np.float32)


def affine(seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return (1 + rng.standard_normal(D) * 0.3).astype(np.float32), rng.standard_normal(D).astype(np.float32)


def plain_norm(rows: np.ndarray, norm: Norm) -> np.ndarray:
    x = rows.astype(np.float64)
    if norm.kind == "layernorm":
        x = (x - x.mean(axis=1, keepdims=True)) / np.sqrt(x.var(axis=1, keepdims=True) + norm.epsilon)
    if norm.kind == "rmsnorm":
        x = x / np.sqrt((x**2).mean(axis=1, keepdims=True) + norm.epsilon)
    x = x * (1.0 if norm.weight is None else norm.weight)
    return x + (0.0 if norm.bias is None else norm.bias)


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm", "none"])
@pytest.mark.parametrize("with_affine", [True, False])
@pytest.mark.parametrize("n", [1, N, 6000])
def test_norms_are_their_definition(kind: str, with_affine: bool, n: int) -> None:
    weight, bias = affine() if with_affine else (None, None)
    norm = Norm(parse_kind(kind), weight, bias, 1e-5)
    rows = drawn(n=n)
    before = rows.copy()
    found = apply_norm(rows, norm)
    np.testing.assert_allclose(found, plain_norm(rows, norm), atol=1e-5)
    np.testing.assert_array_equal(rows, before)
    apply_norm(rows, norm, out=rows)
    np.testing.assert_array_equal(rows, found)


def test_an_unknown_norm_is_refused() -> None:
    with pytest.raises(UsageError, match="layernorm, rmsnorm, none"):
        parse_kind("batchnorm")


@pytest.mark.parametrize(
    "contribution",
    [Contribution(Norm("none"), 0.5), Contribution(Norm("rmsnorm", affine()[0], None, 1e-6), 2.0)],
)
def test_needs_are_their_definition(contribution: Contribution) -> None:
    x, y, residual = drawn(1), drawn(2), drawn(3)
    surrogate = solve(spectrum(from_rows(x, y)), 1e-2)
    mean_c = contribution(y).astype(np.float64).mean(axis=0)
    norm = np.linalg.norm(residual, axis=1)
    found = row_needs(x, y, norm, surrogate, contribution, None if contribution.is_scaling else mean_c)
    wide = y.astype(np.float64)
    predicted = x.astype(np.float64) @ surrogate.weight.astype(np.float64).T + surrogate.bias
    error = np.linalg.norm(wide - predicted, axis=1)
    centred = wide - y.astype(np.float64).mean(axis=0)
    spread = (centred**2).sum(axis=1).mean()

    def c(rows: np.ndarray) -> np.ndarray:
        return contribution.multiplier * plain_norm(rows, contribution.post_norm)

    wanted = {
        "error": error / np.sqrt((centred**2).sum(axis=1) + spread),
        "error_raw": error / np.linalg.norm(wide, axis=1),
        "error_norm": error,
        "error_stream": np.linalg.norm(c(wide) - c(predicted), axis=1) / norm,
        "y_norm": np.linalg.norm(wide, axis=1),
        "y_centred_norm": np.linalg.norm(centred, axis=1),
    }
    for name, values in wanted.items():
        assert found[name].dtype == np.float32
        np.testing.assert_allclose(found[name], values, rtol=20 * ROUNDING)
    if not contribution.is_scaling:
        np.testing.assert_allclose(
            found["contribution_centred"], np.linalg.norm(c(wide) - mean_c, axis=1), rtol=20 * ROUNDING
        )


def test_error_is_bounded_where_the_output_vanishes() -> None:
    x, y = drawn(1), drawn(2)
    y[5] = 0.0
    residual = drawn(3)
    residual[6] = 0.0
    surrogate = solve(spectrum(from_rows(x, y)), 1e-2)
    norm = np.linalg.norm(residual, axis=1)
    found = row_needs(x, y, norm, surrogate, Contribution(Norm("none")))
    assert np.isnan(found["error_raw"][5])
    assert np.isnan(found["error_stream"][6])
    assert np.isfinite(found["error"]).all()


def test_each_row_is_scored_by_the_surrogate_of_its_fold() -> None:
    x, y, norm = drawn(1), drawn(2), np.ones(N, np.float32)
    folds = np.random.default_rng(4).integers(-1, 3, N).astype(np.int32)
    surrogates = [constant(value) for value in (0.0, 10.0, 20.0, 30.0)]
    found = needs_by_fold(x, y, norm, folds, surrogates, Contribution(Norm("none")))
    for fold in (-1, 0, 1, 2):
        index = np.flatnonzero(folds == fold)
        alone = row_needs(x[index], y[index], norm[index], surrogates[fold], Contribution(Norm("none")))
        for name, values in alone.items():
            np.testing.assert_array_equal(found[name][index], values)


def constant(value: float) -> Surrogate:
    """Predicts the same everywhere."""
    return Surrogate(
        np.zeros((D, D), np.float32), np.full(D, value, np.float32), np.full(D, value), 1.0, 1.0, 1.0, 1.0
    )


def population(seed: int = 0, n: int = N) -> Population:
    rng = np.random.default_rng(seed)
    ints = {
        name: rng.integers(0, 9, n).astype(np.int32)
        for name in ("document", "sequence", "position", "token_id", "target_id")
    }
    split = rng.integers(0, 3, n).astype(np.uint8)
    body = rng.random(n) < 0.9
    return Population(
        split=split,
        fold=np.full(n, -1, np.int32),
        group=rng.integers(0, 40, n).astype(np.int32),
        special=np.zeros(n, bool),
        body=body,
        sink=~body,
        **ints,
    )


def columns(seed: int = 0, n: int = N) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    found = {name: rng.gamma(2.0, 0.3, n).astype(np.float32) for name in (*NEEDS, "y_centred_norm")}
    found["error_raw"][::7] = np.nan
    return found


def test_summaries_are_plain_statistics_of_the_rows() -> None:
    needs, where = columns(), population()
    rows = list(need_rows(needs, where))
    assert [(r["split"], r["population"], r["need"]) for r in rows[:5]] == [
        *(("fit", "body", need) for need in NEEDS),
        ("fit", "sink", "error"),
    ]
    assert len(rows) == 3 * 2 * len(NEEDS)
    for row in rows:
        member = where.body if row["population"] == "body" else where.sink
        chosen = member & (where.split == ("fit", "gate", "test").index(row["split"]))
        values = needs[row["need"]][chosen].astype(np.float64)
        group = where.group[chosen][np.isfinite(values)]
        values = values[np.isfinite(values)]
        assert row["n_tokens"] == values.size
        assert row["n_groups"] == np.unique(group).size
        assert row["mean"] == pytest.approx(values.mean())
        assert row["mean_lo"] < row["mean"] < row["mean_hi"]
        assert row["sd"] == pytest.approx(values.std())
        assert row["skew"] == pytest.approx(((values - values.mean()) ** 3).mean() / values.std() ** 3)
        assert row["q50"] == pytest.approx(np.median(values))
        assert row["q01"] == pytest.approx(np.quantile(values, 0.01))
        assert row["max"] == values.max()
        assert row["share_below_half"] == pytest.approx((values < 0.5).mean())
        assert 0 <= row["share_below_one_lo"] <= row["share_below_one"] <= row["share_below_one_hi"] <= 1
        top = np.sort(values**2)[::-1][: max(1, round(0.05 * values.size))]
        assert row["top5_share"] == pytest.approx(top.sum() / (values**2).sum())


@pytest.mark.parametrize(("some", "others"), [(0.2, 0.7), (1.5, 2.0)])
def test_bounds_of_shares_rise_with_their_limit(some: float, others: float) -> None:
    """Nearly all below a limit is nearly all below a higher one, where all that is known of that by itself is
    the number of groups; and where nearly nothing lies below a limit, nothing below a lower one."""
    where = population(n=3000)
    values = np.full(3000, some, np.float32)
    values[:: 97 if some < 1 else 1] = others
    if some > 1:
        values[::97] = 0.8
    (row,) = (
        one
        for one in need_rows({"error": values}, where)
        if (one["split"], one["population"], one["need"]) == ("test", "body", "error")
    )
    assert (row["share_below_one"] == 1.0) == (some < 1)
    assert (row["share_below_half"] == 0.0) == (some > 1)
    for end in ("lo", "hi"):
        assert row[f"share_below_half_{end}"] <= row[f"share_below_one_{end}"]
    known = "share_below_half_lo" if some < 1 else "share_below_one_hi"
    assert (row[known] > 0.95) if some < 1 else (row[known] < 0.05)


def test_no_rows_give_a_row_of_nothing() -> None:
    needs, where = columns(n=6), population(n=6)
    rows = list(need_rows({name: values * np.nan for name, values in needs.items()}, where))
    assert all(row["n_tokens"] == 0 and np.isnan(row["mean"]) and np.isnan(row["top5_share"]) for row in rows)


def test_histograms_hold_every_test_row_once() -> None:
    needs, where = columns(), population()
    needs["error"][3] = 40.0
    rows = list(histogram_rows(needs, where, 12))
    for need in NEEDS:
        bins = [row for row in rows if row["need"] == need]
        assert len(bins) == 13
        values = needs[need][where.rows(2)]
        assert sum(row["count"] for row in bins) == np.isfinite(values).sum()
        assert all(left["bin_hi"] == right["bin_lo"] for left, right in itertools.pairwise(bins))
        assert bins[0]["bin_lo"] == 0.0


def test_unexplained_sums_are_those_of_groups() -> None:
    needs, where = columns(), population()
    rows = where.rows(2)
    error, total, present = unexplained(needs, where, rows)
    np.testing.assert_array_equal(np.flatnonzero(present), np.unique(where.group[rows]))
    assert error.sum() == pytest.approx((needs["error_norm"][rows].astype(np.float64) ** 2).sum())
    seven = rows[where.group[rows] == 7]
    assert total[7] == pytest.approx((needs["y_centred_norm"][seven].astype(np.float64) ** 2).sum())
