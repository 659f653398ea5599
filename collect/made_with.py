"""What numbers of a measurement depend on, and which of them hold when some of that has changed.

In: digests of stores, surrogates, gates and needs, and how the model computes. Out: whether two measurements
may share their numbers, which stores are others by now, and which replacements route by something else. Cost:
none; no torch is loaded.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .interventions import Intervention


@dataclass(frozen=True, slots=True)
class Unit:
    """One replacement: an intervention (a single draw of it) at these layers, which increase."""

    intervention: Intervention
    layers: tuple[int, ...]

    @property
    def spelled(self) -> str:
        return ",".join(map(str, self.layers))


@dataclass(frozen=True, slots=True)
class MadeWith:
    """What numbers depend on. `key`: all of them; `stores`: those of a store, by its name; `routes`: those
    that route by it, by names that `routes_of` gives."""

    key: Mapping[str, Any]
    stores: Mapping[str, str]
    routes: Mapping[str, str]

    @classmethod
    def parse(cls, found: object) -> "MadeWith | None":
        names = ("key", "stores", "routes")
        good = isinstance(found, dict) and all(isinstance(found.get(name), dict) for name in names)
        return cls(*(found[name] for name in names)) if good else None  # pyright: ignore

    def plain(self) -> dict[str, Any]:
        return {"key": dict(self.key), "stores": dict(self.stores), "routes": dict(self.routes)}

    def and_of(self, now: "MadeWith") -> "MadeWith":
        """What both depend on; where they differ, as it is now."""
        return MadeWith(now.key, {**self.stores, **now.stores}, {**self.routes, **now.routes})

    def changed_stores(self, now: "MadeWith") -> set[str]:
        """Stores that both name and that are others now."""
        return _changed(self.stores, now.stores)

    def changed_routes(self, now: "MadeWith") -> set[str]:
        """Routes that both name and that differ."""
        return _changed(self.routes, now.routes)

    @property
    def need(self) -> str:
        """The need that routes where an intervention names none."""
        return str(self.key["need"])


def _changed(before: Mapping[str, str], now: Mapping[str, str]) -> set[str]:
    return {name for name in before.keys() & now.keys() if before[name] != now[name]}


def routes_of(unit: "Unit", store: str, made_with: MadeWith) -> list[str]:
    """What a replacement routes by, of what there is."""
    one, need = unit.intervention, unit.intervention.need or made_with.need
    names = []
    for layer in unit.layers:
        if one.features is not None:
            names.append(gate_route(f"{one.features}@{one.size}", need, layer))
        elif one.kind == "token_list":
            names.append(types_route(need, layer))
        elif one.kind == "oracle":
            names.append(need_route(need, store, layer))
    return names


def gate_route(gate: str, need: str, layer: int) -> str:
    return f"gate {gate} of {need}, layer {layer}"


def types_route(need: str, layer: int) -> str:
    return f"token types by {need}, layer {layer}"


def need_route(need: str, store: str, layer: int) -> str:
    return f"{need} of {store}, layer {layer}"
