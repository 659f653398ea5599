"""Anatomy, capture, norms, logits and the site table, for every family, against plain hooks and named
modules.
"""

from dataclasses import replace
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers_models import D_MODEL, FAMILIES, N_LAYERS, VOCAB_SIZE, captured, tiny_model
from nearline.collect.anatomy import anatomy, logits
from nearline.collect.norm_parameters import apply, norm_parameters
from nearline.collect.sites import sites_table
from nearline.store.errors import UsageError
from torch import Tensor, nn
from transformers import AutoModel, BertConfig, BertForMaskedLM, MambaConfig, MambaForCausalLM

# Two float32 formulas of one norm over 32 features: a few units in the last place.
FLOAT32_ROUNDING = 2e-6
# One bfloat16 unit on each side of the multiplication by the weight.
BFLOAT16_ROUNDING = 2e-2

# Written out by hand and on purpose not taken from the adapters: (block, norm, mlp, attention) by family.
NAMES = {
    "gpt2": ("transformer.h.{}", "ln_2", "mlp", "attn"),
    "gpt_neox": ("gpt_neox.layers.{}", "post_attention_layernorm", "mlp", "attention"),
    "gpt_neox_sequential": ("gpt_neox.layers.{}", "post_attention_layernorm", "mlp", "attention"),
    "gemma2": ("model.layers.{}", "pre_feedforward_layernorm", "mlp", "self_attn"),
    "gemma3": ("model.layers.{}", "pre_feedforward_layernorm", "mlp", "self_attn"),
}
LLAMA_NAMES = ("model.layers.{}", "post_attention_layernorm", "mlp", "self_attn")
IDS = torch.randint(3, VOCAB_SIZE, (3, 11), generator=torch.Generator().manual_seed(5))


