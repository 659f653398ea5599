"""Tables `measured` with planted costs: what an intervention costs a token at each layer in, sums over groups
out.

A token's extra loss is its intervention's cost, plus an effect of its document, plus noise of its own with
heavy tails (Student's t with 3 degrees of freedom), of which half is common to all layers. Documents are of
very different lengths.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from nearline.analyze.cost_tables import COST_SCHEMAS
from nearline.analyze.measured import Scored, read_measured

BASE = 3.0  # nats a token


@dataclass
class Planted:
    """Groups of tokens, and the rows of a table `measured` that grow by `add`."""

    seed: int
    n_groups: int = 30
    spread: float = 1.0  # of the logarithm of document lengths
    mean_length: float = 5.0
    store: str = "a"
    split: str = "test"
    sequence_length: int = 128
    document_effect: float = 0.02  # nats a token
    token_noise: float = 0.3  # nats
    rows: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng((self.seed, 1))
        lengths = np.ceil(self.rng.lognormal(self.mean_length, self.spread, self.n_groups)).astype(int)
        self.lengths = lengths
        self.starts = np.append(0, np.cumsum(lengths)[:-1])
        self.base = self.sums(BASE + self.rng.standard_normal(lengths.sum()))
        self.common = self.rng.standard_t(3, lengths.sum())
        self.common_document = self.rng.standard_t(4, self.n_groups)

    def sums(self, tokens: np.ndarray) -> np.ndarray:
        """Per group."""
        return np.add.reduceat(tokens, self.starts)

    def noise(self) -> np.ndarray:
        """Of every group, the summed noise of one layer."""
        token = (self.common + self.rng.standard_t(3, self.lengths.sum())) / np.sqrt(2.0)
        document = (self.common_document + self.rng.standard_t(4, self.n_groups)) / np.sqrt(2.0)
        return self.sums(self.token_noise * token) + self.document_effect * document * self.lengths

    def add(
        self,
        name: str,
        layers: Sequence[int] | str,
        delta: np.ndarray | float,
        *,
        share: np.ndarray | float | None = None,
        chosen: str = "one",
        draw: int = -1,
        kl: np.ndarray | float = 0.01,
    ) -> None:
        """Rows of one intervention. `delta`: nats more than the base, by group (a number: that a token)."""
        kind = name.partition("@")[0]
        shown = layers if isinstance(layers, str) else ",".join(map(str, layers))
        n_layers = shown.count(",") + 1
        of_group = delta if isinstance(delta, np.ndarray) else delta * self.lengths
        if share is None:
            share = 0.0 if kind == "none" else 1.0
        for g in range(self.n_groups):
            n = int(self.lengths[g])
            one = float(share[g]) if isinstance(share, np.ndarray) else share
            self.rows.append(
                {
                    "store": self.store,
                    "split": self.split,
                    "sequence_length": self.sequence_length,
                    "name": name,
                    "kind": kind,
                    "layers": shown,
                    "chosen": chosen,
                    "draw": draw,
                    "group": 7 * g + 3,
                    "n_tokens": n,
                    "base_nll": float(self.base[g]),
                    "nll": float(self.base[g] + of_group[g]),
                    "kl": float(kl[g]) if isinstance(kl, np.ndarray) else kl * n,
                    "n_linear": round(one * n) * n_layers,
                    "n_covered": n * n_layers,
                }
            )

    def layers(self, name: str, costs: Mapping[int, float], share: float | None = None) -> None:
        """One intervention on single layers, with noise around these costs."""
        for layer, cost in costs.items():
            self.add(name, [layer], cost * self.lengths + self.noise(), share=share)

    def table(self) -> pa.Table:
        return measured(self.rows)


def measured(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """These rows as the table."""
    schema = COST_SCHEMAS["measured"]
    return pa.table({name: [row[name] for row in rows] for name in schema.names}, schema=schema)


def rows_of(table: pa.Table) -> list[dict[str, Any]]:
    return table.to_pylist()


def only(rows: list[dict[str, Any]], **wanted: object) -> dict[str, Any]:
    (found,) = [row for row in rows if all(row[name] == value for name, value in wanted.items())]
    return found


def same(one: pa.Table, other: pa.Table) -> bool:
    """Bit for bit, NaN being NaN."""
    return one.schema.equals(other.schema) and repr(one.to_pylist()) == repr(other.to_pylist())


def one_scored(planted: Planted, split: str = "test") -> Scored:
    (found,) = read_measured(planted.table(), split)
    return found


def planted_delta(planted: Planted, name: str, layers: str) -> np.ndarray:
    found = [row for row in planted.rows if (row["name"], row["layers"]) == (name, layers)]
    return np.array([row["nll"] - row["base_nll"] for row in found])


def routed(
    seed: int, gain: float, shares: tuple[float, ...] = (0.4,), n_layers: int = 1, noise: float = 1.0
) -> Planted:
    """A gate at a share of its own beside random routing at a half: the cost of random routing is a parabola
    in the share, and the gate costs `gain` less than random routing at its share.
    """
    planted = Planted(seed)
    for layer in range(n_layers):
        a, b = 0.04 * (layer + 1), 0.02
        heavy = planted.rng.gamma(8.0, 1 / 8, planted.n_groups) if noise else 1.0

        def cost(s: float, a: float = a, b: float = b, heavy: np.ndarray | float = heavy) -> np.ndarray:
            own = planted.rng.standard_t(3, planted.lengths.sum())
            return (a * s + b * s * s) * heavy * planted.lengths + noise * 0.1 * planted.sums(own)

        for draw in range(3):
            planted.add("random@0.5", [layer], cost(0.5), share=0.5, draw=draw)
        planted.add("linear", [layer], cost(1.0))
        for share in shares:
            planted.add(f"gated@input:{share:g}", [layer], cost(share) - gain * planted.lengths, share=share)
    return planted
