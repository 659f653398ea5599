"""A preview of a live model gives the errors that the offline path gives for the same tokens."""

import html
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, dataclass
from pathlib import Path
from typing import Any

import nearline
import numpy as np
import polars as pl
import pytest
import torch
from helpers_harvest import harvested, plain_forward, texts
from helpers_models import tiny_model, tiny_tokenizer
from nearline.analyze import fit
from nearline.analyze.layers import layer_source
from nearline.analyze.needs import row_needs
from nearline.analyze.norms import squared_norms
from nearline.analyze.ridge import Surrogate
from nearline.collect.harvesting import harvest
from nearline.collect.peek_text import readable, whole_characters
from nearline.collect.peeking import peek
from nearline.store import Reader, Study
from nearline.store.errors import DamageError, FormatError, IncompleteError, ProofFailed, UsageError

# Of one error: y, and what the surrogate makes of x, both change by a roundoff of the storage dtype (2^-24,
# 2^-11, 2^-8), and the surrogates of these models have gains of a few. Batches of other shapes sum in another
# order, which shows in float32. Measured: 3e-7, 4e-4, and 0 where the model itself rounds to bfloat16.
ROUNDING = {"float32": 5e-6, "float16": 2**-9, "bfloat16": 2**-6}
# Family, compute dtype, storage dtype, BOS: sequential and parallel blocks, post-norms, both kinds of norm.
WORLDS = {
    "llama": ("float32", "float32", "always"),
    "gpt_neox": ("float32", "float16", "never"),
    "gemma2": ("bfloat16", "bfloat16", "always"),
}


