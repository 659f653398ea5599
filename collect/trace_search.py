"""What a block is made of, found by arithmetic on two traces of it: the MLP, its norms, the attention.

In: the calls of one block in a plain trace, and the same calls in a second one in which position 0 of what
entered the block was another row. Out: the one `Layout` that both traces confirm, or a UsageError that says
what was found and what was missing. Names are never evidence; they only appear in messages. Cost: float64
arithmetic on twenty rows for a few hundred pairs of tensors per layer.

Attention is what gives new rows at later positions though it read none. The MLP's output is what makes the
block's sum: stream + multiplier · post_norm(y) = block output, where the stream is what the norm in front of
the MLP read (or the MLP itself, where there is none); in a parallel block, it is block input + attention.
Where several layouts hold, they are the same sum told in more or less detail, and the most detailed one is
taken: a norm apart from the MLP rather than in it, one module rather than a span, the outermost.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .agreement import componentwise_error
from .trace_doubts import refuse_hidden_norm, refuse_unaccounted, refused
from .trace_layout import MARGIN, BlockTrace, Layout, multiplier_of
from .trace_recording import Call, shown


def find_layout(trace: BlockTrace) -> Layout:
    """The layout of one block that both traces confirm."""
    mixers = tuple(call for call in trace.parts if trace.mixes(call))
    if not mixers:
        raise refused(
            trace,
            "no module in it mixes positions, so it has no attention (or one that is not a module of its "
            "own). Every block has to be attention and MLP around one residual stream",
        )
    found = [layout for layout in _layouts(trace, mixers) if not _too_small(trace, layout)]
    if not found:
        raise refused(trace, _why_nothing(trace, mixers))
    best = min(layout.detail for layout in found)
    readings = _readings([layout for layout in found if layout.detail == best])
    if len(readings) > 1:
        sums = "; or ".join(layout.told() for layout in readings[:2])
        raise refused(trace, f"more than one reading of it fits: {sums}")
    refuse_hidden_norm(trace, readings[0])
    refuse_unaccounted(trace, readings[0])
    return readings[0]


def _layouts(trace: BlockTrace, mixers: Sequence[Call]) -> Iterator[Layout]:
    """Every layout whose sum holds in both traces, each different one once."""
    entries = list(_entries(trace))
    for sum_norm, total in _totals(trace):
        for parallel, stream, read in _streams(trace, entries, mixers):
            addends = torch.stack([one.double() for one in stream])
            rest, scale = total.double() - addends.sum(0), addends.abs().sum(0) + total.double().abs()
            for last, post_norm, added in _tails(trace):
                multiplier = multiplier_of(rest, added.double(), scale, trace)
                if multiplier is None:
                    continue
                for norm, x in [(norm, x) for norm, x, r in entries if r is read]:
                    span = _span(trace, mixers, x, last, norm)
                    if span is None:
                        continue
                    attention = _attention(mixers, (*span, norm), stream[1] if parallel else None)
                    if attention is None:
                        continue
                    layout = Layout(
                        attention,
                        norm,
                        *span,
                        post_norm,
                        sum_norm,
                        multiplier,
                        parallel,
                        trace.block,
                        readers=_readers(trace, *span),
                    )
                    if layout.error(trace.again) <= trace.limit:
                        yield layout


def _readings(layouts: Sequence[Layout]) -> list[Layout]:
    """Layouts of different tensors. Norms that gave the same rows, as untrained ones do, are one reading: the
    norm nearest to the MLP stands for them."""
    found: dict[tuple[int, ...], Layout] = {}
    for layout in sorted(layouts, key=lambda one: 0 if one.norm is None else -one.norm.start):
        sides = (*layout.stream, (layout.first, "given"), (layout.last, "made"), layout.added, layout.total)
        found.setdefault(tuple(id(getattr(call, side)) for call, side in sides), layout)
    return list(found.values())


def _totals(trace: BlockTrace) -> Iterator[tuple[Call | None, Tensor]]:
    """Where the finished sum may show: at the block's end, or in front of a norm that ends the block."""
    output = trace.block.made
    assert output is not None
    yield None, output
    for call in trace.parts:
        if call.made is output and trace.is_norm(call) and call.given is not None:
            yield call, call.given


def _entries(trace: BlockTrace) -> Iterator[tuple[Call | None, Tensor, Tensor]]:
    """(norm, what the MLP may read, what the norm read): every norm, and every input without one."""
    seen: list[Tensor] = []
    for call in trace.parts:
        if call.given is None:
            continue
        if trace.is_norm(call) and call.made is not None:
            yield call, call.made, call.given
        if not any(call.given is one for one in seen):
            seen.append(call.given)
            yield None, call.given, call.given


