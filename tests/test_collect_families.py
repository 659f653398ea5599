"""Families with a row: the proof accepts them, a store holds what plain hooks see, faults are refused."""

import operator
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import cpu_offload
from helpers_families import PLACES, plain_pass
from helpers_harvest import harvested
from helpers_models import FAMILIES, KIN, NEW_FAMILIES, VOCAB_SIZE, captured, tiny_config, tiny_model
from nearline.collect.adapters import ADAPTERS, Adapter, adapter_of, refuse_family
from nearline.collect.anatomy import Anatomy, anatomy, logits
from nearline.collect.capture import Capture, first_tensor
from nearline.collect.forward import accepted
from nearline.collect.norm_parameters import norm_parameters
from nearline.collect.proof import prove
from nearline.collect.refused_families import REFUSED
from nearline.store import Reader
from nearline.store.errors import ProofFailed, UsageError
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

# Other batch shapes sum the same float32 products in another order: some 1e-7 of the largest value per layer.
TOLERANCE = 2e-5
IDS = torch.randint(3, VOCAB_SIZE, (3, 11), generator=torch.Generator().manual_seed(5))
CHECKS = ("norm", "identity", "batch", "isolation", "logits", "positions")


def sequences() -> list[np.ndarray]:
    draw = np.random.default_rng(3)
    return [draw.integers(3, VOCAB_SIZE, n).astype(np.int32) for n in (40, 17, 29)]


def with_layer(found: Anatomy, index: int, **changes: Any) -> Anatomy:
    layers = tuple(replace(one, **changes) if one.index == index else one for one in found.layers)
    return replace(found, layers=layers)


def within(facts: dict[str, float]) -> bool:
    checks = [check for check in CHECKS if f"{check}_error" in facts]
    assert facts["identity_error_without_mlp"] > 10 * facts["identity_tolerance"]
    return all(facts[f"{check}_error"] <= facts[f"{check}_tolerance"] for check in checks)


def test_every_row_is_proved_here() -> None:
    tried = {tiny_config(family).model_type for family in (*FAMILIES, *NEW_FAMILIES, *KIN)}
    assert tried == set(ADAPTERS)


@pytest.mark.parametrize("family", [*NEW_FAMILIES, *KIN])
def test_the_proof_accepts_every_family(family: str) -> None:
    assert within(prove(anatomy(tiny_model(family)[0]), sequences()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.long)])
@pytest.mark.parametrize("family", NEW_FAMILIES)
def test_the_proof_accepts_every_family_in_16_bits(family: str, dtype: torch.dtype) -> None:
    found = anatomy(tiny_model(family, dtype=dtype)[0])
    assert found.dtype is dtype
    assert within(prove(found, sequences()))


@pytest.mark.parametrize("family", NEW_FAMILIES)
def test_a_store_holds_what_plain_passes_show(family: str, tmp_path: Path) -> None:
    model, _ = tiny_model(family)
    reader = Reader.open(
        harvested(tmp_path / "s", model=model, storage_dtype="float32", bos="always", tokens=270)
    )
    token, target, nll = (reader.column(name) for name in ("token_id", "target_id", "nll"))
    layers = model.get_submodule(PLACES[family].blocks)
    stored = {site: values_of(reader, site) for site in ("residual", "mlp_output", "embedding")}
    for row0, row1 in zip(reader.plan.row_offsets[:-1], reader.plan.row_offsets[1:], strict=True):
        rows = slice(int(row0), int(row1))
        wanted = plain_pass(family, model, token[rows])
        for site, values in stored.items():
            close(values[:, rows], wanted[site], site)
        # The block's sum again, of stored tensors and of the block's own output.
        for index, block in enumerate(layers):
            residual, y = (torch.from_numpy(stored[site][index, rows]) for site in ("residual", "mlp_output"))
            whole = PLACES[family].whole(block, residual, y, torch.from_numpy(wanted["attention"][index]))
            close(whole.numpy(), wanted["block_output"][index], f"block {index}")
        has_target = target[rows] >= 0
        losses = -wanted["log_p"][np.flatnonzero(has_target), target[rows][has_target]]
        np.testing.assert_allclose(nll[rows][has_target], losses, rtol=TOLERANCE, atol=TOLERANCE)
    assert reader.attributes.model.model_type == model.config.model_type


