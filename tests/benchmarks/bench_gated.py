"""A gated MLP at half share against the dense one, of the size of SmolLM2's: does routing save what it says?

In: sizes. Out: rows of name, value, unit, what to reach, and how. A Llama layer with random weights, its
MLP called on 4,096 rows under `Substitution`: half of the rows go to the surrogate, by a gate on the input
whose threshold is the median of its p (so p is computed too), and by row numbers (a mask that is known
beforehand). Times are CPU seconds of one thread, medians of turns that take every way once. What the floor is
made of is measured in the same turns: the dense MLP on half of the rows, and the surrogate on the other half.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from nearline.analyze.gate_features import TypeMeans
from nearline.collect.anatomy import Anatomy, anatomy
from nearline.collect.gate_routing import GateRouter, gate_router
from nearline.collect.interventions import parse_intervention
from nearline.collect.row_routers import RandomRouter
from nearline.collect.substitutes import LinearMap, Substitute
from nearline.collect.substitution import BatchRows, Substitution
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

SEQUENCES, LENGTH = 8, 512
NO_TYPES = TypeMeans(np.zeros(0, np.int64), np.zeros(0, np.float32), np.float32(0.0))


def rows() -> Iterator[dict[str, Any]]:
    """All rows, for `make bench`."""
    yield from gated_rows()


def gated_rows(
    d: int = 576,
    hidden: int = 1536,
    repeats: int = 15,
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16),
) -> Iterator[dict[str, Any]]:
    """Gated against dense, and against the floor of its parts, in each dtype."""
    for dtype in dtypes:
        taken = _taken(_ways(d, hidden, dtype), repeats)
        name = str(dtype).removeprefix("torch.")
        floor = taken["mlp on half"] + taken["surrogate on half"]
        parts = ", ".join(f"{way} {1000 * seconds:.1f} ms" for way, seconds in taken.items())
        for way in ("gated", "known mask"):
            ratio = taken[way] / taken["dense"]
            note = f"{ratio / (floor / taken['dense']):.2f} of its parts' time; {parts}; {repeats} turns"
            what = f"MLP at share 0.5 against dense, {way}, {name}"
            yield {"name": what, "value": ratio, "unit": "x", "reach": "< 1", "note": note}


def _ways(d: int, hidden: int, dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    found, x = _layer(d, hidden, dtype), _input(d, dtype)
    mlp, linear = found.layers[0].mlp_first, _surrogate(d, dtype)
    half = x.reshape(1, -1, d)[:, : SEQUENCES * LENGTH // 2].clone()
    return {
        "dense": lambda: mlp(x),
        "gated": _substituted(found, x, "gated@input:0.5", linear, _median_gate(x)),
        "known mask": _substituted(found, x, "random@0.5", linear, RandomRouter(0.5, 1)),
        "mlp on half": lambda: mlp(half),
        "surrogate on half": lambda: linear(half),
    }


def _substituted(
    found: Anatomy, x: Tensor, name: str, linear: LinearMap, router: GateRouter | RandomRouter
) -> Callable[[], Any]:
    substitute = Substitute(parse_intervention(name), 0, linear, router)
    shape = (SEQUENCES, LENGTH)
    numbers = np.arange(SEQUENCES * LENGTH).reshape(shape)
    given = BatchRows(np.zeros(shape, np.int64), numbers % LENGTH, np.ones(shape, bool), numbers)

    def run() -> None:
        with Substitution(found, {0: substitute}) as live:
            live.rows = given
            found.layers[0].mlp_first(x)

    return run


def _layer(d: int, hidden: int, dtype: torch.dtype) -> Anatomy:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=d,
        intermediate_size=hidden,
        num_hidden_layers=1,
        num_attention_heads=d // 64,
        vocab_size=64,
    )
    return anatomy(AutoModelForCausalLM.from_config(config).to(dtype).eval())


def _input(d: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(SEQUENCES, LENGTH, d, generator=torch.Generator().manual_seed(1)).to(dtype)


def _surrogate(d: int, dtype: torch.dtype) -> LinearMap:
    weight = torch.randn(d, d, generator=torch.Generator().manual_seed(2)) / d**0.5
    return LinearMap(weight.to(dtype), torch.zeros(d, dtype=dtype))


def _median_gate(x: Tensor) -> GateRouter:
    """A gate on the input that sends half of these rows to the surrogate: p > 0.5 where the logit is above
    its median."""
    weight = np.random.default_rng(3).standard_normal(x.shape[-1]).astype(np.float32) / 10
    middle = float(np.median(x.reshape(-1, x.shape[-1]).float().numpy() @ weight))
    return gate_router(weight, -middle, 0.5, {"x": weight.size}, NO_TYPES)


def _taken(ways: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in ways}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            for turn in range(repeats + 1):
                for name, way in ways.items():
                    start = time.process_time()
                    way()
                    if turn:  # the first one warms up
                        times[name].append(time.process_time() - start)
    finally:
        torch.set_num_threads(threads)
    return {name: statistics.median(values) for name, values in times.items()}


if __name__ == "__main__":
    for one in rows():
        print(one)
