"""Rows through blocks and heads, and what they cost: the measure in which steps that run a model are planned.

In: a shape and windows. Out: `Passes`, and operations of the parts of a decoder. Blocks count whole, whatever
replaces their MLP; padding does not. Cost: none.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from .plan_speed import window_of
from .study_settings import StoreJob
from .study_tables import Shape


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

    shape: Shape
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


def forward_flops(shape: Shape, length: int) -> float:
    """Operations of one token of a window of `length`."""
    return shape.layers * block_flops(shape, length) + head_flops(shape)


def block_flops(shape: Shape, length: int) -> float:
    """Four projections of attention and two matrices of an MLP, scores and values over half the window."""
    return 2.0 * (4 * shape.d_model**2 + 2 * shape.d_model * shape.d_ff + shape.d_model * length)


def head_flops(shape: Shape) -> float:
    return 2.0 * shape.d_model * shape.vocabulary


def sized_for(shape: Shape, store: StoreJob) -> Sized:
    """With the windows of a store."""
    return Sized(shape, window_of(store))


def spread(layers: Sequence[int]) -> tuple[int, ...]:
    """Layers in an order whose every beginning is spread over all of them: the middle, the quarters, …"""
    n = len(layers)
    halves = 2 ** max(1, n.bit_length())
    order = sorted(range(1, halves), key=lambda at: (halves // (at & -at), at))
    places = dict.fromkeys(at * n // halves for at in order)
    return tuple(layers[place] for place in places)
