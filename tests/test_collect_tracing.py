"""A trace finds what the rows of adapters.py say without them, and the parts of families that have no row; it
refuses blocks in which something is missing, doubled, mixed up or hidden.
"""

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import helpers_wirings as wirings
import numpy as np
import pytest
import torch
from accelerate import cpu_offload
from helpers_families import PLACES, Place, plain_pass
from helpers_harvest import harvested
from helpers_models import (
    D_MODEL,
    FAMILIES,
    KIN,
    N_LAYERS,
    NEW_FAMILIES,
    VOCAB_SIZE,
    perturb,
    smollm2_path,
    tiny_model,
)
from helpers_peft import with_lora
from helpers_wirings import wired
from nearline.collect.adapters import ADAPTERS
from nearline.collect.anatomy import Anatomy, anatomy
from nearline.collect.capture import SITES, Capture
from nearline.collect.models import load
from nearline.collect.proof import prove
from nearline.collect.tracing import needs_weights, traced
from nearline.store import Reader
from nearline.store.errors import UsageError
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig

# Other batch shapes sum the same float32 products in another order: some 1e-7 of the largest value per layer.
TOLERANCE = 2e-5
_PLAIN: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": D_MODEL,
    "num_hidden_layers": N_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "num_dense_layers": 1,
    "first_k_dense_replace": 1,
    "sliding_window": 8,
}
_MULTIPLIED = {"residual_multiplier": 0.3, "logits_scaling": 0.2, "use_post_norm": True}

# Families without a row: what their configs need, and, by hand, where their parts are.
ROWLESS: dict[str, tuple[dict[str, Any], Place]] = {
    "afmoe": (_EXPERTS, Place("model.layers", "pre_mlp_layernorm", "mlp", "self_attn")),
    "cohere2_moe": (_EXPERTS, Place("model.layers", "input_layernorm", "mlp", "self_attn")),
    "gpt_neox_japanese": (
        {},
        Place("gpt_neox_japanese.layers", "post_attention_layernorm", "mlp", "attention"),
    ),
    "hyperclovax": (_MULTIPLIED, Place("model.layers", "post_attention_layernorm", "mlp", "self_attn")),
    "jetmoe": (
        {"kv_channels": 8},
        Place("model.layers", "post_attention_layernorm", "mlp", "self_attention"),
    ),
    "nanochat": ({}, Place("model.layers", "post_attention_layernorm", "mlp", "self_attn")),
    "vaultgemma": (_EXPERTS, Place("model.layers", "pre_feedforward_layernorm", "mlp", "self_attn")),
}


def rowless(family: str) -> Any:
    config = CONFIG_MAPPING[family](**_PLAIN, **ROWLESS[family][0])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    perturb(model, seed=0)
    return model.eval().requires_grad_(False)


def sequences() -> list[np.ndarray]:
    draw = np.random.default_rng(3)
    return [draw.integers(4, VOCAB_SIZE, n).astype(np.int32) for n in (40, 17, 29)]


def seen_by(found: Anatomy) -> dict[tuple[str, int], Tensor]:
    seen: dict[tuple[str, int], Tensor] = {}

    def keep(site: str, layer: int, tensor: Tensor) -> None:
        seen[site, layer] = tensor.clone()

    ids = torch.from_numpy(np.stack([one[:17] for one in sequences()])).long()
    with torch.inference_mode(), Capture(found, keep, sites=SITES) as capture:
        found.backbone(input_ids=ids)
        capture.check_counts()
    return seen


def n_hooks(model: nn.Module) -> int:
    return sum(len(one._forward_hooks) + len(one._forward_pre_hooks) for one in model.modules())


def same(left: Any, right: Any) -> bool:
    return left is right or (isinstance(left, bool | int | float | str | dict) and left == right)


def assert_same_parts(got: Anatomy, wanted: Anatomy, but: tuple[str, ...] = ()) -> None:
    for layer, row in zip(got.layers, wanted.layers, strict=True):
        wrong = [
            one.name for one in fields(row) if not same(getattr(layer, one.name), getattr(row, one.name))
        ]
        assert not wrong, (layer.index, wrong)
    names = {one.name for one in fields(wanted)} - {"layers", "positions", *but}
    assert not [name for name in names if not same(getattr(got, name), getattr(wanted, name))]
    assert (got.positions is None) == (wanted.positions is None)
    if got.positions is not None and wanted.positions is not None:
        assert torch.equal(got.positions, wanted.positions)


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.long)])
@pytest.mark.parametrize("family", [*FAMILIES, *NEW_FAMILIES])
def test_a_trace_finds_captures_and_proves_what_the_row_says(family: str, dtype: torch.dtype) -> None:
    model, _ = tiny_model(family, dtype=dtype)
    before = n_hooks(model)
    got, wanted = traced(model), anatomy(model)
    assert n_hooks(model) == before
    assert_same_parts(got, wanted)
    if dtype is torch.float32:
        left, right = seen_by(got), seen_by(wanted)
        assert left.keys() == right.keys()
        assert all(torch.equal(left[key], right[key]) for key in right)
        prove(got, sequences())


