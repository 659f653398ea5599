"""What fine-tuning is said to have shown, where it is known: a bundled model with one MLP changed.

A random even function in the place of an MLP is nothing that a linear map could keep, and harms; the MLP of
the first layer is needed; an MLP whose output is three times too large wants rescaling, not linearising.
"""

from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from nearline.analyze import FitSettings, fit
from nearline.collect import collect, finetune, models
from nearline.collect.settings import parse as harvest_settings
from nearline.collect.tuning_settings import parse

LAYER = 1
TUNING: dict[str, Any] = {
    "learning_rates": "1e-4,1e-3",
    "gate_learning_rates": "1e-2,1e-1",
    "steps": 40,
    "gate_steps": 40,
    "points": 1,
    "batch_sequences": 4,
    "sparsity": 0.0,
}


def changed(folder: Path, change: Any, layer: int) -> Path:
    """A bundled model with one MLP changed, and a study of it."""
    loaded = models.load("tiny-gpt2", dtype="float32")
    model: Any = loaded.model
    with torch.no_grad():
        change(model.transformer.h[layer].mlp)
    model.save_pretrained(folder / "model")
    assert loaded.tokenizer is not None
    loaded.tokenizer.save_pretrained(folder / "model")
    settings = {
        "model": str(folder / "model"),
        "corpus": "docs:stdlib",
        "tokens": 12000,
        "sequence_length": 128,
        "keep": "1/4",
        "dtype": "float32",
        "storage_dtype": "float32",
    }
    collect(harvest_settings(settings), folder / "store")
    fit(folder / "study", [folder / "store"], FitSettings(folds=2, examples=1))
    return folder / "study"


def even(mlp: Any) -> None:
    """A sum of |u·x|, of the size that the MLP's output has."""
    drawn = torch.Generator().manual_seed(0)
    half = mlp.c_fc.weight.shape[1] // 2
    up = torch.randn(mlp.c_fc.weight.shape[0], half, generator=drawn) * mlp.c_fc.weight.std()
    down = torch.randn(half, mlp.c_proj.weight.shape[1], generator=drawn) * mlp.c_proj.weight.std()
    mlp.c_fc.weight.copy_(torch.cat([up, -up], dim=1))
    mlp.c_proj.weight.copy_(2.0 * torch.cat([down, down], dim=0))
    mlp.c_fc.bias.zero_()


def three_times(mlp: Any) -> None:
    mlp.c_proj.weight.mul_(3.0)
    mlp.c_proj.bias.mul_(3.0)


def verdicts(study: Path, **settings: Any) -> dict[tuple[str, str], str]:
    """(arm, against) → verdict on the only store, all seeds."""
    table = pl.from_arrow(finetune(study, parse(TUNING | settings)).table("finetune_summary"))
    assert isinstance(table, pl.DataFrame)
    last = table.filter("last")
    for row in last.select("arm", "against", "seed", "excess", "lo", "hi", "verdict").to_dicts():
        print(row)
    pairs = last.select("arm", "against", "verdict").unique().rows()
    return {(arm, against): verdict for arm, against, verdict in pairs}


@pytest.mark.long
def test_a_harmful_nonlinearity_is_better_linearised(tmp_path: Path) -> None:
    found = verdicts(changed(tmp_path, even, LAYER), layers=f"{LAYER}", arms="linear", seeds="0,1,2")
    assert found["linear", "control_matched"] == "better"


@pytest.mark.long
def test_a_needed_nonlinearity_is_not(tmp_path: Path) -> None:
    found = verdicts(changed(tmp_path, lambda _: None, 0), layers="0", arms="linear", seeds="0,1,2")
    assert found["linear", "control_matched"] == "worse"


@pytest.mark.long
def test_rescaling_is_told_from_linearising(tmp_path: Path) -> None:
    """A gate that mixes in a surrogate helps, but no more than one that only scales."""
    study = changed(tmp_path, three_times, LAYER)
    found = verdicts(study, layers=f"{LAYER}", arms="gate_only", seeds="0,1,2")
    assert found["scale_only", "base"] == "better"
    assert found["gate_only", "base"] == "better"
    assert found["gate_only", "scale_only"] != "better"
