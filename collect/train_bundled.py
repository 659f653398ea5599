"""Trains a bundled language model: `python -m nearline.collect.train_bundled tiny-gpt2 --out DIR`.

In: the texts of bundled_texts.py. Out: config.json, model.safetensors (float16, below 8 MB), tokenizer
files and training.json (seed, counts, schedule, loss curve, held-out perplexity), rewritten every ten
minutes and at the end. The number of steps is given, or follows from the minutes given and the speed of the
first steps; the same seed, steps, threads and library versions give the same weights. Every window starts
with the BOS token. Cost: 2 GB of memory; 3,000 to 3,400 tokens/s on one core with bfloat16 instructions
(2,300 to 2,600 in float32).
"""

import argparse
import json
import logging
import math
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import tokenizers
import torch
import transformers
from jaxtyping import Int64
from safetensors.torch import save_file
from torch import Tensor, nn

from .bundled_models import BUNDLED
from .bundled_texts import CONTEXT, VOCABULARY, encode, gather_texts, token_stream, train_tokenizer, windows

LAYERS, WIDTH, HEADS = 6, 192, 6
BATCH = 4  # windows; many steps of small batches: the model is far below its critical batch size
LEARNING_RATE, FINAL_SHARE, WARM_UP = 2e-3, 0.05, 200
TIMED_STEPS, SPEED_MARGIN = 40, 0.75  # other work on the machine may slow the rest of the run
LOG_STEPS = 50
CHECKPOINT_S = 600

logger = logging.getLogger("nearline")


def build_model(name: str, bos_id: int) -> transformers.PreTrainedModel:
    """A freshly initialised model of six layers; both tie the head to the token embedding."""
    common = {
        "vocab_size": VOCABULARY,
        "bos_token_id": bos_id,
        "eos_token_id": bos_id,
        "tie_word_embeddings": True,
    }
    if name == "tiny-gpt2":
        config = transformers.GPT2Config(
            n_positions=CONTEXT, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **common,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(config)
    config = transformers.GPTNeoXConfig(
        max_position_embeddings=CONTEXT, hidden_size=WIDTH, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, intermediate_size=4 * WIDTH, use_parallel_residual=True, **common,
    )  # fmt: skip
    return transformers.GPTNeoXForCausalLM(config)


def loss_sum(model: nn.Module, ids: Int64[Tensor, "batch position"]) -> Tensor:
    """Summed nats of predicting every token after the first."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="sum")


@torch.inference_mode()
def held_out_loss(model: nn.Module, documents: Sequence[Sequence[int]], bos_id: int) -> float:
    """Mean nats per token in float32, each document read alone in windows of CONTEXT that start with BOS."""
    model.eval()
    total, count = 0.0, 0
    for ids in documents:
        for start in range(0, len(ids), CONTEXT - 1):
            window = torch.tensor([[bos_id, *ids[start : start + CONTEXT - 1]]])
            total += float(loss_sum(model, window))
            count += window.shape[1] - 1
    model.train()
    return total / count


def optimizer_for(model: nn.Module) -> torch.optim.AdamW:
    """AdamW; norms and biases do not decay."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95), fused=True)


def rate_at(step: int, steps: int) -> float:
    """Learning rate: linear warm-up, then a cosine down to FINAL_SHARE of the peak."""
    if step < WARM_UP:
        return LEARNING_RATE * (step + 1) / WARM_UP
    progress = min(1.0, (step - WARM_UP) / max(1, steps - WARM_UP))
    return LEARNING_RATE * (FINAL_SHARE + (1 - FINAL_SHARE) * 0.5 * (1 + math.cos(math.pi * progress)))


def run_steps(
    model: nn.Module,
    batches: Iterator[Int64[np.ndarray, "batch position"]],
    steps: int | None,
    budget_s: float,
    report: Callable[[int, int, float], None],
) -> None:
    """Optimises for `steps` steps, or for as many as the first ones say fit into the budget.
    `report(step, steps, loss)` is called every LOG_STEPS steps with their mean loss, and after the last."""
    optimizer = optimizer_for(model)
    planned = steps or sys.maxsize
    step, total, start = 0, 0.0, time.monotonic()
    while step < planned:
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, planned)
        ids = torch.from_numpy(next(batches))
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_sum(model, ids) / (ids.shape[0] * (ids.shape[1] - 1))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        total, step = total + float(loss.detach()), step + 1
        if step == TIMED_STEPS and steps is None:
            per_step = (time.monotonic() - start) / step
            planned = max(2 * WARM_UP, int(SPEED_MARGIN * budget_s / per_step))
        if step % LOG_STEPS == 0 or step == planned:
            report(step, planned, total / ((step - 1) % LOG_STEPS + 1))
            total = 0.0