@dataclass(frozen=True)
class World:
    """A tiny model, its store, and the study fitted on it."""

    model: Any
    tokenizer: Any
    store: Path
    study: Path
    storage_dtype: str
    bos: bool

    @property
    def reader(self) -> Reader:
        return Reader.open(self.store)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """With more, tiny products are mostly waiting for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def worlds(one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, World]:
    folder = tmp_path_factory.mktemp("worlds")
    return {family: made(folder / family, family, *how) for family, how in WORLDS.items()}


def made(folder: Path, family: str, dtype: str, storage_dtype: str, bos: str) -> World:
    model, _ = tiny_model(family, dtype=getattr(torch, dtype))
    harvested(folder / "store", model=model, storage_dtype=storage_dtype, bos=bos)
    fit(folder / "study", [folder / "store"])
    return World(model, tiny_tokenizer(), folder / "store", folder / "study", storage_dtype, bos == "always")


@pytest.fixture(scope="module")
def world(worlds: dict[str, World]) -> World:
    return worlds["llama"]


def surrogate_of(study: Path, layer: int) -> Surrogate:
    one = Study.open(study).surrogates().sel(layer=layer).load()
    return Surrogate(
        weight=np.asarray(one["weight"]), bias=np.asarray(one["bias"]), mean_y=np.asarray(one["mean_y"]),
        spread=float(one["spread"]), alpha=0.0, penalty=0.0, condition=1.0,
    )  # fmt: skip


def offline_errors(world: World) -> np.ndarray:
    """`error` of every stored row, as analyze computes it of the stored bits."""
    reader, errors = world.reader, []
    for layer in reader.layers:
        source = layer_source(reader, layer)
        blocks = [source.block(block) for block in range(reader.n_blocks)]
        residual, x, y = (np.concatenate([block[i] for block in blocks]) for i in range(3))
        norm = np.sqrt(squared_norms(residual))
        needs = row_needs(x, y, norm, surrogate_of(world.study, layer), source.contribution)
        errors.append(needs["error"])
    return np.stack(errors)


def sequences(world: World) -> list[np.ndarray]:
    reader = world.reader
    return np.split(np.asarray(reader.column("token_id")), reader.plan.row_offsets[1:-1])


@pytest.mark.parametrize("family", WORLDS)
def test_errors_are_those_of_the_stored_rows(worlds: dict[str, World], family: str) -> None:
    world = worlds[family]
    found = peek(world.model, world.tokenizer, sequences(world), world.study)
    reader = world.reader
    np.testing.assert_array_equal(found.token_id, reader.column("token_id"))
    np.testing.assert_array_equal(found.position, reader.column("position"))
    body = ~np.asarray(reader.column("special")) & (np.asarray(reader.column("position")) > 0)
    np.testing.assert_array_equal(found.body, body)
    tolerance = ROUNDING[world.storage_dtype]
    np.testing.assert_allclose(found.error, offline_errors(world), rtol=0, atol=tolerance)
    # The needs in the study are those of the same surrogate wherever no fold has seen the document.
    held_out = np.asarray(Study.open(world.study).rows("store")["fold"]) == -1
    assert held_out.sum() > 100
    for index, layer in enumerate(found.layers):
        stored = np.asarray(Study.open(world.study).need(layer, "store")["error"])
        np.testing.assert_allclose(
            found.error[index][held_out], stored[held_out], rtol=0, atol=tolerance, err_msg=str(layer)
        )


@pytest.mark.parametrize("family", WORLDS)
def test_a_text_of_the_corpus_gives_the_errors_of_its_first_window(
    worlds: dict[str, World], family: str
) -> None:
    world, number = worlds[family], 7
    reader, plan = world.reader, world.reader.plan
    first = np.flatnonzero((plan.document == number) & (plan.start == 0))[0]
    rows = slice(int(plan.row_offsets[first]), int(plan.row_offsets[first + 1]))
    found = peek(world.model, world.tokenizer, texts()[number], world.study)
    n_rows = rows.stop - rows.start
    np.testing.assert_array_equal(found.token_id[:n_rows], reader.column("token_id")[rows])
    errors = offline_errors(world)[:, rows]
    # A token sees nothing behind it, so the rest of the text changes nothing.
    np.testing.assert_allclose(found.error[:, :n_rows], errors, rtol=0, atol=ROUNDING[world.storage_dtype])
    spelled = "".join(found.tokens[int(world.bos) :])
    assert spelled == texts()[number]


def test_numbers_are_their_definitions_written_out(world: World) -> None:
    """The slow twin: plain hooks, float64, no code of ours but the surrogate's numbers."""
    text = texts()[11]
    found = peek(world.model, world.tokenizer, text, world.study)
    seen = plain_forward("llama", world.model, found.token_id)
    for index, layer in enumerate(found.layers):
        residual, y = (seen[site][layer].astype(np.float64) for site in ("residual", "mlp_output"))
        norm = world.model.model.layers[layer].post_attention_layernorm
        scale = 1 / np.sqrt((residual**2).mean(axis=1, keepdims=True) + norm.variance_epsilon)
        x = residual * scale * norm.weight.double().numpy()
        one = Study.open(world.study).surrogates().sel(layer=layer).load()
        predicted = x @ np.asarray(one["weight"], np.float64).T + np.asarray(one["bias"], np.float64)
        squared, centred = ((y - other) ** 2 for other in (predicted, np.asarray(one["mean_y"])))
        error = np.sqrt(squared.sum(1) / (centred.sum(1) + float(one["spread"])))
        np.testing.assert_allclose(found.error[index], error, rtol=0, atol=ROUNDING["float32"])
        counts = found.position > 0
        assert list(counts) == list(found.body)
        assert found.r2[index] == pytest.approx(1 - squared[counts].sum() / centred[counts].sum(), abs=1e-5)
        assert found.mean[index] == pytest.approx(error[counts].mean(), abs=1e-5)
        assert found.median[index] == pytest.approx(np.median(error[counts]), abs=1e-5)
        assert found.share_below_half[index] == (error[counts] < 0.5).mean()
        assert found.sink_mean[index] == pytest.approx(error[0], abs=1e-5)
    tested = Study.open(world.study).table("surrogates")["r2_test"].to_numpy()
    np.testing.assert_array_equal(found.r2_test, tested)


