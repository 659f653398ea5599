"""Gates are the logistic regressions of scikit-learn: all folds and penalties at once, spilled or not."""

import resource
from collections.abc import Generator
from pathlib import Path

import numpy as np
import pytest
from nearline.analyze.gate_rows import BLOCK_ROWS, Columns, gate_rows, in_memory, standardise
from nearline.analyze.held_out import held_out_logits, held_out_loss
from nearline.analyze.logistic import solve
from nearline.analyze.logistic_rows import Labels
from nearline.store import EnvironmentFault
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss, roc_auc_score
from sklearn.model_selection import PredefinedSplit
from sklearn.preprocessing import StandardScaler

GRID = (1e-4, 1e-2, 1.0)
# Of the largest weight. The solver stops at 1e-4 of the logits; a direction that hardly any row has may be
# off by more than the logits are.
WEIGHT_TOLERANCE = 2e-3
LOGIT_TOLERANCE = 3e-4  # spread of the difference of logits, for each unit of their own
AUC_TOLERANCE = 1e-4


def planted(n: int, d: int, strength: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Standardised rows with spreads over a decade and a half, labels of a logistic model, and folds."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, d)) * np.logspace(0, -1.5, d) @ np.linalg.qr(rng.standard_normal((d, d)))[0]
    x = (x - x.mean(axis=0)) / x.std(axis=0)
    score = x @ rng.standard_normal(d)
    noise = rng.logistic(size=n)
    return x.astype(np.float32), strength * score / score.std() + noise > 0.4, rng.integers(0, 4, n)


def labels(y: np.ndarray, fold: np.ndarray, known: np.ndarray | None = None, n_folds: int = 4) -> Labels:
    columns = y.reshape(len(y), -1)
    return Labels(
        columns, np.ones_like(columns) if known is None else known.reshape(columns.shape), fold, n_folds
    )


def theirs(x: np.ndarray, y: np.ndarray, c: float) -> LogisticRegression:
    return LogisticRegression(C=c, tol=1e-9, max_iter=20_000).fit(x.astype(np.float64), y)


@pytest.mark.parametrize(
    ("n", "d", "strength"),
    [(900, 12, 0.7), (2500, 40, 3.0), (60, 90, 1.0), (800, 1, 1.0), (1500, 25, 1e3), (150, 200, 1e3)],
    ids=["weak", "strong", "more features than rows", "one feature", "separable", "separable, wide"],
)
def test_weights_are_those_of_scikit_learn(n: int, d: int, strength: float) -> None:
    x, y, fold = planted(n, d, strength)
    found = solve(in_memory(x), labels(y, fold), GRID)
    assert found.converged.all()
    for part in (0, 3, 4):
        used = fold != part
        for index, c in enumerate(GRID):
            twin = theirs(x[used], y[used], c)
            weight, ref = found.weight[0, part, index], twin.coef_[0]
            assert np.abs(weight - ref).max() < WEIGHT_TOLERANCE * np.abs(ref).max()
            ours, reference = x @ weight + found.intercept[0, part, index], twin.decision_function(x)
            assert np.std(ours - reference) < LOGIT_TOLERANCE * np.std(reference)
            assert abs(np.mean(ours - reference)) < LOGIT_TOLERANCE * max(1.0, np.std(reference))
            assert roc_auc_score(y, ours) == pytest.approx(roc_auc_score(y, reference), abs=AUC_TOLERANCE)


@pytest.mark.parametrize("c", [1e-6, 1e4])
def test_extreme_penalties_converge(c: float) -> None:
    x, y, fold = planted(600, 20, 1e3)
    found = solve(in_memory(x), labels(y, fold), [c])
    reference = theirs(x, y, c).decision_function(x)
    assert found.converged.all()
    # At C = 1e4 the labels are separated by weights of hundreds: only the ranking matters.
    ours = x @ found.weight[0, -1, 0]
    assert np.corrcoef(ours, reference)[0, 1] > 0.9999
    assert roc_auc_score(y, ours) == pytest.approx(roc_auc_score(y, reference), abs=AUC_TOLERANCE)


def test_labels_share_a_pass_and_rows_without_a_label_enter_nothing() -> None:
    x, first, fold = planted(1200, 10, 1.0)
    rng = np.random.default_rng(1)
    second = first ^ (rng.random(1200) < 0.3)
    known = np.stack([np.ones(1200, bool), rng.random(1200) < 0.6], axis=1)
    garbage = np.stack([first, np.where(known[:, 1], second, ~first)], axis=1)
    found = solve(in_memory(x), labels(garbage, fold, known), GRID)
    for index, (y, used) in enumerate([(first, known[:, 0]), (second, known[:, 1])]):
        for c_index, c in enumerate(GRID):
            twin = theirs(x[used & (fold != 2)], y[used & (fold != 2)], c)
            difference = found.weight[index, 2, c_index] - twin.coef_[0]
            assert np.abs(difference).max() < WEIGHT_TOLERANCE * np.abs(twin.coef_).max()


def test_held_out_losses_and_logits_are_those_of_a_loop_over_folds() -> None:
    x, y, fold = planted(1500, 15, 1.0)
    design, problem = in_memory(x), labels(y, fold)
    found = solve(design, problem, GRID)
    losses = held_out_loss(design, problem, found)[0]
    expected = np.empty((len(GRID), len(y)))
    for index, c in enumerate(GRID):
        for train, test in PredefinedSplit(fold).split():
            expected[index, test] = theirs(x[train], y[train], c).decision_function(x[test])
        p = 1.0 / (1.0 + np.exp(-expected[index]))
        assert losses[index] == pytest.approx(log_loss(y, p), rel=1e-5)
    chosen = np.array([int(np.argmin(losses))])
    ours = held_out_logits(design, problem, found, chosen)[:, 0]
    np.testing.assert_allclose(ours, expected[chosen[0]], atol=1e-3 * np.abs(expected).max())


def test_degenerate_problems_have_no_gate_and_do_no_harm() -> None:
    x, y, fold = planted(400, 5, 1.0)
    x[:, 2] = 0.0  # a constant feature, standardised
    constant, one_sided = np.ones_like(y), y & (fold != 1)
    one_sided[fold == 1] = True  # without fold 1 both classes are there, and one label differs
    found = solve(in_memory(x), labels(np.stack([y, constant, one_sided], axis=1), fold), GRID)
    assert found.converged.all()
    assert np.isfinite(found.weight).all()
    assert np.isfinite(found.intercept).all()
    assert not found.weight[1].any()
    # Rounding of the eigenvectors that precondition.
    assert np.abs(found.weight[..., 2]).max() < 1e-7
    alone = solve(in_memory(x), labels(y, fold), GRID)
    np.testing.assert_allclose(found.weight[0], alone.weight[0], atol=1e-5)
    nothing = solve(in_memory(np.zeros((400, 1), np.float32)), labels(y, fold), GRID)
    assert nothing.converged.all()
    rate = y.mean()
    np.testing.assert_allclose(nothing.intercept[0, -1], np.log(rate / (1 - rate)), atol=1e-4)


def test_a_gate_of_known_direction_is_found() -> None:
    rng = np.random.default_rng(5)
    x, direction = rng.standard_normal((20_000, 16)).astype(np.float32), rng.standard_normal(16)
    y = x @ direction / np.linalg.norm(direction) + rng.logistic(size=len(x)) > 0
    found = solve(in_memory(x), labels(y, rng.integers(0, 4, len(x))), [1.0]).weight[0, -1, 0]
    assert found @ direction / np.linalg.norm(found) / np.linalg.norm(direction) > 0.99


@pytest.fixture
def matrices() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    n = 2 * BLOCK_ROWS + 77
    wide = rng.standard_normal((n, 9)).astype(np.float32) * 3 + 5
    wide[:, 4] = 2.5
    return {"wide": wide, "other": rng.standard_normal((n, 4)).astype(np.float32)}


def filled(matrices: dict[str, np.ndarray], budget: int) -> Generator[tuple[Columns, dict]]:
    n = len(matrices["wide"])
    with gate_rows(n, {name: rows.shape[1] for name, rows in matrices.items()}, budget) as made:
        for name, rows in matrices.items():
            for start in range(0, n, 333):  # blocks of a store are no blocks of ours
                made[name].write(start, rows[start : start + 333])
        scalings = {name: standardise(n, matrix) for name, matrix in made.items()}
        yield Columns(n, list(made.values())), scalings


def test_spilled_rows_give_the_same_bytes(
    matrices: dict[str, np.ndarray], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    n = len(matrices["wide"])
    rng = np.random.default_rng(0)
    y, fold = matrices["wide"][:, 0] + rng.standard_normal(n) > 5, rng.integers(0, 4, n)
    solutions = []
    for budget in (2**30, 0):
        for design, scalings in filled(matrices, budget):
            solutions.append((solve(design, labels(y, fold), GRID), scalings))
    (inside, scale), (spilled, scale_spilled) = solutions
    assert inside.weight.tobytes() == spilled.weight.tobytes()
    assert inside.intercept.tobytes() == spilled.intercept.tobytes()
    assert scale["wide"].scale.tobytes() == scale_spilled["wide"].scale.tobytes()
    assert not list(tmp_path.iterdir())


def test_spilled_rows_leave_no_file_behind_when_work_fails(
    matrices: dict[str, np.ndarray], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    rows = filled(matrices, 0)
    next(rows)
    with pytest.raises(ZeroDivisionError):
        rows.throw(ZeroDivisionError())
    assert not list(tmp_path.iterdir())


def test_a_full_scratch_disk_is_said_so(
    matrices: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(EnvironmentFault, match="TMPDIR"):
            next(filled(matrices, 0))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_missing_scratch_folder_is_said_so(
    matrices: dict[str, np.ndarray], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    with pytest.raises(EnvironmentFault, match="TMPDIR"):
        next(filled(matrices, 0))


def test_standardised_features_are_those_of_scikit_learn(matrices: dict[str, np.ndarray]) -> None:
    raw = np.concatenate(list(matrices.values()), axis=1).astype(np.float64)
    expected = StandardScaler().fit(raw)
    for design, scalings in filled(matrices, 2**30):
        rows = np.concatenate([np.concatenate(pieces, axis=1) for _, _, pieces in design.blocks()])
        scaling = [
            np.concatenate([getattr(one, name) for one in scalings.values()]) for name in ("mean", "scale")
        ]
        np.testing.assert_allclose(scaling[0], np.asarray(expected.mean_), rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(scaling[1], np.asarray(expected.scale_), rtol=1e-5)
        np.testing.assert_allclose(rows, np.asarray(expected.transform(raw)), atol=2e-5)
        assert not rows[:, 4].any()


def test_a_large_mean_does_not_hide_a_small_spread() -> None:
    rng = np.random.default_rng(0)
    rows = (1000.0 + 0.5 * rng.standard_normal((3 * BLOCK_ROWS, 3))).astype(np.float32)
    exact = rows.astype(np.float64)
    matrix = in_memory(rows.copy()).matrices[0]
    scaling = standardise(len(rows), matrix)
    np.testing.assert_allclose(scaling.scale, exact.std(axis=0), rtol=1e-5)
    # The mean is kept as float32: half a unit of its last place, in units of the spread.
    expected = (exact - exact.mean(axis=0)) / exact.std(axis=0)
    np.testing.assert_allclose(matrix.read(0, len(rows)), expected, atol=1e-4)
