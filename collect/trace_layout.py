"""What a block is made of, and the two traces that have to agree on it.

In: calls of modules, as recorded. Out: a `Layout` names the parts of one block and says how well their sum
holds in a trace; a `BlockTrace` answers what one module did: did it mix positions, is it a norm. Cost:
float64 arithmetic on twenty rows.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..store.errors import UsageError
from .agreement import componentwise_error, row_error
from .norm_parameters import is_norm
from .trace_recording import Call

# A contribution counts as seen when leaving it out is off by this many times what rounding may do.
MARGIN = 4.0
# Rows count as moved when they are off by this many times what rounding may do; mixing moves them by tens
# of per cent.
MOVED = 4.0
_Side = tuple[Call, str]


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """The parts of one block. `readers`: the modules of the MLP that read its input, one in most models."""

    attention: Call
    norm: Call | None
    first: Call
    last: Call
    post_norm: Call | None
    sum_norm: Call | None
    multiplier: float
    parallel: bool
    block: Call
    readers: tuple[Call, ...]

    @property
    def detail(self) -> tuple[bool, ...]:
        """The smaller, the more is told apart."""
        return (
            self.parallel,
            self.norm is None,
            self.post_norm is None,
            self.multiplier != 1.0,
            self.first is not self.last,
        )

    @property
    def stream(self) -> tuple[_Side, ...]:
        """What the contribution is added to."""
        if self.parallel:
            return (self.block, "given"), (self.attention, "made")
        return ((self.norm or self.first, "given"),)

    @property
    def added(self) -> _Side:
        """post_norm(y), before the multiplier."""
        return self.post_norm or self.last, "made"

    @property
    def total(self) -> _Side:
        """Where the sum shows."""
        return (self.block, "made") if self.sum_norm is None else (self.sum_norm, "given")

    def error(
        self, calls: Mapping[str, Call], stream: Mapping[str, Call] | None = None, *, without: bool = False
    ) -> float:
        """How far stream + contribution is from the sum in a trace, in the worst row. The stream may come
        from another trace."""
        before = [_value(stream or calls, side) for side in self.stream]
        added, total = self.multiplier * _value(calls, self.added), _value(calls, self.total)
        rest = total - sum(before) - (0.0 if without else added)
        return float(componentwise_error(rest, *before, added, total).max())

    def told(self) -> str:
        """The sum in words, with paths."""
        names = [f"{'input' if side == 'given' else 'output'} of `{call.path}`" for call, side in self.stream]
        call, _ = self.added
        factor = "" if self.multiplier == 1.0 else f"{self.multiplier:g} · "
        return " + ".join([*names, f"{factor}output of `{call.path}`"])


@dataclass(frozen=True, slots=True, eq=False)
class BlockTrace:
    """One block as two traces saw it. `numbers`: what a multiplier may be, from the config and the block."""

    index: int
    block: Call
    parts: tuple[Call, ...]
    again: Mapping[str, Call]
    changed_rows: Tensor
    numbers: tuple[float, ...]
    limit: float
    _norms: dict[nn.Module, bool] = field(default_factory=dict)

    def moved(self, call: Call, side: str) -> bool:
        """Whether rows at later positions differ between the traces."""
        return self._distance(call, side) > MOVED * self.limit

    def mixes(self, call: Call) -> bool:
        """Whether `call` read the same rows at later positions and gave others: it mixes positions."""
        if call.given is None or call.made is None:
            return False
        return self._distance(call, "given") <= self.limit and self.moved(call, "made")

    def is_norm(self, call: Call) -> bool:
        """Whether a known formula gives what the module gives."""
        if call.given is None or call.made is None or call.is_identity:
            return False
        if call.module not in self._norms:
            self._norms[call.module] = is_norm(call.module)
        return self._norms[call.module]

    def _distance(self, call: Call, side: str) -> float:
        now, then = getattr(self.again[call.path], side), getattr(call, side)
        kept = ~self.changed_rows
        return float(row_error(now[kept], then[kept]).max())


def refusal(index: int, path: str, reason: str) -> UsageError:
    """The error for a block in which nothing, or too much, was found."""
    return UsageError(
        f"layer {index} (`{path}`): {reason}. No row of nearline/collect/adapters.py fits this model, and "
        "its parts could not be found by running it. docs/architectures.md tells how to add a row, where the "
        "model's blocks allow it."
    )


def multiplier_of(rest: Tensor, added: Tensor, scale: Tensor, trace: BlockTrace) -> float | None:
    """m for which rest = m · added within rounding: 1, else a number of the config or the block, else the
    least squares one; None where there is none. `scale`: the magnitudes that made up `rest`; each difference
    is measured by its own, so that large features hide nothing."""

    def fits(multiplier: float) -> bool:
        error = componentwise_error(rest - multiplier * added, scale, multiplier * added)
        return bool((error <= trace.limit).all())

    tiny = torch.finfo(torch.float64).tiny
    weight = scale.clamp_min(tiny).reciprocal()
    left, right = (rest * weight).flatten(), (added * weight).flatten()
    best = float(left @ right / (right @ right).clamp_min(tiny))
    # What rounding does to the least squares: about the limit over the number of telling features.
    uncertainty = MARGIN * trace.limit / max(float(right.norm()), tiny)
    if abs(1.0 - best) <= uncertainty and fits(1.0):
        return 1.0
    if not 1e-4 < abs(best) < 1e4 or not fits(best):
        return None
    near = min(trace.numbers, key=lambda number: abs(number - best), default=best)
    if abs(near - best) <= uncertainty and fits(near):
        return near
    rounded = float(f"{best:.6g}")
    return rounded if fits(rounded) else best


def _value(calls: Mapping[str, Call], side: _Side) -> Tensor:
    call, which = side
    return getattr(calls[call.path], which).double()
