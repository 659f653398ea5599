"""Hooks: counted, removed whatever happens, indifferent to tuples; the norms they stand at as parameters."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers_models import D_MODEL, VOCAB_SIZE, captured, tiny_model
from nearline.analyze.norms import Norm, apply_norm
from nearline.collect.anatomy import anatomy
from nearline.collect.capture import Capture, first_tensor
from nearline.collect.norm_parameters import NO_NORM, apply, norm_parameters, terms
from nearline.store.errors import ProofFailed, UsageError
from torch import Tensor, nn

IDS = torch.randint(3, VOCAB_SIZE, (3, 11), generator=torch.Generator().manual_seed(5))


def test_layers_can_be_chosen() -> None:
    found = anatomy(tiny_model("llama")[0])
    seen: list[tuple[str, int]] = []
    with Capture(found, lambda site, layer, tensor: seen.append((site, layer)), layers=[2]) as capture:
        found.backbone(input_ids=IDS)
        capture.check_counts()
    assert seen == [("embedding", 0), ("residual", 2), ("mlp_output", 2)]
    with pytest.raises(UsageError, match="layer 7: this model has layers 0-2"):
        Capture(found, lambda site, layer, tensor: None, layers=[0, 7])
    with pytest.raises(UsageError, match="site 'resid' is not known"):
        Capture(found, lambda site, layer, tensor: None, sites=["resid"])


@pytest.mark.parametrize("n_passes", [0, 2])
def test_a_hook_that_did_not_fire_once_is_an_error(n_passes: int) -> None:
    found = anatomy(tiny_model("gpt2")[0])
    with Capture(found, lambda site, layer, tensor: None) as capture:
        for _ in range(n_passes):
            found.backbone(input_ids=IDS)
        with pytest.raises(ProofFailed, match=f"fired {n_passes} times"):
            capture.check_counts()
        found.backbone(input_ids=IDS)
        capture.check_counts()


def test_a_bypassed_module_is_noticed() -> None:
    model, _ = tiny_model("llama")
    block = model.model.layers[1]
    mlp = block.mlp
    # As a fused kernel would: the module is there, but its __call__ is never used.
    block.mlp = _Bypass(mlp)
    found = anatomy(model)
    found = replace(
        found, layers=tuple(replace(one, mlp_last=mlp) if one.index == 1 else one for one in found.layers)
    )
    with Capture(found, lambda site, layer, tensor: None) as capture:
        found.backbone(input_ids=IDS)
        with pytest.raises(ProofFailed, match=r"mlp_output layer 1: its hook fired 0 times"):
            capture.check_counts()


class _Bypass(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner.forward(x)


def n_hooks(model: nn.Module) -> int:
    return sum(len(one._forward_hooks) + len(one._forward_pre_hooks) for one in model.modules())


def test_hooks_are_removed_whatever_happens() -> None:
    found = anatomy(tiny_model("gpt2")[0])
    before = n_hooks(found.model)

    def fail(site: str, layer: int, tensor: Tensor) -> None:
        raise ArithmeticError("the sink failed")

    with pytest.raises(ArithmeticError), Capture(found, fail):
        found.backbone(input_ids=IDS)
    assert n_hooks(found.model) == before
    nothing: Any = None
    last = replace(found.layers[2], norm=None, mlp_first=nothing)
    broken = replace(found, layers=(*found.layers[:2], last))
    with pytest.raises(AttributeError):
        Capture(broken, fail).__enter__()
    assert n_hooks(found.model) == before


def test_first_tensor_takes_tuples_apart() -> None:
    tensor = torch.zeros(1)
    assert first_tensor(tensor) is tensor
    assert first_tensor((tensor, None)) is tensor
    assert first_tensor((None, [1], tensor)) is tensor
    with pytest.raises(ProofFailed, match="dict"):
        first_tensor({"hidden": tensor})


def test_tuple_outputs_survive() -> None:
    model, _ = tiny_model("llama")
    wanted = captured(model, IDS)
    # Older versions of transformers returned tuples from blocks; what follows took the first part.
    block, norm = model.model.layers[2], model.model.norm
    whole, normalise = block.forward, norm.forward
    block.forward = lambda *args, **kwargs: (whole(*args, **kwargs), None)
    norm.forward = lambda hidden: normalise(first_tensor(hidden))
    got = captured(model, IDS)
    assert all(torch.equal(got[key], wanted[key]) for key in wanted)


def test_gemma_weight_is_one_plus_w() -> None:
    model, _ = tiny_model("gemma2")
    norm: Any = anatomy(model).layers[1].norm
    np.testing.assert_array_equal(norm_parameters(norm).weight, 1.0 + norm.weight.numpy())


def test_norms_without_affine_and_no_norm() -> None:
    plain = norm_parameters(nn.LayerNorm(8, elementwise_affine=False, eps=1e-3))
    assert (plain.kind, plain.weight, plain.bias, plain.eps) == ("layernorm", None, None, 1e-3)
    assert norm_parameters(nn.RMSNorm(8, eps=1e-5)).kind == "rmsnorm"
    assert norm_parameters(None) is NO_NORM
    rows = torch.randn(4, 8)
    assert apply(NO_NORM, rows) is rows
    assert torch.equal(terms(NO_NORM, rows), rows.abs())


def test_a_norm_of_another_kind_is_refused() -> None:
    class MaxNorm(nn.Module):
        eps = 1e-6

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            return self.weight * x / x.abs().amax(-1, keepdim=True)

    with pytest.raises(UsageError, match="MaxNorm is neither a LayerNorm nor an RMSNorm"):
        norm_parameters(MaxNorm())


def test_terms_bound_the_formula() -> None:
    norm = norm_parameters(anatomy(tiny_model("gpt2")[0]).layers[0].norm)
    rows = torch.randn(16, D_MODEL) + 2.0
    assert bool((terms(norm, rows) >= apply(norm, rows).abs() - 1e-6).all())


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2"])
def test_the_proof_uses_the_offline_formula(family: str) -> None:
    norm = norm_parameters(anatomy(tiny_model(family)[0]).layers[1].norm)
    rows = 3.0 * torch.randn(50, D_MODEL, generator=torch.Generator().manual_seed(1)) + 1.0
    offline = apply_norm(rows.numpy(), Norm(norm.kind, norm.weight, norm.bias, norm.eps))
    # numpy and torch sum the 32 features in another order: a few float32 units of values up to about 5.
    np.testing.assert_allclose(apply(norm, rows).numpy(), offline, rtol=0, atol=5e-6)