def by_plain_hooks(model: nn.Module, family: str, ids: Tensor) -> dict[tuple[str, int], Tensor]:
    block, norm, mlp, attention = NAMES.get(family, LLAMA_NAMES)
    seen: dict[tuple[str, int], Tensor] = {}
    handles = []

    def watch(site: str, layer: int, name: str, side: str) -> None:
        def after(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
            given = args[0] if args else kwargs["hidden_states"]
            made = out[0] if isinstance(out, tuple) else out
            seen[site, layer] = (given if side == "in" else made).clone()

        handles.append(model.get_submodule(name).register_forward_hook(after, with_kwargs=True))

    for layer in range(N_LAYERS):
        here = block.format(layer)
        watch("block_input", layer, here, "in")
        watch("attention_output", layer, f"{here}.{attention}", "out")
        watch("residual", layer, f"{here}.{norm}", "in")
        watch("mlp_input", layer, f"{here}.{mlp}", "in")
        watch("mlp_output", layer, f"{here}.{mlp}", "out")
        watch("block_output", layer, here, "out")
    watch("embedding", 0, block.format(0), "in")
    with torch.inference_mode():
        model(input_ids=ids)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("family", FAMILIES)
def test_every_site_is_what_a_plain_hook_sees(family: str) -> None:
    model, _ = tiny_model(family)
    got, wanted = captured(model, IDS), by_plain_hooks(model, family, IDS)
    assert got.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert torch.equal(got[key], tensor), key


@pytest.mark.parametrize("family", FAMILIES)
def test_embedding_is_what_enters_block_0(family: str) -> None:
    model, config = tiny_model(family)
    table = model.get_input_embeddings().weight
    wanted = table[IDS]
    if family == "gpt2":
        wanted = wanted + model.transformer.wpe.weight[: IDS.shape[1]]
    if family.startswith("gemma"):
        wanted = wanted * torch.tensor(config.hidden_size**0.5)
    assert torch.equal(captured(model, IDS, ["embedding"])["embedding", 0], wanted)


@pytest.mark.parametrize("family", FAMILIES)
def test_residual_and_contribution_make_the_block(family: str) -> None:
    model, _ = tiny_model(family)
    found, seen = anatomy(model), captured(model, IDS)
    assert found.parallel is (family == "gpt_neox")
    for layer in found.layers:
        residual, raw = seen["residual", layer.index], seen["mlp_output", layer.index]
        added = raw if layer.post_norm is None else layer.post_norm(raw)
        whole = residual + layer.multiplier * added
        if layer.parallel:
            whole = whole + seen["attention_output", layer.index]
            assert torch.equal(residual, seen["block_input", layer.index])
        torch.testing.assert_close(whole, seen["block_output", layer.index])


@pytest.mark.parametrize("family", FAMILIES)
def test_facts_of_the_anatomy(family: str) -> None:
    model, config = tiny_model(family)
    found = anatomy(model)
    assert (found.n_layers, found.d_model, found.vocab_size) == (N_LAYERS, D_MODEL, VOCAB_SIZE)
    assert found.model_type == config.model_type
    assert (found.positions is not None) == (family == "gpt2")
    assert found.dtype is torch.float32
    assert found.span == ("h.{i}.mlp" if family == "gpt2" else "layers.{i}.mlp")


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_the_models_own(family: str) -> None:
    model, _ = tiny_model(family)
    found = anatomy(model)
    with torch.inference_mode():
        hidden = found.backbone(input_ids=IDS).last_hidden_state
        wanted = model(input_ids=IDS).logits
        assert torch.equal(logits(found, hidden), wanted)
        if found.logit_softcap is not None:
            uncapped = logits(replace(found, logit_softcap=None), hidden)
            assert not torch.allclose(uncapped, wanted, rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_norm_parameters_give_the_mlp_input(family: str, dtype: torch.dtype) -> None:
    model, _ = tiny_model(family, dtype=dtype)
    found, seen = anatomy(model), captured(model, IDS)
    limit = FLOAT32_ROUNDING if dtype is torch.float32 else BFLOAT16_ROUNDING
    for layer in found.layers:
        norm = norm_parameters(layer.norm)
        assert norm.kind == ("layernorm" if family.startswith("gpt") else "rmsnorm")
        assert norm.weight is not None
        assert norm.weight.dtype == np.float32
        got, wanted = apply(norm, seen["residual", layer.index].float()), seen["mlp_input", layer.index]
        assert float((got - wanted.float()).norm() / wanted.float().norm()) < limit


# torch's own import of its compiler uses a decorator that torch itself has deprecated.
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("how", ["call", "whole", "part", "forward"])
def test_compiled_models_are_refused(how: str) -> None:
    model, _ = tiny_model("gpt2")
    if how == "call":
        model.compile()
    elif how == "part":
        model.transformer.h[1].mlp = torch.compile(model.transformer.h[1].mlp)
    elif how == "forward":
        model.transformer.h[1].forward = torch.compile(model.transformer.h[1].forward)
    target: Any = torch.compile(model) if how == "whole" else model
    with pytest.raises(UsageError, match=r"is compiled \(torch.compile\)"):
        anatomy(target)


def test_models_that_do_not_fit_are_refused() -> None:
    tiny: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 20}
    mamba = MambaForCausalLM(MambaConfig(**tiny))
    with pytest.raises(UsageError, match=r"family 'mamba' cannot be harvested: its layers"):
        anatomy(mamba)
    bert = BertForMaskedLM(BertConfig(**tiny, num_attention_heads=2, intermediate_size=16))
    with pytest.raises(UsageError, match="family 'bert' cannot be harvested: it is an encoder"):
        anatomy(bert)
    headless = AutoModel.from_config(tiny_model("gpt2")[1])
    with pytest.raises(UsageError, match="GPT2Model has no language-model head"):
        anatomy(headless)
    with pytest.raises(UsageError, match="Linear has no transformers config"):
        anatomy(nn.Linear(2, 2))


class _Wrapped(nn.Module):
    """What PEFT puts around a model, as far as it matters here."""

    def __init__(self, inner: nn.Module, *, prompt: bool) -> None:
        super().__init__()
        self.inner = inner
        self.active_peft_config = SimpleNamespace(is_prompt_learning=prompt)

    def get_base_model(self) -> nn.Module:
        return self.inner


def test_peft_wrappers_are_looked_through() -> None:
    model, _ = tiny_model("llama")
    assert anatomy(_Wrapped(model, prompt=False)).model is model
    with pytest.raises(UsageError, match="learns a prompt"):
        anatomy(_Wrapped(model, prompt=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_site_table_names_modules_that_exist(family: str) -> None:
    found = anatomy(tiny_model(family)[0])
    rows = sites_table(found)
    names = [row["site"] for row in rows if row["site"] != "position_embedding"]
    assert names == ["embedding", "residual", "mlp_input", "mlp_output", "mlp_output_grad"]
    assert ("position_embedding" in {row["site"] for row in rows}) == (family == "gpt2")
    for row in rows:
        assert {"site", "stored", "layers", "module", "meaning", "shape"} <= set(row)
        path = row["module"].split(" of ")[-1]
        for layer in range(N_LAYERS):
            attrgetter(path.format(i=layer))(found.model)
    residual = next(row for row in rows if row["site"] == "residual")
    assert ("parallel block" in residual["meaning"]) == (family == "gpt_neox")
