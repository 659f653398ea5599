"""The table `measured` as arrays: sums over groups, as the model gave them, in; interventions over the same
groups out.

Draws of random routing are averaged group by group: their mean is the intervention, and how far they lie
apart is kept beside it. Interventions of one store, split and window length must have been scored on the same
tokens; where counts differ the table is refused, because a difference of two runs on different tokens is no
cost. Cost: one sort of the table.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
from jaxtyping import Float64, Int64

from ..store import DamageError
from .intervals import Estimates, ratios

ONE: Final = "one"  # of `chosen`: a layer by itself
_KINDS: Final = (
    "none",
    "linear",
    "low_rank",
    "mean",
    "zero",
    "gated",
    "soft",
    "token_list",
    "random",
    "oracle",
)
_SIZES: Final = ("linear", "paper", "pca2", "pca6", "pca12")
_KEYS: Final = ("store", "sequence_length", "name", "kind", "layers", "chosen", "draw")
_SUMS: Final = ("base_nll", "nll", "kl", "n_linear", "n_covered")


@dataclass(frozen=True, slots=True)
class Parsed:
    """What the name of an intervention says, such as `gated@input.loss.pca6:0.5` or `oracle@error:0.5`."""

    features: str | None = None
    need: str | None = None
    size: str = "linear"
    share: float | None = None


def parse_name(name: str) -> Parsed:
    """The parts of an intervention's name; of kinds that have none, nothing."""
    kind, _, argument = name.partition("#")[0].partition("@")
    word, colon, share = argument.rpartition(":")
    if kind == "random":
        return Parsed(share=float(argument))
    if kind in ("oracle", "token_list"):
        return Parsed(need=word if colon else None, share=float(share))
    if kind not in ("gated", "soft"):
        return Parsed()
    features, *rest = (word if colon else argument).split(".")
    needs = [part for part in rest if part not in _SIZES]
    sizes = [part for part in rest if part in _SIZES]
    return Parsed(
        features, next(iter(needs), None), next(iter(sizes), "linear"), float(share) if colon else None
    )


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """One intervention on one set of layers: sums over the scored rows of each group, means over draws."""

    name: str
    kind: str
    layers: tuple[int, ...]  # in the order in which they were replaced, where there is one
    chosen: str
    base: Float64[np.ndarray, "group"]  # nats
    delta: Float64[np.ndarray, "group"]  # nats more than the base
    kl: Float64[np.ndarray, "group"]  # nats
    n_linear: Float64[np.ndarray, "group"]
    n_covered: Float64[np.ndarray, "group"]
    of_draws: Float64[np.ndarray, "draw"]  # cost of each draw, nats a token; empty without draws

    @property
    def layer(self) -> int | None:
        """The layer, where it is one by itself."""
        return self.layers[0] if self.chosen == ONE else None

    @property
    def shown_layers(self) -> str:
        return ",".join(map(str, self.layers))

    @property
    def which(self) -> dict[str, str | int | None]:
        """The columns that say which layers were replaced."""
        layers, n_layers = self.shown_layers, len(self.layers)
        return {"layer": self.layer, "layers": layers, "n_layers": n_layers, "chosen": self.chosen}

    @property
    def chosen_on(self) -> str:
        """The rows that the layers were chosen on: none ("advance"), `gate` or `test`."""
        if self.chosen.startswith("paper@"):
            return "test"
        chosen = self.chosen.startswith("cheapest@") or self.chosen in ("order", "greedy")
        return "gate" if chosen else "advance"


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """All interventions of one store, split and window length: all of the same tokens."""

    store: str
    sequence_length: int
    groups: Int64[np.ndarray, "group"]
    n_tokens: Float64[np.ndarray, "group"]
    items: tuple[Scores, ...]

    @property
    def where(self) -> dict[str, str | int]:
        """What the rows of every table begin with."""
        return {"store": self.store, "sequence_length": self.sequence_length}

    @property
    def counts(self) -> dict[str, int]:
        return {"n_tokens": int(self.n_tokens.sum()), "n_groups": int(self.groups.size)}

    def family(self, member: Callable[[Scores], bool]) -> list[Scores]:
        """Those that are a member, in their order."""
        return [item for item in self.items if member(item)]

    def costs(self, items: Sequence[Scores]) -> Estimates:
        """Cost of each: Σ (nll − base) / Σ tokens, nats a token."""
        return self.per_token([item.delta for item in items])

    def per_token(self, sums: Sequence[Float64[np.ndarray, "group"]]) -> Estimates:
        """Σ over groups / tokens, of each of these sums."""
        numerator = np.stack(sums, axis=1) if sums else np.zeros((self.groups.size, 0))
        return ratios(numerator, np.broadcast_to(self.n_tokens[:, None], numerator.shape))

    def shares(self, items: Sequence[Scores]) -> Estimates:
        """Share of the covered rows (of every replaced layer) that did not go through the MLP; NaN where none
        is covered.
        """
        return ratios(
            np.stack([item.n_linear for item in items], axis=1),
            np.stack([item.n_covered for item in items], axis=1),
            np.ones(self.groups.size, bool),
        )


