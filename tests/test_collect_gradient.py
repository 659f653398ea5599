"""The stored gradient is the derivative of the summed loss; scaled, resumed, repaired, read, it stays so."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
import xarray as xr
from helpers_harvest import SMALL, files_of, harvested, texts
from helpers_models import tiny_config, tiny_model, tiny_tokenizer
from nearline.analyze import FitSettings, fit
from nearline.analyze.estimate_checks import targets_following
from nearline.collect import corpora, models, repair
from nearline.collect.anatomy import anatomy
from nearline.collect.capture import Capture
from nearline.collect.describing import attributes_of
from nearline.collect.forward import evaluating, final_hidden, inputs_of
from nearline.collect.gradient_proof import STORED_BELOW, gradient_exponents, prove_gradient
from nearline.collect.harvesting import begin_with
from nearline.collect.interventions import parse_intervention
from nearline.collect.loop import run_blocks
from nearline.collect.needs import block_graph_bytes
from nearline.collect.nll import token_nll, token_nll_and_slope
from nearline.collect.norm_parameters import apply, norm_parameters
from nearline.collect.preparing import cutting_of, prepare
from nearline.collect.proving import proved
from nearline.collect.settings import parse
from nearline.collect.single_patches import single_patch_losses
from nearline.collect.substitutes import LinearMap, Substitute
from nearline.collect.tokenise import tokenise
from nearline.store import Reader, info, pull, silent, verify
from nearline.store.dtypes import GRADIENT
from nearline.store.errors import ProofFailed, UsageError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

SITES = f"+{GRADIENT}"
TOKENS = 270  # three blocks

# The MLP of each family, and how the model ends, written down and not looked up: module whose output is y.
MLPS = {
    "gpt2": "transformer.h.{}.mlp",
    "gpt_neox": "gpt_neox.layers.{}.mlp",
    "llama": "model.layers.{}.mlp",
    "gemma2": "model.layers.{}.mlp",
    "falcon_7b": "transformer.h.{}.mlp",
    "opt": "model.decoder.layers.{}.fc2",
    "opt_350m": "model.decoder.layers.{}.fc2",
    "bloom": "transformer.h.{}.mlp.dense_4h_to_h",
    "mixtral": "model.layers.{}.mlp",
}
# float32 sums over features and later rows in another order, and the batch has another shape: a few hundred
# roundings of 6e-8 each. Measured: up to 2e-6 of the largest value.
SAME = 2e-5
# Along 24 · 32 random values; the third derivative leaves 1e-6 at this step, rounding less. Gemma 2 takes its
# softmax in float32, which moves a loss by 6e-8 of a hundred nats: 3e-2 of a step, shared among its terms.
STEP, STEP_ERROR, SOFTMAX_ERROR = 1e-4, 2e-6, 2e-3
# Rounded to float16, whose unit roundoff is 2^-11; values far below the largest are subnormal at worst.
ROUNDED = 2.0**-11


def gradient_store(path: Path, family: str = "llama", **given: Any) -> Path:
    chosen = {"storage_dtype": "float16", "tokens": TOKENS, "threads": 1, "sites": SITES, **given}
    model = chosen.pop("model", None) or tiny_model(family)[0]
    return harvested(path, model=model, **chosen)


def stored_of(path: Path) -> dict[str, bytes]:
    return files_of(path, without=("README.md", "runs"))


def with_output(output: Any, tensor: Tensor) -> Any:
    """What a module gives, with another tensor in the first place."""
    if isinstance(output, tuple):
        return (tensor, *output[1:])
    return tensor


def slow_gradient(
    model: Any, family: str, layer: int, token_id: np.ndarray, target: np.ndarray
) -> np.ndarray:
    """One sequence alone through the whole model: that one layer's output is a leaf, everything else plain
    autograd of the summed cross entropy of all logits."""
    leaves: list[Tensor] = []

    def cut(_: nn.Module, args: Any, output: Any) -> Any:
        first = output[0] if isinstance(output, tuple) else output
        leaves.append(first.detach().clone().requires_grad_())
        # Falcon writes into what its MLP gives, which a leaf does not allow.
        return with_output(output, leaves[0] * 1.0)

    handle = model.get_submodule(MLPS[family].format(layer)).register_forward_hook(cut)
    logits = model(input_ids=torch.from_numpy(token_id).long()[None]).logits[0]
    handle.remove()
    goal = torch.from_numpy(np.where(target < 0, -100, target)).long()
    loss = torch.nn.functional.cross_entropy(logits.float(), goal, reduction="sum", ignore_index=-100)
    (found,) = torch.autograd.grad(loss, leaves[0])
    return found.reshape(len(token_id), -1).numpy()


# ---- what it is


def _ignore(site: str, layer: int, tensor: torch.Tensor) -> None:
    """Looks at nothing."""


@pytest.mark.parametrize("family", list(MLPS))
def test_each_layer_is_what_autograd_gives_for_that_layer_alone(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)[0]
    path = gradient_store(tmp_path / "store", model=model, storage_dtype="float32")
    assert not any(weight.requires_grad for weight in model.parameters()), "as it was given"
    reader = Reader.open(path)
    columns = {name: reader.column(name) for name in ("sequence", "token_id", "target_id")}
    n_block = reader.block_range(0)[1]
    for layer in reader.layers:
        rows = reader.rows(GRADIENT, layer, 0, 1)
        largest = np.abs(rows).max()
        for sequence in np.unique(columns["sequence"][:n_block]):
            here = np.flatnonzero(columns["sequence"][:n_block] == sequence)
            one = slow_gradient(model, family, layer, columns["token_id"][here], columns["target_id"][here])
            assert np.abs(rows[here] - one).max() <= SAME * largest, (layer, sequence)


def in_float64(model: nn.Module) -> None:
    """RMS norms compute in float32 whatever they are given; here they shall not."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            parts: Any = module
            weight = parts.weight.double() + (1.0 if "Gemma" in type(module).__name__ else 0.0)
            epsilon = getattr(module, "variance_epsilon", None) or parts.eps

            def normed(x: Tensor, weight: Tensor = weight, epsilon: float = epsilon) -> Tensor:
                return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * weight

            parts.forward = normed


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "llama", "gemma2", "opt"])
def test_central_differences_agree_in_float64(family: str) -> None:
    """Along a random direction of a whole layer, in a batch with padding."""
    model = tiny_model(family, dtype=torch.float64)[0]
    in_float64(model)
    ids = np.random.default_rng(1).integers(3, 160, (2, 12))
    mask = np.ones(ids.shape, bool)
    mask[1, 9:] = False
    target = torch.from_numpy(np.roll(ids, -1, 1)[mask])
    target[[11, 20]] = -1
    places = torch.from_numpy(np.flatnonzero(mask))
    net, seen = anatomy(model), dict[int, Tensor]()
    rng = torch.Generator().manual_seed(2)

    def keep(site: str, layer: int, tensor: Tensor) -> None:
        seen[layer] = tensor.clone()

    def rows() -> Tensor:
        return final_hidden(net, inputs_of(ids, mask, net.device)).reshape(-1, 32)[places]

    def loss(layer: int, by: Tensor) -> float:
        def moved(_: nn.Module, args: Any, output: Any) -> Any:
            first = output[0] if isinstance(output, tuple) else output
            return with_output(output, first + by.reshape(first.shape))

        handle = model.get_submodule(MLPS[family].format(layer)).register_forward_hook(moved)
        scores = net.head(rows())
        handle.remove()
        if net.logit_softcap is not None:
            scores = torch.tanh(scores / net.logit_softcap) * net.logit_softcap
        goal = torch.where(target < 0, -100, target)
        return float(torch.nn.functional.cross_entropy(scores, goal, reduction="sum", ignore_index=-100))

    with evaluating(model, 1, gradients=True):
        with Capture(net, keep, sites=[GRADIENT]) as capture:
            with capture.graph():
                hidden = rows()
            capture.pull_back(hidden, token_nll_and_slope(net, hidden, target)[1])
            capture.check_counts()
        assert sorted(seen) == [0, 1, 2]
        for layer, gradient in seen.items():
            there = torch.randn(gradient.shape, generator=rng, dtype=torch.float64)
            found = (loss(layer, STEP * there) - loss(layer, -STEP * there)) / (2 * STEP)
            said = float((there * gradient).sum())
            limit = SOFTMAX_ERROR if family == "gemma2" else STEP_ERROR
            assert abs(found - said) <= limit * (1 + abs(said)), (layer, found, said)


