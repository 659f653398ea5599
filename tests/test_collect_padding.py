"""Padding leaves no trace: a sequence in a padded batch gives the rows it gives alone, whatever the tokenizer
says about padding, and a model that attends to padding is refused."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers_harvest import WORDS, files_of
from helpers_models import captured, tiny_model, tiny_tokenizer
from nearline.collect.harvesting import harvest
from nearline.store import Reader
from nearline.store.errors import ProofFailed
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

# Absolute positions, rotary ones, alibi, and a sliding window of 8 positions.
FAMILIES = ("gpt2", "llama", "bloom", "gemma3")
SITES: tuple[str, ...] = ("residual", "mlp_output", "embedding")
# Root mean square of a sequence's rows, relative to their size: other matrix shapes sum in another order, and
# in bfloat16 each of three layers rounds anew. What attends to padding is off by 0.3 and more.
ROUNDING = {"float32": 2e-6, "bfloat16": 2e-2}
LENGTHS = (1, 60, 1, 40, 2, 25, 55, 8)
SIZES: dict[str, Any] = {"tokens": 600, "sequence_length": 48, "min_length": 1, "block": 200}
# A whole block passes the model at once, one-row sequences beside the longest.
ONE_BATCH = {"batch_tokens": 4096}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """With more, tiny products are mostly waiting for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def documents() -> list[str]:
    """64 texts of 1 to 60 words, no two alike."""
    random = np.random.default_rng(5)
    longer = [" ".join(random.choice(WORDS, size=n)) for _ in range(8) for n in LENGTHS if n > 1]
    return [*longer, *WORDS[:16]]


def word_tokenizer() -> PreTrainedTokenizerFast:
    """One id a word from 0 on, and no special token at all: id 0 is a word like any other."""
    core = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token=WORDS[-1]))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=core)


def padded_by(**changes: Any) -> Any:
    """A tokenizer that would pad as told, if it were asked to."""
    tokenizer = tiny_tokenizer()
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    return tokenizer


def store_of(path: Path, model: Any, tokenizer: Any, **overrides: Any) -> Path:
    return harvest(model, tokenizer, documents(), path, **{**SIZES, **ONE_BATCH, **overrides})


def values_of(reader: Reader, site: str) -> np.ndarray:
    """A site as (layer, token, feature); the embedding counts as one layer."""
    layers = [None] if site == "embedding" else reader.layers
    return np.stack([reader.rows(site, layer, 0, reader.n_blocks) for layer in layers])


def rows_of(reader: Reader) -> list[slice]:
    offsets = reader.plan.row_offsets.tolist()
    return [slice(start, stop) for start, stop in pairwise(offsets)]


def errors_alone(reader: Reader, model: Any) -> dict[str, float]:
    """The largest error of any sequence's rows against a pass of that sequence alone, without mask or
    positions."""
    token, worst = np.asarray(reader.column("token_id")), dict.fromkeys(SITES, 0.0)
    stored = {site: values_of(reader, site) for site in SITES}
    for rows in rows_of(reader):
        seen = captured(model, torch.from_numpy(token[rows]).long()[None], SITES)
        for (site, layer), wanted in seen.items():
            alone = wanted[0].float().numpy()
            error = np.square(stored[site][layer, rows] - alone).mean() / np.square(alone).mean()
            worst[site] = max(worst[site], float(np.sqrt(error)))
    return worst


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_padded_batch_gives_the_rows_of_each_sequence_alone(
    family: str, dtype: str, tmp_path: Path
) -> None:
    model, _ = tiny_model(family, dtype=getattr(torch, dtype))
    reader = Reader.open(store_of(tmp_path / "store", model, word_tokenizer(), storage_dtype=dtype))
    lengths = [reader.plan.length[batch] for block in range(3) for batch in reader.plan.batches_of(block)]
    assert len(lengths) == reader.n_blocks == 3, "each block is one batch"
    assert all(8 * length.min() <= length.max() for length in lengths), lengths
    worst = errors_alone(reader, model)
    assert max(worst.values()) < ROUNDING[dtype], worst


def test_the_other_way_round_the_error_would_be_seen(tmp_path: Path) -> None:
    """The measure above tells a sequence that was padded from one that saw its padding."""
    model, _ = tiny_model("llama")
    reader = Reader.open(store_of(tmp_path / "store", model, word_tokenizer(), storage_dtype="float32"))
    token, stored = np.asarray(reader.column("token_id")), values_of(reader, "residual")[2]
    short = [rows for rows in rows_of(reader) if rows.stop - rows.start < 40][:4]
    for rows in short:
        ids = torch.from_numpy(token[rows]).long()
        left_padded = torch.cat([torch.zeros(48 - len(ids), dtype=torch.long), ids])[None]
        attended = captured(model, left_padded, ["residual"])["residual", 2][0, 48 - len(ids) :].numpy()
        error = np.square(stored[rows] - attended).mean() / np.square(attended).mean()
        assert np.sqrt(error) > 10 * ROUNDING["bfloat16"]


