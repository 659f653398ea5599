"""Gates see what is there and nothing else: numpy alone applies them, noise gets no verdict."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import zarr
from helpers_gates import NESTED, RULES, families, gates_of, simulate
from helpers_planted import KINDS, planted_store
from helpers_store import synthetic, write_all
from nearline.analyze import AnalyzeSettings, FitSettings, analyze, fit, logistic
from nearline.analyze.analyze_settings import parse
from nearline.analyze.compute import session
from nearline.analyze.gate_arrays import gate_arrays
from nearline.analyze.gate_features import FEATURES, choose_features, random_scores, type_means
from nearline.analyze.gate_fit import Rules
from nearline.analyze.gate_layer import GateTask, LayerGates, LayerItem, layer_gates
from nearline.analyze.gate_tables import compare, gate_table, nested_verdict
from nearline.analyze.gates import gate_folds, label_row, layer_item, shared_task
from nearline.analyze.gathering import gather
from nearline.analyze.intervals import ratios, stack
from nearline.store import Reader, Study, UsageError
from scipy.special import expit, ndtr
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss, roc_auc_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

NEEDS = ("error_norm", "loss")
SETTINGS = AnalyzeSettings(only=("gates",), need=NEEDS, folds=3, c_grid=(1e-3, 1e-1, 1.0))
FITTED = FitSettings(folds=3, alphas="1e-4,1e-2", examples=0)  # type: ignore[arg-type]
KEY = ("layer", "need", "features", "size")
# float32 products of a few dozen terms, and weights kept as float32.
P_TOLERANCE = 1e-5
# As scikit-learn's own solver and ours agree; it standardises each fold by its own rows.
AUC_TOLERANCE, LOSS_TOLERANCE = 1e-4, 2e-3
FALSE_RATE = 0.05


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    """Two planted stores, layers of pure token and of a mixture; `loss` is missing without a target."""
    folder = tmp_path_factory.mktemp("gates")
    shares = (KINDS["token"], KINDS["mixture"])
    stores = {
        n: planted_store(folder / n, shares, seed=s, n_tokens=3000, norm_kind="rmsnorm")
        for s, n in enumerate("ab")
    }
    made = fit(folder / "study", stores, FITTED)
    rng = np.random.default_rng(0)
    for name, path in stores.items():
        missing = np.asarray(Reader.open(path).column("target_id")) < 0
        for layer in range(len(shares)):
            error = made.need(layer, name)["error_norm"].to_numpy()
            loss = (0.1 * error + 0.2 * rng.standard_normal(error.size) - 0.2).astype(np.float32)
            loss[missing] = np.nan
            made.write_need(layer, name, pa.table({"loss": loss}), step="measure")
    return analyze(folder / "study", SETTINGS)


@pytest.fixture(scope="module")
def work(study: Study) -> tuple[GateTask, LayerItem]:
    """What a worker gets for layer 1."""
    evidence = gather(study, SETTINGS)
    with session(SETTINGS) as workers:
        task, _ = shared_task(evidence, workers)
    return task, layer_item(evidence, task, 1)


@pytest.fixture(scope="module")
def fitted(work: tuple[GateTask, LayerItem]) -> LayerGates:
    return layer_gates(*work)


def table(study: Study, name: str, **where: Any) -> list[dict[str, Any]]:
    rows = study.table(name).to_pylist()
    return [row for row in rows if all(row[key] == value for key, value in where.items())]


def raw_pieces(store: Path, layer: int, rows: np.ndarray, study: Path, need: int) -> dict[str, np.ndarray]:
    """Features of rows as a teammate computes them with numpy and zarr alone, in float64."""
    arrays = zarr.open_group(store / "activations.zarr", mode="r")
    gates = zarr.open_group(study / "gates.zarr", mode="r")
    context = zarr.open_group(study / "context.zarr", mode="r")
    get = lambda group, name: np.asarray(group[name])  # noqa: E731
    residual = get(arrays, "residual")[layer, rows].astype(np.float64)
    embedding = get(arrays, "embedding")[rows].astype(np.float64)
    gamma = get(arrays, "norm_weight")[layer].astype(np.float64)
    position = get(arrays, "position")[rows]
    of_position = get(arrays, "position_embedding")[position]
    token = embedding - of_position
    scale = lambda v: 1 / np.sqrt((v**2).mean(axis=1, keepdims=True) + 1e-5)  # noqa: E731
    s = scale(residual)
    predicted = token @ get(context, "weight")[layer].T + get(context, "bias")[layer]
    k = gamma * (residual - embedding) * s
    types = get(gates, "type")

    def of_type(name: str, ids: np.ndarray) -> np.ndarray:
        place = np.minimum(np.searchsorted(types, ids), types.size - 1)
        values, grand = get(gates, name)[layer, need], get(gates, f"{name}_grand")[layer, need]
        return np.where(types[place] == ids, values[place], grand)[:, None]

    x = gamma * residual * s
    return {
        "x": x,
        "token": gamma * token * scale(token),
        "t": gamma * token * s,
        "k": k,
        "p": gamma * of_position * s,
        "token_full": gamma * token * s + predicted,
        "context_only": k - predicted,
        "position": np.log1p(position)[:, None],
        "norm": np.linalg.norm(x, axis=1)[:, None],
        "output_norm": np.linalg.norm(get(arrays, "mlp_output")[layer, rows].astype(np.float64), axis=1)[
            :, None
        ],
        "token_type": of_type("token_type", get(arrays, "token_id")[rows]),
        "target_type": of_type("target_type", get(arrays, "target_id")[rows]),
    }


@pytest.mark.parametrize("store", ["a", "b"])
def test_numpy_and_zarr_alone_apply_the_gates(study: Study, store: str) -> None:
    gates = zarr.open_group(study.path / "gates.zarr", mode="r")
    described: Any = gates.attrs["described"]
    names: Any = gates.attrs["gates"]
    assert set(names) == {
        *(f"{name}@linear" for name in FEATURES),
        *(f"input@{size}" for size in ("paper", "pca2", "pca6", "pca12")),
    }
    columns = Reader.open(study.path.parent / store)
    for layer in (0, 1):
        for at, need in enumerate(NEEDS):
            routing = study.routing(layer, need, store)
            of_split = np.asarray(columns.column("split"))[routing["token"].to_numpy()]
            routing = routing.filter(pa.array(of_split == 2))
            rows = routing["token"].to_numpy()
            pieces = raw_pieces(study.path.parent / store, layer, rows, study.path, at)
            pieces["random"] = random_scores(rows, 0)[:, None]
            pieces["oracle"] = -np.asarray(
                study.need(layer, store, step="measure" if need == "loss" else None)[need]
            )[rows, None]
            for index, name in enumerate(names):
                raw = np.concatenate([pieces[piece] for piece in described[name]["pieces"]], axis=1)
                weight = np.asarray(gates["weight"])[layer, at, index]
                assert raw.shape[1] == described[name]["n_features"]
                assert not weight[raw.shape[1] :].any()
                p = expit(raw @ weight[: raw.shape[1]] + np.asarray(gates["bias"])[layer, at, index])
                np.testing.assert_allclose(
                    routing[name], p, atol=P_TOLERANCE, err_msg=f"{layer} {need} {name}"
                )


def test_the_tables_say_what_the_routing_says(study: Study) -> None:
    population = gather(study, SETTINGS)
    for row in table(study, "gates", need="loss", size="linear"):
        routing = study.routing(row["layer"], "loss", row["store"])
        rows = population.test_rows(row["store"])
        of_test = pa.array(np.isin(routing["token"].to_numpy(), rows))
        p = routing.filter(of_test)[f"{row['features']}@linear"].to_numpy()
        need = population.need_columns(row["layer"], row["store"], ("loss",))["loss"][rows]
        (label,) = table(study, "gate_labels", store=row["store"], layer=row["layer"], need="loss")
        known = np.isfinite(need)
        p, need, easy = p[known], need[known], need[known] <= label["cut"]
        assert row["n_tokens"] == known.sum() < rows.size
        assert row["base_rate"] == pytest.approx(easy.mean())
        assert row["share"] == pytest.approx(np.mean(p > 0.5))
        assert row["brier"] == pytest.approx(np.mean((p - easy) ** 2), rel=1e-6)
        assert row["auc"] == pytest.approx(roc_auc_score(easy, p), abs=1e-9)
        assert row["available_at_routing"] == (
            row["features"] not in ("target_type", "output_norm", "oracle")
        )


def test_gates_are_those_of_a_loop_over_scikit_learn(
    work: tuple[GateTask, LayerItem], fitted: LayerGates, study: Study
) -> None:
    """The whole of it: standardised by fold, C by folds of groups, refitted, scored on test rows."""
    task, item = work
    rows, test = task.gate.rows, task.tests["a"].rows
    store, need = study.path.parent / "a", item.gate.need["error_norm"]
    easy = need <= item.cuts["a"]["error_norm"]
    held = item.tests["a"].need["error_norm"] <= item.cuts["a"]["error_norm"]
    at_gate, at_test = (raw_pieces(store, 1, some, study.path, 0) for some in (rows, test))
    for name in ("input", "token_type", "context_only", "token_all+context_only"):
        (index,) = [
            i for i, g in enumerate(fitted.gates) if g.need == "error_norm" and g.name == f"{name}@linear"
        ]
        gate = fitted.gates[index]
        x, unseen = (
            np.concatenate([pieces[piece] for piece in gate.pieces], axis=1) for pieces in (at_gate, at_test)
        )
        losses = []
        for c in SETTINGS.c_grid:
            p = np.empty(len(x))
            for fold in range(SETTINGS.folds):
                model = make_pipeline(StandardScaler(), LogisticRegression(C=c, tol=1e-8, max_iter=5000))
                train = task.fold != fold
                p[~train] = model.fit(x[train], easy[train]).predict_proba(x[~train])[:, 1]
            losses.append(log_loss(easy, p))
            if c == gate.C:
                assert np.abs(p - gate.held_out).max() < 0.02
        np.testing.assert_allclose([loss for _, loss in gate.grid], losses, rtol=LOSS_TOLERANCE)
        assert gate.C == SETTINGS.c_grid[int(np.argmin(losses))]
        model = make_pipeline(StandardScaler(), LogisticRegression(C=gate.C, tol=1e-8, max_iter=5000))
        twin = roc_auc_score(held, model.fit(x, easy).decision_function(unseen))
        assert fitted.worth["a"][index].row["auc"] == pytest.approx(twin, abs=AUC_TOLERANCE)


def test_spilled_rows_and_threads_change_no_byte(
    work: tuple[GateTask, LayerItem], fitted: LayerGates
) -> None:
    """Sets of one wide piece with all sizes, of two wide ones and a narrow one, and of none."""
    task, item = work
    few = replace(task, features=("input", "norm", "token_all+context_only"))
    spilled = layer_gates(replace(few, budget_bytes=0), item)
    again = [gate for gate in fitted.gates if gate.features in few.features]
    for one, two in zip(again, spilled.gates, strict=True):
        assert one.weight.tobytes() == two.weight.tobytes()
        assert one.held_out.tobytes() == two.held_out.tobytes()
        assert (one.bias, one.C, one.threshold) == (two.bias, two.C, two.threshold)
    kept = [fitted.gates.index(gate) for gate in again]
    for store in fitted.p:  # products of other columns at once may round otherwise
        np.testing.assert_allclose(fitted.p[store][:, kept], spilled.p[store], atol=P_TOLERANCE)


def test_token_types_know_the_needs_of_fit_rows_only(
    work: tuple[GateTask, LayerItem], fitted: LayerGates
) -> None:
    """A need of gate or test rows that were in a feature would be the label itself."""
    task, item = work
    rng = np.random.default_rng(0)

    def shuffled(needs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {need: rng.permutation(values) for need, values in needs.items()}

    other = replace(
        item,
        gate=replace(item.gate, need=shuffled(item.gate.need)),
        tests={name: replace(one, need=shuffled(one.need)) for name, one in item.tests.items()},
    )
    few = replace(task, features=("token_type", "target_type", "token_all"))
    found = layer_gates(few, other)
    for name, means in fitted.types.items():
        assert means.mean.tobytes() == found.types[name].mean.tobytes()
    # And with labels that nothing predicts, nothing is predicted.
    for worths in found.worth.values():
        for one in worths:
            low, high = (one.area.estimate[0] + side * 3 * one.area.standard_error[0] for side in (-1, 1))
            assert low <= 0.5 <= high


def test_shrunken_means_of_token_types() -> None:
    rng = np.random.default_rng(1)
    ids = rng.integers(0, 40, 4000)
    effect = rng.standard_normal(40)
    need = effect[ids] + 2.0 * rng.standard_normal(4000)
    found = type_means(ids, need)
    grand = need.mean()
    for token in (0, 17, 39):
        n, mean = np.sum(ids == token), need[ids == token].mean()
        # κ = σ²/τ² = 4 / 1, from 40 types: τ² is known to about a quarter.
        expected = grand + n / (n + 4.0 / effect.var()) * (mean - grand)
        assert found.of(np.array([token]))[0] == pytest.approx(expected, abs=0.05)
    assert found.of(np.array([99, -1, 40])).tolist() == [np.float32(grand)] * 3
    unrelated = type_means(ids, rng.standard_normal(4000))
    assert np.abs(unrelated.mean - unrelated.grand).max() < 0.1
    exact = type_means(ids, effect[ids])
    np.testing.assert_allclose(exact.of(np.arange(40)), effect, rtol=1e-5)
    missing = type_means(ids, np.where(ids < 20, np.nan, need).astype(np.float32))
    assert missing.types.min() == 20
    empty = type_means(ids[:0], need[:0])
    assert empty.of(np.array([3])).tolist() == [0.0]


def test_a_gate_beats_random_routing_at_the_same_share_and_not_on_shuffled_needs() -> None:
    features = ("input", "random")
    for shuffled in (False, True):
        better = []
        for seed in range(4):
            found = families(simulate(seed, 0.4, 0.4, shuffled=shuffled), features)
            curves = [found[f"{name}@linear"].worths[0].curve for name in features]
            # Needs here have mean 0: share of all need makes no sense, the order of the rows does.
            assert np.isnan(curves[0]).all() or curves[0][-1] == pytest.approx(1.0)
            area = found["input@linear"].worths[0].area
            better.append(area.estimate[0] - 0.5 > 3 * area.standard_error[0])
        assert all(better) if not shuffled else not any(better)


def test_a_gate_carries_less_need_than_random_at_every_share(study: Study) -> None:
    for store in ("a", "b"):
        curves = {
            name: {
                row["share"]: row["need_share"]
                for row in table(
                    study,
                    "gate_curves",
                    store=store,
                    layer=1,
                    need="error_norm",
                    features=name,
                    size="linear",
                )
            }
            for name in ("input", "random", "oracle")
        }
        assert len(curves["input"]) == 21
        assert curves["input"][0.0] == 0.0
        assert curves["input"][1.0] == pytest.approx(1.0)
        for share in (0.2, 0.5, 0.8):
            assert curves["oracle"][share] < curves["input"][share] < curves["random"][share] - 0.02
            assert curves["random"][share] == pytest.approx(share, abs=0.03)


def test_area_of_a_known_gate_is_the_one_of_bayes() -> None:
    """Need normal given a normal score: the area of that score lies in the interval of the fitted gate."""
    rows = simulate(3, 0.0, 0.5, groups=60)
    context = rows.pieces["x"]
    rng = np.random.default_rng(0)
    direction = rng.standard_normal(context.shape[1])
    score = context @ direction
    score = ((score - score.mean()) / score.std()).astype(np.float64)
    need = (-score + rng.standard_normal(score.size)).astype(np.float32)
    found = families(replace(rows, need=need), ("input",))["input@linear"]
    (row,) = gate_table([found], 0)
    at = rows.split == 2
    best = roc_auc_score(need[at] <= np.median(need[rows.split == 1]), ndtr(score[at]))
    assert row["auc_sim_lo"] < best < row["auc_sim_hi"]
    (gate,) = gates_of(replace(rows, need=need), ("input",))[:1]
    assert gate.weight @ direction / np.linalg.norm(gate.weight) / np.linalg.norm(direction) > 0.99


@pytest.mark.sampled
def test_what_adds_is_told_apart(request: pytest.FixtureRequest) -> None:
    """Pure token: the context adds nothing, though it contains the token. Pure context: the token adds
    nothing. Noise: nothing can be told. At most one verdict in twenty is false.
    """
    n_sets = 200 if request.config.getoption("--run-long") else 3
    truths = {
        "token": ((1.0, 0.0), {"context adds"}),
        "half token": ((0.5, 0.0), {"context adds"}),
        "context": ((0.0, 1.0), {"token adds"}),
        "half context": ((0.0, 0.5), {"token adds"}),
        "noise": ((0.0, 0.0), {"context adds", "token adds"}),
    }
    for name, ((token, context), untrue) in truths.items():
        counted: Counter[str] = Counter()
        for seed in range(n_sets):
            found = families(simulate(seed, token, context, coded=0.5), NESTED)
            larger = found["token_all+context_only@linear"]
            for claim, smaller in (("context adds", "token_all"), ("token adds", "context_only")):
                (row,) = compare(larger, found[f"{smaller}@linear"], seed, margin=0.01)
                counted[f"{claim}: {row['verdict']}"] += 1
        print(f"{name}, {n_sets} data sets: {dict(counted)}")
        for claim in ("context adds", "token adds"):
            if claim in untrue:
                assert counted[f"{claim}: supported"] <= max(1, FALSE_RATE * n_sets)
            else:
                assert counted[f"{claim}: supported"] >= 0.9 * n_sets
            if name == "noise":
                # In one of twenty data sets the larger gate itself seems to see something.
                assert counted[f"{claim}: cannot tell"] >= n_sets - max(1, FALSE_RATE * n_sets)


@pytest.mark.sampled
def test_a_token_that_only_the_context_knows_is_no_context(request: pytest.FixtureRequest) -> None:
    """The need is a function of the token that no linear map of its embedding finds, and most types are seen
    once or never: the context tells such tokens apart by its copy of them. The plain difference credits it
    with that in nearly every data set; among tokens of one type it adds nothing.
    """
    n_sets = 200 if request.config.getoption("--run-long") else 2
    counted: Counter[str] = Counter()
    for seed in range(n_sets):
        for name, context in (("token", 0.0), ("both", 0.3)):
            rows = simulate(seed, 0.6, context, coded=3.0, n_types=3000, by_code=True)
            found = families(rows, NESTED)
            larger, token = found["token_all+context_only@linear"], found["token_all@linear"]
            (row,) = compare(larger, token, seed, margin=0.01)
            counted[f"{name}, context adds: {row['verdict']}"] += 1
            counted[f"{name}, by the plain difference"] += row["sim_lo"] > 0 and row["difference"] >= 0.01
            (row,) = compare(larger, found["context_only@linear"], seed, 0.01, token)
            counted[f"{name}, token adds: {row['verdict']}"] += 1
            counted[f"{name}, token adds nothing by the plain difference"] += row["sim_hi"] < 0.01
    print(f"{n_sets} data sets: {dict(counted)}")
    assert counted["token, by the plain difference"] >= 0.9 * n_sets
    assert counted["token, context adds: supported"] <= max(1, FALSE_RATE * n_sets)
    # Among tokens of one type there are few pairs: half of such effects are found, and no false ones.
    assert counted["both, context adds: supported"] >= 0.5 * n_sets
    for name in ("token", "both"):
        assert counted[f"{name}, token adds: not supported"] <= FALSE_RATE * n_sets


def test_verdicts_of_nested_gates() -> None:
    assert nested_verdict(0.6, 0.2, 0.1, 0.3, 30, 0.01, within_low=0.02) == "supported"
    assert nested_verdict(0.6, 0.2, 0.1, 0.3, 30, 0.01, within_low=-0.02) == "cannot tell"
    assert nested_verdict(0.6, 0.004, 0.001, 0.008, 30, 0.01, copied=True) == "cannot tell"
    assert nested_verdict(0.6, 0.2, 0.1, 0.3, 30, 0.01, within_low=float("nan")) == "cannot tell"
    assert nested_verdict(0.6, 0.2, 0.1, 0.3, 30, 0.01) == "supported"
    assert nested_verdict(0.5, 0.2, 0.1, 0.3, 30, 0.01) == "cannot tell"
    assert nested_verdict(float("nan"), 0.2, 0.1, 0.3, 30, 0.01) == "cannot tell"
    assert nested_verdict(0.6, 0.004, 0.001, 0.008, 30, 0.01) == "not supported"
    assert nested_verdict(0.6, 0.008, 0.001, 0.02, 30, 0.01) == "cannot tell"
    assert nested_verdict(0.6, 0.03, -0.01, 0.07, 30, 0.01) == "cannot tell"
    assert nested_verdict(0.6, 0.2, 0.1, 0.3, 19, 0.01) == "too few documents"


def test_thresholds_are_chosen_on_held_out_gate_rows() -> None:
    rows = simulate(0, 0.4, 0.4)
    rows = replace(rows, need=np.exp(rows.need))
    easy = gates_of(rows, ("input",))[0]
    assert easy.threshold == 0.5
    by_share = gates_of(rows, ("input",), replace(RULES, target_share=0.3))[0]
    assert np.mean(by_share.held_out > by_share.threshold) == pytest.approx(0.3, abs=0.01)
    by_cost = gates_of(rows, ("input",), replace(RULES, target_cost=0.1))[0]
    need = rows.need[rows.split == 1]
    carried = need[by_cost.held_out > by_cost.threshold].sum() / need.sum()
    assert 0.09 < carried <= 0.1
    worth = families(rows, ("input",), replace(RULES, target_share=0.3))["input@linear"].worths[0]
    assert worth.row["share"] == pytest.approx(0.3, abs=0.06)


def test_one_c_is_enough_and_the_paper_size_needs_none_of_the_grid() -> None:
    linear, paper = gates_of(simulate(0, 0.4, 0.4), ("input",), Rules((1e-3,)))[:2]
    assert (linear.size, linear.C, paper.size, paper.C) == ("linear", 1e-3, "paper", 1.0)
    assert [c for c, _ in linear.grid] == [1e-3]


@pytest.mark.parametrize("kind", ["constant", "all missing", "one class"])
def test_a_need_that_tells_nothing_gives_no_gate_and_no_verdict(kind: str) -> None:
    rows = simulate(0, 0.4, 0.4)
    if kind == "one class":  # the same need all over the gate rows, another one in test
        need = np.where(rows.split == 1, np.float32(0.5), rows.need).astype(np.float32)
    else:
        need = np.full_like(rows.need, np.nan if kind == "all missing" else 0.25)
    changed = replace(rows, need=need)
    for gate in gates_of(changed, ("input", *NESTED)):
        assert np.isnan(gate.held_out).all()
    if kind == "all missing":
        return  # `layer_gates` scores the rows whose need is known: none
    found = families(changed, NESTED)
    for family in found.values():
        (row,) = gate_table([family], 0)
        assert np.isnan(row["auc"])
        assert row["verdict"] == "cannot tell"
    (row,) = compare(found["token_all+context_only@linear"], found["token_all@linear"], 0, 0.01)
    assert row["verdict"] == "cannot tell"


def test_a_need_that_is_missing_everywhere_goes_through(work: tuple[GateTask, LayerItem]) -> None:
    task, item = work
    few = replace(task, features=("input", "token_type", "oracle"))

    def emptied(needs: Any) -> Any:
        return replace(needs, need=dict(needs.need) | {"loss": np.full_like(needs.need["loss"], np.nan)})

    empty = replace(
        item,
        fit=emptied(item.fit),
        gate=emptied(item.gate),
        tests={n: emptied(t) for n, t in item.tests.items()},
    )
    found = layer_gates(few, empty)
    for index, gate in enumerate(found.gates):
        row = found.worth["b"][index].row
        assert np.isnan(row["auc"]) == (gate.need == "loss")
        assert (row["n_tokens"] == 0) == (gate.need == "loss")


def test_families_of_other_groups_keep_each_items_own_spread() -> None:
    rng = np.random.default_rng(0)
    parts = [ratios(rng.random((n, 1)), np.ones((n, 1))) for n in (30, 40)]
    joined = stack([*parts, ratios(np.zeros((0, 1)), np.zeros((0, 1)))])
    for index, part in enumerate(parts):
        assert joined.standard_error[index] == pytest.approx(part.standard_error[0])
        assert joined.n_effective[index] == part.n_effective[0]
    assert np.isnan(joined.standard_error[2])


def test_names_of_features_are_checked() -> None:
    assert choose_features((), has_positions=True) == tuple(FEATURES)
    assert "position_part" not in choose_features((), has_positions=False)
    assert choose_features(("oracle", "input"), has_positions=False) == ("input", "oracle")
    with pytest.raises(UsageError, match="features=inputs: unknown; choose from input, token"):
        choose_features(("inputs",), has_positions=True)
    with pytest.raises(UsageError, match="no position embedding"):
        choose_features(("position_part",), has_positions=False)


def test_models_without_positions_have_gates_too(tmp_path: Path) -> None:
    path = write_all_of(tmp_path / "s", synthetic(n_layers=1, d=8, n_tokens=1600, with_positions=False))
    study = fit(tmp_path / "study", [path], FITTED)
    settings = AnalyzeSettings(only=("gates",), folds=3, c_grid=(1e-2,))
    found = {row["features"] for row in table(analyze(tmp_path / "study", settings), "gates")}
    assert found == set(FEATURES) - {"position_part"}
    before = (study.path / "tables/gates.parquet").read_bytes()
    with pytest.raises(UsageError, match="position_part"):
        analyze(tmp_path / "study", settings.model_copy(update={"features": ("position_part",)}))
    assert (study.path / "tables/gates.parquet").read_bytes() == before


def write_all_of(path: Path, data: Any) -> Path:
    write_all(path, data)
    return path


def test_folds_are_of_groups_and_too_few_are_refused(study: Study) -> None:
    evidence = gather(study, SETTINGS)
    fold = gate_folds(evidence.fitted, SETTINGS)
    population = evidence.fitted.population
    groups = population.group[population.rows(1)]
    assert set(fold.tolist()) == {0, 1, 2}
    for group in np.unique(groups):
        assert np.unique(fold[groups == group]).size == 1
    with pytest.raises(UsageError, match="too few for the 100 folds of gates"):
        gate_folds(evidence.fitted, SETTINGS.model_copy(update={"folds": 100}))
    leaked = replace(population, group=np.where(population.split == 2, groups[0], population.group))
    with pytest.raises(UsageError, match="is in gate and in another split"):
        gate_folds(replace(evidence.fitted, population=leaked), SETTINGS)


def test_two_targets_of_one_threshold_are_refused() -> None:
    for one in ({"target_share": 0.5}, {"target_cost": 0.1}):
        parse(one)
    with pytest.raises(UsageError, match=r"target_cost=0.1: .* so does target_share: leave one out"):
        parse({"target_share": 0.5, "target_cost": 0.1})


def test_solves_that_stopped_short_are_named_and_kept_as_such(
    work: tuple[GateTask, LayerItem], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step is not enough for a gate on many features; a gate for each need is named apart."""
    task, item = work
    few = replace(task, features=("input", "random"))
    monkeypatch.setattr(logistic, "MAX_STEPS", 1)
    found = layer_gates(few, item)
    assert {f"input@linear for {need}" for need in NEEDS} <= set(found.unfinished)
    arrays, attrs = gate_arrays([(1, found.gates, found.types)], few)
    (dims, converged), at = arrays["converged"], attrs["gates"].index("input@linear")
    assert dims == ("layer", "need", "gate")
    assert not converged[0, :, at].any()
    assert converged.sum() == len(found.gates) - len(found.unfinished)


