"""What speaks against a layout though its sum holds: a norm hidden in the MLP, or a part left over.

In: the trace of one block and the one layout that was found. Out: nothing, or a UsageError that says which
module stands in the way. Cost: float64 arithmetic on twenty rows.
"""

from torch import Tensor

from ..store.errors import UsageError
from .agreement import componentwise_error
from .norm_parameters import normalises
from .trace_layout import BlockTrace, Layout, multiplier_of, refusal
from .trace_recording import Call


def refused(trace: BlockTrace, reason: str) -> UsageError:
    """The error for this block."""
    return refusal(trace.index, trace.block.path, reason)


def refuse_hidden_norm(trace: BlockTrace, layout: Layout) -> None:
    """An MLP that begins or ends with a norm: its formula is unknown, or what lies between them no module; or
    a span that begins with a module of the stream's width, of whose output one module makes the MLP's."""
    first = layout.first
    behind = [call for call in trace.parts if call.given is first.made and call.made is layout.last.made]
    if layout.norm is None and first is not layout.last and first.made is not None and behind:
        raise refused(
            trace,
            f"`{first.path}` stands in front of `{behind[0].path}` as a norm would, but is neither a "
            "LayerNorm nor an RMSNorm",
        )
    for call, place in ((first, "in front of"), (layout.last, "behind")):
        if normalises(call.module):
            raise refused(
                trace,
                f"`{call.path}` is a norm {place} the MLP, but is neither a LayerNorm nor an RMSNorm, or "
                "something that is no module lies between the two",
            )


def refuse_unaccounted(trace: BlockTrace, layout: Layout) -> None:
    """Between the block's input and a sequential block's stream lies attention and nothing else."""
    if layout.parallel:
        return
    reader, _ = layout.stream[0]
    stream, entered = reader.given, trace.block.given
    assert stream is not None
    assert entered is not None
    sums = [stream, *(one.given for one in trace.parts if one.made is stream and trace.is_norm(one))]
    bases = [entered, *(one.made for one in trace.parts if one.given is entered and trace.is_norm(one))]
    earlier = [one for one in trace.parts if one.before(layout.first) and one.made is not None]
    if any(one.made is total and trace.mixes(one) for one in earlier for total in sums):
        return
    for total in sums:
        for base in bases:
            rest, scale = total.double() - base.double(), total.double().abs() + base.double().abs()
            if any(_accounts(trace, rest, scale, one) for one in earlier):
                return
    raise refused(
        trace,
        f"between its input and what `{reader.path}` reads lies more than the output of one attention "
        f"(`{layout.attention.path}`), so that `{layout.last.path}` would be only one of several parts",
    )


def _accounts(trace: BlockTrace, rest: Tensor, scale: Tensor, call: Call) -> bool:
    """Whether `rest` is what `call` gave, times a number or plus one vector in every row, as a bias is."""
    if call.made is None or not trace.moved(call, "made"):
        return False
    made = call.made.double()
    if multiplier_of(rest, made, scale, trace) is not None:
        return True
    apart = rest - made
    error = componentwise_error(apart - apart.mean(0), scale, made)
    return bool((error <= trace.limit).all())