def test_text_ids_and_lists_of_either_are_the_same_tokens(world: World) -> None:
    whole = peek(world.model, world.tokenizer, texts()[:3], world.study)
    ids = [world.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts()[:3]]
    with_bos = [torch.tensor([1, *one]) for one in ids]
    forms: list[Any] = [ids, with_bos, [np.array(one, np.uint8) for one in ids]]
    for same in forms:
        found = peek(world.model, world.tokenizer, same, world.study)
        np.testing.assert_array_equal(found.token_id, whole.token_id)
        np.testing.assert_array_equal(found.error, whole.error)
    assert list(peek(world.model, world.tokenizer, [1, 1, 1, 5, 1], world.study).token_id) == [1, 5, 1]
    assert list(peek(world.model, world.tokenizer, [[1], [1, 1]], world.study).token_id) == [1, 1]
    assert list(np.unique(whole.text)) == [0, 1, 2]
    assert (whole.token_id[whole.position == 0] == 1).all(), "one BOS in front of each, and one only"
    first = peek(world.model, world.tokenizer, ids[0], world.study)
    np.testing.assert_array_equal(first.token_id, whole.token_id[whole.text == 0])
    np.testing.assert_allclose(first.error, whole.error[:, whole.text == 0], rtol=0, atol=ROUNDING["float32"])
    tensor = peek(world.model, world.tokenizer, torch.tensor([ids[0]]), world.study)
    np.testing.assert_array_equal(tensor.error, first.error)