def test_losses_beside_a_gradient_are_the_losses_without_one() -> None:
    """Bit for bit, whatever the chunks; and the slope is that of all rows at once."""
    net = anatomy(tiny_model("gemma2")[0])
    hidden = torch.randn(50, 32, generator=torch.Generator().manual_seed(0))
    target = torch.arange(50) % 160
    target[::7] = -1
    nll, slope = token_nll_and_slope(net, hidden, target, limit_bytes=4 * 160 * 6)
    with torch.no_grad():
        assert torch.equal(
            nll.nan_to_num(-1.0),
            token_nll(net, hidden, target, limit_bytes=4 * 160 * 6).nan_to_num(-1.0),
        )
    leaf = hidden.clone().requires_grad_()
    scores = torch.tanh(net.head(leaf) / 2.0) * 2.0
    goal = torch.where(target < 0, -100, target)
    torch.nn.functional.cross_entropy(scores, goal, reduction="sum", ignore_index=-100).backward()
    torch.testing.assert_close(slope, leaf.grad, rtol=SAME, atol=1e-7)
    assert not slope[::7].any()


def test_nothing_follows_the_last_target(tmp_path: Path) -> None:
    reader = Reader.open(gradient_store(tmp_path / "store", "gpt2"))
    sequence, target = reader.column("sequence"), reader.column("target_id")
    after = np.array(
        [not (target[at:][sequence[at:] == sequence[at]] >= 0).any() for at in range(reader.n_tokens)]
    )
    assert after.any()
    for layer in reader.layers:
        rows = reader.rows(GRADIENT, layer, 0, reader.n_blocks)
        assert not rows[after].any()
        assert rows[~after].any(axis=1).all()