TOKENIZERS = {
    "right": {"padding_side": "right"},
    "left": {"padding_side": "left"},
    "eos": {"pad_token": "</s>", "padding_side": "left"},
    "none": {"pad_token": None, "padding_side": "left"},
}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_what_a_tokenizer_says_about_padding_changes_nothing(family: str, tmp_path: Path) -> None:
    model, _ = tiny_model(family)
    files = {}
    for name, changes in TOKENIZERS.items():
        tokenizer = padded_by(**changes)
        assert (tokenizer.pad_token_id, tokenizer.padding_side) == (
            {"eos": 2, "none": None}.get(name, 0),
            changes["padding_side"],
        )
        store = store_of(tmp_path / name, model, tokenizer, bos="always")
        files[name] = files_of(store, without=("runs", "README.md"))
    assert files["left"] == files["right"]
    for name in ("eos", "none"):
        # Which token pads is part of a tokenizer's fingerprint; every stored row is the same to the bit.
        chunks = {key: content for key, content in files[name].items() if "/c/" in key}
        assert len(chunks) > 30
        assert chunks == {key: content for key, content in files["right"].items() if "/c/" in key}


def test_id_0_is_a_token_like_any_other(tmp_path: Path) -> None:
    model, _ = tiny_model("llama")
    reader = Reader.open(store_of(tmp_path / "store", model, word_tokenizer()))
    token, special = np.asarray(reader.column("token_id")), np.asarray(reader.column("special"))
    assert (token == 0).sum() > 10
    assert not special.any()
    texts = documents()
    for rows in rows_of(reader):
        document, position = (np.asarray(reader.column(name))[rows] for name in ("document", "position"))
        assert list(position) == list(range(len(position)))
        words = [WORDS[index] for index in token[rows]]
        assert " ".join(words) in texts[document[0]]


def test_a_document_of_one_token_stands_beside_a_long_one(tmp_path: Path) -> None:
    model, _ = tiny_model("gpt2")
    reader = Reader.open(store_of(tmp_path / "store", model, word_tokenizer(), storage_dtype="float32"))
    token, target = np.asarray(reader.column("token_id")), np.asarray(reader.column("target_id"))
    single = [rows for rows in rows_of(reader) if rows.stop - rows.start == 1]
    lonely = [rows.start for rows in single if target[rows.start] == -1]
    assert len(lonely) >= 3, "some of these documents have one token only"
    residual, nll = values_of(reader, "residual"), np.asarray(reader.column("nll"))
    for row in lonely:
        seen = captured(model, torch.tensor([[int(token[row])]]), ["residual"])
        for layer in reader.layers:
            wanted = seen["residual", layer][0].numpy()
            np.testing.assert_allclose(residual[layer, row], wanted[0], rtol=0, atol=1e-5)
        assert np.isnan(nll[row])


def attends_to_padding(model: Any) -> Any:
    """Every row sees, beside what it should, the padding behind its sequence."""

    def see_more(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        mask = kwargs.get("attention_mask")
        if not isinstance(mask, Tensor) or mask.ndim != 2 or bool(mask.all()):
            return args, kwargs
        n = mask.shape[1]
        causal = torch.ones(n, n, dtype=torch.bool, device=mask.device).tril()
        seen = causal[None, None] | (mask == 0)[:, None, None, :]
        return args, {**kwargs, "attention_mask": seen}

    model.base_model.register_forward_pre_hook(see_more, with_kwargs=True)
    return model


def counts_padding_as_positions(model: Any) -> Any:
    """Positions start behind the padding, as they would if it stood on the left and nobody said so."""

    def shift(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        mask = kwargs.get("attention_mask")
        if isinstance(mask, Tensor) and not bool(mask.all()):
            behind = (mask.shape[1] - mask.sum(1, keepdim=True)).to(kwargs["position_ids"].device)
            kwargs = {**kwargs, "position_ids": kwargs["position_ids"] + behind}
        return args, kwargs

    model.base_model.register_forward_pre_hook(shift, with_kwargs=True)
    return model


@pytest.mark.parametrize(
    ("family", "plant"),
    [("llama", attends_to_padding), ("gpt2", attends_to_padding), ("gpt2", counts_padding_as_positions)],
)
def test_a_model_that_lets_padding_in_is_refused(family: str, plant: Any, tmp_path: Path) -> None:
    model = plant(tiny_model(family)[0])
    with pytest.raises(ProofFailed, match="in a padded batch"):
        store_of(tmp_path / "store", model, word_tokenizer(), sequence_length=24)
    assert not (tmp_path / "store").exists()
