"""One look at a machine with a GPU: what a harvest stores there is right, and how busy the GPU is meanwhile.

In: nothing; random models are made here. Out: a few lines per model, and exit code 0; 1 where a check failed,
4 with one line where torch finds no CUDA. Per model: the stored rows against an unbatched pass of the same
model, all sites; of the small one, moments summed on the device against those of the stored rows; tokens a
second against the bare forward with the same losses; the share of the time in which the GPU had no work, by
its own events; the time waited for the disk. Needs about 12 GB of GPU memory and 25 GB of disk; takes a
minute or two. `python tests/benchmarks/cuda_check.py [FOLDER]`.
"""

import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import torch
from helpers_models import tiny_tokenizer
from nearline.analyze.layers import layer_source
from nearline.analyze.moments_file import open_moments
from nearline.analyze.moments_reading import read_moments
from nearline.analyze.surrogates import solve_layer
from nearline.collect import corpora, models, moments_only
from nearline.collect.agreement import row_error
from nearline.collect.anatomy import anatomy
from nearline.collect.batch_budget import batch_budget
from nearline.collect.describing import attributes_of
from nearline.collect.forward import evaluating, final_hidden, inputs_of
from nearline.collect.harvesting import begin_with
from nearline.collect.lanes import moved
from nearline.collect.loop import run_blocks
from nearline.collect.nll import token_nll
from nearline.collect.preparing import Prepared, prepare
from nearline.collect.proof import TOLERANCES
from nearline.collect.rows import block_batches, block_columns
from nearline.collect.settings import parse
from nearline.collect.site_names import MOMENTS_SITES
from nearline.collect.stopping import Watch
from nearline.collect.tokenise import tokenise
from nearline.store import Reader, silent, verify
from transformers import LlamaConfig, LlamaForCausalLM

NO_CUDA = 4
MOST_MOMENTS = 256  # features of a model whose moments are summed too
PREDICTIONS = 1e-5
WORDS = "the quick brown fox jumps over the lazy dog and a model reads what a store keeps".split()


@dataclass(frozen=True, slots=True)
class Size:
    """A random llama, and how much of it is stored."""

    name: str
    n_layers: int
    d_model: int
    dtype: torch.dtype
    tokens: int
    sequence_length: int


SIZES = (
    Size("tiny", 3, 64, torch.float32, 20_000, 128),
    Size("mid-size", 24, 2048, torch.bfloat16, 60_000, 512),
)


def main(device_name: str = "cuda", folder: str | None = None, sizes: tuple[Size, ...] = SIZES) -> int:
    """Check each size; the exit code."""
    if device_name == "cuda" and not torch.cuda.is_available():
        print("no CUDA here: torch.cuda.is_available() is false, so nothing was checked")
        return NO_CUDA
    device = torch.device(device_name)
    if device.type == "cuda":
        print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}")
    good = True
    for size in sizes:
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            good &= check(size, device, Path(scratch))
    print("all checks passed" if good else "A CHECK FAILED")
    return 0 if good else 1


def check(size: Size, device: torch.device, scratch: Path) -> bool:
    """One model, harvested and looked at."""
    prepared, writer = prepared_store(size, device, scratch / "store")
    n_tokens = prepared.planned.plan.n_tokens
    with evaluating(prepared.anatomy.model, None):
        bare(prepared)  # warms allocator and kernels
        bare_s = timed(lambda: bare(prepared), device)[0]
        seconds, waits = timed(
            lambda: run_blocks(prepared, writer, mask_nonfinite=False, progress=silent), device
        )
        writer.seal()
        error, limit = against_single_passes(prepared, scratch / "store", size)
    idle = "" if waits.busy_s is None else f", GPU idle {100 * max(0.0, 1 - waits.busy_s / seconds):.1f} %"
    print(
        f"{size.name} ({size.n_layers} layers, d {size.d_model}, {size.dtype}): {n_tokens:,} rows in "
        f"{prepared.planned.plan.n_blocks} blocks, batch_tokens {prepared.planned.plan.batch_tokens:,}, "
        f"{prepared.store_bytes / 2**30:.2f} GiB"
    )
    print(
        f"  {n_tokens / seconds:,.0f} tokens/s, bare forward {n_tokens / bare_s:,.0f} (ratio "
        f"{bare_s / seconds:.2f}); waited for the disk {waits.disk_s:.2f} of {seconds:.2f} s, the host for "
        f"the GPU {waits.device_s:.2f} s{idle}"
    )
    whole = verify(scratch / "store", level="full").whole
    print(f"  largest error against unbatched passes {error:.2g} (allowed {limit:.2g}); store whole: {whole}")
    if size.d_model <= MOST_MOMENTS:
        off = moments_error(prepared, scratch)
        print(
            f"  predictions by moments summed here differ by {off:.2g} of the spread (allowed {PREDICTIONS})"
        )
        whole = whole and off <= PREDICTIONS
    if device.type == "cuda":
        print(f"  GPU memory at the peak {torch.cuda.max_memory_allocated(device) / 2**30:.2f} GiB")
    return whole and error <= limit