# ---- how it is stored


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("stores")
    return {
        dtype: gradient_store(folder / dtype, storage_dtype=dtype)
        for dtype in ("float32", "float16", "bfloat16")
    }


def test_float16_is_scaled_by_layer_and_reading_undoes_it(stores: dict[str, Path]) -> None:
    exact, scaled = Reader.open(stores["float32"]), Reader.open(stores["float16"])
    exponents = scaled.attributes.storage.gradient_exponents
    assert len(exponents) == 3
    assert exact.attributes.storage.gradient_exponents == ()
    assert "gradient_exponents" not in exact.attributes.to_dict()["storage"], "as stores always were"
    for layer, exponent in zip(scaled.layers, exponents, strict=True):
        wanted = exact.rows(GRADIENT, layer, 0, exact.n_blocks)
        found = scaled.rows(GRADIENT, layer, 0, scaled.n_blocks)
        largest = np.abs(wanted).max()
        np.testing.assert_allclose(found, wanted, rtol=ROUNDED, atol=largest * 2.0**-30)
        raw = scaled.stored(GRADIENT, layer, 0, scaled.n_blocks)
        assert raw.dtype == np.float16
        np.testing.assert_array_equal(raw.astype(np.float32), found * 2.0**exponent)
        # The first batch's largest value lies in [2^6, 2^7); that of all of them may lie above.
        assert 2.0 ** (STORED_BELOW - 1) <= np.abs(raw).max() < 2.0 ** (STORED_BELOW + 3)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_way_to_look_at_it_knows_it(dtype: str, stores: dict[str, Path]) -> None:
    path = stores[dtype]
    reader, facts = Reader.open(path), info(path)
    assert verify(path, level="full").whole
    rows = np.stack([reader.rows(GRADIENT, layer, 0, reader.n_blocks) for layer in reader.layers])
    opened = xr.open_dataset(path, engine="nearline")
    np.testing.assert_array_equal(opened[GRADIENT].values, rows)
    assert facts["values"][GRADIENT]["max_abs"] == pytest.approx(np.abs(rows).max(), rel=2.0**-8)
    assert facts["values"][GRADIENT]["n_underflow"] == 0
    assert facts["proof"]["gradient_error"] <= facts["proof"]["gradient_tolerance"]
    card = (path / "README.md").read_text(encoding="utf-8")
    assert "gradient of the sequence's summed loss" in card
    assert ("gradient_exponents" in card) == (dtype == "float16")
    if dtype == "float16":
        code = next(part for part in card.split("```python\n") if part.startswith("exponents"))
        names: dict[str, Any] = {"data": xr.open_zarr(path / "activations.zarr", chunks=None)}
        exec(code.partition("```")[0], names)
        np.testing.assert_array_equal(names["gradient"], rows[0, :4])


