"""Speed of a harvest against a bare forward pass that computes the same losses over the same batches.

In: a model and sizes. Out: rows of name, value, unit, what is to be reached, and how it was measured. Both
sides run in one process, in turns, the order changing every time; a ratio is the median over the pairs. The
harvest's side is everything that a run does per block: hooks, copies, statistics, digests, durable commits.
"""

import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from helpers_models import smollm2_path
from nearline.collect import HarvestSettings, corpora, models, parse_settings
from nearline.collect.anatomy import anatomy
from nearline.collect.claim import Claim
from nearline.collect.forward import evaluating, final_hidden, inputs_of
from nearline.collect.harvesting import begin
from nearline.collect.loop import run_blocks
from nearline.collect.models import LoadedModel
from nearline.collect.nll import token_nll
from nearline.collect.preparing import Prepared, prepare
from nearline.collect.rows import block_batches, block_columns
from nearline.collect.tokenise import tokenise
from nearline.store import StoreWriter, silent

REACH = {"float32": ">= 0.95", "bfloat16": ">= 0.85"}
Row = dict[str, Any]


def rows() -> list[Row]:
    """Every row of `make bench` about harvests."""
    return collect_rows()


def collect_rows(
    model_source: str = "smollm2",
    dtypes: Sequence[str] = ("float32", "bfloat16"),
    n_tokens: int = 6144,
    repeats: int = 5,
    threads: int = 2,
    corpus: str = "docs:python",
) -> list[Row]:
    """Per compute dtype: the ratio, the speed, the cost of the losses, and what the writer took."""
    settings = parse_settings({"tokens": n_tokens, "block": n_tokens // 6, "corpus": corpus})
    return [row for dtype in dtypes for row in _dtype_rows(model_source, dtype, settings, repeats, threads)]


def _dtype_rows(
    model_source: str, dtype: str, settings: HarvestSettings, repeats: int, threads: int
) -> list[Row]:
    loaded = _load(model_source, dtype)
    with evaluating(loaded.model, threads), tempfile.TemporaryDirectory() as folder:
        prepared = _prepare(loaded, settings, Path(folder))
        claims = [Claim(Path(folder) / f"{turn}") for turn in range(repeats)]
        writers = [begin(claim, prepared, loaded, settings, {}) for claim in claims]
        sides: dict[str, Callable[[int], float]] = {
            "bare": lambda _: _bare(prepared, losses=True),
            "collect": lambda turn: _collect(prepared, writers[turn]),
        }
        _bare(prepared, losses=True)  # warms caches and allocators for both
        turns = [_turn(sides, number) for number in range(repeats)]
        without_losses = statistics.median(
            _timed(lambda _: _bare(prepared, losses=False), 0)[0] for _ in range(2)
        )
    (bare, bare_cpu), (full, full_cpu) = (
        tuple(statistics.median(turn[side][clock] for turn in turns) for clock in (0, 1)) for side in sides
    )
    ratio = statistics.median(turn["bare"][0] / turn["collect"][0] for turn in turns)
    cpu_ratio = statistics.median(turn["bare"][1] / turn["collect"][1] for turn in turns)
    waited = statistics.median(turn["collect"][2] for turn in turns)
    rows_done = prepared.planned.plan.n_tokens
    where = (
        f"{model_source}, {dtype}, {prepared.anatomy.n_layers} layers, {rows_done} rows, {threads} threads"
    )
    note = f"{where}: bare {bare:.2f} s (CPU {bare_cpu:.1f}), collect {full:.2f} s (CPU {full_cpu:.1f})"
    name = f"collect {dtype}"
    return [
        _row(
            f"{name}: speed against a bare forward with the same losses",
            ratio,
            "x",
            REACH.get(dtype, ""),
            note,
        ),
        _row(f"{name}: the same in CPU seconds", cpu_ratio, "x", "", "what a busy machine cannot blur"),
        _row(f"{name}: speed", rows_done / full, "tokens/s", "", f"bare {rows_done / bare:,.0f}"),
        _row(f"{name}: waiting for the writer", 100 * waited / full, "% of time", "", "last commit included"),
        _row(f"{name}: cost of the losses", 100 * (bare / without_losses - 1), "% of forward", "", where),
    ]


def _turn(sides: dict[str, Callable[[int], float]], number: int) -> dict[str, tuple[float, float, float]]:
    """Wall seconds, CPU seconds and waiting of each side; every other turn starts with the other side."""
    order = list(sides) if number % 2 == 0 else list(sides)[::-1]
    return {side: _timed(sides[side], number) for side in order}


def _timed(action: Callable[[int], float], turn: int) -> tuple[float, float, float]:
    gc.collect()
    wall, cpu = time.perf_counter(), time.process_time()
    waited = action(turn)
    return time.perf_counter() - wall, time.process_time() - cpu, waited


def _bare(prepared: Prepared, *, losses: bool) -> float:
    plan, tokens, net = prepared.planned.plan, prepared.tokens, prepared.anatomy
    for number in range(plan.n_blocks):
        columns = block_columns(plan, number, tokens.ids, tokens.special_ids)
        for batch in block_batches(plan, number, columns["token_id"]):
            hidden = final_hidden(net, inputs_of(batch.ids, batch.mask, net.device))
            if losses:
                target = torch.from_numpy(columns["target_id"][batch.row0 : batch.row1])
                token_nll(net, hidden[torch.from_numpy(batch.mask)], target)
    return 0.0


def _collect(prepared: Prepared, writer: StoreWriter) -> float:
    return run_blocks(prepared, writer, mask_nonfinite=False, progress=silent).disk_s


def _prepare(loaded: LoadedModel, settings: HarvestSettings, folder: Path) -> Prepared:
    corpus = corpora.load(settings.corpus)
    assert loaded.tokenizer is not None
    tokens = tokenise(corpus, loaded.tokenizer, bos=settings.bos)
    return prepare(anatomy(loaded.model), corpus, tokens, settings, folder)


def _load(model_source: str, dtype: str) -> LoadedModel:
    if model_source != "smollm2":
        return models.load(model_source, dtype=dtype, device="cpu")
    folder, gguf_file = smollm2_path()
    return models.load(str(folder), gguf_file=gguf_file, dtype=dtype, device="cpu")


def _row(name: str, value: float, unit: str, reach: str, note: str) -> Row:
    return {"name": name, "value": value, "unit": unit, "reach": reach, "note": note}


if __name__ == "__main__":
    for row in rows():
        print(row)
