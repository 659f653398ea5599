"""What the settings of a measurement ask for, whatever study and model they meet: replacements of single
layers, on which rows, and sets of layers.

In: settings, layers, and replacements with their draws. Out: an `Asked`, by which a measurement and its plan
beforehand count the same passes. Cost: none; no torch is loaded.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from .interventions import Intervention
from .made_with import Unit
from .measure_settings import MeasureSettings, chosen_set, layers_of_set

LINEAR: Final = Intervention("linear")
ROUTERS: Final = ("input", "token_type", "norm", "position", "context_only")
_ALWAYS: Final = ("linear", "linear@all", "mean", "zero")


@dataclass(frozen=True, slots=True)
class Entry:
    """A replacement as a table shows it: `chosen` says how its layers came about, `layers` in which order."""

    chosen: str
    intervention: Intervention
    layers: tuple[int, ...]

    @property
    def unit(self) -> Unit:
        return Unit(self.intervention, tuple(sorted(self.layers)))


@dataclass(frozen=True, slots=True)
class Asked:
    """`singles`: replacements of one layer; `joint`: of sets of layers; draws apart."""

    settings: MeasureSettings
    layers: tuple[int, ...]
    singles: tuple[Intervention, ...]
    joint: tuple[Intervention, ...]

    @property
    def chooses(self) -> bool:
        """Whether layers have to be chosen by what they cost on gate rows."""
        named = [chosen_set(one) for one in self.settings.compound]
        return self.settings.progressive != "none" or any(one and one[0] == "cheapest" for one in named)

    @property
    def on_gate(self) -> tuple[Intervention, ...]:
        """Replacements of one layer that are measured on gate rows."""
        if "gate" in self.settings.splits:
            return tuple(dict.fromkeys((LINEAR, *self.singles)))
        return tuple(dict.fromkeys((LINEAR, *(self.joint if self.chooses else ()))))

    @property
    def on_test(self) -> tuple[Intervention, ...]:
        """Replacements of one layer that are measured on test rows."""
        paper = self.joint if self.papers else ()
        return tuple(dict.fromkeys((LINEAR, *self.singles, *paper)))

    @property
    def papers(self) -> list[tuple[str, int]]:
        """Sets that are chosen on the very rows they are scored on: their names and sizes."""
        named = [(name, chosen_set(name)) for name in self.settings.compound]
        return [(name, found[1]) for name, found in named if found is not None and found[0] == "paper"]

    def each(self, interventions: Sequence[Intervention]) -> list[Entry]:
        """Each layer by itself."""
        return [Entry("one", one, (layer,)) for one in interventions for layer in self.layers]

    def sets(self, orders: Mapping[str, Sequence[int]]) -> list[Entry]:
        """Sets of layers that are known before test rows are seen, and the steps of the progressive curve."""
        settings = self.settings
        found: list[Entry] = []
        for one in self.joint:
            for name in settings.compound:
                chosen, layers = chosen_set(name), layers_of_set(name)
                if chosen is None:
                    label = "all" if layers is None else "given"
                    found.append(Entry(label, one, tuple(layers or self.layers)))
                elif chosen[0] == "cheapest":
                    found.append(Entry(name, one, tuple(orders[bare(one)][: chosen[1]])))
            if settings.progressive != "none":
                greedy = settings.progressive == "greedy"
                order = orders[greedily(bare(one)) if greedy else bare(one)]
                steps = range(1, 1 + self.n_steps(order))
                found += [Entry(settings.progressive, one, tuple(order[:step])) for step in steps]
        return list(dict.fromkeys(found))

    def n_steps(self, order: Sequence[int]) -> int:
        """Of the progressive curve."""
        return min(len(order), self.settings.progressive_steps or len(order))

    def greedy_step(self, name: str, chosen: Sequence[int], left: Sequence[int]) -> list[Entry]:
        """What is tried after the layers chosen so far. `name`: of a joint replacement, draws together."""
        draws = [one for one in self.joint if bare(one) == name]
        return [Entry("greedy", one, (*chosen, layer)) for one in draws for layer in left]


def by_default(there: Sequence[str], settings: MeasureSettings) -> list[str]:
    """Replacements where none are named. `there`: features of gates, those of `ROUTERS` that were made."""
    names = [*_ALWAYS, "gated@input"]
    for share in settings.shares:
        names += [f"gated@{features}:{share:g}" for features in there]
        names += [f"token_list@{share:g}", f"random@{share:g}", f"oracle@{settings.need}:{share:g}"]
    return names


def drawn(named: Iterable[Intervention], settings: MeasureSettings) -> tuple[Intervention, ...]:
    """Draws of random routing apart, each replacement once."""
    return tuple(dict.fromkeys(draw for one in named for draw in one.draws(settings.draws)))


def has_sets(settings: MeasureSettings) -> bool:
    """Whether layers are replaced together at all."""
    return bool(settings.compound) or settings.progressive != "none"


def bare(one: Intervention) -> str:
    """Its name without a draw: draws have their layers together."""
    return replace(one, draw=None).name


def greedily(name: str) -> str:
    """What the order of a greedy curve is called, beside that of the layers by themselves."""
    return f"{name}, greedy"