def test_what_does_not_fit_is_counted_and_the_run_goes_on(tmp_path: Path) -> None:
    """Exponents as another first batch might have chosen them: much too large, right, much too small."""
    loaded = models.describe(tiny_model("llama")[0], tiny_tokenizer(), None)
    settings = parse({**SMALL, "tokens": TOKENS, "sites": SITES, "storage_dtype": "float16"})
    corpus = corpora.from_documents(texts(), "documents")
    tokens = tokenise(corpus, loaded.tokenizer, bos=settings.bos)
    (tmp_path / "store").mkdir()
    with evaluating(loaded.model, 1, gradients=True):
        prepared = prepare(anatomy(loaded.model), corpus, tokens, settings, tmp_path / "store")
        right = proved(prepared).exponents
        planted = (right[0] + 12, right[1], right[2] - 30)
        attributes = attributes_of(prepared, loaded, settings, {}, planted)
        writer = begin_with(tmp_path / "store", attributes, prepared)
        run_blocks(prepared, writer, mask_nonfinite=False, progress=silent)
    writer.seal()
    reader = Reader.open(tmp_path / "store")
    assert verify(tmp_path / "store", level="full").whole
    raw = [reader.stored(GRADIENT, layer, 0, 1).astype(np.float64) for layer in reader.layers]
    found = reader.record(0).statistics[GRADIENT]
    assert found["n_out_of_range"][0] == (np.abs(raw[0]) == 65504).sum() > 0
    assert found["n_out_of_range"][1:] == [0, 0]
    assert found["n_underflow"][:2] == [0, 0]
    exact = Reader.open(gradient_store(tmp_path / "exact", storage_dtype="float32")).rows(GRADIENT, 2, 0, 1)
    assert found["n_underflow"][2] == ((raw[2] == 0) & (exact != 0)).sum() > 0
    assert info(tmp_path / "store")["values"][GRADIENT]["n_underflow"] > 0


def test_a_part_keeps_the_exponents_of_its_layers(stores: dict[str, Path], tmp_path: Path) -> None:
    full = Reader.open(stores["float16"])
    pull(stores["float16"], tmp_path / "part", layers=[2], sites=f"residual,{GRADIENT}", split="test")
    part = Reader.open(tmp_path / "part")
    assert part.attributes.storage.gradient_exponents == full.attributes.storage.gradient_exponents[2:]
    blocks = np.flatnonzero(full.plan.block_split == 2)
    np.testing.assert_array_equal(
        part.rows(GRADIENT, 2, 0, 1), full.rows(GRADIENT, 2, int(blocks[0]), int(blocks[0]) + 1)
    )
    pull(stores["float16"], tmp_path / "bare", sites="residual")
    assert Reader.open(tmp_path / "bare").attributes.storage.gradient_exponents == ()
    assert verify(tmp_path / "part", level="full").whole


