"""Routers at equal share: random routing is known at any share, gains equal their slow twin, the right ones
are compared, and the front is what nothing beats.
"""

from typing import Any

import numpy as np
import pytest
from helpers_costs import Planted, one_scored, only, routed, rows_of
from nearline.analyze.costs import cost_tables
from nearline.analyze.random_curve import random_curve
from scipy import stats


def test_random_routing_is_known_at_any_share() -> None:
    planted = routed(13, 0.0, noise=0.0)
    scored = one_scored(planted)
    curve = random_curve(scored, scored.items)
    assert curve is not None
    nothing = np.zeros(planted.n_groups)
    for share in (0.0, 0.1, 0.5, 0.83, 1.0):
        # Realised shares are rounded to whole tokens, and the planted curve is of the planted share.
        assert curve.at(share, nothing).estimate[0] == pytest.approx(0.04 * share + 0.02 * share**2, abs=1e-4)


def test_without_linear_random_routing_is_known_only_nearby() -> None:
    planted = routed(14, 0.01, shares=(0.495, 0.3), noise=0.0)
    planted.rows = [row for row in planted.rows if row["name"] != "linear"]
    near, far = (
        only(rows_of(cost_tables(planted.table())["routers"]), router=f"gated@input:{share}")
        for share in (0.495, 0.3)
    )
    assert near["difference"] == pytest.approx(0.01, abs=1e-3)
    assert np.isnan(far["difference"])
    assert far["verdict"] == "shares differ"


def test_a_gain_at_another_share_is_that_of_leaving_groups_out() -> None:
    """The slow twin of the linearised gain: the whole comparison again without each group, where realised
    shares, the curve and the costs all change.
    """
    planted = routed(15, 0.01)
    rng = np.random.default_rng(0)
    for row in planted.rows:  # shares that differ from document to document
        if row["name"] != "linear":
            row["n_linear"] = int(rng.binomial(row["n_tokens"], row["n_linear"] / row["n_tokens"]))
    row = only(rows_of(cost_tables(planted.table())["routers"]), against="random")

    def gain(rows: list[dict[str, Any]]) -> float:
        def total(name: str, column: str) -> float:
            return sum(r[column] for r in rows if r["name"] == name)

        def cost(name: str) -> float:
            return (total(name, "nll") - total(name, "base_nll")) / total(name, "n_tokens")

        r = total("random@0.5", "n_linear") / total("random@0.5", "n_covered")
        s = total("gated@input:0.4", "n_linear") / total("gated@input:0.4", "n_covered")
        curve = np.polyfit([0.0, r, 1.0], [0.0, cost("random@0.5"), cost("linear")], 2)
        return float(np.polyval(curve, s)) - cost("gated@input:0.4")

    groups = sorted({r["group"] for r in planted.rows})
    without = np.array([gain([r for r in planted.rows if r["group"] != g]) for g in groups])
    error = np.sqrt(29 / 30 * ((without - without.mean()) ** 2).sum())
    found = (row["hi"] - row["lo"]) / 2
    lengths = planted.lengths
    expected = error * stats.t.ppf(0.975, lengths.sum() ** 2 / (lengths**2).sum() - 1)
    assert row["difference"] == pytest.approx(gain(planted.rows), rel=1e-6)
    # To first order in a group's weight; the largest documents here weigh a tenth.
    assert found == pytest.approx(expected, rel=0.05)


def test_a_gate_that_is_worth_something_beats_random_and_one_that_is_not_does_not() -> None:
    """In these data; how often they would mislead is counted below."""
    worth = rows_of(cost_tables(routed(29, 0.02, n_layers=4).table())["routers"])
    nothing = rows_of(cost_tables(routed(29, 0.0, n_layers=4).table())["routers"])
    assert [row["verdict"] for row in worth] == ["supported"] * 4
    assert [row["verdict"] for row in nothing] == ["cannot tell"] * 4
    for row in worth:
        assert row["lo"] <= 0.02 <= row["hi"]
        assert row["against"] == "random"
        assert row["share_router"] == row["share_against"] == pytest.approx(0.4, abs=0.01)
        assert row["cost_against"] - row["cost_router"] == pytest.approx(row["difference"])


def test_who_is_set_against_whom() -> None:
    planted = Planted(17)
    names = "gated@input:0.5 gated@norm:0.5 token_list@0.5 oracle@error:0.5 gated@input gated@norm"
    names += " gated@input.loss:0.5"
    for at, name in enumerate(names.split()):
        planted.add(name, [0], 0.01 * (at + 1), share=0.5)
    planted.add("random@0.5", [0], 0.1, share=0.5, draw=0)
    rows = rows_of(cost_tables(planted.table())["routers"])
    pairs = {(row["router"], row["against"]) for row in rows if row["against"] != "random"}
    assert pairs == {
        ("gated@input:0.5", "gated@norm:0.5"),
        ("gated@input:0.5", "token_list@0.5"),
        ("gated@input.loss:0.5", "gated@norm:0.5"),
        ("gated@input.loss:0.5", "token_list@0.5"),
        ("oracle@error:0.5", "gated@input:0.5"),
        ("gated@input", "gated@norm"),
    }
    assert sum(row["against"] == "random" for row in rows) == 7
    # At equal shares a comparison is that of the costs.
    row = only(rows, router="gated@input:0.5", against="token_list@0.5")
    assert row["difference"] == pytest.approx(0.02)
    assert np.isnan(only(rows, router="gated@input", against="gated@norm")["share"])


def test_routers_of_other_shares_are_compared_by_what_they_gain_over_random() -> None:
    planted = routed(18, 0.0, shares=(), noise=0.0)
    planted.add("gated@input:0.5", [0], 0.04 * 0.5 + 0.02 * 0.25 - 0.004, share=0.5)
    planted.add("token_list@0.5", [0], 0.04 * 0.45 + 0.02 * 0.45**2 - 0.0015, share=0.45)
    planted.add("gated@norm:0.5", [0], 0.0, share=0.2)
    rows = rows_of(cost_tables(planted.table())["routers"])
    row = only(rows, against="token_list@0.5")
    # Shares are rounded to whole tokens.
    assert row["difference"] == pytest.approx(0.0025, abs=2e-4)
    assert row["cost_against"] < row["cost_router"]
    assert only(rows, against="gated@norm:0.5")["verdict"] == "shares differ"


def test_the_front_is_what_nothing_beats() -> None:
    planted = Planted(19)
    rng = np.random.default_rng(1)
    points = {"linear": 1.0, "mean": 1.0, "none": 0.0}
    points |= {f"gated@{name}:{s:g}": s for name in ("input", "norm") for s in (0.25, 0.5, 0.75)}
    points |= {"oracle@error:0.5": 0.5, "gated@output_norm:0.5": 0.5}
    for name, share in points.items():
        planted.add(name, [0], 0.0 if name == "none" else float(rng.uniform(0.01, 0.1)), share=share)
    planted.add("linear@all", [0], -1.0)
    rows = rows_of(cost_tables(planted.table())["pareto"])
    usable = [row for row in rows if row["kind"] != "oracle" and "output_norm" not in row["name"]]
    for row in rows:
        beaten = any(
            other["linear_share"] >= row["linear_share"]
            and other["delta_nats"] <= row["delta_nats"]
            and (other["linear_share"], other["delta_nats"]) != (row["linear_share"], row["delta_nats"])
            for other in usable
        )
        assert row["on_front"] == (row in usable and not beaten)
        assert row["available_at_routing"] == (row in usable)
    assert "linear@all" not in {row["name"] for row in rows}
    shares = [row["linear_share"] for row in rows]
    assert shares == sorted(shares)
