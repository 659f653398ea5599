"""What is best at what it saves: rows of the table `interventions` in, share against cost out.

Of one store and one set of layers every intervention is a point: the share of rows that do not go through the
MLP, and what that costs. A point is on the front where no other that can be routed goes at least as far for
at most the same cost. Points that nobody could use are left out of the front: an oracle, and what was chosen
on the test rows. The front is by point estimates: differences are tried in `routers`. Cost: none.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from .measured import parse_name

_COLUMNS = (
    "store sequence_length layer layers n_layers chosen name kind n_tokens n_groups "
    "linear_share mlp_flops_saved flops_saved delta_nats delta_lo delta_hi"
).split()


def pareto_rows(interventions: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of the table `pareto`, by increasing share within a set of layers."""
    sets: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in interventions:
        if row["replaced_positions"] == "all" or row["linear_share"] != row["linear_share"]:
            continue
        point = {name: row[name] for name in _COLUMNS} | {"available_at_routing": _is_available(row)}
        key = tuple(row[name] for name in ("store", "sequence_length", "chosen", "layers"))
        sets.setdefault(key, []).append(point)
    found = []
    for points in sets.values():
        usable = [point for point in points if point["available_at_routing"] and row_is_fair(point)]
        for point in sorted(
            points, key=lambda point: (point["linear_share"], point["delta_nats"], point["name"])
        ):
            on_front = any(point is one for one in usable) and not any(_beats(one, point) for one in usable)
            found.append(point | {"on_front": on_front})
    return found


def row_is_fair(row: Mapping[str, Any]) -> bool:
    """Whether its layers were chosen without the test rows."""
    return not str(row["chosen"]).startswith("paper@")


def _is_available(row: Mapping[str, Any]) -> bool:
    """Whether what routes is known when routing."""
    return row["kind"] != "oracle" and parse_name(row["name"]).features not in (
        "oracle",
        "target_type",
        "output_norm",
    )


def _beats(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """At least as good in both, better in one."""
    mine, theirs = ((row["linear_share"], -row["delta_nats"]) for row in (one, other))
    return mine != theirs and mine[0] >= theirs[0] and mine[1] >= theirs[1]