@pytest.mark.parametrize("wrong", [(1, 2), (1, 2, 200), (1.5, 2, 3)])
def test_exponents_that_cannot_be_are_refused(wrong: Any, stores: dict[str, Path]) -> None:
    from nearline.store.attributes import parse_attributes
    from nearline.store.errors import FormatError

    found = Reader.open(stores["float16"]).attributes.to_dict()
    found["storage"]["gradient_exponents"] = list(wrong)
    with pytest.raises(FormatError, match="gradient_exponents"):
        parse_attributes(found)


# ---- whatever interrupts it


def test_ranks_and_resumed_runs_give_the_same_bytes(stores: dict[str, Path], tmp_path: Path) -> None:
    for rank in (1, 0):
        gradient_store(tmp_path / "store", rank=rank, world_size=2)
    assert stored_of(tmp_path / "store") == stored_of(stores["float16"])


def test_a_store_keeps_the_exponents_that_it_was_begun_with(
    stores: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that would choose others continues with the store's."""
    gradient_store(tmp_path / "store", rank=0, world_size=2)
    monkeypatch.setattr("nearline.collect.gradient_proof.STORED_BELOW", STORED_BELOW + 3)
    gradient_store(tmp_path / "store", rank=1, world_size=2)
    assert stored_of(tmp_path / "store") == stored_of(stores["float16"])
    other = Reader.open(gradient_store(tmp_path / "other")).attributes.storage.gradient_exponents
    assert other == tuple(
        one + 3 for one in Reader.open(stores["float16"]).attributes.storage.gradient_exponents
    ), "or nothing was planted"


def test_a_damaged_gradient_is_made_again(stores: dict[str, Path], tmp_path: Path) -> None:
    path = gradient_store(tmp_path / "store")
    chunk = path / "activations.zarr" / GRADIENT / "c" / "1" / "1" / "0"
    content = bytearray(chunk.read_bytes())
    content[40] ^= 8
    chunk.write_bytes(content)
    model = models.describe(tiny_model("llama")[0], tiny_tokenizer(), None)
    corpus = corpora.from_documents(texts(), "documents")
    assert repair(path, model=model, corpus=corpus).blocks == (1,)
    assert stored_of(path) == stored_of(stores["float16"])


def test_other_sites_do_not_notice(stores: dict[str, Path], tmp_path: Path) -> None:
    """On a CPU in float32 the same kernels run, so what is beside the gradient has the same bytes."""
    path = gradient_store(tmp_path / "store", sites="residual,mlp_output,embedding")
    for site in ("residual", "mlp_output", "embedding", "nll", "valid"):
        assert files_of(path / "activations.zarr" / site) == files_of(
            stores["float16"] / "activations.zarr" / site
        )
    assert "gradient_error" not in Reader.open(path).attributes.proof


# ---- the lowest layer, memory


def test_the_graph_begins_at_the_lowest_layer(tmp_path: Path) -> None:
    model, began = tiny_model("llama")[0], list[bool]()
    for index, block in enumerate(model.model.layers):
        block.register_forward_hook(
            lambda _, args, output, index=index: began.append((output.requires_grad, index))  # type: ignore
        )
    path = gradient_store(tmp_path / "store", model=model, layers="1-2")
    assert {entry for entry in began if entry[0]} == {(True, 1), (True, 2)}  # type: ignore[index]
    full = Reader.open(gradient_store(tmp_path / "full"))
    np.testing.assert_array_equal(Reader.open(path).rows(GRADIENT, 2, 0, 1), full.rows(GRADIENT, 2, 0, 1))


def test_the_model_is_as_it_was_given(tmp_path: Path) -> None:
    model = tiny_model("gpt2")[0].train()
    for index, weight in enumerate(model.parameters()):
        weight.requires_grad_(index % 2 == 0)
    gradient_store(tmp_path / "store", model=model)
    assert model.training
    assert [weight.requires_grad for weight in model.parameters()] == [
        index % 2 == 0 for index, _ in enumerate(model.parameters())
    ]
    assert all(weight.grad is None for weight in model.parameters())


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "opt", "gemma2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_plan_counts_what_the_graph_keeps(family: str, dtype: torch.dtype) -> None:
    """Never less than torch keeps, and not much more: widths and lengths as of real models."""
    config = tiny_config(family)
    config.hidden_size = 128
    for name, width in (
        ("intermediate_size", 344),
        ("ffn_dim", 512),
        ("word_embed_proj_dim", 128),
        ("head_dim", 32),
    ):
        if getattr(config, name, None):
            setattr(config, name, width)
    model = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    held: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with evaluating(model, 1, gradients=True):
        net = anatomy(model)
        ids = np.random.default_rng(0).integers(3, 160, (4, 64))
        weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        with Capture(net, _ignore, sites=[GRADIENT]) as capture, capture.graph(), hooks:
            hidden = final_hidden(net, inputs_of(ids, np.ones(ids.shape, bool), net.device))
    assert hidden.requires_grad
    kept = sum(size for place, size in held.items() if place not in weights)
    said = net.n_layers * block_graph_bytes(net, ids.size, 64)
    assert kept <= said <= 3 * kept


def test_a_plan_counts_blocks_from_the_lowest_layer_on_and_takes_smaller_batches(tmp_path: Path) -> None:
    net, corpus = anatomy(tiny_model("llama")[0]), corpora.from_documents(texts(), "documents")
    tokens, sizes = tokenise(corpus, tiny_tokenizer(), bos="auto"), list[tuple[int, int]]()
    for layers, sites in (("0-2", None), ("2", SITES), ("0-2", SITES)):
        settings = parse({**SMALL, "tokens": TOKENS, "sites": sites, "layers": layers})
        found = prepare(net, corpus, tokens, settings, tmp_path).needs
        sizes.append((found.batch_bytes, found.logits_bytes))
    one, graph = sizes[0][0], block_graph_bytes(net, 96, 24)
    assert [batch for batch, _ in sizes] == [one, one + graph, one + 3 * graph]
    assert sizes[1][1] == 2 * sizes[0][1]
    free = {**SMALL, "batch_tokens": None}
    batches = [
        cutting_of(net, tokens, parse(free | {"sites": sites})).batch_tokens for sites in (None, SITES)
    ]
    assert batches == [4096, 1024]


# ---- what is refused


def sequences() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(3, 160, length) for length in (30, 17, 22)]


