"""x = β + t + p + k on real models: every layer of both bundled ones, and of SmolLM2."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers_harvest import texts
from helpers_models import smollm2_path
from nearline.analyze.parts import parts_source
from nearline.collect.bundled_models import BUNDLED, bundled_path
from nearline.collect.corpora import Corpus
from nearline.collect.harvesting import harvest
from nearline.collect.loading import load_both
from nearline.collect.models import LoadedModel, load
from nearline.collect.settings import parse
from nearline.store import Reader

# As for synthetic stores; trained residuals hold features hundreds of times larger than the rest.
ROUNDING = 2e-5
FEW: dict[str, Any] = {
    "tokens": 320,
    "block": 80,
    "batch_tokens": 256,
    "sequence_length": 32,
    "min_length": 4,
}


def deviations(loaded: LoadedModel, corpus: Corpus | list[str], path: Path) -> dict[int, float]:
    """Of each layer, the largest deviation over all rows; position 0 and special tokens too."""
    sites = "embedding,residual,mlp_output"
    harvest(loaded.model, loaded.tokenizer, corpus, path, name=loaded.name, sites=sites, **FEW)
    reader, found = Reader.open(path), {}
    assert (reader.position_embedding is not None) == (loaded.name == "tiny-gpt2")
    for layer in reader.layers:
        source = parts_source(reader, layer)
        worst = [source.block(block).deviation() for block in range(reader.n_blocks)]
        assert np.isfinite(np.concatenate(worst)).all()
        found[layer] = float(np.concatenate(worst).max())
    return found


@pytest.mark.parametrize("name", BUNDLED)
def test_the_input_is_the_sum_of_its_parts_on_every_layer_of_a_bundled_model(
    name: str, tmp_path: Path
) -> None:
    found = deviations(load(str(bundled_path(name))), texts(), tmp_path / "s")
    assert len(found) == 6
    assert max(found.values()) < ROUNDING


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_input_is_the_sum_of_its_parts_on_every_layer_of_smollm2(
    dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, gguf_file = smollm2_path()
    corpus, loaded = load_both(
        parse({"model": str(folder), "gguf_file": gguf_file, "corpus": "docs:scientific", "dtype": dtype})
    )
    found = deviations(loaded, corpus, tmp_path / "s")
    assert len(found) == 30
    with capsys.disabled():
        print(f"\nSmolLM2-135M in {dtype}: largest deviation of a layer {max(found.values()):.1e}")
    assert max(found.values()) < ROUNDING
