"""Speed of a sweep over layers (each MLP replaced by a linear map, every row's loss and divergence) against
its floor: what no such sweep can do without, measured in the same run.

In: a model and sizes. Out: rows of name, value, unit, what is to be reached, and how it was measured. The
floor is one bare forward pass with the head and the losses; then, per layer, the replaced block without its
MLP, the bare blocks above it, the head, losses and divergences, written out here without any of our code
around them. Sweep and floor take turns layer by layer, the order changing every time, so that whatever else
the machine does falls on both; a time is the median over the rounds, a ratio one of sums over layers.
"""

import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import torch
from bench_collect import _load, _row
from nearline.collect import HarvestSettings, corpora, harvest
from nearline.collect.anatomy import Anatomy, anatomy, logits
from nearline.collect.capture import first_tensor
from nearline.collect.forward import evaluating, final_hidden, inputs_of
from nearline.collect.interventions import parse_intervention
from nearline.collect.losses import CACHE_BYTES
from nearline.collect.measured_windows import WindowBatch
from nearline.collect.models import LoadedModel
from nearline.collect.nll import rows_per_chunk
from nearline.collect.passes import Visit
from nearline.collect.substitutes import LinearMap, Substitute
from nearline.collect.substitution import Substitution
from nearline.store import Reader
from torch import Tensor

REACH = "<= 1.15"
MEMORY_LIMIT = 4 * 2**30
Row = dict[str, Any]
Pair = tuple[float, float]  # wall and CPU seconds


def rows(
    model_source: str = "smollm2",
    dtypes: Sequence[str] = ("float32", "bfloat16"),
    n_tokens: int = 1024,
    rounds: int = 3,
    threads: int = 2,
    corpus: str = "docs:python",
) -> list[Row]:
    """Per compute dtype: the ratio, by the clock and in CPU seconds, and seconds per layer."""
    return [
        row for dtype in dtypes for row in _dtype_rows(model_source, dtype, n_tokens, rounds, threads, corpus)
    ]


def _dtype_rows(
    model_source: str, dtype: str, n_tokens: int, rounds: int, threads: int, corpus: str
) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        loaded = _load(model_source, dtype)
        reader = _store(loaded, Path(folder) / "store", n_tokens, threads, corpus)
        with evaluating(loaded.model, threads):
            net = anatomy(loaded.model)
            visit = Visit(net, reader, np.asarray(reader.column("target_id")) >= 0, memory_limit=MEMORY_LIMIT)
            batch = max(visit.batches(range(reader.plan.n_blocks)), key=lambda one: one.n_rows)
            visit.base(batch)  # warms caches, and shows that blocks may be left out
            times = [_round(visit, batch, number) for number in range(rounds)]
    assert visit.reuses_prefix
    wall, cpu = (
        {
            side: [
                statistics.median(column) for column in zip(*(one[side][clock] for one in times), strict=True)
            ]
            for side in ("sweep", "floor")
        }
        for clock in (0, 1)
    )
    ratio, cpu_ratio = (sum(clock["sweep"]) / sum(clock["floor"]) for clock in (wall, cpu))
    bare = wall["floor"][0]
    name = f"measure {dtype}"
    where = (
        f"{model_source}, {net.n_layers} layers, {batch.n_rows} rows, {threads} threads: bare pass, losses "
        f"{bare:.2f} s, sweep {sum(wall['sweep']):.1f} s, floor {sum(wall['floor']):.1f} s"
    )
    per_layer = sum(wall["sweep"]) / net.n_layers
    return [
        _row(f"{name}: time of a sweep over all layers against its floor", ratio, "x", REACH, where),
        _row(f"{name}: the same in CPU seconds", cpu_ratio, "x", "", "what a busy machine cannot blur"),
        _row(f"{name}: a layer and intervention", per_layer, "s", "", f"of {batch.n_rows} rows"),
    ]