def test_labels_by_quantile_and_by_the_rule_of_the_paper() -> None:
    need, test = np.arange(100, dtype=np.float32) / 100, np.array([0.1, 0.3, 0.7, 2.0, np.nan], np.float32)
    row = label_row(need, test, 0.5)
    assert (row["rule"], row["share_gate"], row["share_test"]) == ("quantile 0.5", 0.5, 0.5)
    assert (row["share_below_half"], row["share_below_one"]) == (0.5, 0.75)
    assert label_row(need, test, "paper")["rule"] == "paper: quantile 0.25"
    assert label_row(need, test, "paper")["share_gate"] == 0.25
    assert label_row(need - 0.3, test, "paper") == label_row(need - 0.3, test, 0.5) | {
        "rule": "paper: quantile 0.5"
    }
    assert np.isnan(label_row(need[:0], test[:0], 0.5)["share_test"])


def test_random_scores_are_uniform_and_belong_to_rows() -> None:
    rows = np.arange(20_000)
    scores = random_scores(rows, 7)
    assert scores.min() >= 0
    assert scores.max() < 1
    assert np.abs(np.histogram(scores, 10)[0] - 2000).max() < 200
    assert np.abs(np.corrcoef(scores[:-1], scores[1:])[0, 1]) < 0.03
    np.testing.assert_array_equal(random_scores(rows[::3], 7), scores[::3])
    assert np.abs(np.corrcoef(random_scores(rows, 8), scores)[0, 1]) < 0.03
