"""The sizes that a settings file writes down, against what models say of themselves."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers_model_hub import FakeModelHub
from nearline.collect.bundled_models import BUNDLED, bundled_path
from nearline.collect.model_shape import ModelShape, shape_in

GPT2 = {"n_layer": 24, "n_embd": 1024, "n_inner": None, "vocab_size": 50257}
NEOX = {"num_hidden_layers": 16, "hidden_size": 2048, "intermediate_size": 8192, "vocab_size": 50304}
SETTINGS = """
[collect]
tokens = 2000
[[models]]
model = "org/tiny"
shape = { layers = 7, d_model = 192, d_ff = 768, vocabulary = 4096 }
[[corpora]]
corpus = "docs:python"
"""


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (GPT2, (24, 1024, 4096, 50257)),
        ({**GPT2, "n_inner": 512}, (24, 1024, 512, 50257)),
        (NEOX, (16, 2048, 8192, 50304)),
        ({"text_config": NEOX, "vocab_size": 7}, (16, 2048, 8192, 50304)),
        ({**NEOX, "hidden_size": "2048"}, None),
        ({**NEOX, "num_hidden_layers": True}, None),
        ({}, None),
    ],
)
def test_a_config_says_its_sizes(config: dict[str, Any], expected: tuple[int, ...] | None) -> None:
    found = shape_in(config)
    assert (None if found is None else tuple(found.model_dump().values())) == expected


@pytest.mark.parametrize("name", BUNDLED)
def test_a_bundled_model_has_the_sizes_of_its_config(name: str) -> None:
    config = json.loads((bundled_path(name) / "config.json").read_text(encoding="utf-8"))
    assert shape_in(config) == ModelShape(layers=6, d_model=192, d_ff=768, vocabulary=4096)


@pytest.mark.long
def test_a_model_of_the_hub_is_compared_before_its_weights_are_asked_for(tmp_path: Path) -> None:
    """First when its harvest begins; then, since its config is here, before any step."""
    (tmp_path / "study.toml").write_text(SETTINGS, encoding="utf-8")
    with FakeModelHub() as hub:
        hub.fill("org/tiny", bundled_path("tiny-gpt2"))
        for asked in (True, False):
            hub.seen.clear()
            done = subprocess.run(
                [sys.executable, "-m", "nearline", "run", "study.toml"],
                capture_output=True,
                text=True,
                cwd=tmp_path,
                env=hub.environment(tmp_path / "cache"),
                check=False,
            )
            assert done.returncode == 2, done.stderr
            assert "[[models]] tiny, shape: layers = 7 is written and the model has 6" in done.stderr
            assert bool(hub.seen) == asked
            assert not any("safetensors" in one for one in hub.seen)
    assert not (tmp_path / "study" / "stores").exists()
