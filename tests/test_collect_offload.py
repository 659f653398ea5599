"""Models that accelerate spreads over devices, main memory and a disk: the same digests, the same bytes, and
nothing is moved.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from helpers_harvest import files_of, harvested
from helpers_models import tiny_model, tiny_tokenizer
from helpers_peft import with_lora
from nearline.collect.hashes import weights_hash
from nearline.collect.max_memory import parse_max_memory
from nearline.collect.models import describe, load, outline
from nearline.collect.settings import parse
from nearline.store.errors import UsageError

# What is "cpu" stays in place where the model runs on "cpu", and else lies in main memory while it rests, as
# beside a GPU: accelerate takes a torch.device for another place.
RUNS_ON: list[Any] = ["cpu", torch.device("cpu")]
MAPS = {
    "llama": {
        "model.embed_tokens": "cpu",
        "model.layers.0": "cpu",
        "model.layers.1": "disk",
        "model.layers.2": "disk",
        "model.norm": "disk",
        "model.rotary_emb": "cpu",
        "lm_head": "disk",
    },
    "gpt2": {
        "transformer.wte": "disk",
        "transformer.wpe": "disk",
        "transformer.drop": "cpu",
        "transformer.h.0": "disk",
        "transformer.h.1": "cpu",
        "transformer.h.2": "disk",
        "transformer.ln_f": "disk",
        "lm_head": "disk",
    },
}
IDS = torch.arange(3, 20)[None]


def dispatched(family: str, folder: Path, runs_on: Any = "cpu") -> Any:
    model, _ = tiny_model(family)
    folder.mkdir()
    return dispatch_model(model, dict(MAPS[family]), main_device=runs_on, offload_dir=str(folder))


def places(model: Any) -> dict[str, str]:
    return {name: str(tensor.device) for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("runs_on", RUNS_ON, ids=["disk", "memory and disk"])
@pytest.mark.parametrize("family", MAPS)
def test_the_digest_is_that_of_the_whole_model(family: str, runs_on: Any, tmp_path: Path) -> None:
    whole, _ = tiny_model(family)
    model = dispatched(family, tmp_path / "away", runs_on)
    before = places(model)
    assert set(before.values()) == ({"meta", "cpu"} if runs_on == "cpu" else {"meta"})
    assert weights_hash(model) == weights_hash(whole)
    with torch.inference_mode():
        assert torch.equal(model(IDS).logits, whole(IDS).logits)
    found = describe(model)  # tied weights are two objects after a forward pass
    assert (found.weights_hash, found.config_hash) == (weights_hash(whole), describe(whole).config_hash)
    assert places(model) == before
    with torch.no_grad():
        next(tensor for tensor in whole.parameters()).view(-1)[7] += 1e-6
    assert weights_hash(model) != weights_hash(whole)


@pytest.mark.parametrize("family", MAPS)
def test_a_harvest_gives_the_same_bytes_and_moves_nothing(family: str, tmp_path: Path) -> None:
    model = dispatched(family, tmp_path / "away")
    before = places(model)
    away = harvested(tmp_path / "store", model=model)
    assert places(model) == before
    whole = harvested(tmp_path / "whole", family)
    assert files_of(away, without=("runs", "README.md")) == files_of(whole, without=("runs", "README.md"))


def test_weights_that_are_nowhere_stay_refused(tmp_path: Path) -> None:
    tiny_model("llama")[0].save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="nothing says from where"):
        describe(outline(str(tmp_path)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    tiny_model("llama")[0].save_pretrained(folder / "base")
    tiny_tokenizer().save_pretrained(folder / "base")
    with_lora(tiny_model("llama")[0]).save_pretrained(folder / "lora")
    return folder


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_settings_spread_a_model_that_is_loaded(dtype: str, folder: Path, tmp_path: Path) -> None:
    spread = {"device_map": "auto", "max_memory": {"cpu": 60_000}, "offload_folder": str(tmp_path / "away")}
    found = load(str(folder / "base"), dtype=dtype, **spread)
    assert "meta" in places(found.model).values()
    assert found.weights_hash == load(str(folder / "base"), dtype=dtype).weights_hash
    roomy = load(str(folder / "base"), dtype=dtype, device_map="auto")
    assert set(places(roomy.model).values()) == {"cpu"}
    assert roomy.weights_hash == found.weights_hash


def test_an_adapter_needs_its_base_in_place(folder: Path, tmp_path: Path) -> None:
    base, lora = str(folder / "base"), str(folder / "lora")
    roomy = load(base, adapter=lora, device_map="auto")
    assert roomy.weights_hash == load(base, adapter=lora).weights_hash
    with pytest.raises(UsageError, match=r"cannot be put on .*device_map.*merge"):
        load(base, adapter=lora, device_map="auto", max_memory={"cpu": 60_000})


def test_max_memory_is_read_by_device() -> None:
    assert parse_max_memory("0=20GiB, cpu = 64 GiB") == {0: 20 * 2**30, "cpu": 64 * 2**30}
    settings = parse({"device_map": "auto", "max_memory": "cpu=1MB"})
    assert settings.max_memory_bytes == {"cpu": 10**6}
    assert parse({}).max_memory_bytes is None


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"device_map": "auto", "device": "cuda:0"}, ["device_map=auto", "device=cuda:0"]),
        ({"device_map": "everywhere"}, ["device_map", "balanced"]),
        ({"max_memory": "cpu=1GiB"}, ["max_memory=cpu=1GiB", "device_map=auto"]),
        ({"offload_folder": "x"}, ["offload_folder=x", "device_map=auto"]),
        ({"device_map": "auto", "max_memory": "gpu=1GiB"}, ["gpu=1GiB", "0=20GiB,cpu=64GiB"]),
        ({"device_map": "auto", "max_memory": "20GiB"}, ["20GiB", "0=20GiB,cpu=64GiB"]),
        ({"device_map": "auto", "max_memory": "0=lots"}, ["lots", "4 GiB"]),
        ({"device_map": "auto", "max_memory": "0=1GiB,0=2GiB"}, ["0 twice"]),
    ],
)
def test_settings_that_cannot_be_are_one_sentence(given: dict[str, str], words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        parse(given)
    for word in words:
        assert word in str(caught.value)