def close(got: np.ndarray, wanted: np.ndarray, what: str) -> None:
    np.testing.assert_allclose(got, wanted, rtol=0, atol=TOLERANCE * np.abs(wanted).max(), err_msg=what)


def values_of(reader: Reader, site: str) -> np.ndarray:
    if site == "embedding":
        return reader.rows(site, None, 0, reader.n_blocks)[None]
    return np.stack([reader.rows(site, layer, 0, reader.n_blocks) for layer in reader.layers])


def _wrong_multiplier(found: Anatomy) -> Anatomy:
    return with_layer(found, 1, multiplier=found.layers[1].multiplier * 0.97)


def _no_multiplier(found: Anatomy) -> Anatomy:
    return with_layer(found, 1, multiplier=1.0)


def _residual_in_the_span(found: Anatomy) -> Anatomy:
    block: Any = found.layers[1].block
    return with_layer(found, 1, mlp_last=block.mlp if hasattr(block, "mlp") else block.ffn)


def _sum_norm_missing(found: Anatomy) -> Anatomy:
    return with_layer(found, 1, sum_norm=None)


def _sum_norm_as_post_norm(found: Anatomy) -> Anatomy:
    return with_layer(found, 1, post_norm=found.layers[1].sum_norm, sum_norm=None)


def _other_sum_norm(found: Anatomy) -> Anatomy:
    layer: Any = found.layers[1].block
    return with_layer(found, 1, sum_norm=layer.self_attn_layer_norm)


def _next_row_of_the_table(found: Anatomy) -> Anatomy:
    assert found.positions is not None
    return replace(found, positions=found.positions[1:])


def _no_table(found: Anatomy) -> Anatomy:
    return replace(found, positions=None)


def _norm_in_the_span(found: Anatomy) -> Anatomy:
    layer = found.layers[1]
    return with_layer(found, 1, norm=None, mlp_first=layer.norm)


def _post_norm_in_the_span(found: Anatomy) -> Anatomy:
    layer = found.layers[1]
    return with_layer(found, 1, post_norm=None, mlp_last=layer.post_norm)


def _half_of_the_span(found: Anatomy) -> Anatomy:
    return with_layer(found, 1, mlp_last=found.layers[1].mlp_first)


def _whole_table(found: Anatomy) -> Anatomy:
    return replace(found, positions=found.backbone.get_submodule("embed_positions").weight)  # type: ignore[arg-type]


def _wrong_logit_scale(found: Anatomy) -> Anatomy:
    return replace(found, logit_scale=found.logit_scale * 1.02)


def _no_logit_scale(found: Anatomy) -> Anatomy:
    return replace(found, logit_scale=1.0)


def _sequential(found: Anatomy) -> Anatomy:
    return with_layer(found, 1, parallel=False)


def _norm_in_front(found: Anatomy) -> Anatomy:
    block: Any = found.layers[1].block
    return with_layer(found, 1, norm=block.post_feedforward_layernorm)


