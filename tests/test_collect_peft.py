"""PEFT adapters: which act is in the record, and equal weights have equal digests however they came about."""

import copy
import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers_harvest import SMALL, files_of, harvested, texts
from helpers_models import tiny_model, tiny_tokenizer
from helpers_peft import lora_config, quiet, quiet_peft, reloaded, with_adapter, with_lora
from nearline.collect import peft_state
from nearline.collect.anatomy import anatomy, unwrapped
from nearline.collect.harvesting import collect
from nearline.collect.hashes import weights_hash
from nearline.collect.models import describe, load, recorded_name
from nearline.collect.norm_parameters import norm_parameters
from nearline.collect.peft_state import adapters_of
from nearline.collect.repairing import repair
from nearline.collect.settings import HarvestSettings
from nearline.collect.twin import settings_of
from nearline.store import Reader
from nearline.store.errors import EnvironmentFault, UsageError
from safetensors.torch import load_file, save_file


@pytest.fixture(scope="module")
def base() -> Any:
    return tiny_model("llama")[0]


@pytest.fixture(scope="module")
def folders(base: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`base`, and an adapter on it as `my-lora`."""
    folder = tmp_path_factory.mktemp("Ordner mit Lücke")
    base.save_pretrained(folder / "base")
    tiny_tokenizer().save_pretrained(folder / "base")
    with_lora(copy.deepcopy(base)).save_pretrained(folder / "my-lora")
    return folder


def copy_of(base: Any) -> Any:
    return copy.deepcopy(base)


def digest(model: Any) -> str:
    return weights_hash(unwrapped(model))


def test_each_state_of_an_adapter_has_its_own_digest(base: Any) -> None:
    model = with_lora(copy_of(base))
    first = digest(model)
    with quiet():
        torch.manual_seed(6)
        model.add_adapter("other", lora_config())
    assert digest(model) == first  # it is there and does nothing
    seen = {"base": digest(base), "first": first}
    model.set_adapter("other")
    seen["other"] = digest(model)
    model.base_model.set_adapter(["default", "other"])
    seen["both"] = digest(model)
    assert adapters_of(unwrapped(model)) == ("default", "other")
    model.set_adapter("default")
    assert digest(model) == first
    model.base_model.model.model.layers[1].mlp.down_proj.scale_layer(0.5)
    seen["scaled"] = digest(model)
    model.base_model.model.model.layers[1].mlp.down_proj.unscale_layer()
    assert digest(model) == first
    with model.disable_adapter():
        assert adapters_of(unwrapped(model)) == ()
        assert digest(model) == seen["base"]  # it computes what its base computes
    model.merge_adapter()
    assert adapters_of(unwrapped(model)) == ("default (merged)",)
    seen["merged"] = digest(model)
    assert len(set(seen.values())) == len(seen)


def kinds() -> dict[str, Any]:
    peft = quiet_peft()
    return {
        "lora": lora_config(),
        "dora": lora_config(use_dora=True),
        "head": lora_config(modules_to_save=["lm_head"]),
        "ia3": peft.IA3Config(
            target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], init_ia3_weights=False
        ),
        "lokr": peft.LoKrConfig(target_modules=["q_proj"], init_weights=False),
    }


@pytest.mark.parametrize("kind", ["lora", "dora", "head", "ia3", "lokr"])
def test_equal_weights_have_equal_digests(kind: str, base: Any, tmp_path: Path) -> None:
    model = with_adapter(copy_of(base), kinds()[kind])
    first = digest(model)
    assert first != digest(base)
    with model.disable_adapter():
        assert digest(model) == digest(base)
    model.save_pretrained(tmp_path)
    assert digest(reloaded(copy_of(base), tmp_path)) == first
    assert digest(reloaded(copy_of(base), tmp_path, "another_name")) == first
    with quiet():
        model.merge_adapter()
        merged = digest(model)
        assert merged == digest(model.merge_and_unload())
    assert merged not in (first, digest(base))


def test_transformers_own_load_adapter_counts_too(base: Any, folders: Path) -> None:
    inside = copy_of(base)
    inside.load_adapter(str(folders / "my-lora"))
    assert describe(inside).adapters == ("default",)
    assert digest(inside) == digest(with_lora(copy_of(base)))


def test_numbers_that_are_no_tensors_count(base: Any) -> None:
    def vera(key: int) -> Any:
        options = {"save_projection": False, "projection_prng_key": key}  # the projection is drawn from a key
        with quiet():
            config = quiet_peft().VeraConfig(r=4, target_modules=["q_proj"], **options)
        return with_adapter(copy_of(base), config)

    one, two = vera(1), vera(2)
    assert digest(one) != digest(two)


def test_each_of_several_experts_parameters_counts() -> None:
    model, _ = tiny_model("qwen2_moe")
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    tuned = with_lora(copy_of(model), target_modules=[], target_parameters=parameters)
    first, weights = digest(tuned), dict(tuned.named_parameters())
    path = next(name for name in weights if "experts.base_layer.lora_A" in name)
    for name in (path, path.replace("experts.base_layer", "experts")):  # one wrapper inside another
        weights[name][0, 0] += 1
        assert digest(tuned) != first, name
        weights[name][0, 0] -= 1
    with tuned.disable_adapter():
        assert digest(tuned) == digest(model)


def test_weights_that_would_share_a_name_are_refused(base: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peft_state, "_name", lambda model, key: "the same")
    with pytest.raises(UsageError, match=r"cannot be told apart.*merge_and_unload"):
        digest(with_lora(copy_of(base)))


def test_a_setting_that_a_later_peft_adds_changes_nothing(base: Any) -> None:
    model = with_lora(copy_of(base))
    first, config = digest(model), unwrapped(model).peft_config["default"]
    later = dataclasses.make_dataclass("Later", [("of_tomorrow", bool, False)], bases=(type(config),))
    config.__class__, config.of_tomorrow = later, False
    assert digest(model) == first
    config.of_tomorrow = True
    assert digest(model) != first


def test_a_tuned_norm_is_stored_as_it_acts(base: Any) -> None:
    config = quiet_peft().LNTuningConfig(target_modules=["post_attention_layernorm"])
    model = with_adapter(copy_of(base), config)
    with torch.no_grad():
        next(one for name, one in model.named_parameters() if "ln_tuning" in name).mul_(1.5)
    plain = norm_parameters(base.model.layers[0].post_attention_layernorm)
    assert plain.weight is not None

    def stored() -> Any:
        return norm_parameters(anatomy(model).layers[0].norm)

    np.testing.assert_array_equal(stored().weight, plain.weight * np.float32(1.5))
    assert stored().eps == plain.eps
    with model.disable_adapter():
        np.testing.assert_array_equal(stored().weight, plain.weight)


def test_a_live_model_names_its_adapters(base: Any) -> None:
    model = with_lora(copy_of(base))
    found = describe(model)
    assert (found.name, found.adapters) == ("llama+default", ("default",))
    assert describe(model, name="mine").name == "mine"
    with quiet():
        assert describe(model.merge_and_unload()).adapters == ()


def test_what_acts_outside_the_layers_is_refused(base: Any) -> None:
    with pytest.raises(UsageError, match=r"acts through its wrapper's forward pass.*merged model"):
        describe(with_lora(copy_of(base), alora_invocation_tokens=[3, 4]))
    model = with_lora(copy_of(base))
    model.merge_adapter()
    with model.disable_adapter(), pytest.raises(UsageError, match=r"merged .* and disabled at once"):
        describe(model)


def test_the_store_of_a_live_adapter_says_so_and_differs(base: Any, tmp_path: Path) -> None:
    model = with_lora(copy_of(base))
    plain = harvested(tmp_path / "plain", model=base)
    tuned = harvested(tmp_path / "tuned", model=model)
    with model.disable_adapter():
        disabled = harvested(tmp_path / "disabled", model=model)
    facts = {path.name: Reader.open(path).attributes.model for path in (plain, tuned, disabled)}
    assert facts["tuned"].adapters == ("default",)
    assert facts["plain"].adapters == facts["disabled"].adapters == ()
    assert facts["plain"].weights_hash == facts["disabled"].weights_hash != facts["tuned"].weights_hash
    chunks = {path.name: chunks_of(path) for path in (plain, tuned, disabled)}
    assert chunks["plain"] == chunks["disabled"]
    assert chunks["plain"].keys() == chunks["tuned"].keys()
    assert chunks["plain"] != chunks["tuned"]


def chunks_of(store: Path) -> dict[str, bytes]:
    found = files_of(store / "activations.zarr")
    return {name: content for name, content in found.items() if not name.endswith("zarr.json")}


def test_from_a_folder_it_is_what_it_is_alive(base: Any, folders: Path) -> None:
    lora = str(folders / "my-lora")
    found = load(str(folders / "base"), adapter=lora)
    assert (found.name, found.adapters) == ("base+my-lora", ("my-lora",))
    assert recorded_name(str(folders / "base"), adapter=lora) == "base+my-lora"
    assert recorded_name("tiny-gpt2", adapter="owner/lora") == "tiny-gpt2+owner/lora"
    assert found.weights_hash == digest(with_lora(copy_of(base)))
    assert found.config_hash == describe(base).config_hash
    assert not found.model.training
    assert not any(parameter.requires_grad for parameter in found.model.parameters())


def test_an_adapters_folder_is_loaded_with_the_base_it_names(folders: Path, tmp_path: Path) -> None:
    wanted = load(str(folders / "base"), adapter=str(folders / "my-lora"))
    lora = copied(folders / "my-lora", tmp_path / "my-lora", base_model_name_or_path=str(folders / "base"))
    found = load(str(lora))
    assert (found.name, found.weights_hash) == (wanted.name, wanted.weights_hash)
    assert recorded_name(str(lora)) == wanted.name
    assert found.tokenizer is not None


def test_collect_with_an_adapter_leaves_no_path_behind(folders: Path, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("\n".join(json.dumps({"text": text}) for text in texts()), encoding="utf-8")
    where: dict[str, Any] = {
        "model": str(folders / "base"),
        "adapter": str(folders / "my-lora"),
        "device_map": "auto",
    }
    collect(HarvestSettings(**where, corpus=f"jsonl:{corpus}", **SMALL), tmp_path / "store")
    attributes = Reader.open(tmp_path / "store").attributes
    assert attributes.model.name == "base+my-lora"
    for name, content in files_of(tmp_path / "store", without=("runs",)).items():
        assert folders.name.encode() not in content, name
    again = settings_of(attributes, tmp_path / "store")  # from runs/, which does say where
    assert {name: getattr(again, name) for name in where} == where


def test_a_store_made_with_an_adapter_is_repaired(folders: Path, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("\n".join(json.dumps({"text": text}) for text in texts()), encoding="utf-8")
    where: dict[str, Any] = {"model": str(folders / "base"), "adapter": str(folders / "my-lora")}
    store = tmp_path / "store"
    collect(HarvestSettings(**where, corpus=f"jsonl:{corpus}", **SMALL), store)
    before, chunk = chunks_of(store), store / "activations.zarr/residual/c/1/2/0"
    chunk.write_bytes(bytes(chunk.stat().st_size))
    assert repair(store).blocks == (2,)
    assert chunks_of(store) == before


def copied(folder: Path, to: Path, **changes: Any) -> Path:
    to.mkdir()
    for path in folder.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    config = json.loads((to / "adapter_config.json").read_text(encoding="utf-8")) | changes
    (to / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return to


def refusal(*words: str, model: str, **options: Any) -> None:
    with pytest.raises(UsageError) as caught:
        load(model, **options)
    text = str(caught.value)
    assert "\n" not in text
    for word in words:
        assert word in text, text


@pytest.mark.parametrize(
    ("named", "words"),
    [
        (None, ["does not say of which model", "model=BASE adapter=FOLDER"]),
        ("../models/base", ["relative path", "../models/base", "model=BASE"]),
        ("/no/such/base", ["/no/such/base is not on this machine", "model=BASE"]),
        ("tiny-gpt-2", ["did you mean 'tiny-gpt2'?"]),
    ],
)
def test_a_base_that_is_not_here_is_one_sentence(
    named: str | None, words: list[str], folders: Path, tmp_path: Path
) -> None:
    lora = copied(folders / "my-lora", tmp_path / "my-lora", base_model_name_or_path=named)
    refusal(*words, model=str(lora))


def test_adapters_that_cannot_be_put_on_are_one_sentence(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, lora = str(folders / "base"), folders / "my-lora"
    refusal("has no adapter_config.json", model=base, adapter=base)
    refusal("It is an adapter: name it as adapter", model=str(lora), adapter=str(lora))
    with pytest.raises(EnvironmentFault, match=r"adapter 'nowhere' .*Give the folder of the adapter, or try"):
        load(base, adapter="nowhere")
    refusal("no such folder", "not a hub id", model=base, adapter="not a name!")
    refusal("is a file", model=base, adapter=str(lora / "adapter_config.json"))
    broken = copied(lora, tmp_path / "broken")
    (broken / "adapter_config.json").write_text("[", encoding="utf-8")
    refusal("is not a PEFT config", model=base, adapter=str(broken))
    prompt = copied(lora, tmp_path / "prompt", peft_type="PROMPT_TUNING", num_virtual_tokens=4)
    refusal("could not be loaded", model=base, adapter=str(prompt))
    other = copied(lora, tmp_path / "other", target_modules=["c_attn"])
    refusal("could not be loaded", "c_attn", model=base, adapter=str(other))
    wide = copied(lora, tmp_path / "wide", r=8)
    refusal("could not be loaded", model=base, adapter=str(wide))
    part = copied(lora, tmp_path / "part")
    weights = load_file(part / "adapter_model.safetensors")
    del weights["base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"]
    save_file(weights, part / "adapter_model.safetensors")
    refusal("lacks weights", model=base, adapter=str(part))
    bare = copied(lora, tmp_path / "bare")
    (bare / "adapter_model.safetensors").unlink()
    refusal("holds no weights", model=base, adapter=str(bare))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None)
    refusal("needs the package peft", 'pip install "nearline[collect]"', model=base, adapter=str(lora))


def test_pickled_adapters_only_when_allowed(folders: Path, tmp_path: Path) -> None:
    base, lora = str(folders / "base"), copied(folders / "my-lora", tmp_path / "my-lora")
    wanted = load(base, adapter=str(lora)).weights_hash
    torch.save(load_file(lora / "adapter_model.safetensors"), lora / "adapter_model.bin")
    (lora / "adapter_model.safetensors").unlink()
    refusal("only as a pickle", "allow_pickle", model=base, adapter=str(lora))
    assert load(base, adapter=str(lora), allow_pickle=True).weights_hash == wanted


def test_a_model_and_an_adapter_in_one_folder_are_refused(folders: Path, tmp_path: Path) -> None:
    both = copied(folders / "my-lora", tmp_path / "both")
    for path in (folders / "base").iterdir():
        (both / path.name).write_bytes(path.read_bytes())
    refusal("a whole model and an adapter", "folder of their own", model=str(both))
