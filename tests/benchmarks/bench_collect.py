"""Speed of a harvest against a bare forward pass that computes the same losses over the same batches, and of
a harvest that stores moments alone.

In: a model and sizes. Out: rows of name, value, unit, what is to be reached, and how it was measured. Both
sides run in one process, in turns, the order changing every time; a ratio is the median over the pairs. The
harvest's side is everything that a run does per block: hooks, copies, statistics, digests, durable commits.
Moments alone are set against what gives the same surrogates otherwise: rows collected, then summed.
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
from nearline.analyze.moments_reading import read_moments
from nearline.collect import HarvestSettings, corpora, models, moments_only, parse_settings
from nearline.collect.anatomy import anatomy
from nearline.collect.claim import Claim
from nearline.collect.describing import attributes_of
from nearline.collect.forward import evaluating, final_hidden, inputs_of
from nearline.collect.harvesting import begin
from nearline.collect.loop import run_blocks
from nearline.collect.models import LoadedModel
from nearline.collect.nll import token_nll
from nearline.collect.preparing import Prepared, prepare
from nearline.collect.proving import Proved
from nearline.collect.rows import block_batches, block_columns
from nearline.collect.stopping import Watch
from nearline.collect.tokenise import tokenise
from nearline.store import Reader, StoreWriter, silent

REACH = {"float32": ">= 0.95", "bfloat16": ">= 0.85"}
Row = dict[str, Any]


def rows() -> list[Row]:
    """Every row of `make bench` about harvests."""
    return [*collect_rows(), *moments_rows()]


def moments_rows(
    model_source: str = "smollm2",
    n_tokens: int = 6144,
    repeats: int = 3,
    threads: int = 2,
    corpus: str = "docs:python",
    layers: str = "0-9",
    folds: int = 3,
) -> list[Row]:
    """Moments alone, float32 in bfloat16 storage, against collecting the rows and against that and summing
    them: seconds, and bytes on the disk."""
    given = {"tokens": n_tokens, "block": n_tokens // 6, "corpus": corpus, "layers": layers}
    given["storage_dtype"] = "bfloat16"
    rows, sums = (parse_settings(given | only) for only in ({}, {"moments_only": True, "folds": folds}))
    loaded = _load(model_source, "float32")
    with evaluating(loaded.model, threads), tempfile.TemporaryDirectory() as folder:
        there = Path(folder)
        ready, summing = _prepare(loaded, rows, there), _prepare(loaded, sums, there)
        writers = [
            begin(Claim(there / f"{turn}"), ready, loaded, rows, Proved({})) for turn in range(repeats)
        ]
        attributes = attributes_of(summing, loaded, sums, {})

        def moments(turn: int) -> float:
            out = there / f"moments {turn}"
            moments_only.run(out, summing, attributes, sums, silent, Watch())
            return _bytes(out)

        def collected(turn: int) -> float:
            _collect(ready, writers[turn])
            writers[turn].seal()
            return _bytes(writers[turn].path)

        sides: dict[str, Callable[[int], float]] = {
            "collect": collected,
            "read": lambda turn: _read(writers[turn].path, folds),
            "moments": moments,
        }
        _bare(ready, losses=True)
        turns = [_turn_in_order(sides, number) for number in range(repeats)]
    wall = {side: statistics.median(turn[side][0] for turn in turns) for side in sides}
    size = {side: turns[0][side][2] / 2**20 for side in sides}
    both = statistics.median((one["collect"][0] + one["read"][0]) / one["moments"][0] for one in turns)
    busy = statistics.median((one["collect"][1] + one["read"][1]) / one["moments"][1] for one in turns)
    plan = ready.planned.plan
    note = (
        f"{model_source}, layers {layers}, {plan.n_tokens} rows, {threads} threads: collect "
        f"{wall['collect']:.2f} s, sum {wall['read']:.2f} s, moments alone {wall['moments']:.2f} s (no pass "
        "over gate rows)"
    )
    return [
        _row("moments only: speed against collect, then summing the rows", both, "x", "", note),
        _row("moments only: the same in CPU seconds", busy, "x", "", "what a busy machine cannot blur"),
        _row(
            "moments only: bytes on the disk against those of the rows",
            size["moments"] / size["collect"],
            "x",
            "",
            f"{size['moments']:.1f} MiB whatever the tokens, rows {size['collect']:.1f} MiB",
        ),
    ]


def _turn_in_order(
    sides: dict[str, Callable[[int], float]], number: int
) -> dict[str, tuple[float, float, float]]:
    """Rows are summed after they were collected; moments go first in every other turn."""
    order = list(sides) if number % 2 == 0 else ["moments", "collect", "read"]
    return {side: _timed(sides[side], number) for side in order}


def _read(path: Path, folds: int) -> float:
    return float(read_moments(Reader.open(path), "rows", folds=folds).n_folds)


def _bytes(folder: Path) -> float:
    return float(sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()))


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
        writers = [begin(claim, prepared, loaded, settings, Proved({})) for claim in claims]
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
