"""The names of our sites elsewhere: paths lead to the hooked modules, and each name is of the same tensor."""

from typing import Any

import pytest
import torch
from helpers_models import FAMILIES, N_LAYERS, tiny_model
from nearline.collect.anatomy import Anatomy, anatomy
from nearline.collect.sites import sites_table, sites_text
from nearline.collect.translations import LIBRARIES, translations
from nearline.workflows import show

IDS = torch.arange(3, 15)[None]


def module_at(model: Any, path: str, layer: int) -> tuple[Any, str]:
    """What nnsight's path leads to in the plain model, and which side of it."""
    where, _, side = path.rpartition(".")
    return eval(f"model.{where.replace('[i]', f'[{layer}]')}", {"model": model}), side


@pytest.mark.parametrize("family", FAMILIES)
def test_nnsights_paths_lead_to_the_hooked_modules(family: str) -> None:
    model, _ = tiny_model(family)
    found = anatomy(model)
    names = translations(found)
    for layer in found.layers:
        hooked = {
            "residual": (layer.norm or layer.mlp_first, "input"),
            "mlp_input": (layer.mlp_first, "input"),
            "mlp_output": (layer.mlp_last, "output"),
        }
        for site, place in hooked.items():
            assert module_at(model, names[site].nnsight, layer.index) == place
    assert module_at(model, names["embedding"].nnsight, 0) == (found.layers[0].block, "input")
    if found.positions is not None:
        table, side = module_at(model, names["position_embedding"].nnsight, 0)
        assert side == "weight"
        assert table.weight.shape[0] >= found.positions.shape[0]
    assert len(found.layers) == N_LAYERS


# What each library calls residual, mlp_input and mlp_output, written down per form of a block.
LENS, BRIDGE, ENGINE = "transformer_lens", "transformer_bridge", "interp_engine"
EXPECTED: dict[str, dict[str, tuple[str, str, str]]] = {
    "gpt2": {
        "nnterp": ("-", "mlps_input[i]", "mlps_output[i]"),
        LENS: ("blocks.i.hook_resid_mid", "blocks.i.ln2.hook_normalized", "blocks.i.hook_mlp_out"),
        BRIDGE: ("blocks.i.ln2.hook_in", "blocks.i.mlp.hook_in", "blocks.i.mlp.hook_out"),
        ENGINE: ("resid_mid.i", "mlp_in.i", "mlp_out.i"),
    },
    "llama": {LENS: ("blocks.i.hook_resid_mid", "-", "blocks.i.hook_mlp_out")},
    "gpt_neox": {
        "nnterp": ("layers_input[i]", "mlps_input[i]", "mlps_output[i]"),
        LENS: ("blocks.i.hook_resid_pre", "blocks.i.ln2.hook_normalized", "blocks.i.hook_mlp_out"),
        BRIDGE: ("blocks.i.hook_in", "blocks.i.mlp.hook_in", "blocks.i.mlp.hook_out"),
        ENGINE: ("resid_pre.i", "mlp_in.i", "mlp_out.i"),
    },
    "gemma2": {
        LENS: ("blocks.i.hook_resid_mid", "-", "-"),
        BRIDGE: ("blocks.i.ln2.hook_in", "blocks.i.mlp.hook_in", "blocks.i.mlp.hook_out"),
    },
    "olmo2": {
        "nnterp": ("mlps_input[i]", "mlps_input[i]", "mlps_output[i]"),
        LENS: ("-", "-", "-"),
        BRIDGE: ("blocks.i.mlp.hook_in", "blocks.i.mlp.hook_in", "blocks.i.mlp.hook_out"),
        ENGINE: ("mlp_in.i", "mlp_in.i", "mlp_out.i"),
    },
    "granite": {LENS: ("blocks.i.hook_resid_mid", "-", "-")},
    "bloom": {
        "nnterp": ("-", "mlps_input[i]", "mlps_output[i]"),
        LENS: ("blocks.i.hook_resid_mid", "blocks.i.ln2.hook_normalized", "blocks.i.hook_mlp_out"),
        BRIDGE: ("blocks.i.ln2.hook_in", "blocks.i.mlp.hook_in", "blocks.i.mlp.out.hook_out"),
    },
    "opt": {
        "nnterp": ("-", "-", "-"),
        BRIDGE: ("blocks.i.ln2.hook_in", "blocks.i.mlp.in.hook_in", "blocks.i.mlp.out.hook_out"),
    },
}


