"""The two ends of an MLP's span, made to compute some rows and to take the others from elsewhere.

In: the modules where a span begins and ends, and a `Route` that says of each call which rows go where. Out:
the same modules with a `forward` of their own in front of their class's, until `leave`. Hooks stay where they
are: they see what the model sees. A span of one module is asked for the rows that need it; one of two modules
(fc1 … fc2, with the activation in between in the block) gets these rows in at the first and is completed at
the last. Where every row is replaced, one row still runs, once a span or where it must, because only the
module knows the form of its answer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from jaxtyping import Float, Float32, Int
from torch import Tensor, nn

from .capture import first_tensor


@dataclass(frozen=True, slots=True, eq=False)
class Division:
    """Where the rows of one call go. `weight`: how much of each row is the replacement's (1, 0, or p)."""

    weight: Float32[Tensor, "row"]
    way: Literal["mlp", "replaced", "mixed", "divided"]
    replaced: Int[Tensor, "some"] | None = None  # numbers of rows, where they are divided
    mlp: Int[Tensor, "others"] | None = None


class Route(Protocol):
    """Decides on each call, and computes what is put in the place of the MLP's output."""

    def divide(self, x: Float[Tensor, "*row feature"]) -> Division: ...

    def replacement(self, x: Float[Tensor, "*row feature"]) -> Float[Tensor, "*row feature"]: ...


class Replaced:
    """A `forward` in front of a module's own."""

    def __init__(self, original: Callable[..., Any], forward: Callable[..., Any]) -> None:
        self.original, self._forward = original, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(self.original, args, kwargs)


def is_replaced(module: nn.Module) -> bool:
    """Whether somebody has replaced the forward of `module` and not put it back."""
    return isinstance(vars(module).get("forward"), Replaced)


class Span:
    """One layer's MLP. `divides`: whether what lies between the two ends works row by row on what the first
    one gives, so that it may be given some of the rows only; otherwise the span runs whole."""

    def __init__(self, first: nn.Module, last: nn.Module, route: Route, *, divides: bool) -> None:
        self._first, self._last, self._route, self._divides = first, last, route, divides
        self._before: list[tuple[nn.Module, Any]] = []
        self._open: _Call | None = None
        self._form: Any = None

    def enter(self) -> None:
        if self._first is self._last:
            self._put(self._first, self._one_module)
        else:
            self._put(self._first, self._at_first)
            self._put(self._last, self._at_last)

    def leave(self) -> None:
        while self._before:
            module, own = self._before[-1]
            if own is None:
                vars(module).pop("forward", None)
            else:
                module.forward = own
            self._before.pop()

    def _put(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._before.append((module, vars(module).get("forward")))
        module.forward = Replaced(module.forward, forward)

    def _one_module(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = _Call(self._route, args, kwargs, divides=self._divides)
        if call.way == "replaced" and self._form is not None:
            return call.completed(self._form)
        answer = original(*call.args, **call.kwargs)
        if call.way == "replaced":
            self._form = answer
        return call.completed(answer)

    def _at_first(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._open = _Call(self._route, args, kwargs, divides=self._divides)
        return original(*self._open.args, **self._open.kwargs)

    def _at_last(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call, self._open = self._open, None
        answer = original(*args, **kwargs)
        return answer if call is None else call.completed(answer)


class _Call:
    """One call of a span: what its first module is given, and how its answer is completed."""

    def __init__(self, route: Route, args: tuple[Any, ...], kwargs: dict[str, Any], *, divides: bool) -> None:
        x = first_tensor(args or tuple(kwargs.values()))
        division = route.divide(x)
        self.way, self._division, self._shape = division.way, division, x.shape[:-1]
        self.args, self.kwargs = args, kwargs
        # Before the MLP runs: it may write over its input.
        self._made = None
        if self.way == "divided":
            self._made = route.replacement(_some(x, division.replaced))
        elif self.way != "mlp":
            self._made = route.replacement(x)
        if divides and self.way in ("divided", "replaced") and _only_tensor(x, args, kwargs):
            given = _some(x, division.mlp if self.way == "divided" else _first(x))
            self.args = tuple(given if one is x else one for one in args)
            self.kwargs = {name: given if one is x else one for name, one in kwargs.items()}
            self._ran_all = False
        else:
            self._ran_all = True

    def completed(self, answer: Any) -> Any:
        """The module's answer with the replaced rows in it."""
        if self.way == "mlp":
            return answer
        assert self._made is not None
        y = first_tensor(answer)
        whole = self._filled(y, self._made.to(y.dtype))
        if isinstance(answer, Tensor):
            return whole
        return type(answer)(whole if one is y else one for one in answer)

    def _filled(self, y: Float[Tensor, "..."], made: Float[Tensor, "..."]) -> Float[Tensor, "*row feature"]:
        shape = (*self._shape, y.shape[-1])
        if self.way == "replaced":
            return made.reshape(shape)
        flat, division = y.reshape(-1, y.shape[-1]), self._division
        if self.way == "mixed":
            return _mixed(flat, made.reshape(flat.shape), division.weight).reshape(shape)
        if self._ran_all:
            whole = flat.clone()
        else:
            assert division.mlp is not None
            whole = flat.new_empty(division.weight.numel(), flat.shape[1])
            whole.index_copy_(0, division.mlp, flat)
        assert division.replaced is not None
        whole.index_copy_(0, division.replaced, made.reshape(-1, flat.shape[1]))
        return whole.reshape(shape)


def _some(x: Float[Tensor, "*row feature"], rows: Int[Tensor, "some"] | None) -> Float[Tensor, "..."]:
    """These rows, as one sequence where the module is given sequences."""
    assert rows is not None
    chosen = x.reshape(-1, x.shape[-1]).index_select(0, rows)
    return chosen.reshape(*(1,) * (x.ndim - 2), *chosen.shape)


def _first(x: Float[Tensor, "*row feature"]) -> Int[Tensor, "one"]:
    return torch.zeros(1, dtype=torch.long, device=x.device)


def _only_tensor(x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether nothing else comes with x that could belong to its rows."""
    values = [one for one in (*args, *kwargs.values()) if one is not x]
    return not any(isinstance(one, Tensor | tuple | list | dict) for one in values)


def _mixed(
    y: Float[Tensor, "row feature"], made: Float[Tensor, "row feature"], weight: Float32[Tensor, "row"]
) -> Float[Tensor, "row feature"]:
    """(1 - p)·y + p·made in float32; a row with p = 0 is the MLP's own, whatever stands beside it."""
    p = weight[:, None]
    mixed = (1.0 - p) * y.float() + p * made.float()
    return torch.where(p > 0, mixed, y.float()).to(y.dtype)
