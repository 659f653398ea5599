"""Several layers at once, sinks, windows of other lengths, and the paper's choice on test rows: each is set
against what it should be, on the same groups.
"""

import numpy as np
import pytest
from helpers_costs import Planted, measured, one_scored, only, planted_delta, rows_of
from nearline.analyze.costs import cost_tables
from nearline.analyze.paper_selection import paper_selection_rows

# Sums of some dozen float64 numbers, in another order.
SAME = 1e-9


def test_a_compound_is_set_against_the_sum_of_its_layers() -> None:
    planted = Planted(20)
    planted.layers("linear", {layer: 0.02 for layer in range(4)})
    alone = {row["layers"]: row for row in rows_of(cost_tables(planted.table())["interventions"])}
    parts = {(r["layers"], r["group"]): r["nll"] - r["base_nll"] for r in planted.rows}
    groups = [r["group"] for r in planted.rows if r["layers"] == "0"]
    together = np.array([sum(parts[str(layer), g] for layer in (0, 1, 2)) for g in groups])
    planted.add("linear", [0, 1, 2], together, chosen="given")
    planted.add("linear", [1, 3], 0.2, chosen="cheapest@2")
    planted.add("linear", [1, 9], 0.2, chosen="given")
    rows = rows_of(cost_tables(planted.table())["compound"])
    added = only(rows, layers="0,1,2")
    assert added["sum_nats"] == pytest.approx(sum(alone[str(layer)]["delta_nats"] for layer in range(3)))
    assert added["excess"] == pytest.approx(0.0, abs=1e-12)
    more = only(rows, layers="1,3")
    assert (more["verdict"], more["chosen_on"]) == ("supported", "gate")
    assert more["excess"] == pytest.approx(0.2 - more["sum_nats"])
    assert np.isnan(only(rows, layers="1,9")["excess"])  # layer 9 was not measured by itself


def test_a_progressive_curve_begins_with_its_first_layer() -> None:
    planted = Planted(21)
    planted.layers("linear", {0: 0.05, 1: 0.01, 2: 0.03})
    planted.add("linear", [1, 2], 0.06, chosen="order")
    planted.add("linear", [1, 2, 0], 0.2, chosen="order")
    planted.add("linear", [1], 0.01, chosen="greedy")
    rows = rows_of(cost_tables(planted.table())["progressive"])
    curve = [row for row in rows if row["chosen"] == "order"]
    assert [(row["step"], row["layer"], row["layers"]) for row in curve] == [
        (1, 1, "1"),
        (2, 2, "1,2"),
        (3, 0, "1,2,0"),
    ]
    alone = only(rows_of(cost_tables(planted.table())["interventions"]), layer=1)
    assert curve[0]["added"] == pytest.approx(alone["delta_nats"])
    assert curve[1]["added"] == pytest.approx(0.06 - alone["delta_nats"])
    assert curve[2]["added"] == pytest.approx(0.14)
    assert curve[0]["excess"] == pytest.approx(0.0, abs=1e-15)
    assert curve[2]["delta_sim_hi"] >= curve[2]["delta_hi"] == pytest.approx(0.2)
    assert len([row for row in rows if row["chosen"] == "greedy"]) == 1


def test_sinks_are_apart() -> None:
    planted = Planted(22)
    same = planted.noise()
    planted.add("linear", [0], 0.02 * planted.lengths + same)
    planted.add("linear@all", [0], 0.5 * planted.lengths + same)
    planted.layers("linear", {1: 0.02})
    planted.add("linear@all", [1], planted_delta(planted, "linear", "1"))
    planted.layers("linear", {2: 0.1})
    rows = rows_of(cost_tables(planted.table())["sinks"])
    assert [row["layer"] for row in rows] == [0, 1]
    # Paired: the noise that both have is gone.
    assert rows[0]["lo"] == pytest.approx(0.48, abs=1e-9)
    assert rows[0]["verdict"] == "supported"
    assert rows[0]["all_pct"] == pytest.approx(100 * (np.exp(rows[0]["all_nats"]) - 1))
    assert (rows[1]["difference"], rows[1]["verdict"]) == (0.0, "cannot tell")


