"""Quantised models: named in the record, identified by their packed weights, or refused with the reason."""

import copy
import json
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers_harvest import harvested
from helpers_models import smollm2_path, tiny_config, tiny_model, tiny_tokenizer
from nearline.collect.gguf_header import gguf_packing
from nearline.collect.hashes import weights_hash
from nearline.collect.models import describe, load
from nearline.collect.packed import quantisation_of
from nearline.store import Reader
from nearline.store.errors import UsageError
from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig, quantize_
from transformers import AutoModelForCausalLM, TorchAoConfig


def packed(model: Any) -> Any:
    # Without the head, as transformers does it.
    quantize_(model, Int8WeightOnlyConfig(), lambda module, name: "_proj" in name and is_linear(module))
    return model


def is_linear(module: Any) -> bool:
    return isinstance(module, torch.nn.Linear)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that transformers wrote with torchao's weights in it."""
    folder = tmp_path_factory.mktemp("quantised")
    tiny_model("llama")[0].save_pretrained(folder / "plain")
    how = TorchAoConfig(Int8WeightOnlyConfig())
    model = AutoModelForCausalLM.from_pretrained(folder / "plain", quantization_config=how)
    model.save_pretrained(folder / "int8")
    tiny_tokenizer().save_pretrained(folder / "int8")
    return folder / "int8"


def test_a_quantised_checkpoint_is_loaded_packed_and_named(folder: Path) -> None:
    found = load(str(folder))
    assert found.quantization == "torchao int8_weight_only"
    live = describe(found.model, name=found.name)
    assert (live.quantization, live.weights_hash) == (found.quantization, found.weights_hash)
    by_hand = describe(packed(tiny_model("llama")[0]))
    assert by_hand.quantization == "torchao Int8Tensor"
    assert by_hand.weights_hash == found.weights_hash
    assert found.weights_hash != weights_hash(tiny_model("llama")[0])


def test_the_digest_sees_each_packed_part() -> None:
    model = packed(tiny_model("llama")[0])
    first = weights_hash(model)
    assert first == weights_hash(copy.deepcopy(model))
    weight = model.model.layers[1].mlp.down_proj.weight
    for part in ("qdata", "scale"):
        values = getattr(weight, part)
        before = values.clone()
        values.view(-1)[3] += 1
        assert weights_hash(model) != first, part
        values.copy_(before)
    assert weights_hash(model) == first


def test_a_quantised_model_is_harvested(folder: Path, tmp_path: Path) -> None:
    store = harvested(tmp_path / "store", model=load(str(folder)).model)
    attributes = Reader.open(store).attributes
    assert attributes.model.quantization == "torchao int8_weight_only"
    assert attributes.compute.dtype == "float32"


NAMES: list[tuple[dict[str, Any], str]] = [
    (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        "bitsandbytes nf4",
    ),
    ({"load_in_8bit": True}, "bitsandbytes int8"),
    ({"quant_method": "torchao", "quant_type": "int8_weight_only"}, "torchao int8_weight_only"),
    ({"quant_method": "torchao", "quant_type": Int4WeightOnlyConfig()}, "torchao int4_weight_only"),
    ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "gptq 4-bit"),
    ({"quant_method": "awq", "bits": 4}, "awq 4-bit"),
    ({"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 3}}}, "hqq 3-bit"),
    (
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int"}}},
        },
        "compressed-tensors pack-quantized 4-bit",
    ),
    ({"quant_method": "fp8", "fmt": "e4m3"}, "fp8 e4m3"),
    ({"quant_method": "quanto", "weights": "int8"}, "quanto int8"),
    ({"quant_method": "mxfp4"}, "mxfp4"),
]


@pytest.mark.parametrize(("settings", "name"), NAMES, ids=[name for _, name in NAMES])
def test_methods_are_named_with_their_bits(settings: dict[str, Any], name: str) -> None:
    config = tiny_config("llama")
    assert quantisation_of(config) is None
    config.quantization_config = settings
    assert quantisation_of(config) == name


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"quant_method": "gptq", "bits": 4}, ["gptq 4-bit", "pip install gptqmodel"]),
        ({"quant_method": "aqlm"}, ["aqlm", "pip install aqlm"]),
        ({"quant_method": "homemade"}, ["'homemade'", "does not know"]),
    ],
)
def test_methods_that_cannot_be_read_here_are_refused(
    settings: dict[str, Any], words: list[str], folder: Path, tmp_path: Path
) -> None:
    for path in (folder.parent / "plain").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"quantization_config": settings}), encoding="utf-8"
    )
    with pytest.raises(UsageError) as caught:
        load(str(tmp_path))
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_weights_whose_values_cannot_be_read_are_refused() -> None:
    model, _ = tiny_model("llama")
    layer = model.model.layers[0].mlp.down_proj
    layer.register_module("packed", _Opaque())
    with pytest.raises(UsageError, match=r"is packed as a tuple, whose values cannot be read"):
        weights_hash(model)


class _Opaque(torch.nn.Module):
    """As torch's own quantised layers keep their weights."""

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}_packed_params"] = (1, 2)


def test_weights_that_a_forward_pass_repacked_are_refused() -> None:
    model, _ = tiny_model("llama")
    # As bitsandbytes marks them on a CPU with AVX-512.
    model.model.layers[2].mlp.up_proj.weight.quant_state = SimpleNamespace(packing_format_for_cpu=True)
    with pytest.raises(UsageError, match=r"layers\.2\.mlp\.up_proj .*repacked .*Load the model anew"):
        describe(model)


def test_the_packing_of_a_gguf_file_is_in_its_header(tmp_path: Path) -> None:
    folder, name = smollm2_path()
    assert gguf_packing(folder / name) == "Q4_1"
    for kind, packing in ((0, None), (1, None), (15, "Q4_K_M")):
        assert gguf_packing(gguf(tmp_path / "typed.gguf", kind)) == packing
    assert gguf_packing(gguf(tmp_path / "untyped.gguf", None)) == "Q8_0"
    (tmp_path / "cut.gguf").write_bytes((tmp_path / "typed.gguf").read_bytes()[:60])
    assert gguf_packing(tmp_path / "cut.gguf") == "of an unknown kind"


def gguf(path: Path, kind: int | None) -> Path:
    """A header: an array of tokens, perhaps the type of the file, one small and one large tensor."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    tokens = text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("bc")
    scores = text("tokenizer.ggml.scores") + struct.pack("<IIQff", 9, 6, 2, 0.5, 1.5)
    facts = [tokens, scores]
    if kind is not None:
        facts.append(text("general.file_type") + struct.pack("<II", 4, kind))
    small = text("norm") + struct.pack("<IQIQ", 1, 32, 0, 0)
    large = text("weight") + struct.pack("<IQQIQ", 2, 32, 32, 8, 128)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 2, len(facts)) + b"".join(facts) + small + large)
    return path