SUM = r"layer 1: \[residual \+ contribution = block output\]"
HEAD = r"head\(final hidden states\) = model logits"
TABLE = "a position adds its row of the table"
# Each fault as a wrong row would make it, the families that could have it, and the identity that shows it.
FAULTS: list[tuple[Callable[[Anatomy], Anatomy], tuple[str, ...], str]] = [
    (_wrong_multiplier, ("granite", "bloom", "mpt"), SUM),
    (_wrong_multiplier, ("olmo2", "opt_350m"), r"layer 1: \[residual \+ contribution = "),
    (_no_multiplier, ("granite",), SUM),
    (_residual_in_the_span, ("bloom", "mpt"), SUM),
    (_sum_norm_missing, ("opt_350m",), SUM),
    (_sum_norm_as_post_norm, ("opt_350m",), SUM),
    (_other_sum_norm, ("opt_350m",), r"layer 1: \[norm\(residual \+ contribution\) = block output\]"),
    (_next_row_of_the_table, ("gpt2", "opt", "opt_350m"), TABLE),
    (_whole_table, ("opt", "opt_350m"), TABLE),
    (_no_table, ("gpt2", "opt", "ctrl", "xglm"), "a token enters alike at every position"),
    (_norm_in_the_span, ("llama", "gpt2", "gemma"), "layer 1: the MLP begins with .*, which is a norm"),
    (_post_norm_in_the_span, ("gemma2", "olmo2", "glm4"), "layer 1: the MLP ends with .*, which is a norm"),
    (
        _half_of_the_span,
        ("bloom", "opt"),
        "layer 1: mlp_output has (128|64) features, the residual stream 32",
    ),
    (_wrong_logit_scale, ("granite", "cohere", "bloom"), HEAD),
    (_no_logit_scale, ("granite", "cohere", "cohere2"), HEAD),
    (_sequential, ("phi", "gptj", "falcon_7b", "falcon_11b", "falcon_40b", "cohere"), r"layer 1: \[residual"),
    (_norm_in_front, ("olmo2", "olmo3"), "layer 1: its hook fired|does not hold"),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("family", "plant", "what"),
    [(family, plant, what) for plant, families, what in FAULTS for family in families],
)
def test_faults_of_each_kind_are_refused(
    family: str, plant: Callable[[Anatomy], Anatomy], what: str, dtype: torch.dtype
) -> None:
    found = plant(anatomy(tiny_model(family, dtype=dtype)[0]))
    with pytest.raises(ProofFailed, match=what):
        prove(found, sequences())


def test_rows_of_the_position_table_are_what_positions_add() -> None:
    for family in ("gpt2", "opt", "opt_350m", "biogpt", "openai-gpt", "ctrl", "xglm"):
        model, config = tiny_model(family)
        found = anatomy(model)
        assert found.positions is not None
        assert len(found.positions) == config.max_position_embeddings == found.max_positions
        entered = captured(model, torch.full((1, 9), 7), ["embedding"])["embedding", 0][0]
        torch.testing.assert_close(entered - entered[0], found.positions[:9] - found.positions[0])


def test_the_path_of_the_position_table_names_it() -> None:
    """The table begins at what position 0 adds. (Traces give the same paths: test_collect_tracing.py.)"""
    rows = {family: adapter_of(tiny_config(family)) for family in (*FAMILIES, *NEW_FAMILIES, *KIN)}
    with_table = [family for family, row in rows.items() if row is not None and row.positions is not None]
    assert {"gpt2", "opt", "biogpt", "openai-gpt", "ctrl", "xglm"} <= {*with_table}
    for family in with_table:
        model, _ = tiny_model(family)
        found = anatomy(model)
        assert found.positions is not None
        named = operator.attrgetter(found.paths["positions"])(model)
        assert torch.equal(named[-len(found.positions) :], found.positions), (family, found.paths)


def test_flat_rows_are_shown_as_sequences() -> None:
    model, _ = tiny_model("opt")
    seen = captured(model, IDS)
    assert {tensor.shape for tensor in seen.values()} == {(3, 11, 32)}
    alone = captured(model, IDS[1:2])
    for key, tensor in alone.items():
        torch.testing.assert_close(seen[key][1:2], tensor)


@pytest.mark.parametrize("kept", [slice(1, None), slice(0, 0)])
def test_rows_that_are_missing_are_an_error(kept: slice) -> None:
    model, _ = tiny_model("opt")
    found = anatomy(model)

    class Some(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, rows: Tensor) -> Tensor:
            self.inner(rows[kept])
            return self.inner.forward(rows)

    first = found.layers[1].mlp_first
    model.model.decoder.layers[1].fc1 = Some(first)
    with (
        pytest.raises(
            ProofFailed,
            match=r"mlp_input layer 1: its module passed \(\d+, 32\) where the pass has \(3, 11\)",
        ),
        Capture(found, lambda site, layer, tensor: None, sites=["mlp_input"]),
        torch.inference_mode(),
    ):
        found.backbone(input_ids=IDS)


MOE = ("mixtral", "qwen2_moe", "qwen3_moe")