@pytest.mark.parametrize("family", KIN)
def test_a_trace_finds_what_the_row_of_kin_says(family: str) -> None:
    model, _ = tiny_model(family, dtype=torch.float16 if family == "granite_swa" else torch.float32)
    assert_same_parts(traced(model), anatomy(model))


def test_untrained_norms_that_give_the_same_rows_are_no_riddle() -> None:
    torch.manual_seed(0)
    config = tiny_model("falcon_40b")[1]
    model: Any = AutoModelForCausalLM.from_config(config).eval()
    assert_same_parts(traced(model), anatomy(model))


@pytest.mark.parametrize("family", ROWLESS)
def test_a_family_without_a_row_is_harvested(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert family not in ADAPTERS
    model = rowless(family)
    path = harvested(tmp_path / "s", model=model, storage_dtype="float32", bos="always", tokens=270)
    reader = Reader.open(path)
    monkeypatch.setitem(PLACES, family, ROWLESS[family][1])
    token, target, nll = (reader.column(name) for name in ("token_id", "target_id", "nll"))
    for row0, row1 in zip(reader.plan.row_offsets[:-1], reader.plan.row_offsets[1:], strict=True):
        rows = slice(int(row0), int(row1))
        wanted = plain_pass(family, model, token[rows])
        for site in ("residual", "mlp_output", "embedding"):
            got = values_of(reader, site)[:, rows]
            np.testing.assert_allclose(got, wanted[site], rtol=0, atol=TOLERANCE * np.abs(wanted[site]).max())
        has_target = target[rows] >= 0
        losses = -wanted["log_p"][np.flatnonzero(has_target), target[rows][has_target]]
        np.testing.assert_allclose(nll[rows][has_target], losses, rtol=TOLERANCE, atol=TOLERANCE)


def values_of(reader: Reader, site: str) -> np.ndarray:
    if site == "embedding":
        return reader.rows(site, None, 0, reader.n_blocks)[None]
    return np.stack([reader.rows(site, layer, 0, reader.n_blocks) for layer in reader.layers])


_Found = tuple[bool, str, str | None, str | None, str | None, float]
RIGHT: dict[Callable[[Any, Tensor], Tensor], _Found] = {
    wirings.sequential: (False, "ff", "n2", None, None, 1.0),
    wirings.parallel: (True, "ff", "n1", None, None, 1.0),
    wirings.parallel_two_norms: (True, "ff", "n2", None, None, 1.0),
    wirings.sandwich: (False, "ff", "n2", "n4", None, 1.0),
    wirings.behind_only: (False, "ff", None, "n4", None, 1.0),
    wirings.multiplied: (False, "ff", "n2", None, None, 0.707107),
    wirings.sum_normed: (False, "ff", None, None, "n2", 1.0),
    wirings.flat_span: (False, "gate…down", "n2", None, None, 1.0),
    wirings.scaled_by_module: (False, "ff…scale", "n2", None, None, 1.0),
    wirings.biased_attention: (False, "ff", "n2", None, None, 1.0),
    wirings.in_place: (True, "ff", "n1", None, None, 1.0),
}


@pytest.mark.parametrize("wiring", RIGHT)
def test_every_right_wiring_is_found_and_proved(wiring: Callable[[Any, Tensor], Tensor]) -> None:
    found = traced(wired(wiring))
    paths = {part: path.rsplit(".", 1)[-1] for part, path in found.paths.items()}
    span = found.span.replace("blocks.{i}.", "")
    parts = (found.parallel, span, paths.get("norm"), paths.get("post_norm"), paths.get("sum_norm"))
    assert (*parts, found.layers[0].multiplier) == RIGHT[wiring]
    assert paths["attention"] == "attn"
    prove(found, sequences())


def test_layers_may_differ() -> None:
    found = traced(wired(wirings.sequential, wirings.behind_only, wirings.flat_span))
    assert [layer.norm is None for layer in found.layers] == [False, True, False]
    assert [layer.post_norm is None for layer in found.layers] == [True, False, True]
    assert found.span == "blocks.{i}.ff or blocks.{i}.gate…blocks.{i}.ff or blocks.{i}.down"
    prove(found, sequences())


def test_a_multiplier_of_the_config_or_the_block_is_taken_exactly() -> None:
    model = wired(wirings.multiplied)
    model.config.depth_scale = wirings.MULTIPLIER
    assert {layer.multiplier for layer in traced(model).layers} == {wirings.MULTIPLIER}
    del model.config.depth_scale
    model.base_model.blocks[1].some_factor = wirings.MULTIPLIER
    assert [layer.multiplier for layer in traced(model).layers] == [0.707107, wirings.MULTIPLIER, 0.707107]
    # In 16 bits too, 0.7 in the config is not near enough to be it.
    halved = [layer.multiplier for layer in traced(wired(wirings.multiplied).to(torch.bfloat16)).layers]
    assert halved == pytest.approx([wirings.MULTIPLIER] * N_LAYERS, rel=2e-3)


def test_a_multiplier_near_one_is_none_that_rounding_explains() -> None:
    """0.99 in bfloat16: each feature alone could be rounding, all of them together cannot."""

    def almost(b: Any, h: Tensor) -> Tensor:
        r = b.attended(h)
        return r + 0.99 * b.ff(b.n2(r))

    found = traced(wired(almost).to(torch.bfloat16))
    assert [layer.multiplier for layer in found.layers] == pytest.approx([0.99] * N_LAYERS, rel=1e-3)
    prove(found, sequences())


WRONG: dict[Callable[[Any, Tensor], Tensor], str] = {
    wirings.no_mlp: r"what it adds last is the output of `.*\.attn`, which mixes positions",
    wirings.no_attention: "no module in it mixes positions, so it has no attention",
    wirings.attention_last: "but not when the MLP reads other rows",
    wirings.attention_twice: r"`.*\.attn2` would be only one of several parts",
    wirings.mlp_twice: "An MLP is missing, runs twice",
    wirings.two_mlps_added: "is one of several that are added up",
    wirings.two_mlps_after_another: r"`.*\.ff` would be only one of several parts",
    wirings.scaled_by_vector: "is scaled by something that is not one number",
    wirings.scaled_stream: "no single module that works on each position by itself",
    wirings.unknown_norm: r"`.*\.peak` stands in front of `.*\.ff` as a norm would",
    wirings.halved_input: r"`.*\.n2` is a norm in front of the MLP, but .* no module lies between",
    wirings.halved_output: r"`.*\.n4` is a norm behind the MLP, but .* no module lies between",
    wirings.unknown_norm_halved: r"`.*\.peak` is a norm in front of the MLP, but is neither",
    wirings.unknown_norm_behind: r"`.*\.peak` is a norm behind the MLP, but is neither",
    wirings.mean_of_all: r"does not follow the rows that `.*\.up`, `.*\.gate` reads position by position",
    wirings.gated_by_position: r"does not follow the rows that `.*\.up` reads position by position",
    wirings.used_again: "the MLP's output is used in more than one place",
    wirings.two_readings: r"more than one reading of it fits: .*\.ff2`; or .*\.ff`|\.ff`; or .*\.ff2`",
}


@pytest.mark.parametrize("wiring", WRONG)
def test_every_wrong_wiring_is_refused(wiring: Callable[[Any, Tensor], Tensor]) -> None:
    model = wired(wirings.sequential, wiring, wirings.sequential)
    if wiring is wirings.two_readings:  # its fixed point needs a contraction
        model.base_model.blocks[1].ff2.down.weight.mul_(0.3)
    before = n_hooks(model)
    told = rf"layer 1 \(`base_model\.blocks\.1`\): .*{WRONG[wiring]}.*docs/architectures\.md"
    with pytest.raises(UsageError, match=told):
        traced(model)
    assert n_hooks(model) == before


def test_layers_that_are_parallel_in_part_are_refused() -> None:
    with pytest.raises(UsageError, match=r"layer 2 .* parallel, or not, unlike in layer 0"):
        traced(wired(wirings.sequential, wirings.sequential, wirings.parallel))


def test_a_contribution_that_rounding_could_make_up_is_refused() -> None:
    model = wired(wirings.sequential)
    for parameter in model.base_model.blocks[2].ff.down.parameters():
        parameter.mul_(1e-6)
    with pytest.raises(UsageError, match=r"layer 2 .*what `.*ff` adds is so small beside the stream"):
        traced(model)


@pytest.mark.parametrize(("sizes", "lacking"), [({}, "hidden_size"), ({"hidden_size": 32}, "vocab_size")])
def test_a_config_that_lacks_a_size_is_refused(sizes: dict[str, Any], lacking: str) -> None:
    model = wired(wirings.sequential)
    model.config = PreTrainedConfig(**sizes)
    with pytest.raises(UsageError, match=f"Config has no `{lacking}`.*attribute_map"):
        traced(model)


def test_models_without_a_chain_of_blocks_are_refused() -> None:
    model = wired(wirings.sequential)
    model.base_model.between = lambda hidden: 1.01 * hidden
    with pytest.raises(UsageError, match=r"what `base_model.blocks.1` reads is not what `.*0` gave"):
        traced(model)
    model = wired(wirings.sequential)
    model.base_model.blocks[2] = model.base_model.blocks[1]
    with pytest.raises(
        UsageError, match=r"`base_model.blocks.1`, `base_model.blocks.2` did not run exactly once"
    ):
        traced(model)
    model = wired(wirings.sequential)
    model.config.num_hidden_layers = 5
    with pytest.raises(UsageError, match=r"the longest chain is .*; the config speaks of 5 layers"):
        traced(model)
    model.base_model.blocks = nn.ModuleList([model.base_model.blocks[0]])
    model.config.num_hidden_layers, model.config.hidden_size = 1, D_MODEL + 1
    with pytest.raises(UsageError, match="is not one row of the model's width per token"):
        traced(model)


def test_one_block_is_enough() -> None:
    model = wired(wirings.parallel, wirings.parallel)
    model.base_model.blocks = model.base_model.blocks[:1]
    model.config.num_hidden_layers = 1
    found = traced(model)
    assert (found.n_layers, found.span) == (1, "blocks.{i}.ff")


def test_embeddings_that_mix_positions_in_are_refused() -> None:
    model = wired(wirings.sequential)
    embed, steps = model.base_model.embed, torch.linspace(0, 1, 10)[:, None]
    model.base_model.embedded = lambda ids: embed(ids) + steps
    with pytest.raises(UsageError, match="depends on a token's position or on its neighbours"):
        traced(model)
    model.base_model.embedded = lambda ids: embed(ids) + embed(ids.roll(1, 1))
    with pytest.raises(UsageError, match="depends on a token's position or on its neighbours"):
        traced(model)


def test_heads_that_do_more_are_refused() -> None:
    model = wired(wirings.sequential)
    model.scored = lambda logits: logits.clamp_min(-0.1)
    with pytest.raises(UsageError, match="are not the model's logits"):
        traced(model)
    model.scored = lambda logits: 0.25 * logits
    assert traced(model).logit_scale == pytest.approx(0.25, rel=1e-6)
    model.head.register_forward_hook(lambda *_: None)
    model.get_output_embeddings = lambda: None
    with pytest.raises(UsageError, match="has no language-model head"):
        traced(model)


def test_a_model_that_cannot_run_on_ids_says_so() -> None:
    model = wired(wirings.sequential)
    model.base_model.between = lambda hidden: hidden @ hidden
    with pytest.raises(UsageError, match="running it on 2 × 10 token ids; that failed: RuntimeError"):
        traced(model)
    assert n_hooks(model) == 0


def test_a_model_without_weights_is_told_apart_from_an_offloaded_one() -> None:
    config = CONFIG_MAPPING["nanochat"](**_PLAIN)
    with torch.device("meta"):
        outline = AutoModelForCausalLM.from_config(config)
    assert needs_weights(outline)
    with pytest.raises(UsageError, match=r"'nanochat' has no row .*has no weights. Load the model"):
        anatomy(outline)
    model = rowless("nanochat")
    wanted = traced(model)
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert next(model.model.layers[0].mlp.parameters()).is_meta
    assert not needs_weights(model)
    assert_same_parts(traced(model), wanted)


def test_a_peft_model_is_looked_through() -> None:
    model = rowless("nanochat")
    found = traced(with_lora(model, target_modules=["q_proj", "fc1", "fc2"]))
    assert found.model is model
    assert [layer.mlp_first for layer in found.layers] == [layer.mlp for layer in model.model.layers]
    prove(found, sequences())


def test_the_model_is_left_as_it_was_and_the_result_is_the_same_again() -> None:
    model = rowless("afmoe").train()
    model.model.layers[1].eval()
    training = [module.training for module in model.modules()]
    first, second = traced(model), traced(model, torch.arange(20, 29))
    assert [module.training for module in model.modules()] == training
    assert_same_parts(first, second)
    assert_same_parts(first, traced(model))
    with pytest.raises(UsageError, match="at least two token ids"):
        traced(model, torch.tensor([3]))


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_trained_weights_are_traced_as_the_row_says(dtype: torch.dtype) -> None:
    folder, file = smollm2_path()
    model = load(str(folder), gguf_file=file, device="cpu").model.to(dtype)
    assert_same_parts(traced(model), anatomy(model))
