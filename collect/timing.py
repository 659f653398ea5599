"""Seconds of the original, the linearised and the gated model, side by side on the device at hand.

In: an `Anatomy`, `Configuration`s with the substitutes of their layers, token ids of real text. Out: the
table `timing`: medians and quartiles of interleaved runs, and beside the time saved the operations saved at
the shares that went linear in these very runs. Models run as after `load_linearised`: token by token the MLP
or the surrogate.

A prefill run is one forward pass over `batch_size` prompts, logits of all positions included; a decode run
is `n_steps` further tokens of the same texts, one after the other with the KV cache, so that every
configuration works on the same tokens. In each round every configuration runs once, in an order that turns by
one from round to round; ratios are taken within a round, so that a machine that slows down slows both. Cost:
(rounds + 1) · (configurations + 1) runs a batch size.
"""

import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Int
from torch import Tensor

from ..analyze.budget_tables import DECODE, ORIGINAL, PREFILL, to_budget_table
from ..store import Reader
from ..store.errors import UsageError
from .anatomy import Anatomy
from .batch_budget import is_full
from .budget import Configuration, spent_by
from .flops import ModelFlops, model_flops
from .forward import evaluating
from .gate_routing import GateRouter
from .interventions import parse_intervention
from .kv_cache import decoded
from .linearised import Linearised
from .substitutes import Substitute

Substitutes = Mapping[int, Substitute]


@dataclass(frozen=True, slots=True)
class TimingRules:
    """What is run. Prompts have `prompt_length` tokens, decoding goes `n_steps` further."""

    batch_sizes: tuple[int, ...] = (1, 4)
    prompt_length: int = 128
    n_steps: int = 16
    n_rounds: int = 5
    threads: int | None = None  # None: as torch is set