@pytest.mark.parametrize("family", MOE)
def test_experts_switch_and_every_implementation_gives_the_same(family: str) -> None:
    model, _ = tiny_model(family)
    gate = model.model.layers[1].mlp.gate
    chosen: list[Tensor] = []
    handle = gate.register_forward_hook(lambda _, args, output: chosen.append(output[-1].sort(-1).values))
    seen = {}
    for implementation in ("eager", "batched_mm", "grouped_mm"):
        model.set_experts_implementation(implementation)
        seen[implementation] = captured(model, IDS)
        assert within(prove(anatomy(model), sequences()))
    handle.remove()
    routes = {tuple(pair) for pair in chosen[0].tolist()}
    assert len(routes) > 3
    assert anatomy(model).routes_from == (1 if family == "qwen2_moe" else 0)
    for implementation in ("batched_mm", "grouped_mm"):
        for key, tensor in seen["eager"].items():
            torch.testing.assert_close(seen[implementation][key], tensor, rtol=1e-4, atol=1e-5)


class _Crowded(nn.Module):
    """Experts with a shared capacity: what a row gets depends on the others in the batch."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return y + 0.3 * y.mean((0, 1), keepdim=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_that_share_a_capacity_are_refused(dtype: torch.dtype) -> None:
    model, _ = tiny_model("mixtral", dtype=dtype)
    found = anatomy(model)
    model.model.layers[0].mlp = _Crowded(model.model.layers[0].mlp)
    assert found.routes_from == 0
    with pytest.raises(ProofFailed, match=r"in a padded batch|stays when the end of document 1 changes"):
        prove(anatomy(model), sequences())


class _Overheard(nn.Module):
    """An attention of which four rows of every document hear document 1."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        mixed, weights = self.inner(*args, **kwargs)
        mixed[:, 25:29] += mixed[:1].mean((0, 1))
        return mixed, weights


def test_in_16_bits_every_row_counts_up_to_the_first_experts() -> None:
    """Behind them, the median row of a document decides, and four rows would pass."""
    model, _ = tiny_model("mixtral", dtype=torch.bfloat16)
    model.model.layers[0].self_attn = _Overheard(model.model.layers[0].self_attn)
    with pytest.raises(ProofFailed, match=r"layer 0: \[residual of (sequence|other documents)"):
        prove(anatomy(model), sequences())


def test_dense_and_sparse_layers_stand_in_one_model() -> None:
    kinds = [type(layer.mlp_last).__name__ for layer in anatomy(tiny_model("qwen3_moe")[0]).layers]
    assert kinds == ["Qwen3MoeSparseMoeBlock", "Qwen3MoeSparseMoeBlock", "Qwen3MoeMLP"]


def test_an_epsilon_inside_the_formula_is_found() -> None:
    for family, eps in (("olmo", 1e-5), ("bloom", 1e-5), ("mpt", 1e-5)):
        for dtype in (torch.float32, torch.bfloat16):
            model, _ = tiny_model(family, dtype=dtype)
            found = norm_parameters(anatomy(model).layers[0].norm)
            assert (found.kind, found.eps) == ("layernorm", pytest.approx(eps))

    class Literal(nn.Module):
        def __init__(self, eps: float) -> None:
            super().__init__()
            self.eps_, self.normalized_shape = eps, (16,)

        def forward(self, x: Tensor) -> Tensor:
            wide = x.float()
            return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps_)).to(x)

    for eps in (1e-5, 1e-6, 1e-8):
        assert norm_parameters(Literal(eps)).eps == eps
    assert norm_parameters(nn.RMSNorm(16)).eps == torch.finfo(torch.float32).eps


@pytest.mark.parametrize("family", ["cohere", "granite", "gemma2", "opt_350m", "bloom"])
def test_logits_are_the_models_own(family: str) -> None:
    model, _ = tiny_model(family)
    found = anatomy(model)
    with torch.inference_mode():
        hidden = found.backbone(input_ids=IDS).last_hidden_state
        torch.testing.assert_close(logits(found, hidden), model(input_ids=IDS).logits)