def test_windows_of_two_lengths_are_paired_by_document() -> None:
    short, long = Planted(23), Planted(23, sequence_length=512)
    heavy = short.rng.gamma(2.0, 0.5, 30)  # what a document costs, whatever its windows
    long.lengths = long.lengths + 5  # fewer first tokens are left out
    for planted, cost in ((short, 0.05), (long, 0.08)):
        planted.add("linear", [0], cost * heavy * planted.lengths)
        planted.add("mean", [0], 0.5)
    long.add("linear", [1], 0.5)
    long.rows = [row for row in long.rows if row["group"] != 3]  # a document that is too short
    (row, same) = rows_of(cost_tables(measured(short.rows + long.rows))["context_lengths"])
    assert (row["shorter"], row["longer"], row["name"], row["layer"]) == (128, 512, "linear", 0)
    assert (row["n_groups"], row["verdict"]) == (30, "supported")
    assert row["n_tokens_longer"] == long.lengths[1:].sum()
    expected = [
        cost * (heavy * planted.lengths)[at].sum() / planted.lengths[at].sum()
        for planted, cost, at in ((short, 0.05, slice(None)), (long, 0.08, slice(1, None)))
    ]
    assert row["difference"] == pytest.approx(expected[1] - expected[0])
    apart = rows_of(cost_tables(measured(short.rows + long.rows))["interventions"])
    widths = [one["delta_hi"] - one["delta_lo"] for one in apart if one["name"] == "linear"]
    assert row["hi"] - row["lo"] < np.hypot(*widths[:2])
    assert same["difference"] == pytest.approx(0.0, abs=1e-12)


# The paper's selection


def equal_gates(seed: int, cost: float, n_layers: int = 6) -> Planted:
    """Four gates that cost the same, as the paper's gate sizes."""
    planted = Planted(seed)
    for layer in range(n_layers):
        for name in ("gated@input", "gated@input.pca2", "gated@input.pca6", "gated@input.pca12"):
            planted.add(name, [layer], cost * planted.lengths + planted.noise(), share=0.4)
    return planted


def test_a_choice_on_test_rows_is_made_again_without_each_group() -> None:
    planted = equal_gates(26, 0.01, n_layers=1)
    planted.add("gated@norm", [0], -1.0, share=0.4)  # no size of the paper's gate
    row = only(rows_of(cost_tables(planted.table())["paper_selection"]), layer=0)
    names = ["gated@input", "gated@input.pca2", "gated@input.pca6", "gated@input.pca12"]
    delta = np.stack([planted_delta_of(planted, name) for name in names], axis=1)
    n = planted.lengths
    held = sum(delta[g, np.argmin(np.delete(delta, g, axis=0).sum(axis=0))] for g in range(len(n)))
    assert row["picked"] == names[int(np.argmin(delta.sum(axis=0)))]
    assert row["picked_nats"] == pytest.approx(delta.sum(axis=0).min() / n.sum(), rel=SAME)
    assert row["heldout_nats"] == pytest.approx(held / n.sum(), rel=SAME)
    assert row["bias"] == pytest.approx(row["picked_nats"] - row["heldout_nats"], rel=SAME)
    assert row["bias"] < -0.01  # or the choice is the same without any group, and nothing is tested
    assert (row["n_candidates"], row["fixed"]) == (4, "gated@input")
    assert row["fixed_nats"] == pytest.approx(delta[:, 0].sum() / n.sum(), rel=SAME)


def planted_delta_of(planted: Planted, name: str) -> np.ndarray:
    return planted_delta(planted, name, "0")


def test_choosing_on_test_rows_looks_better_than_it_is() -> None:
    """Gates that all cost a little: the paper's choice puts layers below the baseline, the gate fixed before
    is never called better, and the choice on groups left out has no bias to speak of.
    """
    cost, chosen = 0.005, []
    for seed in range(12):
        chosen += paper_selection_rows(one_scored(equal_gates(100 + seed, cost)), seed)
    below = np.mean([row["picked_below_base"] for row in chosen])
    fixed_below = np.mean([row["fixed_nats"] < 0 for row in chosen])
    assert below > 2 * fixed_below
    assert np.mean([row["bias"] for row in chosen]) < -0.005
    # 72 layers, whose held-out costs have a standard error of 0.002 together.
    assert np.mean([row["heldout_nats"] for row in chosen]) == pytest.approx(cost, abs=0.006)
    assert [row["verdict"] for row in chosen].count("supported") <= 3


def test_a_gate_that_is_better_than_the_model_is_called_so() -> None:
    planted = Planted(25)
    for name in ("gated@input", "gated@input.pca2"):
        planted.add(name, [0], -0.1 * planted.lengths + 0.1 * planted.noise(), share=0.4)
    row = only(rows_of(cost_tables(planted.table())["paper_selection"]), layer=0)
    assert (row["verdict"], row["picked_below_base"]) == ("supported", True)
    row = rows_of(cost_tables(planted.table())["interventions"])[0]
    assert row["verdict"] == "not supported"  # that it costs more than nothing


def test_one_gate_alone_is_no_selection() -> None:
    planted = Planted(26)
    planted.add("gated@input", [0], 0.1, share=0.4)
    assert cost_tables(planted.table())["paper_selection"].num_rows == 0
