"""A device that is too small for a batch halves the batch before the plan is fixed, and never after."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers_harvest import harvested, texts
from helpers_models import N_LAYERS, tiny_model, tiny_tokenizer
from nearline.collect import corpora
from nearline.collect.anatomy import anatomy
from nearline.collect.batch_budget import Budget, batch_budget, fits
from nearline.collect.forward import evaluating
from nearline.collect.preparing import cutting_of, prepare, row_shape
from nearline.collect.settings import HarvestSettings, parse
from nearline.collect.tokenise import TokenisedCorpus, tokenise
from nearline.store import Reader
from nearline.store.errors import EnvironmentFault, UsageError

LENGTH = 128
CORPUS = corpora.from_documents(texts(), "documents")


class Small:
    """A tiny model on a device that has memory for so many tokens at once."""

    def __init__(self, most_tokens: int) -> None:
        self.model, _ = tiny_model("llama")
        self.most_tokens, self.batches = most_tokens, list[Any]()
        self.error: RuntimeError = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        self.model.model.register_forward_pre_hook(self._look, with_kwargs=True)

    def _look(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.batches.append((tuple(kwargs["input_ids"].shape), kwargs["attention_mask"]))
        if kwargs["input_ids"].numel() > self.most_tokens:
            raise self.error


@pytest.fixture(scope="module")
def tokens() -> TokenisedCorpus:
    return tokenise(CORPUS, tiny_tokenizer(), bos="auto")


def settings(**given: Any) -> HarvestSettings:
    return parse({"sequence_length": LENGTH, "min_length": 4, "tokens": 900, **given})


def budget(
    small: Small, tokens: TokenisedCorpus, folder: Path, *, probe: bool = True, **given: Any
) -> Budget:
    with evaluating(small.model, 1):
        return batch_budget(anatomy(small.model), tokens, settings(**given), folder, probe=probe)


def test_what_fits_is_taken_as_it_is(tokens: TokenisedCorpus, tmp_path: Path) -> None:
    small = Small(10**9)
    found = budget(small, tokens, tmp_path)
    assert (found.settings.batch_tokens, found.measured, found.note) == (4096, True, None)
    shapes = [shape for shape, _ in small.batches]
    assert shapes == [(4096 // LENGTH, LENGTH)] * 2, "two passes, one behind the other as in a harvest"
    assert all(mask is not None for _, mask in small.batches), "padded, as most batches are"


@pytest.mark.parametrize(("most", "found"), [(4000, 2048), (1100, 1024), (LENGTH, LENGTH)])
def test_what_does_not_fit_is_halved(most: int, found: int, tokens: TokenisedCorpus, tmp_path: Path) -> None:
    small = Small(most)
    chosen = budget(small, tokens, tmp_path)
    assert chosen.settings.batch_tokens == found
    assert chosen.note == (
        f"batches of 4,096 tokens do not fit this device beside the model; batch_tokens={found:,} is used"
    )
    net = anatomy(small.model)
    prepared = prepare(net, CORPUS, tokens, chosen.settings, tmp_path, measured=chosen.measured)
    assert prepared.planned.plan.batch_tokens == found
    assert cutting_of(net, tokens, chosen.settings).batch_tokens == found


def test_no_window_fits(tokens: TokenisedCorpus, tmp_path: Path) -> None:
    with pytest.raises(
        EnvironmentFault, match=r"for one window of 128 tokens .* Set a lower sequence_length"
    ):
        budget(Small(LENGTH - 1), tokens, tmp_path)


def test_nothing_is_tried_on_a_cpu_nor_where_a_number_is_given(
    tokens: TokenisedCorpus, tmp_path: Path
) -> None:
    small = Small(1)
    with evaluating(small.model, 1):
        assert batch_budget(anatomy(small.model), tokens, settings(), tmp_path) == Budget(settings())
    given = settings(batch_tokens=512)
    assert budget(small, tokens, tmp_path, batch_tokens=512) == Budget(given)
    assert not small.batches


def test_a_store_that_was_begun_keeps_its_number(tokens: TokenisedCorpus, tmp_path: Path) -> None:
    path = harvested(tmp_path / "store", batch_tokens=96, tokens=270, threads=1)
    assert Reader.open(path).attributes.plan.batch_tokens == 96
    found = budget(Small(10**9), tokens, path)
    assert (found.settings.batch_tokens, found.measured, found.note) == (96, True, None)
    with pytest.raises(EnvironmentFault, match="was begun with batch_tokens=96, for which this device has"):
        budget(Small(95), tokens, path)


def test_ranks_have_to_agree(tokens: TokenisedCorpus, tmp_path: Path) -> None:
    with pytest.raises(
        EnvironmentFault, match=r"All 2 ranks need the same number: give each batch_tokens=1024\."
    ):
        budget(Small(2000), tokens, tmp_path, rank=0, world_size=2)
    found = budget(Small(10**9), tokens, tmp_path, rank=0, world_size=2)
    assert found.settings.batch_tokens == 4096


def test_the_probe_is_the_work_of_a_batch(tokens: TokenisedCorpus) -> None:
    """Hooks on every stored layer and site, and the losses: the head sees as many rows as there are."""
    small, rows = Small(10**9), list[int]()
    small.model.lm_head.register_forward_pre_hook(lambda module, args: rows.append(len(args[0])))
    calls: list[int] = []
    for layer in small.model.model.layers:
        layer.mlp.register_forward_hook(lambda *_: calls.append(1))
    net = anatomy(small.model)
    with evaluating(small.model, 1):
        assert fits(net, tokens, row_shape(net, settings(sites="mlp_input,mlp_output")), 512, LENGTH)
    assert sum(rows) == 2 * (512 - 1)
    assert len(calls) == 2 * N_LAYERS


def test_a_corpus_shorter_than_a_batch_is_repeated(tmp_path: Path) -> None:
    short = tokenise(corpora.from_documents(["the quick brown fox"], "d"), tiny_tokenizer(), bos="auto")
    assert sum(map(len, short.ids)) < 20
    small = Small(10**9)
    assert budget(small, short, tmp_path).measured
    assert np.prod(small.batches[0][0]) == 4096 // LENGTH * LENGTH


@pytest.mark.parametrize(
    "says",
    ["CUDA error: CUBLAS_STATUS_ALLOC_FAILED in a call", "CUDA error: out of memory"],
)
def test_memory_that_a_library_lacks_is_memory(says: str, tokens: TokenisedCorpus, tmp_path: Path) -> None:
    small = Small(2048)
    small.error = RuntimeError(says)
    assert budget(small, tokens, tmp_path).settings.batch_tokens == 2048
    small.error = RuntimeError("another error")
    with pytest.raises(RuntimeError, match="another error"):
        budget(small, tokens, tmp_path)


def test_a_device_that_no_harvest_runs_on(tokens: TokenisedCorpus, tmp_path: Path) -> None:
    model = tiny_model("llama")[0].to("meta")
    with pytest.raises(UsageError, match=r"the model is on meta; a harvest runs on a CPU or on CUDA devices"):
        batch_budget(anatomy(model), tokens, settings(), tmp_path)
