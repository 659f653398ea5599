"""Costs of interventions: every table equals its slow, obvious twin, says what it cannot know, and refuses
what cannot be compared.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from helpers_costs import Planted, measured, only, rows_of, same
from nearline.analyze.cost_rows import cheapest, layer_costs
from nearline.analyze.cost_tables import COST_SCHEMAS, to_cost_table
from nearline.analyze.costs import cost_tables, write_cost_tables
from nearline.analyze.intervals import MIN_GROUPS
from nearline.analyze.measured import parse_name
from nearline.store import DamageError, Study
from scipy import stats

# Sums of some dozen float64 numbers, in another order.
SAME = 1e-9


def test_a_cost_is_what_a_loop_over_groups_says() -> None:
    planted = Planted(0)
    planted.layers("linear", {3: 0.05})
    rows = planted.rows
    row = only(rows_of(cost_tables(planted.table())["interventions"]), layer=3)

    def cost(kept: list[dict[str, Any]]) -> float:
        return sum(r["nll"] - r["base_nll"] for r in kept) / sum(r["n_tokens"] for r in kept)

    without = np.array([cost(rows[:g] + rows[g + 1 :]) for g in range(len(rows))])
    n = len(rows)
    error = np.sqrt((n - 1) / n * ((without - without.mean()) ** 2).sum())
    weight = np.array([r["n_tokens"] for r in rows], float)
    quantile = stats.t.ppf(0.975, weight.sum() ** 2 / (weight**2).sum() - 1)
    assert row["delta_nats"] == pytest.approx(cost(rows), rel=SAME)
    assert row["delta_lo"] == pytest.approx(cost(rows) - quantile * error, rel=SAME)
    assert row["delta_hi"] == pytest.approx(cost(rows) + quantile * error, rel=SAME)
    assert (row["n_tokens"], row["n_groups"]) == (weight.sum(), n)
    assert row["kl"] == pytest.approx(0.01)


def test_percent_of_perplexity_is_the_change_of_perplexity() -> None:
    planted = Planted(1)
    planted.layers("linear", {0: 0.1, 1: 0.3})
    for row in rows_of(cost_tables(planted.table())["interventions"]):
        assert row["ppl_pct"] == pytest.approx(100 * (row["ppl"] / row["base_ppl"] - 1), rel=SAME)
        for end in ("lo", "hi", "sim_lo", "sim_hi"):
            assert row[f"ppl_{end}"] == pytest.approx(100 * (np.exp(row[f"delta_{end}"]) - 1), rel=SAME)
        assert row["delta_sim_lo"] < row["delta_lo"] < row["delta_nats"]


def test_random_routing_is_the_mean_of_its_draws() -> None:
    planted = Planted(2)
    costs = (0.02, 0.03, 0.07)
    for draw, cost in enumerate(costs):
        planted.add(f"random@0.5#{draw}", [4], cost, share=0.5, draw=draw)
    row = only(rows_of(cost_tables(planted.table())["interventions"]), layer=4)
    assert (row["name"], row["n_draws"]) == ("random@0.5", 3)
    assert row["delta_nats"] == pytest.approx(np.mean(costs))
    assert row["draw_sd"] == pytest.approx(np.std(costs, ddof=1))


def test_the_true_mlp_costs_nothing_at_all() -> None:
    planted = Planted(3)
    planted.add("none", [0], 0.0)
    planted.add("none", [1], 0.0)
    for row in rows_of(cost_tables(planted.table())["interventions"]):
        assert row["delta_nats"] == row["delta_lo"] == row["ppl_pct"] == row["linear_share"] == 0.0
        assert row["verdict"] == "cannot tell"


def test_under_twenty_documents_there_is_no_verdict() -> None:
    for n_groups, verdict in ((MIN_GROUPS - 1, "too few documents"), (MIN_GROUPS, "supported")):
        planted = Planted(4, n_groups=n_groups, spread=0.1)
        planted.layers("linear", {0: 1.0})
        planted.add("linear@all", [0], 2.0)
        found = cost_tables(planted.table())
        assert rows_of(found["interventions"])[0]["verdict"] == verdict
        assert rows_of(found["sinks"])[0]["verdict"] == verdict
        assert np.isfinite(rows_of(found["interventions"])[0]["delta_lo"])


def test_two_documents_one_and_none() -> None:
    for n_groups in (1, 2):
        planted = Planted(5, n_groups=n_groups)
        planted.layers("linear", {0: 0.1, 1: 0.2})
        (row, _) = rows_of(cost_tables(planted.table())["interventions"])
        assert np.isfinite(row["delta_nats"])
        assert np.isfinite(row["delta_lo"]) == (n_groups == 2)
    for table in cost_tables(measured([])).values():
        assert table.num_rows == 0


def test_a_model_that_broke_down_has_no_cost_and_hides_no_other() -> None:
    planted, whole = Planted(6), Planted(6)
    for one in (planted, whole):
        one.layers("linear", {0: 0.1, 1: 0.1})
        one.add("linear", [0, 1], 0.3, chosen="order")
        one.add("linear@all", [0], np.full(30, np.inf) if one is planted else 0.5)
        one.add("linear@all", [1], 0.5)
    found, expected = cost_tables(planted.table()), cost_tables(whole.table())
    assert np.isnan(only(rows_of(found["interventions"]), name="linear@all", layer=0)["delta_nats"])
    assert only(rows_of(found["sinks"]), layer=1)["difference"] == pytest.approx(
        only(rows_of(expected["sinks"]), layer=1)["difference"]
    )
    assert same(found["progressive"], expected["progressive"])


def test_scores_of_different_tokens_are_refused() -> None:
    """As in the paper's GPT-2 small run, where a gate that routes nothing shows −3 %."""
    planted = Planted(7)
    planted.add("linear", [0], 0.1)
    planted.add("gated@input", [0], 0.0, share=0.0)
    planted.rows[-1]["n_tokens"] -= 1
    with pytest.raises(DamageError, match=r"gated@input at layers 0 on \d+ tokens of 30 groups"):
        cost_tables(planted.table())
    del planted.rows[-1]
    with pytest.raises(DamageError, match="of 29 groups"):
        cost_tables(planted.table())


