"""A study's surrogates and gates in a live model for good: the measured model's numbers, whatever way its
tokens come in; saved again byte for byte; in no other model; and taken away again without a trace.
"""

import copy
import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from blake3 import blake3
from helpers_harvest import files_of, harvested
from helpers_models import D_MODEL, VOCAB_SIZE, smollm2_path, tiny_model
from helpers_substitution import linear_map, unchanged
from nearline.analyze import AnalyzeSettings, FitSettings, analyze, fit
from nearline.collect import export, load_linearised, save_linearised
from nearline.collect.anatomy import anatomy
from nearline.collect.budget import Configuration
from nearline.collect.exported_folder import read_exported, write_exported
from nearline.collect.exporting import remove_linearised
from nearline.collect.gate_routing import GateRouter, LiveRows, Piece
from nearline.collect.harvesting import harvest
from nearline.collect.hidden_units import HiddenUnits
from nearline.collect.interventions import parse_intervention
from nearline.collect.kv_cache import decoded
from nearline.collect.linearised import Linearised, linearised_of
from nearline.collect.loading import load_both
from nearline.collect.settings import parse
from nearline.collect.substitutes import Substitute, substitutes_of
from nearline.collect.substitution import BatchRows, Substitution
from nearline.collect.timing import TimingRules, prompts_of, timings
from nearline.store import Reader, Study
from nearline.store.errors import DamageError, FormatError, IncompleteError, NearlineError, UsageError
from safetensors.torch import load, save
from torch import Tensor
from transformers import AutoModelForCausalLM

# A cache and other numbers of rows sum float32 in another order: some 1e-7 of the largest logit a layer.
TOLERANCE = 2e-5
# And so move p: two routes of a token may differ where p is this near to the threshold, and nowhere else.
NEAR = 1e-4
LAYERS = [0, 2]
SPECIAL = (0, 1, 2)  # <pad>, <s>, </s>; <unk> too is special for the tokenizer
GATED = (None, "input:0.5", "token_all+context_only", "position")
IDS = torch.from_numpy(np.random.default_rng(5).integers(4, VOCAB_SIZE, (1, 20)))
IDS[0, 0], IDS[0, 6] = 1, 2


@dataclass(frozen=True)
class Made:
    """A tiny GPT-2 (positions, norms with biases) and a study of it."""

    model: Any
    study: Path
    reader: Reader


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder, model = tmp_path_factory.mktemp("export"), tiny_model("gpt2")[0]
    store = harvested(folder / "s", "gpt2", model=model, tokens=600, block=60)
    fit(folder / "study", [store], FitSettings(folds=2, alphas=(0.1, 1.0)))
    features = ("input", "token_all+context_only", "position")
    analyze(folder / "study", AnalyzeSettings(only=("gates",), features=features))
    return Made(model, folder / "study", Reader.open(store))


@pytest.fixture
def model(made: Made) -> Any:
    return copy.deepcopy(made.model)


def full(model: Any, ids: Tensor, **more: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids, **more).logits


def close(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=0, atol=TOLERANCE * float(wanted.abs().max()))


@dataclass(frozen=True)
class Routes:
    """Of the layers, one after the other: what was replaced, and what the gates said."""

    weight: Tensor
    p: Tensor

    @classmethod
    def of(cls, model: Any) -> "Routes":
        layers = linearised_of(model).layers.values()
        weights = [layer.weight for layer in layers if layer.weight is not None]
        p = [torch.zeros(0) if layer.p is None else layer.p for layer in layers]
        return cls(torch.stack(weights), torch.stack(p))


def stepwise(model: Any, ids: Tensor, first: int) -> tuple[Tensor, Routes]:
    """Logits of one text, its first tokens at once and the others one by one with a cache."""
    logits, seen, cache = list[Tensor](), list[Routes](), None
    with torch.no_grad():
        for begin, end in [(0, first), *((at, at + 1) for at in range(first, ids.shape[1]))]:
            found, cache = decoded(model, ids[:, begin:end], cache)
            logits.append(found)
            seen.append(Routes.of(model))
    routes = Routes(torch.cat([one.weight for one in seen], 1), torch.cat([one.p for one in seen], 1))
    return torch.cat(logits, 1), routes


