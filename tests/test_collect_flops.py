"""Operations counted from shapes are those that torch counts while the model runs; what an intervention saves
is what a replaced model no longer does; seconds are measured side by side.
"""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers_models import D_MODEL, FAMILIES, KIN, N_LAYERS, NEW_FAMILIES, VOCAB_SIZE, tiny_config
from helpers_peft import with_lora
from helpers_substitution import linear_map
from nearline.analyze.budget_tables import BUDGET_SCHEMAS, to_budget_table
from nearline.collect.anatomy import Anatomy, anatomy, unwrapped
from nearline.collect.budget import Configuration, budget, flops_saved, spent_by
from nearline.collect.flops import ModelFlops, model_flops
from nearline.collect.gate_routing import GateRouter, Piece
from nearline.collect.hidden_units import HiddenUnits
from nearline.collect.interventions import parse_intervention
from nearline.collect.linearised import Linearised
from nearline.collect.substitutes import Substitute
from nearline.collect.timing import TimingRules, timings
from nearline.store.errors import UsageError
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig

LENGTH = 12
# Two and three matrices, parallel blocks, shared keys, windows, flat spans, experts beside and instead of
# dense layers, latent attention, experts in one flat matrix, projections around the blocks.
SAMPLE = (
    "gpt2 gpt_neox llama gemma2 falcon_40b opt_350m bloom mixtral qwen2_moe deepseek_v3 dbrx gpt_oss"
).split()
# Its eager attention computes the same scores twice.
TWICE = ("diffllama",)
OTHERS = [name for name in (*FAMILIES, *NEW_FAMILIES, *KIN) if name not in (*SAMPLE, *TWICE)]
SMOLLM2 = LlamaConfig(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    tie_word_embeddings=True,
)


def plain_model(family: str) -> Any:
    """With attention, and experts where there are any, as matrix products that torch can count."""
    config = tiny_config(family)
    experts = {"experts_implementation": "eager"} if "moe" in family or "experts" in str(config) else {}
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", **experts)
    return model.eval().requires_grad_(False)