def test_a_backbone_gets_what_its_signature_names() -> None:
    given: dict[str, Tensor | None] = dict.fromkeys(("input_ids", "attention_mask", "position_ids"), IDS)
    for family, missing in (("bloom", "position_ids"), ("mpt", "position_ids"), ("openai-gpt", "use_cache")):
        names = set(accepted(anatomy(tiny_model(family)[0]).backbone, given))
        assert names == {*given, "use_cache"} - {missing}
    assert set(accepted(anatomy(tiny_model("llama")[0]).backbone, given)) == {*given, "use_cache"}

    class Anything(nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> None: ...

    assert set(accepted(Anything(), given)) == {*given, "use_cache"}


def test_a_backbone_without_a_mask_is_proved_and_harvested(tmp_path: Path) -> None:
    model, _ = tiny_model("gpt2")
    few: dict[str, Any] = {"storage_dtype": "float32", "tokens": 270}
    with_mask = Reader.open(harvested(tmp_path / "mask", model=model, **few))
    whole = model.transformer.forward

    def forward(input_ids: Tensor) -> Any:
        return whole(input_ids=input_ids, use_cache=False)

    def with_head(input_ids: Tensor) -> Any:
        return SimpleNamespace(logits=model.lm_head(first_tensor(model.transformer(input_ids=input_ids)[0])))

    # As in models written by hand, which know nothing but ids.
    model.transformer.forward, model.forward = forward, with_head
    without = Reader.open(harvested(tmp_path / "none", model=model, **few))
    for site in ("residual", "mlp_output"):
        np.testing.assert_allclose(values_of(without, site), values_of(with_mask, site), rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", ["opt", "olmo2", "gemma2"])
def test_an_offloaded_model_is_read_where_its_weights_lie(family: str) -> None:
    here, away = anatomy(tiny_model(family)[0]), tiny_model(family)[0]
    cpu_offload(away, execution_device=torch.device("cpu"))
    assert all(weight.is_meta for weight in away.parameters())
    found = anatomy(away)
    assert (found.device.type, found.dtype) == ("cpu", torch.float32)
    if here.positions is not None:
        assert found.positions is not None
        assert torch.equal(found.positions, here.positions)
    for mine, other in zip(here.layers, found.layers, strict=True):
        for part in ("norm", "post_norm"):
            wanted, got = (norm_parameters(getattr(layer, part)) for layer in (mine, other))
            assert (got.kind, got.eps) == (wanted.kind, wanted.eps)
            np.testing.assert_array_equal(got.weight, wanted.weight)
    assert prove(found, sequences()) == prove(here, sequences())
    assert all(weight.is_meta for weight in away.parameters()), "and left as it was"


class _Packed(nn.Module):
    """A layer with int8 weights and a scale, as quantisers leave it."""

    def __init__(self, linear: Any) -> None:
        super().__init__()
        scale = linear.weight.abs().amax() / 127
        self.weight = nn.Parameter((linear.weight / scale).round().to(torch.int8), requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.to(x) * self.scale)


def test_packed_weights_do_not_hide_the_dtype_of_the_stream() -> None:
    model, _ = tiny_model("llama", dtype=torch.bfloat16)
    for layer in model.model.layers:
        for name in ("gate_proj", "up_proj", "down_proj"):
            setattr(layer.mlp, name, _Packed(getattr(layer.mlp, name)))
    found = anatomy(model)
    assert next(found.layers[0].mlp_first.parameters()).dtype is torch.int8
    assert found.dtype is torch.bfloat16
    assert within(prove(found, sequences()))
    table: Any = nn.Parameter(torch.zeros(VOCAB_SIZE, 32, dtype=torch.int8), requires_grad=False)
    model.model.embed_tokens.weight = table
    assert anatomy(model).dtype is torch.bfloat16


def test_a_residual_in_another_dtype_is_refused() -> None:
    model, _ = tiny_model("llama", dtype=torch.bfloat16)
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda _, args: (args[0].float(), *args[1:]))
        layer.float()
    model.model.norm.register_forward_pre_hook(lambda _, args: (args[0].bfloat16(),))
    with pytest.raises(ProofFailed, match="residual stream is float32, the embedding's weights are bfloat16"):
        prove(anatomy(model), sequences())


ENCODER = "it is an encoder, whose positions see the tokens after them"
ENCODER_DECODER = "its decoder attends to an encoder"
RECURRENT = "mix tokens by a recurrence or a convolution"
WRAPPER = "it takes more than text. Give the language model inside it alone"
BY_NAME = [
    ("bert", ENCODER),
    ("roberta", ENCODER),
    ("distilbert", ENCODER),
    ("modernbert", ENCODER),
    ("xlm-roberta", ENCODER),
    ("t5", ENCODER_DECODER),
    ("bart", ENCODER_DECODER),
    ("whisper", ENCODER_DECODER),
    ("marian", ENCODER_DECODER),
    ("t5gemma", ENCODER_DECODER),
    ("mamba", RECURRENT),
    ("mamba2", RECURRENT),
    ("falcon_mamba", RECURRENT),
    ("rwkv", RECURRENT),
    ("xlstm", RECURRENT),
    ("jamba", RECURRENT),
    ("bamba", RECURRENT),
    ("zamba", RECURRENT),
    ("zamba2", RECURRENT),
    ("recurrent_gemma", RECURRENT),
    ("falcon_h1", RECURRENT),
    ("nemotron_h", RECURRENT),
    ("granitemoehybrid", RECURRENT),
    ("qwen3_next", RECURRENT),
    ("qwen3_5_text", RECURRENT),
    ("lfm2", RECURRENT),
    ("kimi_linear", RECURRENT),
    ("olmo_hybrid", RECURRENT),
    ("minimax", RECURRENT),
    ("gemma3", f"{WRAPPER}: transformers.Gemma3ForCausalLM, family 'gemma3_text'"),
    ("llava", f"{WRAPPER}: transformers.LlamaForCausalLM, family 'llama'"),
    ("llama4", f"{WRAPPER}: transformers.Llama4ForCausalLM, family 'llama4_text'"),
    ("qwen2_vl", WRAPPER),
    ("fuyu", f"{WRAPPER}: transformers.PersimmonForCausalLM"),
    ("qwen3_5", f"{WRAPPER}, as a causal language model of its own"),
    ("xlnet", "predicts tokens in permuted order"),
    ("reformer", "reversible"),
]


@pytest.mark.parametrize(("model_type", "why"), BY_NAME)
def test_what_cannot_be_harvested_is_refused_by_name(model_type: str, why: str) -> None:
    config = CONFIG_MAPPING[model_type]()
    with pytest.raises(UsageError) as refused:
        refuse_family(config)
    text = str(refused.value)
    assert text.startswith(f"model family {model_type!r} cannot be harvested: ")
    assert why in text
    assert "Give " in text, "what to do instead"


def test_a_model_without_a_row_or_with_other_names_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    model, config = tiny_model("llama")
    wanted = anatomy(model)
    monkeypatch.setitem(ADAPTERS, "llama", Adapter("layers", norm="ln_7", attention="self_attn"))
    names = anatomy(model)
    with torch.device("meta"):
        outline = AutoModelForCausalLM.from_config(config)
    with pytest.raises(UsageError, match="LlamaDecoderLayer has no module 'ln_7'"):
        anatomy(outline)
    monkeypatch.delitem(ADAPTERS, "llama")
    for found in (names, anatomy(model)):
        for mine, other in zip(wanted.layers, found.layers, strict=True):
            assert all(getattr(mine, one.name) == getattr(other, one.name) for one in fields(mine))


def test_refusals_and_rows_know_no_unknown_names() -> None:
    assert not set(REFUSED) & set(ADAPTERS)
    assert {*REFUSED, *ADAPTERS} <= {*CONFIG_MAPPING.keys()}


def test_an_encoder_by_its_config_and_a_hybrid_by_its_layers_are_refused_too() -> None:
    config = tiny_config("llama")
    refuse_family(config)
    assert adapter_of(config) is not None
    config.model_type = "another"
    refuse_family(config)
    assert adapter_of(config) is None
    config.layer_types = ["full_attention", "linear_attention", "full_attention"]
    with pytest.raises(UsageError, match="'another' cannot be harvested: its layers"):
        refuse_family(config)
    config = tiny_config("gpt2")
    config.add_cross_attention = True
    with pytest.raises(UsageError, match="attends to an encoder"):
        refuse_family(config)


def test_the_page_on_architectures_runs_as_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[1] / "docs" / "architectures.md").read_text(encoding="utf-8")
    monkeypatch.setitem(ADAPTERS, "llama", ADAPTERS["llama"])  # put back afterwards
    exec(page.split("```python\n")[1].split("```")[0], {})
    facts = eval(capsys.readouterr().out)
    assert within(facts)
    named = {field.name for field in fields(Adapter)}
    assert sorted(name for name in named if f"`{name}`" not in page) == []