def agreeing(got: Routes, wanted: Routes, thresholds: Tensor) -> int:
    """How many tokens went the same way in all layers before one did not. That one has to be near to the
    threshold in the lowest of the layers where it went another way; what comes after it follows from it."""
    other = got.weight != wanted.weight
    if not other.any():
        return other.shape[1]
    token = int(other.any(0).nonzero()[0])
    layer = int(other[:, token].nonzero()[0])
    assert abs(float(wanted.p[layer, token] - thresholds[layer])) < NEAR
    return token


def thresholds_of(model: Any) -> Tensor:
    routers = [layer.substitute.router for layer in linearised_of(model).layers.values()]
    return torch.tensor([one.threshold if isinstance(one, GateRouter) else 0.0 for one in routers])


# The same model as the one that was measured


@pytest.mark.parametrize("gated", GATED)
def test_an_exported_model_is_the_measured_one_and_is_saved_again_byte_for_byte(
    made: Made, model: Any, gated: str | None, tmp_path: Path
) -> None:
    export(made.study, tmp_path / "out", LAYERS, gated, model=model)
    load_linearised(model, tmp_path / "out")
    got = full(model, IDS)
    name = "linear" if gated is None else f"gated@{gated}"
    found = anatomy(made.model)
    ids, position = IDS.numpy(), np.arange(IDS.shape[1])[None]
    covered = (position > 0) & ~np.isin(ids, made.reader.attributes.tokenizer.special_ids)
    substitutes = substitutes_of(Study.open(made.study), name, LAYERS, anatomy=found)
    with Substitution(found, substitutes) as live:
        live.rows = BatchRows(ids, position, covered, position)
        assert torch.equal(got, full(made.model, IDS))
        routed = torch.stack([live.linear(layer).reshape(-1) for layer in LAYERS])
    weight = Routes.of(model).weight
    assert torch.equal(weight, routed)
    assert weight.any()
    assert not weight[:, [0, 6]].any()
    assert gated is None or 0 < weight.mean() < 0.95
    save_linearised(model, tmp_path / "again")
    assert files_of(tmp_path / "again") == files_of(tmp_path / "out")
    assert set(files_of(tmp_path / "out")) == {"config.json", "surrogates.safetensors", "gates.safetensors"}


@pytest.mark.parametrize("gated", [None, "input:0.5", "token_all+context_only"])
def test_logits_of_decoding_are_those_of_the_full_context_where_routes_agree(
    made: Made, model: Any, gated: str | None, tmp_path: Path
) -> None:
    load_linearised(model, export(made.study, tmp_path / "out", LAYERS, gated, model=model))
    with torch.no_grad():
        generated = model.generate(IDS[:, :7], max_new_tokens=12, min_new_tokens=12, do_sample=False)
    assert generated.shape == (1, 19)
    wanted = full(model, generated)
    of_full = Routes.of(model)
    got, routes = stepwise(model, generated, 7)
    assert agreeing(routes, of_full, thresholds_of(model)) == 19  # none of these tokens is near
    close(got, wanted)
    # Greedy tokens are those of the full context. `min_new_tokens` forbids the end of the text.
    wanted[..., 2] = -torch.inf
    assert torch.equal(wanted[0, 6:-1].argmax(-1), generated[0, 7:])


def test_a_token_at_the_threshold_may_go_either_way_and_no_other(
    made: Made, model: Any, tmp_path: Path
) -> None:
    load_linearised(model, export(made.study, tmp_path / "out", [0], "input:0.5"))
    layer = linearised_of(model).layers[0]
    full(model, IDS)
    assert layer.p is not None
    at_threshold = layer.p.clone()
    for token in (1, 8, 15):
        set_threshold(layer, float(at_threshold[token]))
        wanted, of_full = full(model, IDS), Routes.of(model)
        got, routes = stepwise(model, IDS, 5)
        n_same = agreeing(routes, of_full, thresholds_of(model))
        assert n_same in (token, IDS.shape[1])
        close(got[:, :n_same], wanted[:, :n_same])


def set_threshold(layer: Any, threshold: float) -> None:
    substitute = layer._substitute
    layer._substitute = replace(substitute, router=replace(substitute.router, threshold=threshold))


def test_a_gate_that_sends_every_token_is_the_linear_model_and_one_that_sends_none_the_original(
    made: Made, model: Any, tmp_path: Path
) -> None:
    load_linearised(model, export(made.study, tmp_path / "linear", LAYERS))
    linear = full(model, IDS)
    for share, wanted in (("1", linear), ("0", full(made.model, IDS))):
        remove_linearised(model)
        load_linearised(model, export(made.study, tmp_path / share, LAYERS, f"input:{share}"))
        assert torch.equal(full(model, IDS), wanted)
        assert save_linearised(model, tmp_path / "again") == tmp_path / "again"
        assert files_of(tmp_path / "again") == files_of(tmp_path / share)


