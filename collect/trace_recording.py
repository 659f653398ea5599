"""One short forward pass written down: what every module of a model read and gave, as rows of width d.

In: a model, token ids, and rows to put in place of what some modules read. Out: a frozen `Trace` of calls in
the order of time, with copies on the CPU taken at hook time, because a model may go on in place. Cost: one
forward pass. Memory: each different tensor of width d once, about fifteen per layer: for twenty rows of a
model with 80 layers of width 8192 in 16 bits, half a gigabyte. No hook is left behind.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..store.errors import NearlineError, UsageError
from .forward import accepted


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One call of one module. `given`, `made`: the first tensor it read and gave, as rows, where that has the
    width of the stream. Equal rows are the same object, so `is` compares bit for bit."""

    path: str
    module: nn.Module
    start: int
    end: int
    given: Tensor | None
    made: Tensor | None

    @property
    def is_identity(self) -> bool:
        """Dropout in evaluation, and its kin."""
        return self.given is self.made

    def holds(self, other: "Call") -> bool:
        """Whether `other` ran inside this call."""
        return self.start < other.start and other.end < self.end

    def before(self, other: "Call") -> bool:
        """Whether this call had ended when `other` began."""
        return self.end < other.start


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """All calls of a pass in the order in which they began; what the model gave at its end (path ""), and all
    modules that read the token ids, by path."""

    calls: tuple[Call, ...]
    outputs: Mapping[str, Any]

    def once(self) -> dict[str, Call]:
        """The calls of modules that ran exactly once, by path: only these can be hooked and counted."""
        by_path: dict[str, list[Call]] = {}
        for call in self.calls:
            by_path.setdefault(call.path, []).append(call)
        return {path: calls[0] for path, calls in by_path.items() if len(calls) == 1}


def record(
    model: nn.Module,
    ids: Int[Tensor, "sequence position"],
    width: int,
    instead: Mapping[nn.Module, Tensor] | None = None,
) -> Trace:
    """Run `model` on `ids`. The modules in `instead` read the given rows in place of their first tensor."""
    scribe = _Scribe(ids, width, instead or {})
    try:
        for path, module in model.named_modules():
            scribe.watch(path, module)
        _run(model, ids)
    finally:
        scribe.leave()
    return Trace(tuple(sorted(scribe.calls, key=lambda call: call.start)), scribe.outputs)


class _Scribe:
    """The hooks of one recording and what they wrote."""

    def __init__(self, ids: Tensor, width: int, instead: Mapping[nn.Module, Tensor]) -> None:
        self.calls: list[Call] = []
        self.outputs: dict[str, Any] = {}
        self._ids, self._n_rows, self._width, self._instead = ids, ids.numel(), width, instead
        self._open: dict[str, list[tuple[int, Tensor | None, bool]]] = {}
        self._known: dict[tuple[torch.dtype, bytes], Tensor] = {}
        self._time = 0
        self._handles: list[RemovableHandle] = []

    def watch(self, path: str, module: nn.Module) -> None:
        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            changed = None
            if module in self._instead:
                changed = args, kwargs = _replaced(args, kwargs, self._instead[module])
            values = (*args, *kwargs.values())
            given = self._rows(args or tuple(kwargs.values()))
            reads_ids = any(value is self._ids for value in values)
            self._open.setdefault(path, []).append((self._tick(), given, reads_ids))
            return changed

        def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            start, given, reads_ids = self._open[path].pop()
            self.calls.append(Call(path, module, start, self._tick(), given, self._rows(output)))
            if reads_ids:
                self.outputs[path] = output

        self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        self._handles.append(module.register_forward_hook(after))

    def leave(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _tick(self) -> int:
        self._time += 1
        return self._time

    def _rows(self, value: Any) -> Tensor | None:
        """A copy of the first tensor as (row, width); None where it has another size or holds no numbers."""
        found = value if isinstance(value, Tensor) else _first(value)
        if found is None or not found.is_floating_point() or found.shape[-1:] != (self._width,):
            return None
        if found.numel() != self._n_rows * self._width:
            return None
        rows = found.detach().to("cpu", copy=True).reshape(self._n_rows, self._width).contiguous()
        digest = hashlib.blake2b(rows.view(torch.uint8).numpy().tobytes(), digest_size=16).digest()
        return self._known.setdefault((rows.dtype, digest), rows)


def _first(value: Any) -> Tensor | None:
    parts = value if isinstance(value, tuple | list) else ()
    return next((part for part in parts if isinstance(part, Tensor)), None)


def _replaced(
    args: tuple[Any, ...], kwargs: dict[str, Any], rows: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same arguments with `rows` in the place of their first tensor."""
    if args:
        return tuple(_with_first(list(args), rows)), kwargs
    return args, dict(zip(kwargs, _with_first(list(kwargs.values()), rows), strict=True))


def _with_first(parts: list[Any], rows: Tensor) -> list[Any]:
    for place, part in enumerate(parts):
        if isinstance(part, Tensor):
            # A copy, for the model may go on in place.
            parts[place] = rows.to(device=part.device, dtype=part.dtype, copy=True).reshape(part.shape)
            break
    return parts


def _run(model: nn.Module, ids: Tensor) -> None:
    try:
        model(**accepted(model, {"input_ids": ids}))
    except NearlineError:
        raise
    except Exception as error:
        # A model of an unknown family may raise anything; the user needs to know what was tried.
        sizes = " × ".join(str(size) for size in ids.shape)
        raise UsageError(
            f"{type(model).__name__} has no row that fits in nearline/collect/adapters.py, so its parts are "
            f"found by running it on {sizes} token ids; that failed: {type(error).__name__}: {error}. Give a "
            "causal language model that takes input_ids alone."
        ) from error


def shown(names: Sequence[str]) -> str:
    """Module paths for a message, at most three."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(f"`{name}`" for name in names[:3]) + more