@pytest.mark.parametrize("family", EXPECTED)
def test_each_name_is_that_of_the_same_tensor(family: str) -> None:
    names = translations(anatomy(tiny_model(family)[0]))
    for library, expected in EXPECTED[family].items():
        found = tuple(getattr(names[site], library) for site in ("residual", "mlp_input", "mlp_output"))
        assert found == expected, library


def outputs(model: Any, path: str) -> list[torch.Tensor]:
    """What the module at nnsight's path gave in each layer."""
    seen: list[torch.Tensor] = []
    modules = [module_at(model, path, layer)[0] for layer in range(N_LAYERS)]
    handles = [
        module.register_forward_hook(lambda _, args, output: seen.append(output.reshape(IDS.shape[1], -1)))
        for module in modules
    ]
    with torch.inference_mode():
        model(input_ids=IDS)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("family", ["gpt2", "bloom", "opt", "gemma2"])
def test_what_is_added_is_our_output_exactly_where_no_name_is_withheld(family: str) -> None:
    """HookedTransformer's hook_mlp_out is what a block adds for its MLP: so it is our mlp_output, or "-"."""
    model, _ = tiny_model(family)
    names, found = translations(anatomy(model)), anatomy(model)
    ours, sums = outputs(model, names["mlp_output"].nnsight), list[Any]()
    blocks = [layer.block for layer in found.layers]
    reads = [layer.norm or layer.mlp_first for layer in found.layers]
    residuals: list[torch.Tensor] = []
    handles = [
        block.register_forward_hook(
            lambda _, args, output: sums.append(output[0] if isinstance(output, tuple) else output)
        )
        for block in blocks
    ]
    handles += [
        module.register_forward_pre_hook(lambda _, args: residuals.append(args[0].clone()))
        for module in reads
    ]
    with torch.inference_mode():
        model(input_ids=IDS)
    for handle in handles:
        handle.remove()
    added = [
        whole.reshape(ours[0].shape) - residual.reshape(ours[0].shape)
        for whole, residual in zip(sums, residuals, strict=True)
    ]
    same = all(torch.allclose(*pair, atol=1e-4) for pair in zip(ours, added, strict=True))
    assert same == (names["mlp_output"].transformer_lens == "blocks.i.hook_mlp_out")


def test_the_rows_have_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    found: Anatomy = anatomy(tiny_model("gemma2")[0])
    rows = sites_table(found)
    assert all({*LIBRARIES, "note"} <= set(row) for row in rows)
    stored = ["by default", "by default", "with --sites", "by default", "with --sites"]
    assert [row["stored"] for row in rows] == stored
    show.sites(rows, as_json=True)
    assert '"transformer_bridge": "blocks.i.mlp.hook_out"' in capsys.readouterr().out


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("family", ["gpt2", "gemma2", "opt", "gpt_neox"])
def test_a_person_reads_it_on_a_terminal(family: str, width: int) -> None:
    rows = sites_table(anatomy(tiny_model(family)[0]))
    text = sites_text(rows, width)
    assert max(map(len, text.splitlines())) <= width
    words = " ".join(text.split())
    for row in rows:
        assert f"{row['site']}: {row['shape']}" in words
        for name in ("meaning", "module", "note", *LIBRARIES):
            assert row[name] in words
    assert text.endswith("-: this library has no name for the tensor")


def test_a_family_without_a_row_is_loaded_and_traced(tmp_path: Any) -> None:
    from nearline.collect.sites import sites
    from transformers import AutoModelForCausalLM, Phi3Config

    config = Phi3Config(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=160,
        pad_token_id=0,
        eos_token_id=2,
        bos_token_id=1,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    rows = {row["site"]: row for row in sites(str(tmp_path))}
    assert rows["residual"]["nnsight"] == "model.layers[i].post_attention_layernorm.input"
    assert rows["mlp_output"]["nnsight"] == "model.layers[i].mlp.output"