def test_positions_are_read_from_wherever_they_are(made: Made, model: Any, tmp_path: Path) -> None:
    load_linearised(model, export(made.study, tmp_path / "out", LAYERS, "position", model=model))
    wanted, routes = full(model, IDS), Routes.of(model)
    pads = 3
    padded = torch.cat([torch.zeros(1, pads, dtype=torch.long), IDS], 1)
    mask = (torch.arange(padded.shape[1]) >= pads).long()[None]
    places = (mask.cumsum(1) - 1).clamp_min(0)
    got = full(model, padded, attention_mask=mask, position_ids=places)
    assert torch.equal(Routes.of(model).weight[:, pads:], routes.weight)
    assert not Routes.of(model).weight[:, :pads].any()
    close(got[:, pads:], wanted)
    # By the mask alone: the first real token is at 0, whatever the model itself takes it for.
    full(model, padded, attention_mask=mask)
    assert torch.equal(Routes.of(model).weight[:, pads:], routes.weight)
    # A batch of texts of different lengths, padded on the left, continues each as it is continued alone.
    short = IDS[:, :9]
    both = torch.cat([IDS, torch.cat([torch.zeros(1, 11, dtype=torch.long), short], 1)])
    mask = torch.ones_like(both)
    mask[1, :11] = 0
    more: dict[str, Any] = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    together = model.generate(both, attention_mask=mask, **more)[:, -5:]
    alone = [model.generate(one, **more)[0, -5:] for one in (IDS, short)]
    assert torch.equal(together, torch.stack(alone))


def hand_gate(threshold: float, d: int = D_MODEL) -> GateRouter:
    weight = torch.randn(d, generator=torch.Generator().manual_seed(1))
    none = torch.zeros(0)
    return GateRouter((Piece("x", own=weight),), 0.0, threshold, False, None, None, none.long(), none, 0.0)


FORMS = {  # flat rows in a span of two modules, experts, parallel blocks, a post-norm
    "opt": ("linear", "gated@input"),
    "mixtral": ("linear", "gated@input"),
    "gpt_neox": ("soft@input",),
    "bloom": ("gated@input",),
    "gemma2": ("linear@all",),
}


@pytest.mark.parametrize(("family", "name"), [(one, name) for one, names in FORMS.items() for name in names])
def test_every_form_of_a_block_decodes_as_it_reads(family: str, name: str) -> None:
    model = tiny_model(family)[0]
    with unchanged(model):
        found, one = anatomy(model), parse_intervention(name)
        router = hand_gate(0.5) if one.is_routed else None
        substitutes = {
            layer: Substitute(one, layer, linear_map(D_MODEL, seed=layer), router) for layer in LAYERS
        }
        before = full(model, IDS)
        linearised = Linearised(found, substitutes, SPECIAL)
        wanted, routes = full(model, IDS), Routes.of(model) if router else None
        assert not torch.allclose(wanted, before)
        if routes is None:
            with torch.no_grad():
                logits, cache = decoded(model, IDS[:, :9])
                more, cache = decoded(model, IDS[:, 9:16], cache)
                last, _ = decoded(model, IDS[:, 16:], cache)
            close(torch.cat([logits, more, last], 1), wanted)
        else:
            got, stepped = stepwise(model, IDS, 9)
            if one.kind != "soft":
                assert agreeing(stepped, routes, thresholds_of(model)) == IDS.shape[1]
            close(got, wanted)
        linearised.remove()
        assert torch.equal(full(model, IDS), before)


def test_a_model_in_sixteen_bits_keeps_its_surrogates_in_them(made: Made, model: Any, tmp_path: Path) -> None:
    export(made.study, tmp_path / "out", LAYERS, "input:0.5")
    load_linearised(model.to(torch.bfloat16), tmp_path / "out", any_model=True)
    got = full(model, IDS)
    assert got.dtype == torch.bfloat16
    save_linearised(model, tmp_path / "once")
    again = copy.deepcopy(made.model).to(torch.bfloat16)
    load_linearised(again, tmp_path / "once", any_model=True)
    assert torch.equal(full(again, IDS), got)
    save_linearised(again, tmp_path / "twice")
    assert files_of(tmp_path / "once") == files_of(tmp_path / "twice")
    # Gates stay in float32, surrogates have half the bytes.
    sizes = [
        {name: len(bytes_) for name, bytes_ in files_of(tmp_path / one).items()} for one in ("out", "once")
    ]
    assert sizes[0]["gates.safetensors"] == sizes[1]["gates.safetensors"]
    assert sizes[1]["surrogates.safetensors"] < 0.6 * sizes[0]["surrogates.safetensors"]