def counted(model: Any, ids: torch.Tensor) -> dict[str, int]:
    """What torch counts in one forward pass, by module."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(input_ids=ids, use_cache=False)
    prefix = f"{type(model).__name__}."
    found = {name.removeprefix(prefix): ops for name, ops in counter.get_flop_counts().items()}
    return {name: sum(ops.values()) for name, ops in found.items()}


def compare(model: Any) -> None:
    found, ids = anatomy(model), torch.randint(3, 150, (2, LENGTH))
    flops, torchs = model_flops(found), counted(model, ids)
    names = {module: name for name, module in model.named_modules()}

    def of(*modules: nn.Module) -> int:
        return sum(torchs.get(names[module], 0) for module in dict.fromkeys(modules))

    for layer, own in zip(found.layers, flops.layers, strict=True):
        assert of(layer.mlp_first, layer.mlp_last) == ids.numel() * own.mlp
        assert of(layer.attention) == ids.numel() * own.attention(own.keys(LENGTH, masked=True))
        assert own.other == 0
    whole = flops.mlp + flops.attention(LENGTH, masked=True) + flops.head
    assert torchs["Global"] == ids.numel() * whole


@pytest.mark.parametrize("family", SAMPLE)
def test_what_shapes_say_is_what_torch_counts_in_a_forward_pass(family: str) -> None:
    compare(plain_model(family))


def test_an_adapter_is_counted_beside_what_it_adapts() -> None:
    model = unwrapped(with_lora(plain_model("llama")))
    compare(model)
    assert model_flops(anatomy(model)).mlp > model_flops(anatomy(plain_model("llama"))).mlp


@pytest.mark.long
@pytest.mark.parametrize("family", OTHERS)
def test_what_shapes_say_is_what_torch_counts_in_every_other_family(family: str) -> None:
    compare(plain_model(family))


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_neo"])
@pytest.mark.parametrize("length", [1, 5, 8, 30])
def test_a_token_is_charged_for_the_keys_that_it_sees(family: str, length: int) -> None:
    with torch.device("meta"):
        found = anatomy(AutoModelForCausalLM.from_config(tiny_config(family)))
    windows = {"llama": [None] * 3, "gemma2": [8, None, 8], "gpt_neo": [None, 8, None]}[family]
    for own, window in zip(model_flops(found).layers, windows, strict=True):
        seen = [min(at + 1, window or length) for at in range(length)]
        assert own.keys(length) == sum(seen) / length
        assert own.last_keys(length) == seen[-1]


def test_experts_that_no_config_counts_are_refused() -> None:
    model = plain_model("mixtral")
    found = anatomy(model)
    vars(model.config)["num_experts_per_tok"] = None  # the config itself refuses it
    with pytest.raises(UsageError, match="how many of its experts a token is sent to"):
        model_flops(found)


# What interventions save


@pytest.fixture(scope="module")
def smollm2() -> ModelFlops:
    with torch.device("meta"):
        return model_flops(anatomy(AutoModelForCausalLM.from_config(SMOLLM2)))


def test_the_budget_of_smollm2_by_hand(smollm2: ModelFlops) -> None:
    d, wide, n_layers, n_keys, length = 576, 1536, 30, 3 * 64, 512
    mlp, surrogate = 2 * 3 * d * wide, 2 * d * d
    attention = 2 * (2 * d * d + 2 * d * n_keys) + 2 * 2 * d * (length + 1) / 2
    total = n_layers * (mlp + attention) + 2 * d * 49152
    table = budget(
        smollm2,
        [Configuration("linear@all", tuple(range(n_layers))), Configuration("linear", (4,))],
        [length],
    ).to_pylist()
    original, every, one = (row for row in table if row["phase"] == "prefill")
    assert original["total_flops"] == total
    assert original["mlp_flops"] == n_layers * mlp
    # 576² in place of 3 · 576 · 1536: an eighth.
    assert every["mlp_flops_saved"] == 7 / 8
    assert every["flops_saved"] == pytest.approx(n_layers * (mlp - surrogate) / total, rel=1e-12)
    assert every["parameters_saved"] == n_layers * (3 * d * wide - d * d - d)
    # Sinks keep the MLP unless they are replaced too, so it cannot be thrown away.
    assert one["parameters_saved"] == -(d * d + d)
    assert one["parameters_saved_at_most"] == 3 * d * wide - d * d - d
    last = next(row for row in table if row["phase"] == "decode")
    assert last["attention_flops"] - original["attention_flops"] == n_layers * 4 * d * (length - 1) / 2


def test_a_saving_follows_the_share_and_is_charged_for_what_comes_instead(smollm2: ModelFlops) -> None:
    saved, mlp = flops_saved(smollm2, 512), smollm2.mlp
    own, surrogate, gate = mlp / 30, 2 * 576**2, 2 * 576
    of_mlps = {name: saved(name, (3,), 0.5)[0] * mlp for name in "linear random@0.5 gated@input".split()}
    assert of_mlps["linear"] == of_mlps["random@0.5"] == pytest.approx((own - surrogate) / 2)
    assert of_mlps["gated@input"] == pytest.approx((own - surrogate) / 2 - gate)
    assert saved("gated@input", (3,), 0.0)[0] * mlp == pytest.approx(-gate)
    # A soft gate computes both for every token.
    assert saved("soft@input", (3,), 0.5)[0] * mlp == pytest.approx(-surrogate - gate)
    assert saved("low_rank@16", (3,), 1.0)[0] * mlp == pytest.approx(own - 4 * 576 * 16)
    assert saved("zero", (3, 4), 1.0)[0] == pytest.approx(2 / 30)
    assert saved("none", (3,), 0.0) == (0.0, 0.0)
    # By the name where nothing was measured, and less where some tokens are not covered.
    assert saved("gated@input:0.5", (3,), math.nan) == saved("gated@input", (3,), 0.5)
    part = flops_saved(smollm2, 512, covered=0.9)
    assert part("linear", (3,), 1.0)[0] == pytest.approx(0.9 * saved("linear", (3,), 1.0)[0])
    assert part("linear@all", (3,), 1.0) == saved("linear@all", (3,), 1.0)


def gate_of(weight: torch.Tensor, threshold: float) -> GateRouter:
    return GateRouter(
        pieces=(Piece("x", own=weight),),
        bias=0.0,
        threshold=threshold,
        centred=False,
        eps=None,
        positions=None,
        types=torch.zeros(0, dtype=torch.long),
        type_means=torch.zeros(0),
        grand_mean=0.0,
    )


def gated(found: Anatomy, layers: tuple[int, ...]) -> dict[int, Substitute]:
    """Gates that send about half of the tokens to a surrogate."""
    one, d = parse_intervention("gated@input"), found.d_model
    weights = torch.randn(len(layers), d, generator=torch.Generator().manual_seed(3))
    return {
        layer: Substitute(one, layer, linear_map(d, seed=layer), gate_of(weight, 0.5))
        for layer, weight in zip(layers, weights, strict=True)
    }


@pytest.mark.parametrize("family", ["llama", "opt", "mixtral"])
def test_a_gated_model_really_does_what_its_budget_says(family: str) -> None:
    torch.manual_seed(0)
    model = plain_model(family)
    found, ids, layers = anatomy(model), torch.randint(3, 150, (2, LENGTH)), (0, 2)
    flops, before = model_flops(found), counted(model, ids)["Global"]
    linearised = Linearised(found, gated(found, layers), special_ids=(0, 1, 2))
    after = counted(model, ids)["Global"]
    share = linearised.share()
    assert 0.2 < share < 0.8
    won = flops_saved(flops, LENGTH)("gated@input", layers, share)[0] * flops.mlp
    # A product of a matrix and one vector, the gate, is not among what torch counts.
    uncounted = len(layers) * 2 * D_MODEL
    assert before - after == pytest.approx(ids.numel() * (won + uncounted), rel=1e-9)


# Seconds


def test_timing_sets_the_saving_of_operations_beside_that_of_time() -> None:
    torch.manual_seed(0)
    found = anatomy(plain_model("llama"))
    texts = np.random.default_rng(0).integers(3, VOCAB_SIZE, (2, 12))
    linear = parse_intervention("linear@all")
    every = tuple(range(N_LAYERS))
    configurations = [
        (
            Configuration("linear@all", every),
            {layer: Substitute(linear, layer, linear_map(D_MODEL, seed=layer)) for layer in every},
        ),
        (Configuration("gated@input", (1,)), gated(found, (1,))),
    ]
    rules = TimingRules(batch_sizes=(1, 2), prompt_length=8, n_steps=3, n_rounds=3)
    table = timings(found, configurations, texts, (0, 1, 2), rules)
    assert table.schema == BUDGET_SCHEMAS["timing"]
    rows = table.to_pylist()
    assert [(row["batch_size"], row["name"], row["phase"]) for row in rows] == [
        (size, name, phase)
        for size in (1, 2)
        for name in ("original", "linear@all", "gated@input")
        for phase in ("prefill", "decode")
    ]
    for row in rows:
        assert row["n_runs"] == 3
        assert 0 < row["seconds_q25"] <= row["seconds"] <= row["seconds_q75"]
        n_tokens = row["batch_size"] * (8 if row["phase"] == "prefill" else 3)
        assert row["tokens_per_second"] == pytest.approx(n_tokens / row["seconds"])
        assert row["time_saved"] == 1 - row["ratio"]
        if row["name"] == "original":
            assert (row["ratio"], row["share"], row["flops_saved"]) == (1.0, 0.0, 0.0)
        elif row["name"] == "linear@all":
            flops = model_flops(found)
            last = row["phase"] == "decode"
            whole = flops.total(8 + 2 if last else 8, last=last)
            saved = flops.mlp - N_LAYERS * 2 * D_MODEL**2
            assert (row["share"], row["flops_saved"]) == (1.0, pytest.approx(saved / whole))
    assert not any(name for name, _ in found.model.named_modules() if "nearline" in name)


def test_a_gate_with_hidden_units_is_charged_for_them() -> None:
    """By hand: d products a unit and one more for its weight in the sum, of two operations each."""
    found, units = anatomy(plain_model("llama")), 5
    substitutes = gated(found, (1,))
    hidden = HiddenUnits(torch.zeros(units, D_MODEL), torch.zeros(units), torch.zeros(units))
    router = replace(gate_of(torch.zeros(D_MODEL), 0.6), pieces=(), hidden=hidden)  # sends none
    substitutes[1] = replace(substitutes[1], router=router)
    rules = TimingRules(batch_sizes=(1,), prompt_length=8, n_steps=3, n_rounds=1)
    texts = np.random.default_rng(0).integers(3, VOCAB_SIZE, (1, 11))
    table = timings(found, [(Configuration("gated@input", (1,)), substitutes)], texts, (0, 1, 2), rules)
    row = next(row for row in table.to_pylist() if (row["name"], row["phase"]) == ("gated@input", "prefill"))
    flops, spent = model_flops(found), 2 * (units * D_MODEL + units)
    assert (row["share"], row["flops_saved"]) == (0.0, pytest.approx(-spent / flops.total(8)))
    of_name = spent_by(flops, parse_intervention("gated@input"), (1,), 0.0, hidden=units)
    assert of_name.gate == spent
    assert of_name.parameters_came == D_MODEL**2 + D_MODEL + units * D_MODEL + units + units + 1


def test_timing_needs_as_many_and_as_long_texts_as_it_runs() -> None:
    found = anatomy(plain_model("llama"))
    with pytest.raises(UsageError, match=r"needs 4 texts of 144 tokens, and there are 2 of 12"):
        timings(found, [], np.ones((2, 12), np.int64), ())


def test_a_row_of_another_form_is_refused() -> None:
    with pytest.raises(ValueError, match="differ"):
        to_budget_table("budget", [{"name": "linear"}])