def read_measured(table: pa.Table, split: str = "test") -> list[Scored]:
    """By store and window length, in the order of the table; rows of other splits are left out."""
    table = table.filter(np.array(table["split"].to_pylist(), object) == split)
    columns = {name: table[name].to_pylist() for name in _KEYS}
    keys = list(zip(*columns.values(), strict=True))
    group = table["group"].to_numpy()
    n_tokens = table["n_tokens"].to_numpy().astype(np.float64)
    sums = np.stack([table[name].to_numpy().astype(np.float64) for name in _SUMS], axis=1)
    sums[~np.isfinite(sums)] = np.nan  # a model that broke down has no cost, and no interval either
    rows: dict[tuple[str, int], dict[tuple[object, ...], list[int]]] = {}
    for index, (store, length, *rest) in enumerate(keys):
        rows.setdefault((store, length), {}).setdefault(tuple(rest), []).append(index)
    found = []
    for (store, length), of_items in rows.items():
        held = {
            key: np.array(index)[np.argsort(group[index], kind="stable")] for key, index in of_items.items()
        }
        first = next(iter(held.values()))
        kept = np.flatnonzero(n_tokens[first] > 0)
        _check_tokens(store, held, group, n_tokens)
        items = _average_draws({key: sums[index[kept]] for key, index in held.items()}, n_tokens[first[kept]])
        ordered = tuple(sorted(items, key=_order))
        found.append(Scored(store, length, group[first[kept]], n_tokens[first[kept]], ordered))
    return found


def _check_tokens(
    store: str, held: dict[tuple[object, ...], np.ndarray], group: np.ndarray, n_tokens: np.ndarray
) -> None:
    """Every intervention was scored on the tokens that the first one was scored on."""
    first, index = next(iter(held.items()))
    for key, other in held.items():
        if not np.array_equal(group[index], group[other]) or not np.array_equal(
            n_tokens[index], n_tokens[other]
        ):
            counts = [
                f"{key[0]} at layers {key[2]} on {n_tokens[rows].sum():.0f} tokens of {rows.size} groups"
                for key, rows in ((first, index), (key, other))
            ]
            raise DamageError(
                f"table measured, store {store}: {' and '.join(counts)}: scores of different tokens "
                "cannot be compared; measure the study again"
            )


def _average_draws(sums: dict[tuple[object, ...], np.ndarray], n_tokens: np.ndarray) -> list[Scores]:
    """One value for each intervention and set of layers, its draws averaged."""
    single = sorted({int(str(key[2])) for key in sums if key[3] == ONE})
    draws: dict[tuple[str, str, str, str], list[np.ndarray]] = {}
    for (name, kind, layers, chosen, _), values in sums.items():
        draws.setdefault((str(name).partition("#")[0], str(kind), str(layers), str(chosen)), []).append(
            values
        )
    found = []
    for (name, kind, layers, chosen), values in draws.items():
        base, nll, kl, n_linear, n_covered = np.mean(values, axis=0).T
        costs = [float((one[:, 1] - one[:, 0]).sum() / n_tokens.sum()) for one in values]
        numbers = single if layers == "all" else [int(layer) for layer in layers.split(",")]
        found.append(
            Scores(
                name,
                kind,
                tuple(numbers),
                chosen,
                base,
                nll - base,
                kl,
                n_linear,
                n_covered,
                np.array(costs if kind == "random" else []),
            )
        )
    return found


def _order(item: Scores) -> tuple[object, ...]:
    """A fixed order, whatever was measured first."""
    kind = _KINDS.index(item.kind) if item.kind in _KINDS else len(_KINDS)
    return item.chosen != ONE, item.chosen, kind, item.name, len(item.layers), item.layers