def test_a_copy_is_a_model_of_its_own_and_the_original_comes_back(
    made: Made, model: Any, tmp_path: Path
) -> None:
    export(made.study, tmp_path / "out", LAYERS, "token_all+context_only", model=model)
    with unchanged(model):
        before = full(model, IDS)
        load_linearised(model, tmp_path / "out")
        got, copied = full(model, IDS), copy.deepcopy(model)
        assert any("nearline" in name for name in model.state_dict())
        with pytest.raises(UsageError, match="replaced already"):
            load_linearised(model, tmp_path / "out", any_model=True)
        assert torch.equal(full(model, IDS), got)
        remove_linearised(model)
        assert torch.equal(full(model, IDS), before)
        assert torch.equal(full(copied, IDS), got)
        with torch.no_grad():
            for weight in linearised_of(copied).layers[0].parameters():
                weight.add_(1.0)
        assert not torch.equal(full(copied, IDS), got)
    save_linearised(copied, tmp_path / "changed")
    load_linearised(model, tmp_path / "changed")
    assert torch.equal(full(model, IDS), full(copied, IDS))
    with pytest.raises(UsageError, match="no MLP of this model is replaced"):
        save_linearised(made.model, tmp_path / "none")


# Mistakes


def refused(call: Any, kind: type[NearlineError], match: str) -> None:
    with pytest.raises(kind, match=match):
        call()