def test_a_gradient_that_is_not_the_slope_is_refused() -> None:
    """Half of what MLPs pass back is cut off: every check of tensors holds, the slope does not."""
    model = tiny_model("llama")[0]

    def halve(_: nn.Module, args: Any) -> Any:
        return (0.5 * args[0].detach() + 0.5 * args[0],)

    handles = [layer.mlp.register_forward_pre_hook(halve) for layer in model.model.layers[1:]]
    with evaluating(model, 1, gradients=True):
        with pytest.raises(ProofFailed, match="a step along the gradient"):
            prove_gradient(anatomy(model), sequences())
        for handle in handles:
            handle.remove()
        prove_gradient(anatomy(model), sequences())


def test_a_gradient_of_another_tensor_is_refused() -> None:
    """Something behind the MLP doubles what it adds, so that y counts twice."""
    net = anatomy(tiny_model("granite")[0])
    layers = [dataclasses.replace(layer, multiplier=1.0) for layer in net.layers]
    with (
        evaluating(net.model, 1, gradients=True),
        pytest.raises(ProofFailed, match="through the contribution"),
    ):
        prove_gradient(dataclasses.replace(net, layers=tuple(layers)), sequences())


def test_a_model_that_cannot_be_differentiated_is_one_sentence(tmp_path: Path) -> None:
    model = tiny_model("llama")[0]

    def special(_: nn.Module, args: Any, output: Any) -> Any:
        return with_output(output, torch.igamma(output[0].abs() + 1, output[0].exp()))

    model.model.layers[1].self_attn.register_forward_hook(special)
    with pytest.raises(UsageError, match=f"cannot be differentiated .*leave {GRADIENT} out") as caught:
        gradient_store(tmp_path / "store", model=model)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "store").exists()