@dataclass(slots=True)
class Recorder:
    """Keeps the loss curve, and writes the artefact now and then and after the last step."""

    out: Path
    model: transformers.PreTrainedModel
    tokenizer: transformers.PreTrainedTokenizerFast
    held_out: list[list[int]]
    facts: dict[str, object]
    start: float = field(default_factory=time.monotonic)
    written: float = field(default_factory=time.monotonic)
    curve: list[dict[str, float]] = field(default_factory=list)

    def __call__(self, step: int, planned: int, loss: float) -> None:
        now = time.monotonic()
        point = {"step": step, "loss": round(loss, 4), "minutes": round((now - self.start) / 60, 2)}
        self.curve.append(point)
        if step == planned or now - self.written > CHECKPOINT_S:
            nats = held_out_loss(self.model, self.held_out, int(self.tokenizer.bos_token_id))  # pyright: ignore[reportArgumentType]
            point["held_out_loss"] = round(nats, 4)
            progress: dict[str, float] = {
                "steps_planned": planned,
                "steps": step,
                "tokens": step * BATCH * CONTEXT,
            }
            progress["held_out_perplexity"] = round(math.exp(nats), 3)
            write_artefact(
                self.out, self.model, self.tokenizer, {**self.facts, **progress, "curve": self.curve}
            )
            self.written = time.monotonic()
        logger.info("of %d: %s", planned, point)


def write_artefact(
    out: Path,
    model: transformers.PreTrainedModel,
    tokenizer: transformers.PreTrainedTokenizerFast,
    facts: dict[str, object],
) -> None:
    """The model's folder, file by file under its final name. Weights are rounded to float16 to stay small,
    while the configuration says float32, so that they are loaded for exact computation."""
    aside = out / "partial"
    aside.mkdir(parents=True, exist_ok=True)
    tied: set[str] = set(getattr(model, "_tied_weights_keys", None) or ())
    weights = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    half = {name: tensor.half() if tensor.is_floating_point() else tensor for name, tensor in weights.items()}
    save_file(half, aside / "model.safetensors", metadata={"format": "pt"})
    model.config.architectures = [type(model).__name__]
    model.config.dtype = torch.float32
    model.config.save_pretrained(aside)
    tokenizer.save_pretrained(aside)
    (aside / "training.json").write_text(json.dumps(facts, indent=1) + "\n")
    for file in sorted(aside.iterdir()):
        file.chmod(0o644)  # safetensors writes files that only their owner may read
        file.replace(out / file.name)
    aside.rmdir()


def train(name: str, out: Path, minutes: float, threads: int, seed: int, steps: int | None) -> None:
    """One whole training run; see the module's docstring."""
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    texts = gather_texts()
    tokenizer = train_tokenizer(texts)
    bos_id = int(tokenizer.bos_token_id)  # pyright: ignore[reportArgumentType]
    stream = token_stream(texts, tokenizer, bos_id)
    held_out = encode(tokenizer, texts.held_out)
    model = build_model(name, bos_id)
    facts: dict[str, object] = {
        "program": f"python -m nearline.collect.train_bundled {name}", "seed": seed, "threads": threads,
        "minutes": minutes, **texts.counts, "tokens_per_epoch": len(stream),
        "held_out_tokens": sum(map(len, held_out)), "parameters": model.num_parameters(),
        "batch_windows": BATCH, "context": CONTEXT, "bos": "first in every window and every document",
        "learning_rate": LEARNING_RATE, "warm_up_steps": WARM_UP,
        "schedule": f"cosine to {FINAL_SHARE} of the peak",
        "precision": "bfloat16 autocast on float32 weights", "versions": versions(),
    }  # fmt: skip
    logger.info("%s", json.dumps(facts))
    recorder = Recorder(out, model, tokenizer, held_out, facts)
    run_steps(model, windows(stream, bos_id, BATCH, seed), steps, minutes * 60, recorder)


def versions() -> dict[str, str]:
    """The libraries that decide the weights."""
    libraries = (torch, transformers, tokenizers)
    return {"python": platform.python_version()} | {
        library.__name__: library.__version__ for library in libraries
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train a bundled language model.")
    parser.add_argument("name", choices=BUNDLED)
    parser.add_argument("--out", type=Path, required=True, help="folder that receives the model")
    parser.add_argument("--minutes", type=float, default=85.0, help="time to plan the number of steps for")
    parser.add_argument("--steps", type=int, default=None, help="number of steps, instead of --minutes")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and of the order of windows")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    train(**vars(arguments))


if __name__ == "__main__":
    main()