def _round(visit: Visit, batch: WindowBatch, number: int) -> dict[str, tuple[list[float], list[float]]]:
    """Wall and CPU seconds of the base, then of each layer, by side."""
    net, held = visit.anatomy, {}
    inputs = inputs_of(batch.ids, batch.mask, net.device)

    def base() -> None:
        held["base"] = visit.base(batch)

    def bare() -> None:
        held["log_p"] = _bare_head(net, final_hidden(net, inputs), batch, None)

    pairs = [_turn(base, bare, number)]
    with _calls(net) as calls:  # what each block is called with
        final_hidden(net, inputs)
    for layer in range(net.n_layers):
        live = Substitution(net, {layer: _linear(net, layer)})

        def under(layer: int = layer, live: Substitution = live) -> None:
            visit.under(held["base"], live, [layer])

        def floor(layer: int = layer) -> None:
            _bare_head(net, _bare_blocks(net, layer, calls), batch, held["log_p"])

        pairs.append(_turn(under, floor, number + layer))
    sides = dict(zip(("sweep", "floor"), zip(*pairs, strict=True), strict=True))
    return {side: ([one[0] for one in found], [one[1] for one in found]) for side, found in sides.items()}


@contextmanager
def _calls(net: Anatomy) -> Generator[list[tuple[Any, ...]]]:
    """The arguments of each block in the next pass."""
    found: list[tuple[Any, ...]] = []

    def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append((args[0].clone(), args[1:], kwargs))

    handles = [layer.block.register_forward_pre_hook(before, with_kwargs=True) for layer in net.layers]
    yield found
    for handle in handles:
        handle.remove()


def _bare_blocks(net: Anatomy, layer: int, calls: list[tuple[Any, ...]]) -> Tensor:
    """A block without its MLP and the blocks above it, on what entered it; nothing else of the model."""
    mlp = net.layers[layer].mlp_first
    hidden = calls[layer][0]
    mlp.forward = lambda x: x
    try:
        for part, (_, args, kwargs) in zip(net.layers[layer:], calls[layer:], strict=True):
            hidden = first_tensor(part.block(hidden, *args, **kwargs))
            vars(mlp).pop("forward", None)
    finally:
        vars(mlp).pop("forward", None)
    return hidden


def _bare_head(net: Anatomy, hidden: Tensor, batch: WindowBatch, base: list[Tensor] | None) -> list[Tensor]:
    """Losses, and with the log-probabilities of the base divergences: the head on many rows, what follows on
    few enough to stay in the cache. Gives the log-probabilities where there is no base yet."""
    has = batch.target_id >= 0
    chosen = torch.from_numpy(np.flatnonzero(batch.mask)[has])
    target = torch.from_numpy(batch.target_id[has]).long()
    few, many = rows_per_chunk(net.vocab_size, CACHE_BYTES), rows_per_chunk(net.vocab_size)
    found: list[Tensor] = []
    for places, goals in zip(chosen.split(many), target.split(many), strict=True):
        scores = logits(net, hidden.flatten(0, 1)[places])
        for part, goal in zip(scores.split(few), goals.split(few), strict=True):
            log_q = torch.log_softmax(part.float(), -1)
            torch.nn.functional.nll_loss(log_q, goal, reduction="none")
            if base is None:
                found.append(log_q)
            else:
                log_p = base[len(found)]
                found.append(torch.sub(log_p, log_q, out=log_q).mul_(log_p.exp()).sum(1))
    return found


def _turn(one: Callable[[], None], other: Callable[[], None], number: int) -> tuple[Pair, Pair]:
    """Seconds of both; the second goes first every other time."""
    if number % 2:
        later, earlier = _timed(other), _timed(one)
        return earlier, later
    return _timed(one), _timed(other)


def _timed(action: Callable[[], None]) -> Pair:
    gc.collect()
    wall, cpu = time.perf_counter(), time.process_time()
    action()
    return time.perf_counter() - wall, time.process_time() - cpu


def _linear(net: Anatomy, layer: int) -> Substitute:
    """What a map holds does not matter for its time, as long as nothing overflows."""
    weight = torch.eye(net.d_model, dtype=net.dtype)
    return Substitute(
        parse_intervention("linear"), layer, LinearMap(weight, torch.zeros(net.d_model, dtype=net.dtype))
    )


def _store(loaded: LoadedModel, path: Path, n_tokens: int, threads: int, corpus: str) -> Reader:
    """One batch a block, one layer kept."""
    settings = HarvestSettings(
        tokens=3 * n_tokens,
        block=n_tokens,
        batch_tokens=n_tokens,
        sequence_length=min(256, n_tokens),
        layers="0",
        threads=threads,
    )
    harvest(loaded.model, loaded.tokenizer, corpora.load(corpus), path, settings=settings)
    return Reader.open(path)


if __name__ == "__main__":
    for row in rows():
        print(row)