def test_zero_gradients_have_no_exponent() -> None:
    from nearline.collect.buffers import Shape
    from nearline.collect.rows import Batch

    net = anatomy(tiny_model("llama")[0])
    batch = Batch(0, 4, np.array([[3, 4, 5, 6]]), np.ones((1, 4), bool))
    shape = Shape((0, 1, 2), 32, 4, "float16", (GRADIENT,))
    with evaluating(net.model, 1, gradients=True):
        assert gradient_exponents(net, shape, batch, np.full(4, -1, np.int32)) == (0, 0, 0)
        assert min(gradient_exponents(net, shape, batch, np.array([4, 5, 6, -1], np.int32))) > 0


# ---- what it is for


def linear_fit(reader: Reader, layer: int, norm: Any) -> tuple[np.ndarray, np.ndarray]:
    """Least squares of y on x over all rows but the first of each sequence; what a layer norm leaves almost
    without variance is left out, or weights would be huge and products rounded badly."""
    rows = np.flatnonzero(reader.column("position") != 0)
    residual = torch.from_numpy(reader.rows("residual", layer, 0, reader.n_blocks)[rows])
    x = apply(norm_parameters(norm), residual).numpy()
    y = reader.rows("mlp_output", layer, 0, reader.n_blocks)[rows]
    ones = np.concatenate([x, np.ones((len(x), 1), np.float32)], axis=1)
    found = np.linalg.lstsq(ones, y, rcond=1e-3)[0]
    return np.ascontiguousarray(found[:-1].T), found[-1]


ENDS = {
    "llama": ("model.layers.{}.mlp",) * 2,
    "opt": ("model.decoder.layers.{}.fc1", "model.decoder.layers.{}.fc2"),
}
# Losses of a tiny model are about 5 nats; a sum of 24 of them in float32 is off by 24 · 5 · 6e-8, and rows
# beside the patched one are computed in a product of another shape.
PATCH_ERROR = 5e-5


def slow_patch(
    model: Any,
    ends: tuple[str, str],
    weight: Tensor,
    bias: Tensor,
    token: np.ndarray,
    target: np.ndarray,
    at: int,
) -> float:
    """One sequence alone, twice through the whole model: as it is, and with one position replaced."""
    seen: list[Tensor] = []

    def read(_: nn.Module, args: Any) -> None:
        seen.append(args[0].reshape(len(token), -1))

    def put(_: nn.Module, args: Any, output: Any) -> Any:
        first = (output[0] if isinstance(output, tuple) else output).clone()
        first.reshape(len(token), -1)[at] = weight @ seen[-1][at] + bias
        return with_output(output, first)

    def loss() -> float:
        logits = model(input_ids=torch.from_numpy(token).long()[None]).logits[0].double()
        goal = torch.from_numpy(np.where(target < 0, -100, target)).long()
        return float(torch.nn.functional.cross_entropy(logits, goal, reduction="sum", ignore_index=-100))

    with torch.no_grad():
        before = loss()
        handles = [
            model.get_submodule(ends[0]).register_forward_pre_hook(read),
            model.get_submodule(ends[1]).register_forward_hook(put),
        ]
        after = loss()
        for handle in handles:
            handle.remove()
    return after - before