def prepared_store(size: Size, device: torch.device, path: Path) -> tuple[Prepared, Any]:
    """As `harvest` begins one, with the batch size that fits the device."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=size.d_model,
        intermediate_size=4 * size.d_model,
        num_hidden_layers=size.n_layers,
        num_attention_heads=max(size.d_model // 64, 1),
        vocab_size=32_000,
        max_position_embeddings=size.sequence_length,
        dtype=size.dtype,
    )
    with torch.device(device):
        model: Any = LlamaForCausalLM(config)
    model = model.to(size.dtype).eval().requires_grad_(False)
    settings = parse(
        {
            "tokens": size.tokens,
            "sequence_length": size.sequence_length,
            "storage_dtype": "float32" if size.dtype == torch.float32 else "bfloat16",
            "sites": "embedding,residual,mlp_output,mlp_input",
        }
    )
    random, corpus_tokens = np.random.default_rng(0), 0
    documents: list[str] = []
    while corpus_tokens < 3 * size.tokens:  # about two tokens a word
        documents.append(" ".join(random.choice(WORDS, random.integers(20, min(600, size.tokens // 10)))))
        corpus_tokens += len(documents[-1].split())
    loaded, corpus = (
        models.describe(model, tiny_tokenizer(), size.name),
        corpora.from_documents(documents, "d"),
    )
    path.mkdir()
    with evaluating(model, None):
        assert loaded.tokenizer is not None
        tokens, net = tokenise(corpus, loaded.tokenizer, bos=settings.bos), anatomy(model)
        budget = batch_budget(net, tokens, settings, path)
        prepared = prepare(net, corpus, tokens, budget.settings, path, measured=budget.measured)
        return prepared, begin_with(path, attributes_of(prepared, loaded, budget.settings, {}), prepared)


def bare(prepared: Prepared) -> None:
    """The same batches and losses, and nothing kept; nothing here waits for the device either."""
    plan, tokens, net = prepared.planned.plan, prepared.tokens, prepared.anatomy
    for number in range(plan.n_blocks):
        columns = block_columns(plan, number, tokens.ids, tokens.special_ids)
        for batch in block_batches(plan, number, columns["token_id"]):
            inputs = inputs_of(batch.ids, batch.mask, torch.device("cpu"))
            there = {
                name: None if value is None else moved(value, net.device) for name, value in inputs.items()
            }
            places = moved(torch.from_numpy(np.flatnonzero(batch.mask)), net.device)
            hidden = final_hidden(net, there).flatten(0, 1).index_select(0, places)
            token_nll(net, hidden, torch.from_numpy(columns["target_id"][batch.row0 : batch.row1]))


def against_single_passes(prepared: Prepared, path: Path, size: Size) -> tuple[float, float]:
    """The largest error of a few sequences, each run alone with plain hooks, and what rounding allows."""
    reader, net = Reader.open(path), prepared.anatomy
    sequence, token_id = reader.column("sequence"), reader.column("token_id")
    worst = 0.0
    for number in np.unique(sequence)[:: max(1, len(np.unique(sequence)) // 8)]:
        rows = np.flatnonzero(sequence == number)
        seen: dict[tuple[str, int], torch.Tensor] = {}
        handles = [handle for layer in net.layers for handle in plain_hooks(layer, seen)]
        ids = torch.from_numpy(token_id[rows]).long()[None].to(net.device)
        net.model(input_ids=ids, use_cache=False)
        for handle in handles:
            handle.remove()
        block = int(rows[0]) // reader.plan.block
        for (site, layer), wanted in seen.items():
            found = reader.rows(site, layer, block, block + 1)[rows - reader.block_range(block)[0]]
            errors = row_error(torch.from_numpy(found), wanted.float().cpu())
            worst = max(worst, float(errors.square().mean().sqrt()))
    return worst, TOLERANCES[size.dtype].batch


def moments_error(prepared: Prepared, scratch: Path) -> float:
    """Largest root mean square difference, over the layers, of the predictions of surrogates from moments
    that are summed on the device and from those of the store's rows."""
    reader, settings = Reader.open(scratch / "store"), parse({"moments_only": True, "folds": 2})
    shape = replace(prepared.shape, sites=MOMENTS_SITES)
    summing = replace(prepared, shape=shape, n_sums=settings.n_sums)
    before = torch.get_float32_matmul_precision()
    with evaluating(prepared.anatomy.model, None):
        moments_only.run(scratch / "moments", summing, reader.attributes, settings, silent, Watch())
    assert torch.get_float32_matmul_precision() == before
    found, wanted = open_moments(scratch / "moments"), read_moments(reader, "rows", folds=2)
    worst = 0.0
    for layer in found.layers:
        ours, theirs = (solve_layer(one.layer(layer), (0.1,)).full for one in (found, wanted))
        x = layer_source(reader, layer).inputs(0)[0]
        square = np.square(ours.predict(x) - theirs.predict(x), dtype=np.float64).sum(axis=1).mean()
        worst = max(worst, float(np.sqrt(square / theirs.spread)))
    return worst


def plain_hooks(layer: Any, seen: dict[tuple[str, int], torch.Tensor]) -> list[Any]:
    """Hooks written out here: what enters the norm and the MLP, what leaves the MLP."""

    def before(site: str) -> Any:
        return lambda module, args: seen.__setitem__((site, layer.index), args[0][0].clone())

    return [
        layer.block.post_attention_layernorm.register_forward_pre_hook(before("residual")),
        layer.block.mlp.register_forward_pre_hook(before("mlp_input")),
        layer.block.mlp.register_forward_hook(
            lambda module, args, output: seen.__setitem__(("mlp_output", layer.index), output[0].clone())
        ),
    ]


def timed(action: Any, device: torch.device) -> tuple[float, Any]:
    """Seconds until the device is done, and what the action gave."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    result = action()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started, result


if __name__ == "__main__":
    where = sys.argv[1] if len(sys.argv) > 1 else None
    if where is not None and shutil.disk_usage(where).free < 25 * 2**30:
        print(f"{where}: less than 25 GiB are free")
    sys.exit(main(folder=where))
