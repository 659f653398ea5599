"""The bundled models: whole, small, trained as recorded; and the program that makes them is deterministic."""

import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from nearline.collect import bundled_texts, train_bundled
from nearline.collect.bundled_models import BUNDLED, bundled_path
from nearline.collect.bundled_texts import BOS, CONTEXT, Texts, divide, groups_apart, token_stream, windows
from nearline.collect.corpora import Document, load
from transformers import AutoModelForCausalLM, AutoTokenizer

SIZE_LIMIT_BYTES = 8_000_000
# Of a unigram model's nats per token; after 5,000 steps tiny-gpt2 is at 0.71, tiny-pythia lower.
TRAINED_SHARE = 0.75
MIXED = " ".join(f"word{i}" for i in range(100))


@pytest.fixture(params=BUNDLED)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def model(name: str) -> transformers.PreTrainedModel:
    return load_cleanly(bundled_path(name))


def load_cleanly(folder: Path) -> transformers.PreTrainedModel:
    """The model of a folder, if its weights are exactly the model's."""
    loaded, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)  # pyright: ignore[reportGeneralTypeIssues]
    assert not any(info.values()), f"loading is not clean: {info}"
    return loaded


def test_a_bundled_model_is_whole_and_small(name: str) -> None:
    folder = bundled_path(name)
    assert {file.name for file in folder.iterdir()} == {
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "training.json"
    }  # fmt: skip
    assert (folder / "model.safetensors").stat().st_size <= SIZE_LIMIT_BYTES
    facts = json.loads((folder / "training.json").read_text())
    assert facts["steps"] == facts["steps_planned"]
    assert facts["dropped_as_harvestable"] > 0
    assert facts["curve"][-1]["loss"] < 0.6 * facts["curve"][0]["loss"]
    assert math.log(facts["held_out_perplexity"]) == pytest.approx(
        facts["curve"][-1]["held_out_loss"], abs=1e-3
    )


def test_a_bundled_model_is_what_it_says(name: str, model: transformers.PreTrainedModel) -> None:
    config = model.config
    assert config.model_type == {"tiny-gpt2": "gpt2", "tiny-pythia": "gpt_neox"}[name]
    assert getattr(config, "use_parallel_residual", None) == {"tiny-gpt2": None, "tiny-pythia": True}[name]
    assert config.num_hidden_layers == 6
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    assert isinstance(head, torch.nn.Linear)
    assert head.weight is embedding.weight
    facts = json.loads((bundled_path(name) / "training.json").read_text())
    assert model.num_parameters() == facts["parameters"]


def test_a_bundled_model_predicts_text_it_never_read(name: str, model: transformers.PreTrainedModel) -> None:
    """On passages of the language reference that were never trained on, far below the best unigram model."""
    tokenizer = AutoTokenizer.from_pretrained(bundled_path(name))
    texts = [document.text for document in load("docs:python").documents[:200:8]]
    encoded = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    _, counts = np.unique(np.concatenate(encoded), return_counts=True)
    share = counts / counts.sum()
    unigram = float(-(share * np.log(share)).sum())
    assert train_bundled.held_out_loss(model, encoded, tokenizer.bos_token_id) < TRAINED_SHARE * unigram


def test_an_unknown_name_lists_the_names() -> None:
    with pytest.raises(KeyError, match="tiny-gpt2, tiny-pythia"):
        bundled_path("tiny-llama")


# ---- texts


def test_candidates_that_reach_a_harvestable_text_are_dropped() -> None:
    words = MIXED.split()
    harvest = [Document("h", MIXED)]
    near = Document("near", " ".join(words[:50]))
    chained = Document("chained", " ".join(words[20:50] + [f"other{i}" for i in range(60)]))
    far = [
        Document("far", "something else altogether " * 9),
        Document("far2", "something else altogether " * 10),
    ]
    assert groups_apart([near, chained, *far], harvest) == [far]


def test_held_out_texts_come_from_the_reserved_part_and_are_not_trained_on() -> None:
    members = [[Document(f"k{i}.{j}", f"text {i} {j}") for j in range(6)] for i in range(300)]
    reserved = frozenset(document.key for group in members[:200] for document in group)
    texts = divide(members, reserved, 2000)
    assert texts.held_out
    assert all(document.key in reserved for document in texts.held_out)
    trained = {document.key.partition(".")[0] for document in texts.train}
    assert not trained & {document.key.partition(".")[0] for document in texts.held_out}
    assert len(texts.train) == bundled_texts.PER_GROUP * (300 - len(texts.held_out))
    assert texts.counts["dropped_as_harvestable"] == 2000 - 1800