@pytest.fixture(scope="module")
def tables() -> dict[str, pa.Table]:
    """Of `study_like`."""
    return cost_tables(study_like(8).table(), seed=3)


def test_tables_do_not_depend_on_what_was_measured_first(tables: dict[str, pa.Table]) -> None:
    rows = study_like(8).rows
    shuffled = [rows[i] for i in np.random.default_rng(0).permutation(len(rows))]
    first, again = tables, cost_tables(measured(shuffled), 3)
    assert first.keys() == again.keys()
    for name, table in first.items():
        assert same(table, again[name]), name


def study_like(seed: int) -> Planted:
    """A bit of everything, of test and gate rows."""
    planted = Planted(seed)
    for split in ("test", "gate"):
        planted.split = split
        planted.layers("linear", {0: 0.08, 1: 0.02, 2: 0.05})
        planted.layers("linear@all", {0: 0.3, 1: 0.02, 2: 0.05})
        for name in (
            "gated@input:0.5",
            "gated@norm:0.5",
            "token_list@0.5",
            "oracle@error:0.5",
            "gated@input",
        ):
            planted.layers(name, {0: 0.03, 1: 0.01, 2: 0.02}, share=0.5)
        for draw in range(2):
            for layer in range(3):
                planted.add(f"random@0.5#{draw}", [layer], 0.03, share=0.5, draw=draw)
        planted.add("linear", [1, 2], 0.08, chosen="order")
        planted.add("linear", [1, 2, 0], 0.2, chosen="order")
        planted.add("linear", [1, 2], 0.08, chosen="cheapest@2")
        planted.add("linear", [0, 1], 0.05, chosen="paper@2")
        planted.add("linear", "all", 0.2, chosen="all")
    return planted


def test_layers_are_chosen_on_gate_rows() -> None:
    planted = Planted(9, split="gate")
    for layer, cost in enumerate((0.3, 0.1, 0.2)):
        planted.add("linear", [layer], cost)
    planted.split = "test"
    for layer, cost in enumerate((0.1, 0.3, 0.2)):
        planted.add("linear", [layer], cost)
    assert cheapest(layer_costs(planted.table(), "a"), 2) == (1, 2)
    assert cheapest(layer_costs(planted.table(), "a", "test"), 2) == (0, 2)
    assert layer_costs(planted.table(), "b") == {}
    assert cheapest({0: float("nan"), 1: 5.0}, 2) == (1, 0)


def test_what_was_chosen_on_test_rows_gets_no_verdict(tables: dict[str, pa.Table]) -> None:
    for name in ("interventions", "compound"):
        chosen = {row["chosen_on"]: row["verdict"] for row in rows_of(tables[name]) if row["n_layers"] == 2}
        assert chosen["test"] == "chosen on test"
        assert chosen["gate"] != "chosen on test"
    assert not any(row["on_front"] for row in rows_of(tables["pareto"]) if row["chosen"] == "paper@2")


def test_all_layers_are_those_that_were_measured_alone(tables: dict[str, pa.Table]) -> None:
    row = only(rows_of(tables["compound"]), chosen="all")
    assert (row["layers"], row["n_layers"], row["layer"]) == ("0,1,2", 3, None)