def _streams(
    trace: BlockTrace, entries: Sequence[tuple[Call | None, Tensor, Tensor]], mixers: Sequence[Call]
) -> Iterator[tuple[bool, tuple[Tensor, ...], Tensor]]:
    """(parallel, what the contribution may be added to, what the MLP's norm has to read then)."""
    seen: list[Tensor] = []
    for _, _, read in entries:
        if not any(read is one for one in seen):
            seen.append(read)
            yield False, (read,), read
    entered = trace.block.given
    assert entered is not None
    for number, mixer in enumerate(mixers):
        if mixer.made is not None and not any(mixer.made is other.made for other in mixers[:number]):
            yield True, (entered, mixer.made), entered


def _tails(trace: BlockTrace) -> Iterator[tuple[Call, Call | None, Tensor]]:
    """(a module, a norm that reads what it gave, what may be added), the outermost where several gave it."""
    made: dict[int, Call] = {}
    for call in trace.parts:
        if call.made is None or call.is_identity:
            continue
        other = made.get(id(call.made))
        if other is None or call.path.count(".") < other.path.count("."):
            made[id(call.made)] = call
    for last in made.values():
        assert last.made is not None
        yield last, None, last.made
        for norm in trace.parts:
            if (
                norm.given is last.made
                and last.before(norm)
                and trace.is_norm(norm)
                and norm.made is not None
            ):
                yield last, norm, norm.made


def _span(
    trace: BlockTrace, mixers: Sequence[Call], x: Tensor, last: Call, norm: Call | None
) -> tuple[Call, Call] | None:
    """The module that reads x and gives what `last` gives, or the first one of a span that ends there."""
    readers = [call for call in trace.parts if call.given is x and not call.is_identity]
    if norm is not None:
        readers = [call for call in readers if norm.before(call)]
    readers = [call for call in readers if not any(call is one or call.holds(one) for one in mixers)]
    whole = [call for call in readers if call.made is last.made]
    if whole:
        one = min(whole, key=_depth)
        return one, one
    if any(one is last or last.holds(one) for one in mixers):
        return None
    # A first module deeper down than the last would be a piece of something else, such as a gated norm.
    firsts = [call for call in readers if call.before(last) and last.path.startswith(_parent(call))]
    if not firsts:
        return None
    first = min(firsts, key=lambda call: (_parent(call) != _parent(last), *_depth(call)))
    if any(first.start < one.start and one.end < last.end for one in mixers):
        return None
    return first, last


def _readers(trace: BlockTrace, first: Call, last: Call) -> tuple[Call, ...]:
    """All modules of the span that read what its first one reads, but for those inside another of them."""
    within = [
        call
        for call in trace.parts
        if call.given is first.given and first.start <= call.start and call.end <= last.end
    ]
    return tuple(call for call in within if not any(other.holds(call) for other in within))


def _parent(call: Call) -> str:
    return call.path.rpartition(".")[0] + "."


def _depth(call: Call) -> tuple[int, int]:
    return call.path.count("."), call.start


def _attention(mixers: Sequence[Call], parts: Sequence[Call | None], addend: Tensor | None) -> Call | None:
    """The outermost module that mixes positions and holds none of the MLP's parts; in a parallel block, one
    that gave the addend."""
    outside = [
        call
        for call in mixers
        if not any(part is not None and call.holds(part) for part in parts)
        and (addend is None or call.made is addend)
    ]
    return min(outside, key=_depth, default=None)


def _too_small(trace: BlockTrace, layout: Layout) -> bool:
    calls = {call.path: call for call in (*trace.parts, trace.block)}
    return layout.error(calls, without=True) < MARGIN * trace.limit


def _why_nothing(trace: BlockTrace, mixers: Sequence[Call]) -> str:
    """The nearest thing to a layout that there is, in words."""
    small = next(_layouts(trace, mixers), None)
    if small is not None:
        return (
            f"what `{small.last.path}` adds is so small beside the stream that rounding could make it up. "
            "Load the model in float32; freshly initialised weights need larger values"
        )
    for _, total in _totals(trace):
        for mixer in mixers:
            for call in trace.parts:
                if call.given is None or mixer.made is None or not mixer.made.numel():
                    continue
                error = componentwise_error(
                    total.double() - call.given.double() - mixer.made.double(),
                    total,
                    call.given,
                    mixer.made,
                )
                if bool((error <= trace.limit).all()):
                    return (
                        f"what it adds last is the output of `{mixer.path}`, which mixes positions; an MLP "
                        "behind it was not found"
                    )
    return (
        f"no single module that works on each position by itself gives what the block adds last (attention "
        f"seems to be {shown([min(mixers, key=_depth).path])}). An MLP is missing, runs twice, is one of "
        "several that are added up, or is scaled by something that is not one number"
    )