def test_every_window_opens_with_bos_and_continues_the_stream() -> None:
    stream = np.arange(1, 1 + 7 * CONTEXT, dtype=np.int32)
    batches = windows(stream, 0, 2, seed=3)
    first = [next(batches) for _ in range(6)]
    assert all(batch.shape == (2, CONTEXT) and (batch[:, 0] == 0).all() for batch in first)
    assert all((np.diff(batch[:, 1:]) == 1).all() for batch in first)
    starts = [set(batch[:, 1].tolist()) for batch in first]
    assert len(set.union(*starts[:3])) == 6, "within an epoch no window comes twice"
    again = windows(stream, 0, 2, seed=3)
    assert all(np.array_equal(batch, next(again)) for batch in first)


# ---- the program


@pytest.fixture
def small_program(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The program on forty sentences and a model of one layer; torch's threads are put back."""
    words = [
        Document(f"d{i}", f"Return the {i}th value of the sorted array, or raise. " * 40) for i in range(40)
    ]
    texts = Texts(
        tuple(words[:36]), tuple(words[36:]), frozenset(d.key for d in words[:20]), {"candidates": 40}
    )
    monkeypatch.setattr(train_bundled, "gather_texts", lambda: texts)
    for constant, value in (("LAYERS", 1), ("WIDTH", 16), ("HEADS", 2), ("BATCH", 1), ("WARM_UP", 2)):
        monkeypatch.setattr(train_bundled, constant, value)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("small_program")
def test_two_runs_write_the_same_weights_and_the_files_load(name: str, tmp_path: Path) -> None:
    for run in ("a", "b"):
        train_bundled.train(name, tmp_path / run, minutes=1, threads=1, seed=5, steps=4)
    train_bundled.train(name, tmp_path / "c", minutes=1, threads=1, seed=6, steps=4)
    weights = [(tmp_path / run / "model.safetensors").read_bytes() for run in "abc"]
    assert weights[0] == weights[1]
    assert weights[0] != weights[2]
    assert load_cleanly(tmp_path / "a").dtype == torch.float32
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "a")
    assert (
        tokenizer("value")["input_ids"][0] == tokenizer.bos_token_id == tokenizer.convert_tokens_to_ids(BOS)
    )
    facts = json.loads((tmp_path / "a" / "training.json").read_text())
    assert facts["steps"] == facts["steps_planned"] == 4
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a", "b", "c"]


def test_the_built_in_texts_are_read_twice_an_epoch() -> None:
    texts = Texts(tuple(Document(key, key) for key in "abc"), (), frozenset("b"), {})
    tokenizer = AutoTokenizer.from_pretrained(bundled_path("tiny-gpt2"))
    a, b, c = (tokenizer.convert_tokens_to_ids(key) for key in "abc")
    assert token_stream(texts, tokenizer, 0).tolist() == [0, a, 0, b, 0, c, 0, b]


def test_the_number_of_steps_follows_from_the_first_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """40 timed steps of exactly one second and a budget of 100 s: 75 steps, of which none is lost."""
    clock = iter(float(second) for second in range(0, 10_000, train_bundled.TIMED_STEPS))
    monkeypatch.setattr(train_bundled.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(train_bundled, "WARM_UP", 2)
    seen: list[tuple[int, int]] = []
    model = torch.nn.Linear(1, 1)
    monkeypatch.setattr(train_bundled, "loss_sum", lambda module, ids: module.weight.sum() * ids.sum())
    batches = itertools.repeat(np.ones((1, 3), np.int64))
    train_bundled.run_steps(
        model, batches, None, 100.0, lambda step, planned, loss: seen.append((step, planned))
    )
    assert seen == [(50, 75), (75, 75)]


def test_the_learning_rate_rises_then_falls() -> None:
    rates = [train_bundled.rate_at(step, 1000) for step in range(1000)]
    peak = train_bundled.WARM_UP
    assert np.argmax(rates) in (peak - 1, peak)
    assert (np.diff(rates[:peak]) > 0).all()
    assert (np.diff(rates[peak:]) < 0).all()
    assert rates[-1] == pytest.approx(train_bundled.LEARNING_RATE * train_bundled.FINAL_SHARE, rel=1e-3)
