"""Fine-tuning on a GPU against the same on the host: losses of arms, in float32, with accumulated passes and
activations computed twice, and in bfloat16.

In: nothing; a bundled model on built-in text. Out: a line a way, exit code 0; 1 where losses are further
apart than rounding makes them, 4 with one line where torch finds no CUDA. Takes a minute or two.
`python tests/benchmarks/cuda_finetune.py`.
"""

import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import polars as pl
import torch
from nearline.analyze import FitSettings, fit
from nearline.collect import collect, finetune
from nearline.collect.settings import parse as harvest_settings
from nearline.collect.tuning_settings import parse
from nearline.store import Study

NO_CUDA = 4
HARVEST: dict[str, Any] = {
    "model": "tiny-gpt2",
    "corpus": "docs:stdlib",
    "keep": "1/8",
    "sequence_length": 128,
}
FEW: dict[str, Any] = {
    "layers": "1,4",
    "arms": "linear,gated",
    "seeds": "0",
    "learning_rates": "1e-4",
    "gate_learning_rates": "1e-2",
    "steps": 6,
    "gate_steps": 3,
    "points": 1,
    "batch_sequences": 4,
    "warmup": 2,
}
# Ways to train, and how far mean losses may lie from those on the host, in nats: a few steps of Adam turn
# rounding of 1e-7 (float32) and 4e-3 (bfloat16) into this.
WAYS: dict[str, tuple[dict[str, Any], float]] = {
    "float32": ({}, 1e-3),
    "float32, two passes a step, activations computed twice": (
        {"batch_sequences": 2, "accumulate": 2, "gradient_checkpointing": True},
        1e-3,
    ),
    "bfloat16": ({"dtype": "bfloat16"}, 3e-2),
}


def main(device: str = "cuda", tokens: int = 3_000) -> int:
    """Train on the host, then every way on the device; the exit code."""
    if device == "cuda" and not torch.cuda.is_available():
        print("no CUDA here: torch.cuda.is_available() is false, so nothing was checked")
        return NO_CUDA
    good = True
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        collect(harvest_settings(HARVEST | {"tokens": tokens, "device": "cpu"}), folder / "store")
        fit(folder / "study", [folder / "store"], FitSettings(folds=2, alphas=(1e-2,), examples=1))
        wanted, _ = losses(folder, "host", {"device": "cpu"})
        for number, (name, (way, most)) in enumerate(WAYS.items()):
            found, seconds = losses(folder, str(number), way | {"device": device})
            off = max(abs(found[key] - wanted[key]) for key in wanted)
            good &= found.keys() == wanted.keys() and off <= most
            print(
                f"{device}, {name}: {off:.2g} nats from the host's losses (allowed {most:g}), {seconds:.1f} s"
            )
    print("all checks passed" if good else "A CHECK FAILED")
    return 0 if good else 1


def losses(folder: Path, name: str, way: dict[str, Any]) -> tuple[dict[tuple[Any, ...], float], float]:
    """Mean test losses by arm, phase and step; seconds."""
    study = Path(shutil.copytree(folder / "study", folder / f"study-{name}", symlinks=True))
    began = time.perf_counter()
    finetune(study, parse(FEW | way))
    seconds = time.perf_counter() - began
    rows = pl.DataFrame(Study.open(study).table("finetune").to_pylist())
    rows = rows.filter("chosen", pl.col("split") == "test").select("arm", "phase", "step", "nll")
    return {row[:3]: row[3] for row in rows.rows()}, seconds


if __name__ == "__main__":
    sys.exit(main())