@dataclass(slots=True, eq=False)
class _Runs:
    """Seconds of one configuration at one batch size, and the share of rows that went linear."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: {PREFILL: [], DECODE: []})
    share: dict[str, float] = field(default_factory=dict)


def timings(
    anatomy: Anatomy,
    configurations: Sequence[tuple[Configuration, Substitutes]],
    texts: Int[np.ndarray, "text position"],
    special_ids: tuple[int, ...],
    rules: TimingRules = TimingRules(),
) -> pa.Table:
    """The table `timing`. `texts`: as many as the largest batch, each of prompt_length + n_steps tokens or
    more (`prompts_of` cuts them from a store). A batch that the device has no memory for is left out."""
    n_texts, length = max(rules.batch_sizes), rules.prompt_length + rules.n_steps
    if texts.shape[0] < n_texts or texts.shape[1] < length:
        raise UsageError(
            f"timing needs {n_texts} texts of {length} tokens, and there are {texts.shape[0]} of "
            f"{texts.shape[1]}: time smaller batches or shorter prompts"
        )
    every = [(Configuration(ORIGINAL, ()), {}), *configurations]
    flops = model_flops(anatomy)
    rows: list[dict[str, Any]] = []
    ids = torch.from_numpy(np.ascontiguousarray(texts[:, :length], np.int64)).to(anatomy.device)
    with evaluating(anatomy.model, rules.threads):
        for batch_size in sorted(set(rules.batch_sizes)):
            try:
                runs = _interleaved(anatomy, every, ids[:batch_size], special_ids, rules)
            except RuntimeError as error:
                if not is_full(error):
                    raise
                break  # larger ones would not fit either
            rows += _rows(anatomy, flops, every, runs, batch_size, rules)
    return to_budget_table("timing", rows)


def prompts_of(reader: Reader, n_texts: int, length: int) -> Int[np.ndarray, "text position"]:
    """Token ids of the first sequences of a store that are long enough; fewer where there are not as many."""
    plan, found = reader.plan, []
    for block in range(plan.n_blocks):
        long = [one for one in plan.sequences_of(block) if plan.length[one] >= length]
        if long and len(found) < n_texts:
            ids, first = np.asarray(reader.column_block("token_id", block)), plan.block_range(block)[0]
            starts = [int(plan.row_offsets[one]) - first for one in long[: n_texts - len(found)]]
            found += [ids[start : start + length] for start in starts]
    return np.stack(found).astype(np.int64) if found else np.zeros((0, length), np.int64)


def _interleaved(
    anatomy: Anatomy,
    every: Sequence[tuple[Configuration, Substitutes]],
    ids: Int[Tensor, "text position"],
    special_ids: tuple[int, ...],
    rules: TimingRules,
) -> list[_Runs]:
    runs = [_Runs() for _ in every]
    for round_ in range(-1, rules.n_rounds):  # the first one warms up, and says the shares
        order = np.roll(np.arange(len(every)), -round_).tolist()
        for at in order:
            with _installed(anatomy, every[at][1], special_ids) as installed:
                shares = _run(anatomy, ids, rules, runs[at] if round_ >= 0 else None, installed)
            if round_ < 0:
                runs[at].share = shares
    return runs


@contextmanager
def _installed(
    anatomy: Anatomy, substitutes: Substitutes, special_ids: tuple[int, ...]
) -> Generator[Linearised | None]:
    if not substitutes:
        yield None
        return
    linearised = Linearised(anatomy, substitutes, special_ids)
    try:
        yield linearised
    finally:
        linearised.remove()


def _run(
    anatomy: Anatomy,
    ids: Int[Tensor, "text position"],
    rules: TimingRules,
    runs: _Runs | None,
    installed: Linearised | None,
) -> dict[str, float]:
    """One prefill and one decode; without `runs` a rehearsal, which gives the shares that went linear."""
    state: dict[str, Any] = {}
    counted: dict[str, list[float]] = {PREFILL: [], DECODE: []}

    def prefill() -> None:
        state["cache"] = decoded(anatomy.model, ids[:, : rules.prompt_length])[1]
        count(PREFILL)

    def decode() -> None:
        for at in range(rules.prompt_length, rules.prompt_length + rules.n_steps):
            state["cache"] = decoded(anatomy.model, ids[:, at : at + 1], state["cache"])[1]
            count(DECODE)

    def count(phase: str) -> None:
        if runs is None and installed is not None:
            counted[phase].append(installed.share())

    for phase, work in {PREFILL: prefill, DECODE: decode}.items():
        seconds = _seconds(work, anatomy.device)
        if runs is not None:
            runs.seconds[phase].append(seconds)
    return {phase: float(np.mean(shares)) if shares else 0.0 for phase, shares in counted.items()}


def _seconds(work: Callable[[], None], device: torch.device) -> float:
    """Of a piece of work, the device's part included."""
    _wait(device)
    began = time.perf_counter()
    work()
    _wait(device)
    return time.perf_counter() - began


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def _rows(
    anatomy: Anatomy,
    flops: ModelFlops,
    every: Sequence[tuple[Configuration, Substitutes]],
    runs: Sequence[_Runs],
    batch_size: int,
    rules: TimingRules,
) -> Iterator[dict[str, Any]]:
    for (one, substitutes), own in zip(every, runs, strict=True):
        hidden = _hidden_units(substitutes)
        for phase in (PREFILL, DECODE):
            seconds, original = np.array(own.seconds[phase]), np.array(runs[0].seconds[phase])
            ratio = seconds / original
            n_tokens = batch_size * (rules.prompt_length if phase == PREFILL else rules.n_steps)
            yield {
                "name": one.name,
                "kind": ORIGINAL if one.name == ORIGINAL else parse_intervention(one.name).kind,
                "layers": ",".join(str(layer) for layer in one.layers),
                "n_layers": len(one.layers),
                "phase": phase,
                "sequence_length": rules.prompt_length,
                "device": _device_name(anatomy.device),
                "dtype": str(anatomy.dtype).removeprefix("torch."),
                "threads": torch.get_num_threads(),
                "batch_size": batch_size,
                "n_steps": 1 if phase == PREFILL else rules.n_steps,
                "n_runs": seconds.size,
                "share": own.share[phase],
                **_spread(seconds, "seconds"),
                "tokens_per_second": n_tokens / float(np.median(seconds)),
                "original_seconds": float(np.median(original)),
                **_spread(ratio, "ratio"),
                "time_saved": 1.0 - float(np.median(ratio)),
                "flops_saved": _flops_saved(flops, one, own.share[phase], phase, rules, hidden),
            }


def _spread(values: np.ndarray, name: str) -> dict[str, float]:
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75)).tolist()
    return {name: middle, f"{name}_q25": low, f"{name}_q75": high}


def _hidden_units(substitutes: Substitutes) -> int | None:
    """Of the gates, which are of one kind in all layers."""
    for one in substitutes.values():
        if isinstance(one.router, GateRouter) and one.router.hidden is not None:
            return one.router.hidden.n
    return None


def _flops_saved(
    flops: ModelFlops, one: Configuration, share: float, phase: str, rules: TimingRules, hidden: int | None
) -> float:
    """At the share of all rows that was counted."""
    if one.name == ORIGINAL:
        return 0.0
    spent = spent_by(flops, parse_intervention(one.name), one.layers, share, hidden=hidden)
    before = math.fsum(flops.layers[layer].mlp for layer in one.layers)
    # The middle of the steps stands for all: attention grows by as much before it as behind it.
    length = rules.prompt_length + (rules.n_steps + 1) // 2 if phase == DECODE else rules.prompt_length
    won = before - (spent.mlp + spent.surrogate + spent.gate)
    return won / flops.total(length, last=phase == DECODE)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