def test_flops_saved_go_by_name_layers_and_share(tables: dict[str, pa.Table]) -> None:
    def saved(name: str, layers: tuple[int, ...], share: float) -> tuple[float, float]:
        return share * len(layers), len(name) / 100

    found = cost_tables(measured([row for row in study_like(8).rows if row["kind"] != "gated"]), 3, saved)
    for table in ("interventions", "progressive", "pareto"):
        for row in rows_of(found[table]):
            n_layers = row["layers"].count(",") + 1
            assert row["mlp_flops_saved"] == pytest.approx(row["linear_share"] * n_layers)
            assert row["flops_saved"] == len(row["name"]) / 100
    assert all(np.isnan(row["flops_saved"]) for row in rows_of(tables["pareto"]))


@pytest.mark.parametrize(
    ("name", "features", "need", "size", "share"),
    [
        ("linear", None, None, "linear", None),
        ("linear@all", None, None, "linear", None),
        ("low_rank@16", None, None, "linear", None),
        ("gated@input", "input", None, "linear", None),
        ("gated@input.loss.pca6:0.25", "input", "loss", "pca6", 0.25),
        ("gated@token_all+context_only.pca2", "token_all+context_only", None, "pca2", None),
        ("soft@input.loss", "input", "loss", "linear", None),
        ("random@0.5#3", None, None, "linear", 0.5),
        ("oracle@error:0.5", None, "error", "linear", 0.5),
        ("token_list@0.5", None, None, "linear", 0.5),
        ("token_list@loss:0.5", None, "loss", "linear", 0.5),
    ],
)
def test_names_are_read(name: str, features: str, need: str, size: str, share: float) -> None:
    found = parse_name(name)
    assert (found.features, found.need, found.size, found.share) == (features, need, size, share)


def test_a_row_must_have_the_columns_of_its_table() -> None:
    row = dict.fromkeys(COST_SCHEMAS["loss_histogram"].names)
    assert to_cost_table("loss_histogram", [row]).num_rows == 1
    for wrong in ({**row, "more": 1}, {name: None for name in list(row)[1:]}):
        with pytest.raises(ValueError, match="loss_histogram"):
            to_cost_table("loss_histogram", [wrong])


def study_with_needs(path: Path, planted: Planted, noise: float = 0.3) -> tuple[Study, np.ndarray]:
    """A study whose needs of the test rows are known, and the numbers of these rows."""
    study = Study.create(path)
    group = np.repeat(np.arange(planted.n_groups), planted.lengths)
    group = np.append(np.zeros(50, int), group)  # rows of another split come first
    n = group.size
    split = np.append(np.full(50, "fit"), np.full(n - 50, "test"))
    study.write_rows("a", pa.table({"split": split, "group": group.astype(np.int32)}))
    rng = np.random.default_rng(0)
    for layer in range(2):
        kl = rng.gamma(0.5, 0.1, n)
        loss = kl + noise * rng.standard_t(3, n)
        loss[60] = np.nan
        error = np.sqrt(kl) + rng.random(n)
        needs = {name: (error * (i + 1)).astype(np.float32) for i, name in enumerate(("error", "error_norm"))}
        study.write_need(layer, "a", pa.table(needs))
        losses = {"loss": loss.astype(np.float32), "kl": kl.astype(np.float32)}
        study.write_need(layer, "a", pa.table(losses), step="measure")
    return study, np.arange(50, n)


def test_everything_is_written_to_the_study(tmp_path: Path) -> None:
    planted = Planted(27)
    planted.layers("linear", {0: 0.1, 1: 0.2})
    study, test_rows = study_with_needs(tmp_path / "study", planted)
    outputs = write_cost_tables(study, planted.table(), {"a": test_rows}, range(2))
    assert outputs == [f"tables/{name}.parquet" for name in COST_SCHEMAS]
    for name, schema in COST_SCHEMAS.items():
        assert study.table(name).schema.equals(schema), name
    assert study.table("measured").num_rows == len(planted.rows)
    first = {output: (study.path / output).read_bytes() for output in outputs}
    write_cost_tables(study, planted.table(), {"a": test_rows}, range(2))
    assert first == {output: (study.path / output).read_bytes() for output in outputs}
    (row, _) = [row for row in rows_of(study.table("losses")) if row["need"] == "loss"]
    assert row["n_tokens"] == test_rows.size - 1
    agreement = rows_of(study.table("need_agreement"))
    assert only(agreement, layer=0, need_a="error", need_b="error_norm")["spearman"] == pytest.approx(1.0)
    assert only(agreement, layer=1, need_a="error", need_b="kl")["verdict"] == "supported"
    assert study.table("noise_floor").num_rows == 0
