"""The parts of a model whose family has no row in adapters.py, found by running it and comparing tensors.

In: a causal language model of Hugging Face transformers. Out: an `Anatomy`, or a UsageError that says what
was found, in which layer, and what was missing. Nothing goes by the names of classes or attributes; the
start-up proof confirms the result on real tokens before anything is collected. Cost: three forward passes
over 2 × 10 token ids, and their tensors in memory (trace_recording.py); the model has to be loaded.

  pass 1   as it is: blocks are the list of modules whose outputs and inputs chain; what is added where
  pass 2   position 0 entering every block is another row: what moves later positions is attention
  pass 3   what each MLP reads is replaced by rows drawn from it: its output has to be the same rows of its
           output, and the block's sum has to follow. So the MLP depends on what it reads, position by
           position, and on nothing else, and the block uses it as the sum says
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from ..store.errors import UsageError
from .agreement import row_error
from .anatomy import Anatomy, LayerAnatomy
from .forward import evaluating
from .live_models import config_of, head_of, max_positions_of, refuse_compiled, unwrapped
from .proof import tolerances
from .residence import runs_on
from .trace_layout import MOVED, BlockTrace, Layout, refusal
from .trace_outside import backbone_path, find_blocks, logit_factors, position_table
from .trace_recording import Call, Trace, record, shown
from .trace_search import find_layout

LENGTH = 10
SEED = 7


def needs_weights(model: nn.Module) -> bool:
    """Whether the weights are neither in memory nor offloaded: such a model cannot run."""
    offloaded = any(hasattr(module, "_hf_hook") for module in model.modules())
    return not offloaded and any(parameter.is_meta for parameter in model.parameters())


def traced(model: nn.Module, ids: Int[Tensor, " position"] | None = None) -> Anatomy:
    """The parts of `model`. `ids`: token ids to run it on, ten random ones if None."""
    model = unwrapped(model)
    refuse_compiled(model)
    config = config_of(model)
    if needs_weights(model):
        raise UsageError(
            f"model family {config.model_type!r} has no row in nearline/collect/adapters.py, so its parts "
            "are found by running it, and this one has no weights. Load the model, or add a row "
            "(docs/architectures.md)."
        )
    for name in ("hidden_size", "vocab_size"):
        if not isinstance(getattr(config, name, None), int):
            raise UsageError(
                f"{type(config).__name__} has no `{name}`, without which the parts of this model cannot be "
                "found. Give its config class one, or an `attribute_map` that names what it is called there."
            )
    head = head_of(model)
    with evaluating(model, None):
        return _Tracer(model, head, config, _two_sequences(model, config, ids)).anatomy()


@dataclass(frozen=True, slots=True, eq=False)
class _Tracer:
    """A model and the ids to run it on: a sequence and its reverse, so that each token has two positions."""

    model: nn.Module
    head: nn.Module
    config: Any
    ids: Int[Tensor, "2 position"]

    def anatomy(self) -> Anatomy:
        width = self.config.hidden_size
        plain = record(self.model, self.ids, width)
        blocks = find_blocks(plain, self.model, self.config)
        layouts = self._layouts(plain, blocks, width)
        self._confirm(plain, layouts, width)
        return self._assembled(plain, blocks, layouts)

    def _layouts(self, plain: Trace, blocks: Sequence[Call], width: int) -> list[Layout]:
        """Pass 2, and the search in every block."""
        changed = torch.zeros(self.ids.numel(), dtype=torch.bool)
        changed[:: self.ids.shape[1]] = True
        instead = {block.module: _with_other_first_rows(_given(block), changed) for block in blocks}
        again = record(self.model, self.ids, width, instead).once()
        once = plain.once().values()
        numbers = _numbers(self.config.to_dict())
        # Twenty rows: more threads would only wait for one another.
        with evaluating(self.model, threads=1):
            return [
                find_layout(
                    BlockTrace(
                        index=index,
                        block=block,
                        parts=tuple(call for call in once if block.holds(call) and call.path in again),
                        again=again,
                        changed_rows=changed,
                        numbers=(*numbers, *_numbers(vars(block.module))),
                        limit=tolerances(_given(block).dtype).identity,
                    )
                )
                for index, block in enumerate(blocks)
            ]

    def _confirm(self, plain: Trace, layouts: Sequence[Layout], width: int) -> None:
        """Pass 3."""
        draw = torch.randint(self.ids.numel(), (self.ids.numel(),), generator=_generator())
        instead = {layout.block.module: _given(layout.block) for layout in layouts}
        for layout in layouts:
            instead |= {reader.module: _given(reader)[draw] for reader in layout.readers}
        calls, before = record(self.model, self.ids, width, instead).once(), plain.once()
        for index, layout in enumerate(layouts):
            limit = tolerances(_given(layout.block).dtype).identity
            wanted, got = layout.last.made, calls[layout.last.path].made
            assert wanted is not None
            if got is None or bool((row_error(got, wanted[draw]) > MOVED * limit).any()):
                raise refusal(
                    index,
                    layout.block.path,
                    f"the output of `{layout.last.path}` is what it adds last, but does not follow the rows "
                    f"that {shown([one.path for one in layout.readers])} reads position by position: it "
                    "is no MLP of that input",
                )
            if not layout.error(calls, before) <= limit:
                raise refusal(
                    index,
                    layout.block.path,
                    f"its output is {layout.told()} on one set of rows, but not when the MLP reads other "
                    "rows: the MLP's output is used in more than one place",
                )

    def _assembled(self, plain: Trace, blocks: Sequence[Call], layouts: Sequence[Layout]) -> Anatomy:
        parallel = {layout.parallel for layout in layouts}
        if len(parallel) > 1:
            odd = next(index for index, one in enumerate(layouts) if one.parallel != layouts[0].parallel)
            raise refusal(
                odd, blocks[odd].path, "its attention and MLP are parallel, or not, unlike in layer 0"
            )
        backbone = backbone_path(plain, blocks)
        positions, where = position_table(self.model, blocks, self.ids)
        scale, softcap = logit_factors(self.head, plain.outputs, backbone, self.config)
        paths = _paths(layouts) | ({} if where is None else {"positions": where})
        return Anatomy(
            model=self.model,
            backbone=self.model.get_submodule(backbone),
            head=self.head,
            layers=tuple(_layer(index, one) for index, one in enumerate(layouts)),
            positions=positions,
            model_type=self.config.model_type,
            n_layers=len(blocks),
            d_model=self.config.hidden_size,
            vocab_size=self.config.vocab_size,
            max_positions=max_positions_of(self.config),
            parallel=parallel.pop(),
            span=_span(paths, f"{backbone}."),
            paths=paths,
            logit_softcap=softcap,
            logit_scale=scale,
        )


def _two_sequences(model: Any, config: Any, ids: Tensor | None) -> Tensor:
    if ids is None:
        length = min(LENGTH, max_positions_of(config) or LENGTH)
        named = (value for key, value in config.to_dict().items() if key.endswith("_token_id"))
        special = {one for value in named for one in (value if isinstance(value, list | tuple) else [value])}
        order = torch.randperm(config.vocab_size, generator=_generator())
        ids = torch.tensor([one for one in order.tolist() if one not in special][:length])
    if len(ids) < 2:
        raise UsageError("a trace needs at least two token ids, and the model has fewer that are not special")
    both = torch.stack([ids, ids.flip(0)]).long()
    return both.to(runs_on(model.get_input_embeddings()))


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(SEED)


def _numbers(values: dict[str, Any]) -> tuple[float, ...]:
    plain = (
        value for value in values.values() if isinstance(value, float | int) and not isinstance(value, bool)
    )
    return tuple(float(value) for value in plain)


def _given(call: Call) -> Tensor:
    assert call.given is not None
    return call.given


def _with_other_first_rows(rows: Tensor, first: Tensor) -> Tensor:
    """Each sequence's first row replaced by one from the middle of the other."""
    changed = rows.clone()
    n_rows = len(rows)
    changed[first] = rows[[(3 * n_rows) // 4, n_rows // 4]]
    return changed


def _layer(index: int, layout: Layout) -> LayerAnatomy:
    def module(call: Call | None) -> nn.Module | None:
        return None if call is None else call.module

    return LayerAnatomy(
        index=index,
        block=layout.block.module,
        norm=module(layout.norm),
        mlp_first=layout.first.module,
        mlp_last=layout.last.module,
        post_norm=module(layout.post_norm),
        multiplier=layout.multiplier,
        parallel=layout.parallel,
        attention=layout.attention.module,
        sum_norm=module(layout.sum_norm),
    )


def _paths(layouts: Sequence[Layout]) -> dict[str, str]:
    """Where each part lies, {i} for the layer; where layers differ, all ways."""
    parts = {
        "block": [layout.block for layout in layouts],
        "norm": [layout.norm for layout in layouts],
        "residual": [layout.norm or layout.first for layout in layouts],
        "attention": [layout.attention for layout in layouts],
        "mlp_first": [layout.first for layout in layouts],
        "mlp_last": [layout.last for layout in layouts],
        "post_norm": [layout.post_norm for layout in layouts],
        "sum_norm": [layout.sum_norm for layout in layouts],
    }
    patterns = {part: _pattern(layouts, calls) for part, calls in parts.items()}
    return {part: pattern for part, pattern in patterns.items() if pattern}


def _pattern(layouts: Sequence[Layout], calls: Sequence[Call | None]) -> str:
    ways = {
        f"{layout.block.path.rpartition('.')[0]}.{{i}}{call.path.removeprefix(layout.block.path)}": None
        for layout, call in zip(layouts, calls, strict=True)
        if call is not None
    }
    return " or ".join(ways)


def _span(paths: dict[str, str], prefix: str) -> str:
    first, last = paths["mlp_first"].replace(prefix, ""), paths["mlp_last"].replace(prefix, "")
    return first if first == last else f"{first}…{last}"
