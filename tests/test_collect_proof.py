"""The start-up proof accepts every right anatomy in every dtype and refuses each planted wrong one."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers_models import FAMILIES, VOCAB_SIZE, perturb, tiny_model
from nearline.collect.adapters import ADAPTERS, Adapter
from nearline.collect.anatomy import Anatomy, anatomy
from nearline.collect.norm_parameters import NormParameters, norm_parameters
from nearline.collect.proof import prove
from nearline.store.errors import NotFinite, ProofFailed, UsageError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GraniteConfig

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CHECKS = ("norm", "identity", "batch", "isolation", "logits")
LAYER = 1


def sequences(seed: int = 3, vocab_size: int = VOCAB_SIZE) -> list[np.ndarray]:
    draw = np.random.default_rng(seed)
    return [draw.integers(3, vocab_size, n).astype(np.int32) for n in (40, 17, 29)]


def with_layer(found: Anatomy, index: int, **changes: Any) -> Anatomy:
    layers = tuple(replace(one, **changes) if one.index == index else one for one in found.layers)
    return replace(found, layers=layers)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_right_anatomies_pass(family: str, dtype: torch.dtype) -> None:
    facts = prove(anatomy(tiny_model(family, dtype=dtype)[0]), sequences())
    for check in CHECKS:
        assert facts[f"{check}_error"] <= facts[f"{check}_tolerance"]
    # The proof has teeth: without the MLP, the identity would be off by far more than is allowed.
    assert facts["identity_error_without_mlp"] > 10 * facts["identity_tolerance"]
    assert facts["isolation_error"] == 0.0
    assert facts["n_sequences"] == 3
    assert all(isinstance(value, float) and np.isfinite(value) for value in facts.values())


def _post_norm_tensor_as_residual(found: Anatomy) -> Anatomy:
    return with_layer(found, LAYER, norm=None)


def _next_layers_norm(found: Anatomy) -> Anatomy:
    return with_layer(found, LAYER, norm=found.layers[LAYER + 1].norm)


def _layers_swapped(found: Anatomy) -> Anatomy:
    first, second, third = found.layers
    return replace(found, layers=(replace(second, index=0), replace(first, index=1), third))


def _next_layers_mlp(found: Anatomy) -> Anatomy:
    other = found.layers[LAYER + 1]
    return with_layer(found, LAYER, mlp_first=other.mlp_first, mlp_last=other.mlp_last)


def _attention_output_as_mlp_output(found: Anatomy) -> Anatomy:
    return with_layer(found, LAYER, mlp_last=found.layers[LAYER].attention)


def _block_output_as_mlp_output(found: Anatomy) -> Anatomy:
    # What a hook sees on modules that add the residual themselves.
    return with_layer(found, LAYER, mlp_last=found.layers[LAYER].block)


def _wrong_parallel_flag(found: Anatomy) -> Anatomy:
    return with_layer(found, LAYER, parallel=not found.layers[LAYER].parallel)


def _multiplier(found: Anatomy) -> Anatomy:
    return with_layer(found, LAYER, multiplier=0.95)


def _norm_in_front_of_attention(found: Anatomy) -> Anatomy:
    block: Any = found.layers[LAYER].block
    return with_layer(found, LAYER, norm=block.ln_1 if hasattr(block, "ln_1") else block.input_layernorm)


PLANTED: tuple[Callable[[Anatomy], Anatomy], ...] = (
    _post_norm_tensor_as_residual,
    _next_layers_norm,
    _layers_swapped,
    _next_layers_mlp,
    _attention_output_as_mlp_output,
    _block_output_as_mlp_output,
    _wrong_parallel_flag,
    _multiplier,
    _norm_in_front_of_attention,
)
# In parallel blocks both norms read the same tensor, so hooking the other one captures nothing wrong; that
# its weights are wrong is planted in test_stored_norms_with_other_weights_are_refused.
CASES = [
    (family, plant)
    for family in FAMILIES
    for plant in PLANTED
    if (family, plant) != ("gpt_neox", _norm_in_front_of_attention)
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("family", "plant"), CASES)
def test_wrong_anatomies_are_refused(
    family: str, plant: Callable[[Anatomy], Anatomy], dtype: torch.dtype
) -> None:
    found = anatomy(tiny_model(family, dtype=dtype)[0])
    with pytest.raises(ProofFailed, match=r"layer [01].*‖.*‖ = .*‖.*‖ = .*allowed|layer 1: its hook fired"):
        prove(plant(found), sequences())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_stored_norms_with_other_weights_are_refused(family: str, dtype: torch.dtype) -> None:
    found = anatomy(tiny_model(family, dtype=dtype)[0])
    norms = [norm_parameters(layer.norm) for layer in found.layers]
    prove(found, sequences(), norms=norms)
    for wrong in (norms[2], _scaled(norms[LAYER], 1.03), replace(norms[LAYER], kind="none")):
        planted = [norms[0], wrong, norms[2]]
        with pytest.raises(ProofFailed, match=r"layer 1: \[norm\(residual\) = MLP input\]"):
            prove(found, sequences(), norms=planted)


def _scaled(norm: NormParameters, factor: float) -> NormParameters:
    assert norm.weight is not None
    return replace(norm, weight=(norm.weight * factor).astype(np.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_a_forgotten_post_norm_is_refused(family: str, dtype: torch.dtype) -> None:
    found = anatomy(tiny_model(family, dtype=dtype)[0])
    with pytest.raises(ProofFailed, match=r"layer 1: \[residual \+ contribution = block output\]"):
        prove(with_layer(found, LAYER, post_norm=None), sequences())
    with pytest.raises(ProofFailed, match="layer 1"):
        prove(with_layer(found, LAYER, post_norm=found.layers[0].post_norm), sequences())


def granite() -> tuple[nn.Module, float]:
    config = GraniteConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        residual_multiplier=0.4,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    perturb(model, seed=0)
    return model.eval(), config.residual_multiplier


def test_a_forgotten_multiplier_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, multiplier = granite()
    llama = ADAPTERS["llama"]
    assert isinstance(llama, Adapter)
    monkeypatch.setitem(ADAPTERS, "granite", llama)
    with pytest.raises(ProofFailed, match=r"layer 0: \[residual \+ contribution = block output\]"):
        prove(anatomy(model), sequences())
    monkeypatch.setitem(ADAPTERS, "granite", replace(llama, multiplier=multiplier))
    assert prove(anatomy(model), sequences())["identity_error"] < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_massive_activations_hide_nothing(family: str, dtype: torch.dtype) -> None:
    model, _ = tiny_model(family, dtype=dtype)
    ids = [np.concatenate([[1], one]) for one in sequences()]
    # BOS enters with one feature thousands of times larger than anything else, as in trained models.
    with torch.no_grad():
        model.get_input_embeddings().weight[1, 7] = 3000.0
    found = anatomy(model)
    prove(found, ids)
    for plant in (_post_norm_tensor_as_residual, _next_layers_mlp, _multiplier, _wrong_parallel_flag):
        with pytest.raises(ProofFailed, match="layer 1"):
            prove(plant(found), ids)


def test_a_forgotten_softcap_and_a_wrong_head_are_refused() -> None:
    found = anatomy(tiny_model("gemma2")[0])
    with pytest.raises(ProofFailed, match=r"head\(final hidden states\) = model logits"):
        prove(replace(found, logit_softcap=None), sequences())
    with pytest.raises(ProofFailed, match=r"head\(final hidden states\) = model logits"):
        prove(replace(found, logit_scale=0.5), sequences())


class _MixesRows(nn.Module):
    """An MLP whose output depends on the whole batch, as a router with a shared capacity would make it."""

    def __init__(self, inner: nn.Module, *, axis: int) -> None:
        super().__init__()
        self.inner, self.axis = inner, axis

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + 0.1 * self.inner(x).mean(self.axis, keepdim=True)


@pytest.mark.parametrize("axis", [0, 1])
def test_rows_that_depend_on_their_company_are_refused(axis: int) -> None:
    model, _ = tiny_model("llama")
    model.model.layers[0].mlp = _MixesRows(model.model.layers[0].mlp, axis=axis)
    with pytest.raises(ProofFailed, match=r"layer [01].*in a padded batch"):
        prove(anatomy(model), sequences())


def test_a_model_that_sees_later_tokens_is_refused() -> None:
    config = tiny_model("gemma3")[1].to_dict() | {"use_bidirectional_attention": True}
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(Gemma3TextConfig(**config), attn_implementation="sdpa")
    perturb(model, seed=0)
    with pytest.raises(ProofFailed, match="earlier rows stays when the end of document 1 changes"):
        prove(anatomy(model.eval()), sequences())


def test_overflow_in_half_precision_is_named() -> None:
    model, _ = tiny_model("llama", dtype=torch.float16)
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight.fill_(60000.0)
    with pytest.raises(NotFinite, match=r"mlp_output layer 2 holds .* not finite, in float16.*bfloat16"):
        prove(anatomy(model), sequences())


def test_one_sequence_is_enough() -> None:
    found = anatomy(tiny_model("gpt2")[0])
    facts = prove(found, [torch.arange(3, 30)])
    assert (facts["n_sequences"], facts["n_rows"]) == (2, 27 + 13)
    same = [np.arange(3, 20), np.arange(9, 26)]
    assert prove(found, same)["n_rows"] == 17 + 8
    frozen = np.arange(3, 20)
    frozen.flags.writeable = False
    prove(found, [frozen, np.arange(4, 6)])


def test_bad_input_is_refused() -> None:
    model, _ = tiny_model("gpt2")
    found = anatomy(model)
    with pytest.raises(UsageError, match="at least two tokens"):
        prove(found, [np.array([3])])
    with pytest.raises(UsageError, match="token id 160 is outside the model's vocabulary of 160"):
        prove(found, [np.array([3, 160, 5])])
    model.train()
    with pytest.raises(UsageError, match=r"call model.eval\(\) first"):
        prove(found, sequences())
    with pytest.raises(UsageError, match=r"torch.float64; allowed are float32, bfloat16, float16"):
        prove(anatomy(tiny_model("gpt2", dtype=torch.float64)[0]), sequences())