def test_what_a_study_does_not_have_is_named_and_nothing_is_written(made: Made, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for layers, gated, kind, match in (
        ([7], None, UsageError, "layer 7 was not fitted"),
        ([], None, UsageError, "at least one layer"),
        ("1-", None, UsageError, "layers"),
        ([0], "norm", UsageError, "no gate"),
        ([0], "target_type", UsageError, "not known before the layer has run"),
        ([0], "input:2", UsageError, "no share"),
    ):
        refused(lambda layers=layers, gated=gated: export(made.study, out, layers, gated), kind, match)
    refused(lambda: export(tmp_path / "no", out, [0]), IncompleteError, "does not exist")
    assert not out.exists()
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    refused(lambda: export(made.study, out, [0]), UsageError, "no export of nearline")
    assert files_of(out) == {"mine.txt": b"mine"}


def test_an_export_takes_the_place_of_an_older_one(made: Made, tmp_path: Path) -> None:
    first = files_of(export(made.study, tmp_path / "out", [0]))
    assert files_of(export(made.study, tmp_path / "out", "0,2", "input")) != first
    assert files_of(export(made.study, tmp_path / "out", [0])) == first
    config = json.loads(first["config.json"])
    assert config["model"]["weights_hash"] == made.reader.attributes.model.weights_hash
    assert config["covered"].startswith("tokens that are not special, not padding and not at position 0")


def test_another_model_is_refused_unless_told_otherwise(made: Made, model: Any, tmp_path: Path) -> None:
    out = export(made.study, tmp_path / "out", LAYERS)
    with torch.no_grad():
        model.transformer.h[1].mlp.c_fc.bias[0] += 1
    with unchanged(model):
        refused(
            lambda: load_linearised(model, out), UsageError, "the weights of this model have another digest"
        )
        refused(
            lambda: load_linearised(tiny_model("llama")[0], out),
            UsageError,
            "the configuration of this model",
        )
    load_linearised(model, out, any_model=True)
    assert torch.isfinite(full(model, IDS)).all()
    embeddings = torch.zeros(1, 2, D_MODEL)
    refused(lambda: model(inputs_embeds=embeddings), UsageError, "give input_ids")


def changed(out: Path, change: Any) -> None:
    config = json.loads((out / "config.json").read_bytes())
    change(config)
    (out / "config.json").write_text(json.dumps(config))


def test_a_damaged_export_is_refused(made: Made, model: Any, tmp_path: Path) -> None:
    whole = export(made.study, tmp_path / "whole", LAYERS, "input")

    def refuse(change: Any, kind: type[NearlineError], match: str) -> None:
        out = tmp_path / "out"
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(whole, out)
        change(out)
        with unchanged(model):
            refused(lambda: load_linearised(model, out), kind, match)

    def flip(out: Path) -> None:
        content = bytearray((out / "surrogates.safetensors").read_bytes())
        content[-1] ^= 1
        (out / "surrogates.safetensors").write_bytes(content)

    refuse(flip, DamageError, "is not the file")
    refuse(lambda out: (out / "gates.safetensors").unlink(), IncompleteError, "does not exist")
    refuse(lambda out: (out / "config.json").unlink(), IncompleteError, "does not exist")
    for change, match in (
        (lambda config: config.update(schema=3), "schema 3 is not known to this version"),
        (lambda config: config.update(more=1), "unknown key"),
        (lambda config: config.update(intervention="random@0.5"), "cannot stand in an export"),
        (lambda config: config["layers"].update({"9": config["layers"]["0"]}), "layers 0-2"),
        (lambda config: config["layers"]["0"].update(map="constant"), "a constant map has value"),
        (lambda config: config["layers"]["0"]["gate"].update(bias="often"), "bias"),
        (lambda config: config["layers"]["0"]["gate"]["pieces"][0].update(name="k"), "k needs own"),
        (lambda config: config["model"].update(d_model=8), "x needs own of 8"),
    ):
        refuse(lambda out, change=change: changed(out, change), FormatError, match)


# Gates with hidden units


def with_hidden(whole: Path, out: Path, name: str) -> Path:
    """An export whose gates have hidden units, of other weights in each layer."""
    exported, drawn = read_exported(whole), torch.Generator().manual_seed(4)

    def gate() -> GateRouter:
        units = [torch.randn(*shape, generator=drawn) for shape in ((5, D_MODEL), (5,), (5,))]
        return replace(hand_gate(0.5), pieces=(), bias=0.1, hidden=HiddenUnits(*units))

    intervention = parse_intervention(name)
    substitutes = {
        layer: replace(one, intervention=intervention, router=gate())
        for layer, one in exported.substitutes.items()
    }
    write_exported(out, replace(exported, substitutes=substitutes))
    return out


@pytest.mark.parametrize("name", ["gated@input", "soft@input"])
def test_hidden_units_route_as_their_formula_says_and_decode_as_they_read(
    made: Made, model: Any, name: str, tmp_path: Path
) -> None:
    whole = export(made.study, tmp_path / "whole", LAYERS, "input")
    out = with_hidden(whole, tmp_path / "out", name)
    load_linearised(model, out)
    layer, seen = linearised_of(model).layers[0], list[Tensor]()
    handle = model.transformer.h[0].ln_2.register_forward_hook(lambda *given: seen.append(given[2]))
    wanted, of_full = full(model, IDS), Routes.of(model)
    handle.remove()
    gate = layer.substitute.router
    assert isinstance(gate, GateRouter)
    assert gate.hidden is not None
    z = seen[0][0].double() @ gate.hidden.weight.double().T + gate.hidden.bias.double()
    logit = (z * torch.special.ndtr(z)) @ gate.hidden.out.double() + gate.bias
    torch.testing.assert_close(of_full.p[0].double(), torch.sigmoid(logit), rtol=0, atol=1e-5)
    assert 0.1 < of_full.weight.mean() < 0.9
    got, stepped = stepwise(model, IDS, 7)
    if name == "gated@input":
        assert agreeing(stepped, of_full, thresholds_of(model)) == IDS.shape[1]
    close(got, wanted)
    assert files_of(save_linearised(model, tmp_path / "again")) == files_of(out)
    schemas = [json.loads(files_of(one)["config.json"])["schema"] for one in (whole, out)]
    assert schemas == [1, 2]
    # Products in sixteen bits leave the gate alone.
    with torch.autocast("cpu", torch.bfloat16):
        p = gate.probability(LiveRows(seen[0][0], None, None, IDS[0], IDS[0]))
    assert torch.equal(p, of_full.p[0])


def test_damaged_hidden_units_are_refused(made: Made, tmp_path: Path) -> None:
    out = with_hidden(export(made.study, tmp_path / "whole", [0], "input"), tmp_path / "out", "gated@input")
    whole = files_of(out)

    def refuse(match: str, **tensors: Tensor | None) -> None:
        there = load(whole["gates.safetensors"]) | {f"0.hidden.{name}": one for name, one in tensors.items()}
        content = save({name: one for name, one in there.items() if one is not None})
        (out / "gates.safetensors").write_bytes(content)
        changed(
            out, lambda config: config["files"].update({"gates.safetensors": blake3(content).hexdigest()})
        )
        refused(lambda: read_exported(out), FormatError, match)

    needs = rf"hidden: needs float32 weight \(5, {D_MODEL}\), bias \(5,\), out \(5,\), found "
    refuse(needs, out=None)
    refuse(needs, weight=torch.zeros(5, D_MODEL - 1))
    refuse(needs, bias=torch.zeros(5, dtype=torch.float16))
    refuse("'hidden.gate' is of nothing that this gate has", gate=torch.zeros(5))
    for change, match in (
        (lambda gate: gate["hidden"].update(units=6), "needs float32 weight"),
        (lambda gate: gate["hidden"].update(units=0), "`units` must be an integer in 1"),
        (lambda gate: gate["hidden"].update(activation="relu"), "activation"),
        (lambda gate: gate.pop("hidden"), "'hidden.bias' is of nothing that this gate has"),
        (lambda gate: gate.update(hidden="many"), "expected an object"),
    ):
        for name, content in whole.items():
            (out / name).write_bytes(content)
        changed(out, lambda config, change=change: change(config["layers"]["0"]["gate"]))
        refused(lambda: read_exported(out), FormatError, match)
    (out / "config.json").write_bytes(whole["config.json"])
    changed(out, lambda config: config.update(schema=1))  # what a reader of schema 1 does not know
    refused(lambda: read_exported(out), FormatError, "unknown key 'hidden'")


# A real model


@pytest.mark.long
@pytest.mark.timeout(900)
def test_smollm2_decodes_as_it_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, gguf_file = smollm2_path()
    layers, n_texts, n_read, n_decoded = [4, 8, 12, 20], 6, 16, 32
    settings = {"tokens": 1600, "sequence_length": 64, "keep": "1/8", "layers": ",".join(map(str, layers))}
    source = {"model": str(folder), "gguf_file": gguf_file, "corpus": "docs:scientific"}
    corpus, loaded = load_both(parse({**source, **settings}))
    model: Any = loaded.model
    harvest(model, loaded.tokenizer, corpus, tmp_path / "s", name=loaded.name, **settings)
    fit(tmp_path / "study", [tmp_path / "s"], FitSettings(folds=2))
    analyze(tmp_path / "study", AnalyzeSettings(only=("gates",), features=("input",), folds=2))
    reader, lines, times = Reader.open(tmp_path / "s"), list[str](), []
    texts = prompts_of(reader, n_texts, n_read + n_decoded)
    special, study = reader.attributes.tokenizer.special_ids, Study.open(tmp_path / "study")
    for gated in (None, "input:0.5"):
        load_linearised(model, export(study.path, tmp_path / "out", layers, gated))
        n_same = n_whole = 0
        worst = share = 0.0
        for text in torch.from_numpy(texts)[:, None]:
            wanted, of_full = full(model, text), Routes.of(model)
            got, routes = stepwise(model, text, n_read)
            same = agreeing(routes, of_full, thresholds_of(model))
            close(got[:, :same], wanted[:, :same])
            worst = max(worst, float((got - wanted)[:, :same].abs().max() / wanted.abs().max()))
            n_same, n_whole = n_same + same, n_whole + (same == text.shape[1])
            share += float(of_full.weight.mean()) / n_texts
        remove_linearised(model)
        if gated is None:  # goes into the model as transformers loads it, too
            load_linearised(
                AutoModelForCausalLM.from_pretrained(folder, gguf_file=gguf_file), tmp_path / "out"
            )
        name = "linear" if gated is None else f"gated@{gated}"
        assert gated is None or 0.2 < share < 0.8
        lines.append(
            f"{name}, layers {layers}: {share:.2f} linear; {n_whole} of {n_texts} texts took the same routes "
            f"step by step, {n_same} of {texts.size} tokens before a first other one; logits differ by "
            f"{worst:.1e} of the largest at most"
        )
        times.append((Configuration(name, tuple(layers)), substitutes_of(study, name, layers)))
    rules = TimingRules(batch_sizes=(1, 4), prompt_length=32, n_steps=8, n_rounds=3)
    table = timings(anatomy(model), times, texts, special, rules).to_pylist()
    lines += [
        f"{row['name']}, batch {row['batch_size']}, {row['phase']}: {row['seconds']:.3f} s, time saved "
        f"{row['time_saved']:.1%}, FLOPs saved {row['flops_saved']:.1%}"
        for row in table
    ]
    assert n_whole >= n_texts - 1
    with capsys.disabled():
        print("", *lines, sep="\n")
