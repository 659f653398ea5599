"""Is a gate worth more than chance, or than a list of tokens, at the same share of linear tokens?

In: interventions that route, on the same tokens. Out: rows of the table `routers`. A threshold chosen on the
gate rows gives another share on the test rows, so a router's *gain* is taken at its own realised share: what
random routing would have cost there (`random_curve`) less what the router did cost. Against random that gain
is the difference; two routers are compared by their gains, which at equal shares is the difference of their
costs, and where their shares lie too far apart there is no verdict. Everything is paired over groups, each
pair of routers is a family over layers. The oracle routes by the need itself, which nobody has when routing
and which is no upper bound either. Cost: simultaneous bounds for each pair.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from .cost_bounds import SHARES_DIFFER, bounded, combine
from .influences import difference
from .intervals import Estimates, stack
from .measured import Scored, Scores, parse_name
from .random_curve import RandomCurve, random_curve

MAX_GAP: Final = 0.1  # of realised shares, beyond which gains are not compared
ROUTERS: Final = ("gated", "token_list", "oracle")
MAIN: Final = "input"


def router_rows(scored: Scored, seed: int) -> list[dict[str, Any]]:
    """Rows of the table `routers` of one store and window length."""
    families: dict[tuple[str, str, str], list[_Pair]] = {}
    for items in by_layers(scored).values():
        for pair in _pairs(scored, items):
            families.setdefault((pair.router.name, pair.against, pair.role), []).append(pair)
    return [row for pairs in families.values() for row in _rows(scored, pairs, seed)]


def by_layers(scored: Scored) -> dict[tuple[str, tuple[int, ...]], list[Scores]]:
    """Interventions by the layers that they replace."""
    found: dict[tuple[str, tuple[int, ...]], list[Scores]] = {}
    for item in scored.items:
        found.setdefault((item.chosen, item.layers), []).append(item)
    return found


@dataclass(frozen=True, slots=True, eq=False)
class _Pair:
    """A router and what it is set against, at one set of layers; `gain` is one item, nats a token."""

    router: Scores
    against: str
    share_router: float
    share_against: float
    cost_router: float
    cost_against: float
    gain: Estimates

    @property
    def role(self) -> str:
        """Layers by themselves are one family, sets another."""
        return "one" if self.router.layer is not None else "set"


def _pairs(scored: Scored, items: Sequence[Scores]) -> Iterator[_Pair]:
    """Each router against random, the gate on the MLP's input against every other router of its share and
    need, and the oracle against that gate.
    """
    routers = [item for item in items if item.kind in ROUTERS]
    if not routers:
        return
    curve = random_curve(scored, items)
    gains = {item.name: _gain(scored, item, curve) for item in routers}
    costs = {item.name: float(scored.costs([item]).estimate[0]) for item in routers}
    for item in routers:
        share, gain = gains[item.name]
        if curve is not None:
            yield _Pair(
                item,
                "random",
                share,
                share,
                costs[item.name],
                float(gain.estimate[0]) + costs[item.name],
                gain,
            )
    for item in routers:
        for other in routers:
            if _is_compared(item, other):
                (share, gain), (theirs, less) = gains[item.name], gains[other.name]
                yield _Pair(
                    item,
                    other.name,
                    share,
                    theirs,
                    costs[item.name],
                    costs[other.name],
                    difference(gain, less),
                )


def _is_compared(item: Scores, other: Scores) -> bool:
    one, two = parse_name(item.name), parse_name(other.name)
    if item is other or one.share != two.share or (one.need and two.need and one.need != two.need):
        return False
    if item.kind == "oracle":
        return _is_main(other)
    return _is_main(item) and other.kind != "oracle" and not _is_main(other)


def _is_main(item: Scores) -> bool:
    parsed = parse_name(item.name)
    return item.kind == "gated" and parsed.features == MAIN and parsed.size == "linear"


def _gain(scored: Scored, item: Scores, curve: RandomCurve | None) -> tuple[float, Estimates]:
    """The realised share, and what random routing costs there less what the router costs; without random
    routing, less its cost alone.
    """
    cost, share = scored.costs([item]), scored.shares([item])
    value = float(share.estimate[0])
    if curve is None:
        return value, combine([cost], [-1.0])
    return value, difference(curve.at(value, share.influence[:, 0]), cost)


def _rows(scored: Scored, pairs: Sequence[_Pair], seed: int) -> Iterator[dict[str, Any]]:
    found = bounded(stack([pair.gain for pair in pairs]), seed)
    for at, pair in enumerate(pairs):
        near = abs(pair.share_router - pair.share_against) <= MAX_GAP
        share = parse_name(pair.router.name).share
        yield {
            **scored.where,
            **pair.router.which,
            "router": pair.router.name,
            "against": pair.against,
            **scored.counts,
            "share": float("nan") if share is None else share,
            "share_router": pair.share_router,
            "share_against": pair.share_against,
            "cost_router": pair.cost_router,
            "cost_against": pair.cost_against,
            "difference": float(found.estimate[at]),
            **found.columns(at),
            "p_holm": float(found.p_holm[at]),
            "verdict": _verdict(pair, found.verdict(at, scored.groups.size), near),
        }


def _verdict(pair: _Pair, verdict: str, near: bool) -> str:
    """Of "the router costs less than what it is set against, at the same share"."""
    if pair.router.chosen_on == "test":
        return "chosen on test"
    return verdict if near and np.isfinite(pair.gain.estimate).all() else SHARES_DIFFER
