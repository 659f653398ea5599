"""Rows through blocks and heads, and what they cost: the measure in which steps that run a model are planned.

In: the sizes of a model, its stores and its layers, as they will be. Out: `Passes`, and operations of the
parts of a decoder. Blocks count whole, whatever replaces their MLP; padding does not. Cost: none.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from .model_shape import ModelShape
from .planning import FRACTIONS


@dataclass(frozen=True, slots=True)
class StoreRows:
    """Rows of a store of a corpus that is long enough: the most there can be. `window`: rows of a whole
    window; `batch`: rows of a batch of the model."""

    name: str
    all: float
    window: int
    batch: int

    @property
    def fit(self) -> float:
        return FRACTIONS[0] * self.all

    @property
    def gate(self) -> float:
        return FRACTIONS[1] * self.all

    @property
    def test(self) -> float:
        return FRACTIONS[2] * self.all


@dataclass(frozen=True, slots=True)
class StudyRows:
    """What a fitted study will have: its stores, the one that it is `fitted_on`, and the layers fitted."""

    shape: ModelShape
    stores: tuple[StoreRows, ...]
    fitted_on: StoreRows
    layers: tuple[int, ...]

    def named(self, names: Sequence[str]) -> list[StoreRows]:
        """Some of the stores; all where none is named."""
        return [one for one in self.stores if not names or one.name in names]


@dataclass(frozen=True, slots=True)
class Passes:
    """Rows times the blocks and heads that they pass, and operations of these. In training a backward pass
    counts as one or two more.
    """

    blocks: float = 0.0
    heads: float = 0.0
    flops: float = 0.0

    def __add__(self, other: "Passes") -> "Passes":
        return Passes(self.blocks + other.blocks, self.heads + other.heads, self.flops + other.flops)


@dataclass(frozen=True, slots=True)
class Sized:
    """A shape with windows of one length."""

    shape: ModelShape
    window: int

    def passes(self, rows: float, blocks: float, heads: float = 1.0) -> Passes:
        """Each of these rows through so many blocks and heads."""
        of_block, of_head = block_flops(self.shape, self.window), head_flops(self.shape)
        return Passes(rows * blocks, rows * heads, rows * (blocks * of_block + heads * of_head))

    def base(self, rows: float) -> Passes:
        return self.passes(rows, self.shape.layers)

    def above(self, rows: float, first: float) -> Passes:
        """What a replacement runs: the blocks from its lowest layer upwards, and the head."""
        return self.passes(rows, self.shape.layers - first)


def forward_flops(shape: ModelShape, length: int) -> float:
    """Operations of one token of a window of `length`."""
    return shape.layers * block_flops(shape, length) + head_flops(shape)


def block_flops(shape: ModelShape, length: int) -> float:
    """Four projections of attention and two matrices of an MLP, scores and values over half the window."""
    return 2.0 * (4 * shape.d_model**2 + 2 * shape.d_model * shape.d_ff + shape.d_model * length)


def head_flops(shape: ModelShape) -> float:
    return 2.0 * shape.d_model * shape.vocabulary


def sized_for(shape: ModelShape, store: StoreRows) -> Sized:
    """With the windows of a store."""
    return Sized(shape, store.window)


def spread(layers: Sequence[int]) -> tuple[int, ...]:
    """Layers in an order whose every beginning is spread over all of them: the middle, the quarters, …"""
    n = len(layers)
    halves = 2 ** max(1, n.bit_length())
    order = sorted(range(1, halves), key=lambda at: (halves // (at & -at), at))
    places = dict.fromkeys(at * n // halves for at in order)
    return tuple(layers[place] for place in places)