@pytest.mark.parametrize("family", list(ENDS))
def test_it_predicts_what_patching_single_positions_costs(family: str, tmp_path: Path) -> None:
    """Exact patches are those of the slow way; and ⟨gradient, ŷ − y⟩, all from the store, orders them."""
    model = tiny_model(family)[0]
    path = gradient_store(tmp_path / "store", model=model)
    reader, net, layers = Reader.open(path), anatomy(model), (0, 2)
    columns = {name: reader.column(name) for name in ("sequence", "token_id", "target_id", "position")}
    follows = targets_following(columns["sequence"], columns["target_id"])
    usable = np.flatnonzero((columns["position"] > 0) & (follows > 0))
    rows = np.sort(np.random.default_rng(3).choice(usable, 60, replace=False))
    fits = {layer: linear_fit(reader, layer, net.layers[layer].norm) for layer in layers}
    substitutes = {
        layer: Substitute(
            parse_intervention("linear"), layer, LinearMap(torch.from_numpy(weight), torch.from_numpy(bias))
        )
        for layer, (weight, bias) in fits.items()
    }
    ticks: list[int] = []
    with evaluating(model, 1):
        found = single_patch_losses(net, reader, substitutes, rows, memory_limit=2**26, tick=ticks.append)
    assert list(found) == list(layers)
    assert sum(ticks) < len(rows) * len(layers) * 96, "several sequences are patched in one pass"
    for layer, (weight, bias) in fits.items():
        for place in range(0, len(rows), 12):
            here = np.flatnonzero(columns["sequence"] == columns["sequence"][rows[place]])
            ends = (ENDS[family][0].format(layer), ENDS[family][1].format(layer))
            one = slow_patch(
                model,
                ends,
                torch.from_numpy(weight),
                torch.from_numpy(bias),
                columns["token_id"][here],
                columns["target_id"][here],
                int(rows[place] - here[0]),
            )
            assert abs(found[layer][place] - one) <= PATCH_ERROR, (layer, rows[place])
        residual = torch.from_numpy(reader.rows("residual", layer, 0, reader.n_blocks)[rows])
        x = apply(norm_parameters(net.layers[layer].norm), residual).numpy()
        change = x @ weight.T + bias - reader.rows("mlp_output", layer, 0, reader.n_blocks)[rows]
        estimate = (reader.rows(GRADIENT, layer, 0, reader.n_blocks)[rows] * change).sum(axis=1)
        assert float(scipy.stats.spearmanr(estimate, found[layer]).statistic) > 0.8  # type: ignore[attr-defined]


def test_fit_makes_the_need_of_it(stores: dict[str, Path], tmp_path: Path) -> None:
    """`loss_estimate` of a study is ⟨∂L/∂y, ŷ − y⟩ in nats, whatever the store's scale; NaN where no target
    follows and where a fit leaves rows out."""
    study = fit(tmp_path / "study", {"a": stores["float16"]}, FitSettings(folds=2, alpha=1.0))
    reader = Reader.open(stores["float16"])
    found = study.surrogates().sel(layer=1)
    residual = torch.from_numpy(reader.rows("residual", 1, 0, reader.n_blocks))
    x = apply(norm_parameters(anatomy(tiny_model("llama")[0]).layers[1].norm), residual).numpy()
    change = (
        x @ found["weight"].values.T + found["bias"].values - reader.rows("mlp_output", 1, 0, reader.n_blocks)
    )
    wanted = (reader.rows(GRADIENT, 1, 0, reader.n_blocks) * change).sum(axis=1)
    got = study.need(1, "a")["loss_estimate"].to_numpy()
    follows = targets_following(reader.column("sequence"), reader.column("target_id")) > 0
    unseen = reader.column("split") != 0
    assert np.isnan(got[~follows]).all()
    assert np.isfinite(got[follows]).all()
    np.testing.assert_allclose(got[follows & unseen], wanted[follows & unseen], rtol=1e-3, atol=1e-4)