def test_batches_do_not_change_the_order(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = peek(world.model, world.tokenizer, texts()[:9], world.study)
    monkeypatch.setattr("nearline.collect.peeking.BATCH_TOKENS", 60)
    narrow = peek(world.model, world.tokenizer, texts()[:9], world.study)
    np.testing.assert_array_equal(narrow.token_id, wide.token_id)
    np.testing.assert_allclose(narrow.error, wide.error, rtol=0, atol=ROUNDING["float32"])


def test_a_subset_of_layers_keeps_its_numbers(world: World) -> None:
    every = peek(world.model, world.tokenizer, texts()[0], world.study)
    choices: list[tuple[Any, tuple[int, ...]]] = [
        ((2, 0), (0, 2)),
        (1, (1,)),
        ([1, 1], (1,)),
        (np.int64(2), (2,)),
        ("0,2", (0, 2)),
        ("all", (0, 1, 2)),
    ]
    for asked, wanted in choices:
        some = peek(world.model, world.tokenizer, texts()[0], world.study, layers=asked)
        assert some.layers == wanted
        np.testing.assert_array_equal(some.error, every.error[list(wanted)])


def test_long_text_is_cut_at_the_models_positions(world: World) -> None:
    found = peek(world.model, world.tokenizer, " ".join(texts()[:20]), world.study)
    assert found.error.shape == (3, 128)
    assert any("beyond the model's 128 positions were cut off" in note for note in found.notes)
    assert any("positions from 24 on are beyond what the study has seen" in note for note in found.notes)


def test_special_tokens_and_the_first_position_stand_apart(world: World) -> None:
    found = peek(world.model, world.tokenizer, [5, 2, 6, 7], world.study)
    assert list(found.body) == [False, True, False, True, True]
    assert found.tokens[2] == "</s>"
    alone = peek(world.model, world.tokenizer, [1], world.study)
    assert np.isnan([alone.r2, alone.mean, alone.median, alone.share_below_half]).all()
    assert np.isfinite(alone.sink_mean).all()
    assert "no token is left to count" in alone.notes[0]
    assert "-" in str(alone)


def test_values_that_are_not_finite_count_nowhere(world: World) -> None:
    model, _ = tiny_model("llama")
    ids = [5, 6, 7, 8, 9]
    whole = peek(model, world.tokenizer, ids, world.study)

    def overflow(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        planted = output.clone()
        planted[0, -1, 3] = float("inf")
        return planted

    # In the last layer: through attention, 0 · inf would reach the tokens before.
    model.model.layers[2].mlp.register_forward_hook(overflow)
    found = peek(model, world.tokenizer, ids, world.study)
    assert list(found.body) == [False, *[True] * 4, False]
    np.testing.assert_array_equal(found.error[:, :5], whole.error[:, :5])
    assert "not finite" in found.notes[-1]


def test_the_result_is_frozen_and_shows_itself(world: World) -> None:
    text = "a <b>model</b> " + texts()[1]
    found = peek(world.model, world.tokenizer, text, world.study)
    with pytest.raises(FrozenInstanceError):
        found.layers = ()  # type: ignore[misc]
    table = found.table
    assert isinstance(table, pl.DataFrame)
    assert table["layer"].to_list() == [0, 1, 2]
    np.testing.assert_array_equal(table["r2"], found.r2)
    assert set(table["n_tokens"]) == {int(found.body.sum())}
    words = repr(found)
    assert words == str(found)
    assert "study study" in words
    assert f"{found.mean[0]:.3f}" in words
    assert len(words.splitlines()) < 12
    page = found._repr_html_()
    # What the vocabulary lacks is spelled <unk>, and has to be escaped like any markup in a text.
    assert html.escape("<unk>") in page
    assert "<unk>" not in page
    assert "script" not in page
    assert [line.split()[0] for line in words.splitlines()[2:5]] == ["0", "1", "2"]
    assert "median error" in words
    assert "median error" in page


def test_tokens_that_cut_a_character_are_shown_as_the_character(world: World) -> None:
    from dataclasses import replace

    fox, e_acute = "🦊".encode(), "é".encode()
    raw = [
        b"<s>",
        b"na",
        e_acute[:1],
        e_acute[1:] + b"ve ",
        fox[:1],
        fox[1:2],
        fox[2:],
        fox[:2],
        b"x",
        fox[:3],
    ]
    pieces = whole_characters(raw)
    assert pieces == [("<s>", 1), ("na", 1), ("éve ", 2), ("🦊", 3), ("⟨F0⟩⟨9F⟩x", 2), ("⟨F0⟩⟨9F⟩⟨A6⟩", 1)]
    assert [readable(token) for token in raw[2:5]] == ["⟨C3⟩", "⟨A9⟩ve ", "⟨F0⟩"]
    plain = peek(world.model, world.tokenizer, list(range(4, 13)), world.study)
    error = np.tile(np.linspace(0, 0.9, 10, dtype=np.float32), (3, 1))
    found = replace(plain, pieces=tuple(pieces), error=error)
    page = found._repr_html_()
    assert "\N{REPLACEMENT CHARACTER}" not in page + str(found)
    assert "highest mean error: '⟨F0⟩⟨9F⟩⟨A6⟩' 0.90, '⟨F0⟩⟨9F⟩x' 0.75, '🦊' 0.50, 'éve ' 0.25" in str(found)
    assert '<span title="0.50"' in page


def test_colours_span_the_errors_that_are_shown(world: World) -> None:
    from dataclasses import replace

    plain = peek(world.model, world.tokenizer, list(range(4, 25)), world.study)
    near = np.tile(np.linspace(0.40, 0.42, 22, dtype=np.float32), (3, 1))
    page = replace(plain, error=near)._repr_html_()
    alphas = [
        float(one) for one in re.findall(r'title="[\d.]+" style="background:rgba\(213,94,0,([\d.]+)', page)
    ]
    assert (len(alphas), min(alphas), max(alphas)) == (21, 0.05, 0.85)
    assert "0.40 or less" in page
    assert "0.42 or more" in page
    alone = peek(world.model, world.tokenizer, [1], world.study)
    assert "stands apart" in alone._repr_html_()


def test_many_layers_show_the_best_and_the_worst(world: World) -> None:
    from dataclasses import replace

    found = peek(world.model, world.tokenizer, texts()[1], world.study)
    many = {
        name: np.tile(getattr(found, name), 10)
        for name in ("r2", "r2_test", "mean", "median", "share_below_half", "sink_mean")
    }
    many["r2"] = np.linspace(0, 0.9, 30)
    long = replace(found, layers=tuple(range(30)), error=np.tile(found.error, (10, 1)), **many)
    shown = [line.split()[0] for line in str(long).splitlines()[2:9]]
    assert shown == ["29", "28", "27", "…", "2", "1", "0"]
    assert long.table.height == 30


def test_the_model_is_left_as_it_was(world: World) -> None:
    model, _ = tiny_model("llama")
    model.train()
    model.model.layers[1].eval()
    before = [module.training for module in model.modules()]
    peek(model, world.tokenizer, texts()[0], world.study)
    assert [module.training for module in model.modules()] == before
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    model.model.layers[2].forward = None
    with pytest.raises(TypeError):
        peek(model, world.tokenizer, texts()[0], world.study)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


# Mistakes


def test_things_of_another_kind_are_refused_by_what_they_are(world: World) -> None:
    model, tokenizer, study = world.model, world.tokenizer, world.study
    wrong: list[tuple[tuple[Any, Any, Any, Any], Any, str]] = [
        (("llama", tokenizer, "a", study), None, "a live model is expected, and str was given"),
        ((tokenizer, model, "a", study), None, "a live model is expected, and TokenizersBackend was given"),
        ((model, "gpt2", "a", study), None, "a tokenizer is expected, and str was given"),
        ((model, tokenizer, "a", None), None, "a study is expected, and NoneType was given"),
        ((model, tokenizer, "a", study), [1.5], r"layers=\[1.5\]: a layer is a whole number"),
    ]
    for given, layers, words in wrong:
        with pytest.raises(UsageError, match=words):
            peek(*given, layers=layers)


def test_what_is_no_fitted_study_is_refused(world: World, tmp_path: Path) -> None:
    def refused(kind: type[Exception], study: Path, words: str) -> None:
        with pytest.raises(kind, match=words):
            peek(world.model, world.tokenizer, "a text", study)

    refused(IncompleteError, tmp_path / "nowhere", "nowhere does not exist; `nearline fit .*/nowhere STORE`")
    (tmp_path / "full").mkdir()
    refused(UsageError, tmp_path / "full", "is not a study")
    refused(UsageError, world.store, "is not a study")
    Study.create(tmp_path / "new")
    refused(IncompleteError, tmp_path / "new", "study new .* is not fitted: run `nearline fit .*/new STORE`")


def test_another_model_is_refused_by_name(worlds: dict[str, World], world: World) -> None:
    other, _ = tiny_model("llama", seed=1)
    with pytest.raises(UsageError, match=r"study study is for llama \(weights .*; this is llama \(weights"):
        peek(other, world.tokenizer, "a text", world.study)
    found = peek(other, world.tokenizer, texts()[0], world.study, allow_other_weights=True)
    assert "other weights than the study's, on purpose" in found.notes[0]
    assert found.notes[0] in str(found)
    half, _ = tiny_model("llama", dtype=torch.bfloat16)
    with pytest.raises(UsageError, match=r"float32\); this is llama \(weights \w+, bfloat16\).*in its dtype"):
        peek(half, world.tokenizer, "a text", world.study)
    wide, _ = wider()
    for allowed in (False, True):
        with pytest.raises(UsageError, match=r"3 layers of width 32\); this is .*3 layers of width 64"):
            peek(wide, world.tokenizer, "a text", world.study, allow_other_weights=allowed)


def wider() -> tuple[Any, Any]:
    from helpers_models import tiny_config
    from transformers import AutoModelForCausalLM

    config = tiny_config("llama")
    config.hidden_size = 64
    return AutoModelForCausalLM.from_config(config).eval(), config


def test_another_model_is_proved_before_it_is_compared(world: World) -> None:
    other, _ = tiny_model("llama", seed=1)
    inner = other.model.layers[1].mlp.forward
    other.model.layers[1].mlp.forward = lambda x: inner(x) + inner(x).mean(1, keepdim=True)
    with pytest.raises(ProofFailed, match="layer 1"):
        peek(other, world.tokenizer, texts()[0], world.study, allow_other_weights=True)


def test_another_tokenizer_is_refused(world: World) -> None:
    other = tiny_tokenizer(150)
    with pytest.raises(UsageError, match=r"this tokenizer .* is not the one that store store of study study"):
        peek(world.model, other, "a text", world.study)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", r"the text \(''\) has no token"),
        (["a text", ""], r"text 2 of 2 \(''\) has no token"),
        ([], "list without a text"),
        (b"bytes", "bytes without a text"),
        (["a text", [3, 4]], "neither text nor token ids"),
        ([3.5, 4], "neither text nor token ids"),
        ([[3, 4], []], "neither text nor token ids"),
        ([3, 160], "token id 160 is outside the model's vocabulary of 160"),
        ([-1, 4], "token id -1 is outside"),
        (None, "NoneType without a text"),
    ],
)
def test_what_is_no_text_is_refused(world: World, text: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        peek(world.model, world.tokenizer, text, world.study)


def test_layers_that_are_not_there_are_refused(world: World) -> None:
    with pytest.raises(UsageError, match="layer 9 is not in study study, which has layers 0, 1, 2"):
        peek(world.model, world.tokenizer, "a text", world.study, layers=[1, 9])
    with pytest.raises(UsageError, match="at least one layer"):
        peek(world.model, world.tokenizer, "a text", world.study, layers=[])


def test_text_needs_a_tokenizer(world: World) -> None:
    with pytest.raises(UsageError, match="text needs a tokenizer"):
        peek(world.model, None, "a text", world.study)
    found = peek(world.model, None, [5, 6], world.study)
    assert found.tokens == ("1", "5", "6")
    assert "⟨5⟩" in found._repr_html_()


# What the study holds


def test_the_stores_need_not_be_at_hand(tmp_path: Path) -> None:
    world = made(tmp_path, "llama", "float32", "float32", "always")
    wanted = peek(world.model, world.tokenizer, texts()[0], world.study)
    world.store.rename(tmp_path / "elsewhere")
    world.study.rename(tmp_path / "shared")
    found = peek(world.model, world.tokenizer, texts()[0], tmp_path / "shared", store="store")
    assert found.notes == wanted.notes
    np.testing.assert_array_equal(found.error, wanted.error)
    with pytest.raises(UsageError, match="'other' is none of the stores of study shared, which has store"):
        peek(world.model, world.tokenizer, "a text", tmp_path / "shared", store="other")
    provenance = tmp_path / "shared/provenance.json"
    provenance.write_text(provenance.read_text().replace('"tokenizers"', '"tokenisers"'))
    with pytest.raises(
        IncompleteError, match=r"earlier nearline: .*; run `nearline fit .*/shared STORE` again"
    ):
        peek(world.model, world.tokenizer, "a text", tmp_path / "shared")


def test_surrogates_that_lack_something_are_refused(tmp_path: Path) -> None:
    world = made(tmp_path, "llama", "float32", "float32", "always")
    study = Study.open(world.study)
    arrays: dict[str, Any] = {
        str(name): (array.dims, array.values) for name, array in study.surrogates().data_vars.items()
    }
    layer = study.surrogates()["layer"].values
    attrs = dict(study.surrogates().attrs)
    study.write_surrogates({**{k: v for k, v in arrays.items() if k != "spread"}, "layer": layer}, attrs)
    with pytest.raises(FormatError, match=r"`spread` with axes layer is not in it.*run `nearline fit` again"):
        peek(world.model, world.tokenizer, "a text", world.study)
    narrow = arrays | {"bias": (("layer", "feature_out"), np.zeros((3, 16), np.float32))}
    study.write_surrogates({**{k: v for k, v in narrow.items() if k == "bias"}, "layer": layer}, attrs)
    with pytest.raises(FormatError):
        peek(world.model, world.tokenizer, "a text", world.study)
    for chunk in (world.study / "surrogates.zarr").rglob("c/*"):
        chunk.unlink() if chunk.is_file() else None
    with pytest.raises(DamageError):
        peek(world.model, world.tokenizer, "a text", world.study)


def test_it_is_at_hand_without_loading_torch() -> None:
    program = "import sys, nearline; print('peek' in nearline.__all__, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]
    assert nearline.peek is peek


def test_a_store_of_ids_needs_no_tokenizer(tmp_path: Path) -> None:
    """Where a harvest without a tokenizer is offered, its study takes ids without one."""
    model, _ = tiny_model("gpt2")
    draw = np.random.default_rng(0)
    rows: Any = [draw.integers(3, 160, draw.integers(8, 40)) for _ in range(60)]
    harvest(model, None, rows, tmp_path / "store", tokens=600, sequence_length=24, min_length=4, block=90)  # type: ignore[arg-type]
    fit(tmp_path / "study", [tmp_path / "store"])
    found = peek(model, None, rows[:2], tmp_path / "study")
    assert found.tokens[:2] == (str(rows[0][0]), str(rows[0][1]))
    with pytest.raises(UsageError, match="is not the one"):
        peek(model, tiny_tokenizer(), "a text", tmp_path / "study")
